"""Finding and reading the config of a run."""

from __future__ import annotations

import difflib
import os
import traceback
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlength.commands import InputError
from xlength.runtime.configs import named_configs


def find_config(config: str) -> str:
    """The path of a config that is given as a path or by name.

    Raises:
        InputError: there is none; names one that comes close. A file that is not there is not
            taken for the packaged config of its name, which has none of its settings.
    """
    if os.path.isfile(config):
        return config
    named = named_configs()
    name = config.removesuffix(".py")
    if config in named:
        return str(named[config])
    if name in named:
        copy = f"{name}_copy.py"
        hint = f"{copy} is there" if os.path.isfile(copy) else f"xlength copy-cfg {name} makes one"
        raise InputError(
            f"there is no file {config!r} here; the config that comes with xlength is called "
            f"{name!r}, without .py; for one to edit, {hint}"
        )
    folder, base = os.path.split(config)
    known = list(named)
    if os.path.isdir(folder or "."):
        known += [file for file in os.listdir(folder or ".") if file.endswith(".py")]
    close = difflib.get_close_matches(base, known, 1)
    hint = f"; did you mean {os.path.join(folder, close[0])!r}?" if close else ""
    raise InputError(f"there is no config {config!r}, neither a file nor a name{hint}")


def read_config(config: str, options: Mapping[str, Any] | None = None) -> Any:
    """The config of a file or a name, with some of its settings overridden.

    Args:
        config: see ``find_config``.
        options: dotted keys and their values.

    Raises:
        InputError: it cannot be found or executed, or an option does not fit it.
    """
    from mmengine.config import Config

    path = find_config(config)
    try:
        cfg = Config.fromfile(path)
    except Exception as error:
        raise InputError(f"config {path}{_line_of(error, path)}: {_what(error)}") from error
    _check_options(options or {}, cfg)
    try:
        cfg.merge_from_dict(dict(options or {}))
    except Exception as error:
        raise InputError(f"--cfg-options do not fit {path}: {_what(error)}") from error
    return cfg


def _check_options(options: Mapping[str, Any], cfg: Any) -> None:
    """Options that nothing would read: variables of the file, and misspelt settings."""
    from xlength.runtime.config_check import did_you_mean, known_settings

    known = known_settings()
    for key in options:
        first = key.split(".")[0]
        if first in known:
            continue
        if first in cfg:
            raise InputError(
                f"--cfg-options {key}: {first!r} is a variable of the config file, already used "
                "when the option comes; edit it there, or override the settings it is used in, "
                "such as train_dataloader.dataset.max_length"
            )
        raise InputError(f"--cfg-options {key}: no such setting{did_you_mean(first, known)}")


def load_config(args: Namespace) -> Any:
    """The config with the command line's arguments put in.

    Raises:
        InputError: see ``read_config``.
    """
    from mmengine.logging import print_log

    from xlength.runtime.atomic import checkpoints_in

    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = os.path.join("work_dirs", Path(cfg.filename).stem)
    try:
        os.makedirs(cfg.work_dir, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"work_dir {cfg.work_dir}: cannot make this folder: {error.strerror}"
        ) from error
    if args.seed is not None:
        cfg.merge_from_dict({"randomness": {"seed": args.seed}})
    cfg.setdefault("resume", False)
    cfg.setdefault("load_from", None)
    if args.resume == "latest":
        if not checkpoints_in(cfg.work_dir):
            print_log(f"No checkpoint in {cfg.work_dir} yet: a new run begins.", "current")
            cfg.resume = False  # but weights that the config names are loaded
        else:
            cfg.resume, cfg.load_from = True, None
    elif args.resume is not None:
        cfg.resume, cfg.load_from = True, args.resume
    return cfg


def _line_of(error: Exception, path: str) -> str:
    """Where in the config it went wrong, as far as that is known."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename in (path, "<string>", os.path.abspath(path))]
    return f", line {lines[-1]}" if lines else ""


def _what(error: Exception) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
