"""``LengthConcatDataset``: several sources, one after the other, with their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import ConcatDataset

from xlength.datasets.build import build
from xlength.lengths import get_lengths
from xlength.registry import DATASETS, register


@register(DATASETS)
class LengthConcatDataset(ConcatDataset[Any]):
    """Data sets one after the other; their lengths too, as attributes.

    ``length``, and every other attribute whose name ends in ``length`` and which all the sources
    have (``modality_length``), is a list over all samples. ``get_lengths`` reads the sources.

    Cost: a length property is read once.

    Args:
        datasets: data sets, or config dicts of them.

    Raises:
        ValueError: there is none, or one cannot be built or is empty.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        if isinstance(datasets, Mapping | str) or not len(datasets):
            raise ValueError(f"datasets must be a list of data sets or configs, got {datasets!r}")
        built = [build(item, f"datasets[{i}]") for i, item in enumerate(datasets)]
        for i, dataset in enumerate(built):
            if not len(dataset):
                raise ValueError(f"datasets[{i}] ({type(dataset).__name__}) is empty")
        super().__init__(built)

    def __getattr__(self, name: str) -> list[int]:
        if not name.endswith("length") or "datasets" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            lengths: list[int] = get_lengths(self, name).tolist()
        except ValueError as error:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: {error}") from error
        setattr(self, name, lengths)
        return lengths

    def __repr__(self) -> str:
        names = ", ".join(type(dataset).__name__ for dataset in self.datasets)
        return f"{type(self).__name__} of {len(self)} samples: {names}"
