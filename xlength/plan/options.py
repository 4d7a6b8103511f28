"""Errors about options that name the misspelt key and the one that was meant."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def refuse_unknown(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that are not known.

    Args:
        what: what the names are, for the message: ``'key of TokenBudget'``.
        names: as given.
        known: all that exist.

    Raises:
        ValueError: names the first unknown one, the closest known one, and all known ones.
    """
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            choice = f"known are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"unknown {what}: {name!r}{hint} ({choice})")


def positive(name: str, value: object, optional: bool = False) -> None:
    """Refuse what is no whole number of at least 1 (or None where ``optional``).

    Raises:
        ValueError: names the parameter, the value and the rule.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value.__index__()) < 1:
        rule = "a whole number of at least 1" + (" or None" if optional else "")
        raise ValueError(f"{name} must be {rule}, got {value!r}")
