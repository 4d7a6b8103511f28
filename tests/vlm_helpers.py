"""Components that the configs of test_vlm_train.py import by name, and their data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS, HOOKS, MODELS
from PIL import Image

from xlength import SupervisedFinetune

COLOURS = {"red": (220, 20, 30), "green": (20, 200, 40), "blue": (30, 40, 230)}


def write_rows(folder: Path, num_images: int = 18, num_texts: int = 10) -> Path:
    """Images of one colour and many sizes, and their questions; returns the JSONL file."""
    rng = np.random.RandomState(0)
    rows: list[dict[str, Any]] = []
    for i in range(num_images):
        name = list(COLOURS)[i % 3]
        width, height = rng.randint(20, 120, 2).tolist()
        Image.new("RGB", (width, height), COLOURS[name]).save(folder / f"{i}.png")
        rows.append(row("<image>\nWhat colour?", f"It is {name}.", f"{i}.png"))
    for i in range(num_texts):
        rows.append(row("Say it.", "It is " + "so " * (1 + i % 4), None))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def row(question: str, answer: str, image: str | None) -> dict[str, Any]:
    """One row in LLaVA's format."""
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": said, "image": image}


@HOOKS.register_module(force=True)
class ImageDiary(Hook):
    """Writes what each rank saw at each step, and a digest of its weights at the end."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        data = data_batch["data"]
        self.entries.append(
            {
                "images": data["num_images"].tolist(),
                "lengths": data["lengths"].tolist(),
                "loss": float(outputs["loss"]),
            }
        )

    def after_train(self, runner: Any) -> None:
        weights = [float(p.detach().double().sum()) for p in runner.model.parameters()]
        diary = {"entries": self.entries, "weights": weights, "iter": runner.iter}
        Path(runner.work_dir, f"images{get_rank()}.json").write_text(json.dumps(diary))


@DATA_SAMPLERS.register_module(force=True)
class OneRankTextOtherImage:
    """Every rank its own order of the two kinds: i is an image, t is a text, for each batch."""

    def __init__(self, dataset: Any, kinds: list[str], batch_size: int, seed: Any = None) -> None:
        signs = np.sign(dataset.modality_length)
        self.members = {"i": np.flatnonzero(signs > 0), "t": np.flatnonzero(signs < 0)}
        self.kinds, self.batch_size = kinds, batch_size

    def __iter__(self) -> Iterator[int]:
        for step, kind in enumerate(self.kinds[get_rank() % len(self.kinds)]):
            members = self.members[kind]
            for k in range(self.batch_size):
                yield int(members[(step * self.batch_size + k) % len(members)])

    def __len__(self) -> int:
        return self.batch_size * len(self.kinds[0])

    def set_epoch(self, epoch: int) -> None:
        """The same in every epoch."""


@MODELS.register_module(force=True)
class WithoutBlankImages(SupervisedFinetune):
    """Leaves the vision side out of steps without an image, as models do by themselves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.vision_language.untouched = lambda: None
