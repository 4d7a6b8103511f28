"""What a pool of a stream is to be like: the options of ``PoolSorter`` and ``SlidingSorter``,
checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Entry = tuple[float, int, bool, Any]
"""A held sample: its key (cost), its serial number in the reader's stream, whether it is packed,
itself."""

MODES = ("pool", "sliding")
DEFAULT_MAX_AGE = 10
"""Times ``pool_size // micro_batch_size``, the steps in which a pool is given once."""


@dataclass(frozen=True)
class PoolOptions:
    """How a stream is put in order.

    Args:
        pool_size: samples that are held, at least one micro-batch; rounded down to whole
            micro-batches.
        ascending: sort by rising cost. As the order is shuffled, this matters for the tail only.
        seed: the same on all ranks.
        tail_shuffle: shuffle the last, smaller pool too.
        warmup_steps: ``mode='pool'``: pools, ``mode='sliding'``: micro-batches over which the held
            samples grow linearly from ``initial_pool_size`` to ``pool_size``; 0 for none.
        initial_pool_size: samples at the start of the warm-up; at most ``pool_size``.
        micro_batch_size: samples that will be computed together. They are neighbours by cost, and
            kept together.
        separate_packed: keep packed and other samples apart. With micro-batches, none holds both
            kinds, but for the last ones of a finite stream, and the kind of each comes by a
            schedule that is nearly the same on all ranks.
        mode: ``'pool'`` or ``'sliding'``.
        max_age: ``mode='sliding'``: micro-batches that no sample waits longer than; by default 10
            times ``pool_size // micro_batch_size``.
        packed_share: with ``separate_packed``: share of the packed samples in the data, if it is
            known; then more steps are of one kind on all ranks. In a pool without micro-batches it
            puts that schedule in the place of the original's order, in which the kinds of the ranks
            do not match.

    Raises:
        ValueError: a value out of its range.
    """

    pool_size: int
    ascending: bool = True
    seed: int = 42
    tail_shuffle: bool = True
    warmup_steps: int = 0
    initial_pool_size: int = 10
    micro_batch_size: int = 1
    separate_packed: bool = False
    mode: str = "pool"
    max_age: int | None = None
    packed_share: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("micro_batch_size", 1),
            ("pool_size", 1),
            ("warmup_steps", 0),
            ("initial_pool_size", 1),
        ):
            _check_count(name, getattr(self, name), least)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, the same on all ranks, got {self.seed!r}")
        if self.pool_size < self.micro_batch_size:
            raise ValueError(
                f"pool_size must hold a micro-batch: got pool_size={self.pool_size} and "
                f"micro_batch_size={self.micro_batch_size}"
            )
        if self.separate_packed and not self.as_original and self.pool_size < self._least_size:
            raise ValueError(
                "with separate_packed, pool_size must hold two micro-batches: got "
                f"pool_size={self.pool_size} and micro_batch_size={self.micro_batch_size}"
            )
        if self.mode not in MODES:
            raise ValueError(f"mode must be 'pool' or 'sliding', got {self.mode!r}")
        if self.packed_share is not None:
            if not self.separate_packed:
                raise ValueError(f"packed_share={self.packed_share!r} needs separate_packed=True")
            if not 0 < self.packed_share < 1:
                raise ValueError(f"packed_share must be in (0, 1), got {self.packed_share!r}")
        if self.max_age is not None:
            if self.mode == "pool":
                raise ValueError(
                    f"max_age={self.max_age!r} belongs to mode='sliding'; a pool gives all it holds"
                )
            _check_count("max_age", self.max_age, self.steps_of_pool + self.spare_steps)

    @property
    def as_original(self) -> bool:
        """Whether pools have LLaVA-OneVision-2's order, sample by sample."""
        return self.micro_batch_size == 1 and self.packed_share is None

    @property
    def capacity(self) -> int:
        """Samples that are held at most: whole micro-batches."""
        return self.pool_size // self.micro_batch_size * self.micro_batch_size

    @property
    def steps_of_pool(self) -> int:
        """Micro-batches in a full pool."""
        return self.pool_size // self.micro_batch_size

    @property
    def spare_steps(self) -> int:
        """Steps by which overdue samples are served early, as those of the other kind may be served
        first."""
        return 4 if self.separate_packed else 0

    @property
    def age_limit(self) -> int:
        """``max_age``, or its default."""
        return self.max_age or DEFAULT_MAX_AGE * self.steps_of_pool + self.spare_steps

    def carried_of(self, size: int) -> int:
        """Samples that a pool of ``size`` leaves to the next one, where kinds are kept apart by a
        common schedule: an eighth, as the counts of the kinds differ between ranks."""
        return max(size // 8 // self.micro_batch_size, 1) * self.micro_batch_size

    def size_of_pool(self, flushes: int) -> int:
        """Samples of the pool that comes after ``flushes`` full ones."""
        return self._whole(self._grown(flushes))

    def size_at(self, given: int) -> int:
        """``mode='sliding'``: samples to hold once ``given`` were given."""
        step = given / self.micro_batch_size
        return self.capacity if step >= self.warmup_steps else self._whole(self._grown(step))

    def _grown(self, step: float) -> int:
        if self.warmup_steps == 0 or step >= self.warmup_steps:
            return self.pool_size
        start = min(self.initial_pool_size, self.pool_size)
        return start + int((self.pool_size - start) * (step / self.warmup_steps))

    def _whole(self, size: int) -> int:
        whole = size // self.micro_batch_size * self.micro_batch_size
        return max(whole, self._least_size)

    @property
    def _least_size(self) -> int:
        """Samples of the smallest pool: where kinds are apart, it gives one micro-batch and carries
        one over."""
        apart = self.separate_packed and not self.as_original
        return self.micro_batch_size * (2 if apart else 1)

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for a saved state."""
        return asdict(self)


def first_seed(options: PoolOptions, epoch: int, worker: int) -> int:
    """What the seeds of all shuffles of an epoch and a worker count from; the same on all ranks."""
    return options.seed + (epoch << 48) + (worker << 40)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
