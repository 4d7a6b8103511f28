"""What is peculiar about a set of lengths and worth a warning before anything is chosen."""

from __future__ import annotations

import numpy as np

from xlength.plan.groups import Ints
from xlength.plan.outlook import packing_outlook
from xlength.report.strategies import Setting, budget_of, can_pack

_BLOCK = 1000


def prepare(lengths: Ints, max_length: int | None) -> tuple[Ints, list[str]]:
    """Leave out zero lengths and cut those over ``max_length``, and say so.

    Args:
        lengths: (n,) int64, of either sign, as measured.
        max_length: tokens; None cuts nothing.

    Returns:
        (m,) int64 and the warnings.

    Raises:
        ValueError: nothing is left.
    """
    notes = []
    zeros = np.flatnonzero(lengths == 0)
    if len(zeros):
        notes.append(
            f"{_samples(len(zeros))} of length zero, first at row {int(zeros[0])}: training "
            "refuses them; they are left out here"
        )
        lengths = lengths[lengths != 0]
    if not len(lengths):
        raise ValueError("lengths: no sample is left to report on")
    if max_length is not None:
        over = np.flatnonzero(np.abs(lengths) > max_length)
        if len(over):
            lost = int((np.abs(lengths[over]) - max_length).sum())
            share = lost / int(np.abs(lengths).sum())
            notes.append(
                f"{_samples(len(over))} longer than max_length={max_length}, first at row "
                f"{int(over[0])}: they are cut, which loses {lost:,} tokens ({share:.1%})"
            )
        lengths = np.clip(lengths, -max_length, max_length)
    return lengths, notes


def peculiarities(lengths: Ints, setting: Setting, two_modalities: bool = False) -> list[str]:
    """Warnings about lengths that are otherwise fine.

    Args:
        lengths: (n,) int64, of either sign.
        setting: what is compared.
        two_modalities: whether both signs were expected.
    """
    sizes = np.abs(lengths)
    checks = (
        _few(sizes, setting),
        _equal(sizes),
        _one_modality(lengths, two_modalities),
        _giant(sizes, setting),
        _packing(lengths, setting),
        _file_order(sizes),
    )
    return [note for note in checks if note]


def stream_peculiarities(lengths: Ints) -> list[str]:
    """Warnings about lengths that are to come as a stream."""
    sizes = np.abs(lengths)
    return [note for note in (_equal(sizes), _file_order(sizes)) if note]


def _samples(count: int) -> str:
    return "1 sample is" if count == 1 else f"{count:,} samples are"


def _few(sizes: Ints, setting: Setting) -> str | None:
    step = setting.world_size * setting.batch_size
    if len(sizes) >= 4 * step:
        return None
    return (
        f"only {len(sizes):,} samples for steps of {step:,}: with fewer than four steps an epoch "
        "the figures are rough, and grouping by length has little to choose from"
    )


def _equal(sizes: Ints) -> str | None:
    if len(sizes) < 2 or (sizes != sizes[0]).any():
        return None
    return f"all lengths are {int(sizes[0])}: grouping by length cannot help here"


def _one_modality(lengths: Ints, two_modalities: bool) -> str | None:
    images = int(np.count_nonzero(lengths > 0))
    if 0 < images < len(lengths) or not (two_modalities or images == 0):
        return None
    kind = "have images (> 0)" if images else "are text only (< 0)"
    return f"all samples {kind}: only one modality was found, so nothing is kept apart"


def _giant(sizes: Ints, setting: Setting) -> str | None:
    """One sample, or a few, that decide how large every batch is."""
    longest = int(sizes.max())
    if budget_of(sizes, setting) > longest:
        return None
    cut = int(np.quantile(sizes, 0.999, method="higher"))
    rare = int(np.count_nonzero(sizes > cut))
    if longest < 2 * cut or rare == 0:
        return None
    row = int(np.argmax(sizes))
    others = f" (cut at {cut:,}, which touches {rare:,} of {len(sizes):,} samples"
    tokens = int((sizes[sizes > cut] - cut).sum()) / int(sizes.sum())
    return (
        f"the longest sample, row {row} with {longest:,} tokens, alone decides how large a batch "
        f"has to be: {longest / float(sizes.mean()):.0f} times the mean{others} and loses "
        f"{tokens:.1%} of the tokens, batches could be {longest / cut:.1f} times smaller)"
    )


def _packing(lengths: Ints, setting: Setting) -> str | None:
    if not can_pack(lengths, setting):
        return None
    return packing_outlook(np.abs(lengths), budget_of(lengths, setting))


def _file_order(sizes: Ints) -> str | None:
    """Lengths that go with their place in the file: a stream would serve them in turn."""
    blocks = len(sizes) // _BLOCK
    if blocks < 4 or not (deviation := float(sizes.std())):
        return None
    means = sizes[: blocks * _BLOCK].reshape(blocks, _BLOCK).mean(axis=1)
    # Of blocks of random samples the means deviate by the samples' deviation / sqrt(block).
    ratio = float(means.std()) / (deviation / _BLOCK**0.5)
    if ratio < 4:
        return None
    return (
        "lengths go with their place in the file (sources one after the other): shuffle before "
        "streaming it, or ranks and pools meet one kind of sample at a time"
    )
