"""One module per subcommand of ``xlength``; ``xlength.cli`` imports the one that is asked for.

A module offers ``add_arguments(parser)`` and ``run(args) -> int | None`` (the exit code, None for
0), and its docstring is the help text. Its top level imports nothing heavy, so that ``--help``
answers at once. Bad input is an ``InputError``: one line on stderr and exit code 2. A module may
widen that by ``BAD_INPUT``, a tuple of exception types that mean bad input wherever they are
raised in it.
"""

from __future__ import annotations


class InputError(ValueError):
    """What the user gave cannot be used; the message is one clear line."""
