"""What a saved state says otherwise than the run that is to continue it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(
    state: Mapping[str, Any], expected: Mapping[str, Any], rules: Mapping[str, str]
) -> list[str]:
    """What a state says otherwise than a fresh one does, of the keys in ``rules`` (key -> what it
    means) and of the options; what was and what is."""
    changes = [
        f"{meaning} ({key}) was {state[key]!r} and is {expected[key]!r}"
        for key, meaning in rules.items()
        if state[key] != expected[key]
    ]
    was, now = state["options"], expected["options"]
    return changes + [
        f"option {key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key)
    ]
