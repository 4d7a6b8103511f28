"""What packing can and cannot win on a set of lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.pack import histogram
from xlength.plan.pieces import check_lengths


def packing_outlook(lengths: NDArray[Any], max_length: int) -> str | None:
    """One sentence where packing can win little, else None.

    Said where most samples are so long that no two of them share a pack, and where one length is so
    common that it decides how full a pack can be.

    Args:
        lengths: (n,) integers, tokens of each sample.
        max_length: tokens of a pack.
    """
    sizes = np.minimum(check_lengths(lengths, max_length), max_length)
    if not len(sizes):
        return None
    alone = float(np.mean(sizes > max_length // 2))
    if alone >= 0.8:
        return (
            f"{alone:.0%} of the samples are longer than half of max_length={max_length}; no two "
            "of them share a pack: packing can save little here (alone they fill "
            f"{float(sizes.mean()) / max_length:.1%} of their rows); a larger max_length would help"
        )
    values, counts = histogram(sizes, max_length)
    most = int(np.argmax(counts))
    length, share = int(values[most]), float(counts[most]) / len(sizes)
    whole = max_length // length * length
    if share < 0.5 or whole / max_length > 0.97:
        return None
    return (
        f"{share:.0%} of the samples have {length} tokens, and packs of those alone fill "
        f"{whole / max_length:.1%} of max_length={max_length}: packing can do better only where "
        f"other samples fill the gaps; a max_length of {whole} would help"
    )
