"""Names of the configs that come with xlength, and what each is for.

Any of them is a CONFIG for xlength train, report and log-dataset; xlength copy-cfg makes a copy to
edit.
"""

from __future__ import annotations

import argparse

from xlength.commands import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``xlength list-cfg``."""
    parser.add_argument("-p", "--pattern", help="only names that contain this, in any case")


def run(args: argparse.Namespace) -> int:
    """Print the names by folder."""
    import textwrap

    from xlength.runtime.configs import named_configs, summary_of

    pattern = (args.pattern or "").lower()
    found = {name: file for name, file in named_configs().items() if pattern in name.lower()}
    if not found:
        raise InputError(f"no config has {args.pattern!r} in its name; xlength list-cfg shows all")
    folder = None
    for name, file in found.items():
        if file.parent.name != folder:
            print(f"{'' if folder is None else chr(10)}{file.parent.name}")
            folder = file.parent.name
        print(f"  {name}")
        print(textwrap.indent(textwrap.fill(summary_of(file), 90), " " * 6))
    return 0
