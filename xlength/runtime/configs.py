"""The configs that come with xlength: where they are, and their names."""

from __future__ import annotations

import site
import sys
from pathlib import Path

from xlength.commands import InputError

_SHARE = Path("share/xlength/configs")


def config_root() -> Path:
    """The folder of the configs: beside the package in a checkout, else where pip put them.

    Raises:
        InputError: there is none, as where only the package itself was copied.
    """
    checkout = Path(__file__).resolve().parents[2] / "configs"
    # Of `pip install`, `pip install --user` and `pip install --target`.
    installed = [Path(sys.prefix), Path(site.getuserbase()), checkout.parent]
    for root in (checkout, *(prefix / _SHARE for prefix in installed)):
        if (root / "_base_/runtime.py").is_file():
            return root
    raise InputError("this installation of xlength has no configs; install it with pip")


def named_configs() -> dict[str, Path]:
    """Config files by name, sorted by folder; parts of others (``_base_``) have no name."""
    root = config_root()
    files = sorted(file.relative_to(root) for file in root.rglob("*.py"))
    return {file.stem: root / file for file in files if "_base_" not in file.parts}


def summary_of(file: Path) -> str:
    """The first comment of a config, as one line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)
