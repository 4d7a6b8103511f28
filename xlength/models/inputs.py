"""What of a batch goes to the language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xlength.collate_images import IMAGE_FACTS

BATCH_FACTS = (
    frozenset(
        {
            "lengths",
            "num_tokens",
            "cu_seqlens",
            "cumulative_len",
            "max_seqlen",
            "sample_ids",
        }
    )
    | IMAGE_FACTS
)
"""Keys by which a batch describes itself; they are no arguments of the model."""


def model_inputs(data: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without its facts, and without arguments that are None."""
    return {key: data[key] for key in data if key not in BATCH_FACTS and data[key] is not None}
