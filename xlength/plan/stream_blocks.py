"""Micro-batches of neighbours out of a sorted pool that holds a few samples more than they take."""

from __future__ import annotations

from xlength.plan.pool_options import Entry


def in_blocks(
    entries: list[Entry], count: int, size: int, new_from: int = 0, older_than: int = 0
) -> tuple[list[list[Entry]], list[Entry]]:
    """Blocks of neighbours at equal quantiles of what is sorted, and what lies between them.

    Cost: 1 microsecond a block, and some for each that has samples beside it.

    Args:
        entries: sorted, at least ``count * size``.
        count: blocks.
        size: samples of a block.
        new_from: samples with smaller serial numbers were left between blocks before, and are taken
            now where that is possible.
        older_than: the same for the last block, which otherwise ends at the costliest sample: there
            it matters most that all ranks take the same quantile.

    Returns:
        the blocks by rising cost; the other samples.
    """
    if not count:
        return [], list(entries)
    blocks: list[list[Entry]] = []
    rest: list[Entry] = []
    for block in range(count):
        start = block * len(entries) // count
        stop = (block + 1) * len(entries) // count
        if stop - start > size:
            old = older_than if block == count - 1 else new_from
            window = entries[start:stop]
            first = _best_start(window, size, old)
            rest += window[:first] + window[first + size :]
            start, stop = start + first, start + first + size
        blocks.append(entries[start:stop])
    return blocks, rest


def _best_start(window: list[Entry], size: int, old: int) -> int:
    """Where a block leaves out no old samples or, failing that, the youngest of them; the costliest
    such block."""

    def oldest_outside(start: int) -> int:
        outside = window[:start] + window[start + size :]
        return min(min(entry[1] for entry in outside), old)

    return max(range(len(window) - size + 1), key=lambda start: (oldest_outside(start), start))
