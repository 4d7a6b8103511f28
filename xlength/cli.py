"""The console script ``xlength``: finds the subcommand; bad input is one line and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from xlength import __version__
from xlength.commands import InputError

COMMANDS = {
    "train": "train a model by config",
    "measure": "token lengths of a data set -> lengths.npy",
    "report": "what each strategy of grouping and packing buys on given lengths",
    "bench": "speed of the planning, measured against peers in one run",
    "list-cfg": "names of the configs that come with xlength",
    "copy-cfg": "copy one of them to edit it",
    "log-dataset": "show what a config's training data look like after processing",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``xlength`` with ``argv`` (by default the process's arguments).

    Returns:
        The exit code: 0 on success, 1 after a crash (with its traceback), 2 on bad input (with one
            line), 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"xlength {__version__}")
        return 0
    try:
        return _run(argv[0], argv[1:])
    except KeyboardInterrupt:
        print(f"\nxlength: {argv[0]} was interrupted", file=sys.stderr)
        return 130


def _run(command: str, argv: Sequence[str]) -> int:
    try:
        module = _module_of(command)
    except InputError as error:
        return report_bad_input(error)
    parser = argparse.ArgumentParser(
        prog=f"xlength {command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return module.run(args) or 0
    except (InputError, *getattr(module, "BAD_INPUT", ())) as error:
        return report_bad_input(error)
    except Exception:
        traceback.print_exc()
        return 1


def report_bad_input(error: BaseException, cause: BaseException | None = None) -> int:
    """Print the error as one line (after its traceback with XLENGTH_TRACEBACK=1); returns 2."""
    if os.environ.get("XLENGTH_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(cause or error)
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"xlength: error: {message}", file=sys.stderr)
    return 2


def _module_of(command: str) -> ModuleType:
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(COMMANDS)}"
        raise InputError(f"unknown command {command!r}; {hint}")
    name = f"xlength.commands.{command.replace('-', '_')}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise InputError(f"this installation of xlength has no command {command!r}") from None


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: xlength COMMAND [arguments]   (xlength COMMAND --help for its arguments)\n\n"
        f"Length-aware data loading for MMEngine / XTuner training of LLMs and VLMs.\n\n{rows}"
    )


if __name__ == "__main__":
    sys.exit(main())
