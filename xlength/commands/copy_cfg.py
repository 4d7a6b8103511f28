"""Copy a config that comes with xlength, to edit it.

The copy is one file that needs no other: what the config takes from its _base_ files stands in it,
and what is most often edited stands at its top.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xlength.commands import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``xlength copy-cfg``."""
    parser.add_argument("config", metavar="NAME", help="name (see xlength list-cfg) or a file")
    parser.add_argument(
        "dest",
        nargs="?",
        default=".",
        metavar="DEST",
        help="folder, for DEST/NAME_copy.py, or a file that ends with .py; by default here",
    )
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    """Write the copy and say where it is."""
    from xlength.runtime.config_file import find_config
    from xlength.runtime.flatten import flat_text

    source = Path(find_config(args.config))
    target = Path(args.dest)
    if target.suffix != ".py":
        target = target / f"{source.stem}_copy.py"
    if target.exists() and not args.force:
        raise InputError(f"{target} exists already; give another DEST, or --force to overwrite it")
    text = flat_text(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(
        f"Copied {source.stem} to {target}; edit the settings at its top, then:\n"
        f"  xlength report {target}   # what this config does, and the lines that do better\n"
        f"  xlength train {target}"
    )
    return 0
