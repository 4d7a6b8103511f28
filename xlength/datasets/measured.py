"""Lengths of image-text rows: measured once, on all cores, and kept in a file named by what they
depend on."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.datasets.chat_text import Part
from xlength.datasets.conversations import Conversation, read_conversation
from xlength.datasets.image_sizes import ImageError, read_image_size
from xlength.datasets.image_text import ImageTextEncoder
from xlength.datasets.json_rows import JsonRows, RowError

Ints = NDArray[np.int64]
Found = tuple[Conversation, list[Part], Ints]
"""A conversation, what of it is tokenised, and the sizes of its images."""
Notes = dict[int, tuple[str, str]]
"""Row -> what kind of row it is, and what is the matter."""

BROKEN, IMAGE, UNTRAINED, OVERLONG, CUT = "broken", "image", "untrained", "overlong", "cut"
"""What a row can be: unreadable, with an unusable image, without a label, longer than allowed, cut
to fit."""

_CHUNK = 512
_ROWS_WORTH_A_PROCESS = 2048
_EXAMPLES = 3


@dataclass
class Measured:
    """Which rows make samples, and how long they are.

    Args:
        rows: (n,) int64, the row of each sample, rising.
        lengths: (n,) int64 tokens, > 0 with images, < 0 text only.
        image_tokens: (n,) int64, how many of them are of images.
        counts: how many rows were of each kind named above.
        examples: the first rows of each kind, as (row, what is the matter).
    """

    rows: Ints
    lengths: Ints
    image_tokens: Ints
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


class LengthReader:
    """Measures rows in chunks: one call of the tokenizer for a chunk, image sizes from the rows or
    from headers.

    Args:
        encoder: renders, tokenises and counts.
        image_folder: see ``read_conversation``.
        image_first: see ``read_conversation``.
        overlong: what is done with samples over the encoder's ``max_length``.
    """

    def __init__(
        self, encoder: ImageTextEncoder, image_folder: str, image_first: bool, overlong: str
    ) -> None:
        self.encoder, self.overlong = encoder, overlong
        self.image_folder, self.image_first = image_folder, image_first

    def conversation(self, row: dict[str, Any]) -> Conversation:
        """The conversation of one parsed row."""
        return read_conversation(row, self.image_folder, self.image_first)

    def read(self, rows: JsonRows, start: int, stop: int) -> tuple[Ints, Notes]:
        """(2, stop - start) tokens, and tokens of images, 0 where a row makes no sample; and what
        is the matter with rows."""
        found: dict[int, Found] = {}
        notes: Notes = {}
        for i in range(start, stop):
            try:
                conversation = self.conversation(rows[i])
                parts = self.encoder.chat.parts(conversation.messages)
                found[i] = conversation, parts, _sizes(conversation)
            except RowError as error:
                notes[i] = BROKEN, str(error)
            except ImageError as error:
                notes[i] = IMAGE, str(error)
        lengths = np.zeros((2, stop - start), dtype=np.int64)
        for i, (length, image_tokens) in self._whole(found, notes).items():
            conversation, _, sizes = found[i]
            lengths[:, i - start] = self._limited(
                i, conversation, sizes, length, image_tokens, notes
            )
        return lengths, notes

    def _whole(self, found: dict[int, Found], notes: Notes) -> dict[int, tuple[int, int]]:
        """Tokens and image tokens of each row, before any limit."""
        if not found:
            return {}
        chat = self.encoder.chat
        parts = [parts for _, parts, _ in found.values()]
        texts = count_parts(self.encoder.tokenizer, parts, chat.add_special_tokens)
        nums = np.array([len(sizes) for _, _, sizes in found.values()], dtype=np.int64)
        flat = np.concatenate([sizes for _, _, sizes in found.values()])
        counts, refused = self.encoder.tokens(self.encoder.squared(flat), np.repeat(nums, nums))
        ends = np.cumsum(nums)
        totals = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        images = totals[ends] - totals[ends - nums]
        pairs = zip((texts - nums + images).tolist(), images.tolist(), strict=True)
        result = dict(zip(found, pairs, strict=True))
        owners = np.repeat(np.fromiter(found, dtype=np.int64, count=len(found)), nums)
        for index in {int(owners[position]) for position in refused}:
            conversation, _, sizes = found[index]
            try:
                self.encoder.image_counts(sizes, conversation.images)
            except ImageError as error:
                notes[index] = IMAGE, str(error)
                del result[index]
        return result

    def _limited(
        self,
        index: int,
        conversation: Conversation,
        sizes: Ints,
        length: int,
        image_tokens: int,
        notes: Notes,
    ) -> tuple[int, int]:
        limit = self.encoder.max_length
        over = limit is not None and length > limit
        if over and self.overlong != "truncate":
            notes[index] = OVERLONG, f"{length} tokens, more than max_length {limit}"
            return 0, 0
        if not over and _says_something(conversation):
            return length, image_tokens
        try:
            fitted = self.encoder.fitted(conversation, sizes)
        except RowError as error:
            notes[index] = BROKEN, str(error)
            return 0, 0
        if not fitted.trained:
            once = " once it is cut" if fitted.cut else ""
            notes[index] = UNTRAINED, f"no label is left to train{once}"
            return 0, 0
        if fitted.cut:
            notes[index] = CUT, f"cut to {fitted.length} tokens"
        return fitted.length, fitted.image_tokens


def count_parts(tokenizer: Any, rows: list[list[Part]], add_special_tokens: bool) -> Ints:
    """(n,) int64 tokens of each row, a list of texts and of token ids that are ready."""
    texts = [part for row in rows for part in row if isinstance(part, str)]
    counts = iter(count_tokens(tokenizer, texts, add_special_tokens).tolist())
    totals = [sum(next(counts) if isinstance(p, str) else len(p) for p in row) for row in rows]
    return np.array(totals, dtype=np.int64)


def count_tokens(tokenizer: Any, texts: list[str], add_special_tokens: bool) -> Ints:
    """(n,) int64 tokens of each text, as ``tokenizer(texts)`` makes them, without making lists of
    them."""
    options = {"add_special_tokens": add_special_tokens}
    # This call also puts the back end into the state that the options mean: no padding, no
    # truncation.
    first = tokenizer(texts[:1], **options)["input_ids"]
    count = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast", None)
    rest = count(texts[1:], **options) if count else tokenizer(texts[1:], **options)["input_ids"]
    return np.fromiter(map(len, [*first, *rest]), dtype=np.int64, count=len(texts))


def measure_rows(
    rows: JsonRows, reader: LengthReader, num_proc: int | None = None, title: str = "Measuring"
) -> Measured:
    """Measure all rows.

    Cost: parsing, rendering and tokenising each row once, spread over processes; they are forked
        where the system
    can, so that nothing is copied to them.

    Args:
        rows: the rows.
        reader: how.
        num_proc: processes; None takes the cores this process may use, and one for fewer than 2,048
            rows each.
        title: of the progress bar.
    """
    from tqdm import tqdm

    starts = range(0, len(rows), _CHUNK)
    lengths = np.zeros((2, len(rows)), dtype=np.int64)
    counts: Counter[str] = Counter()
    examples: dict[str, list[tuple[int, str]]] = {}
    bar = tqdm(total=len(rows), desc=title, unit=" rows", disable=len(rows) < _ROWS_WORTH_A_PROCESS)
    with bar, _results(rows, reader, starts, num_proc) as results:
        for start, (part, notes) in zip(starts, results, strict=True):
            lengths[:, start : start + part.shape[1]] = part
            for row, (kind, text) in sorted(notes.items()):
                counts[kind] += 1
                if len(examples.setdefault(kind, [])) < _EXAMPLES:
                    examples[kind].append((row, text))
            bar.update(part.shape[1])
    kept = np.flatnonzero(lengths[0])
    tokens, image_tokens = lengths[:, kept]
    signed = np.where(image_tokens > 0, tokens, -tokens)
    return Measured(kept, signed, image_tokens, dict(counts), examples)


@contextmanager
def _results(
    rows: JsonRows, reader: LengthReader, starts: range, num_proc: int | None
) -> Iterator[Any]:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = num_proc or min(available or 1, len(rows) // _ROWS_WORTH_A_PROCESS)
    global _task
    _task = rows, reader
    if wanted < 2 or len(starts) < 2:
        yield map(_read, starts)
        return
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if can_fork else None)
    task = None if can_fork else _task
    with ProcessPoolExecutor(min(wanted, len(starts)), context, _start, (task,)) as pool:
        yield pool.map(_read, starts)


_task: tuple[JsonRows, LengthReader]


def _start(task: tuple[JsonRows, LengthReader] | None) -> None:
    # One process a core: threads of the tokenizer's own would only be in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if task is not None:
        global _task
        _task = task


def _read(start: int) -> tuple[Ints, Notes]:
    rows, reader = _task
    return reader.read(rows, start, min(start + _CHUNK, len(rows)))


def _sizes(conversation: Conversation) -> Ints:
    sizes = [
        known or read_image_size(source)
        for source, known in zip(conversation.images, conversation.sizes, strict=True)
    ]
    return np.array(sizes, dtype=np.int64).reshape(-1, 2)


def _says_something(conversation: Conversation) -> bool:
    """Whether an answer is surely there to train; if not, labels have to be made to know."""
    return any(
        message["role"] == "assistant"
        and any(part.get("text", "").strip() for part in message["content"])
        for message in conversation.messages
    )
