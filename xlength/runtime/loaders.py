"""Data loaders that start in the middle of an epoch, and loaders without a length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset


def num_batches(loader: Any) -> int | None:
    """Batches in an epoch, None where the loader does not know.

    A stream's workers each have an incomplete last batch, which the length of torch's loader does
    not count; a stream that knows better says so by ``num_batches``.
    """
    count = getattr(getattr(loader, "dataset", None), "num_batches", None)
    try:
        if count is not None and loader.batch_size is not None:
            return int(count(loader.batch_size, loader.num_workers, loader.drop_last))
        return len(loader)
    except TypeError:
        return None


def sampler_of(loader: Any) -> tuple[Any, int]:
    """The sampler that an epoch's order comes from, and how many of its steps make a batch.

    It is the loader's own sampler or, where a batch sampler reads another one (as
    ``PlanBatchSampler`` does), that one; samplers of a plan count batches, others samples.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    if inner is None:
        return getattr(loader, "sampler", None), 1
    if type(batch_sampler) is BatchSampler:
        return inner, batch_sampler.batch_size
    return inner, 1


def state_of(dataset: Any) -> dict[str, Any] | None:
    """What a map-style data set is made from, as ``PackedDataset`` says it; None where it does
    not."""
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return dict(dataset.state_dict())
    return None


def start_sampler_at(loader: Any, epoch: int, step: int) -> bool:
    """Position the loader's sampler, by its state, to start after ``step`` batches.

    Returns:
        False where the sampler keeps no state; nothing has changed then.
    """
    sampler, steps_per_batch = sampler_of(loader)
    if not (hasattr(sampler, "load_state_dict") and hasattr(sampler, "state_dict")):
        return False
    sampler.set_epoch(epoch)
    state = sampler.state_dict(min(step * steps_per_batch, len(sampler)))
    sampler.load_state_dict(state)
    return True


def is_stream(loader: Any) -> bool:
    """Whether the loader can only be read from its beginning, in turn."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def repeat_by_default(loader: Any) -> None:
    """Let a stream repeat for ever that was not told whether to: there is no seam between passes.

    One that can be read only once does not.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if getattr(dataset, "repeat", False) is None and hasattr(dataset, "check_repeatable"):
        try:
            dataset.check_repeatable()
        except ValueError:
            return
        dataset.repeat = True


def ends_unequally(loader: Any) -> bool:
    """Whether the ranks may have unequal numbers of batches in a pass: a stream that ends."""
    dataset = getattr(loader, "dataset", None)
    return isinstance(dataset, IterableDataset) and not getattr(dataset, "repeat", False)


def loader_from(loader: DataLoader[Any], step: int) -> DataLoader[Any]:
    """A loader of the batches after the first ``step`` of the epoch, for a map-style data set.

    Only the indices of what is passed over are drawn, no sample is loaded.
    """
    options: dict[str, Any] = dict(
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
    if loader.batch_sampler is None:
        options.update(batch_size=None, sampler=_After(loader.sampler, step))
    else:
        options["batch_sampler"] = _After(loader.batch_sampler, step)
    return DataLoader(loader.dataset, **options)


class _After:
    """What a sampler yields after its first ``step`` items."""

    def __init__(self, sampler: Any, step: int) -> None:
        self.sampler = sampler
        self.step = step

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.step, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.step)


class EndlessLoader:
    """A loader of a stream, with a length: mmengine's hooks ask for it.

    Args:
        loader: of a stream; everything else is the loader's.
        length: batches of a pass; for a stream without an end the iterations of the run, so that no
            hook sees the end of an epoch before.
    """

    def __init__(self, loader: Any, length: int) -> None:
        self._loader = loader
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
