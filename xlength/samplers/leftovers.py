"""Keywords that a config still carries after its sampler was swapped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmengine.logging import print_log

_MEANINGS: dict[str, tuple[Any, str]] = {
    "shuffle": (True, "the order is random in every epoch"),
    "shuffle_dataset": (True, "the order is random in every epoch"),
    "drop_last": (False, "no sample is dropped; see round_up"),
}


def accept_leftovers(sampler: str, leftovers: Mapping[str, Any]) -> None:
    """Pass over the keywords of the sampler that was replaced, with a warning where their value
    cannot be kept.

    Raises:
        TypeError: a keyword is none of them, as for a misspelt argument.
    """
    for name, value in leftovers.items():
        if name not in _MEANINGS:
            raise TypeError(f"{sampler} got an unexpected keyword argument {name!r}")
        kept, meaning = _MEANINGS[name]
        if value != kept:
            print_log(
                f"{sampler} ignores {name}={value!r}: {meaning}.",
                logger="current",
                level=logging.WARNING,
            )
