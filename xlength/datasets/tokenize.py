"""Conversations -> token ids and labels, many rows in one call of the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xlength.datasets.words import Ids, WordTable, cut_after, flattened, word_table
from xlength.losses import IGNORE_INDEX

IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_INDEX = -200
"""Stands in ``input_ids`` where an image goes, as in XTuner and LLaVA."""

_QWEN = {"QWenTokenizer", "QWen2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"}

Piece = tuple[str | list[int], bool]
"""Text or ready token ids, and whether they are trained."""


def boundary_ids(tokenizer: Any) -> tuple[list[int], list[int] | None]:
    """Ids that begin and end an answer; the end is None where the tokenizer has no such token.

    Qwen's tokenizers begin nothing, ChatGLM's begin with [gMASK] and sop, as in XTuner.
    """
    name = type(tokenizer).__name__
    if name in _QWEN:
        begin: Any = []
    elif name == "ChatGLMTokenizer":
        begin = [64790, 64792]
    else:
        begin = tokenizer.bos_token_id
    end = tokenizer.eos_token_id
    return _as_list(begin) or [], _as_list(end)


class TurnEncoder:
    """Token ids and labels of conversations whose turns are written with a template already.

    Each turn is ``bos, input, output, eos, sep``: output and eos are trained, unless
    ``output_with_loss`` is false; there is no eos where ``need_eos_token`` is false, and then no
    bos before the next turn. Each text is tokenised by itself, without special tokens. The result
    is that of XTuner's ``encode_fn``.

    Cost: one call of the tokenizer for all texts of the rows, equal texts once.

    Args:
        tokenizer: of transformers.
        max_length: longer rows are cut at their end.
        input_ids_with_output: False leaves the answers away, for one turn a row.
        with_image_token: put -200 where an input has ``<image>``.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        input_ids_with_output: bool = True,
        with_image_token: bool = False,
    ) -> None:
        self.texts = TextEncoder(tokenizer)
        self.max_length = max_length
        self.input_ids_with_output = input_ids_with_output
        self.with_image_token = with_image_token
        self.begin, self.end = boundary_ids(tokenizer)

    def prepare(self, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """What a row is made of.

        Raises:
            ValueError: the row cannot be tokenised; the message says why.
        """
        if len(turns) > 1 and not self.input_ids_with_output:
            raise ValueError(f"input_ids_with_output=False takes one turn a row, got {len(turns)}")
        pieces: list[Piece] = []
        begins = True
        for i, turn in enumerate(turns):
            if begins:
                pieces.append((self.begin, False))
            pieces += self._input(turn.get("input") or "")
            if not self.input_ids_with_output:
                continue
            if not isinstance(turn.get("output"), str):
                raise ValueError(f"turn {i} has no 'output': {dict(turn)!r}")
            trained = _flag(turn, "output_with_loss")
            pieces.append((turn["output"], trained))
            begins = _flag(turn, "need_eos_token")
            if begins:
                if self.end is None:
                    raise ValueError(
                        "the tokenizer has no eos_token to end an answer with: set one, or take a "
                        "template with SUFFIX_AS_EOS"
                    )
                pieces.append((self.end, trained))
            if turn.get("sep"):
                pieces.append((turn["sep"], False))
        return pieces

    def _input(self, text: str) -> list[Piece]:
        return with_image_ids(text) if self.with_image_token else [(text, False)]

    def encode(self, rows: Sequence[Sequence[Piece]]) -> list[tuple[Ids, Ids, int]]:
        """(input_ids, labels, tokens cut off) of each row."""
        return encode_pieces(self.texts, rows, self.max_length)


def with_image_ids(text: str) -> list[Piece]:
    """A text that is not trained, with -200 in the place of each ``<image>``."""
    pieces: list[Piece] = []
    for part in text.split(IMAGE_TOKEN):
        pieces += [(part, False), ([IMAGE_TOKEN_INDEX], False)]
    return pieces[:-1]


def encode_pieces(
    encode: Callable[[list[str]], list[Ids]],
    rows: Sequence[Sequence[Piece]],
    max_length: int,
) -> list[tuple[Ids, Ids, int]]:
    """(input_ids, labels, tokens cut off) of each row; each text is tokenised by itself, once."""
    if not rows:
        return []
    texts = dict.fromkeys(text for row in rows for text, _ in row if isinstance(text, str))
    table = dict(zip(texts, encode(list(texts)), strict=True))
    pieces = [
        table[piece] if isinstance(piece, str) else np.array(piece, dtype=np.int32)
        for row in rows
        for piece, _ in row
    ]
    flags = np.array([trained for row in rows for _, trained in row], dtype=bool)
    sizes = np.array([len(piece) for piece in pieces], dtype=np.int64)
    ids = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
    labels = np.where(np.repeat(flags, sizes), ids, np.int32(IGNORE_INDEX))
    ends = np.append(0, np.cumsum(sizes))[np.cumsum([len(row) for row in rows])].tolist()
    starts = [0, *ends[:-1]]
    return [
        (
            ids[start:end][:max_length],
            labels[start:end][:max_length],
            max(0, end - start - max_length),
        )
        for start, end in zip(starts, ends, strict=True)
    ]


class TextEncoder:
    """``encode_texts`` of one tokenizer, which may remember words; see ``words``.

    The tokenizer must stay as it is. What is remembered is not pickled.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.table: WordTable | None = None
        self.asked = False

    def __call__(self, texts: list[str]) -> list[Ids]:
        if not self.asked:
            self.asked = True
            if _is_plain_fast(self.tokenizer):
                self.table = word_table(self.tokenizer, self._encode)
        if self.table is not None:
            return self.table(texts)
        return cut_after(*flattened(self._encode(texts)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "table": None, "asked": False}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return encode_texts(self.tokenizer, texts)


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """``tokenizer.encode(text, add_special_tokens=False)`` of each text, in one call."""
    if not texts:
        return []
    if _is_plain_fast(tokenizer):
        # What transformers itself would do, without the offsets and masks that nobody asked for.
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
    batch = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False)
    ids: list[list[int]] = batch["input_ids"]
    return ids


def _is_plain_fast(tokenizer: Any) -> bool:
    """Whether its class leaves the encoding of text to the ``tokenizers`` library."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    if not hasattr(tokenizer.backend_tokenizer, "encode_batch_fast"):
        return False
    names = ("__call__", "encode", "_call_one", "_encode_plus", "_batch_encode_plus")
    return all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None)
        for name in names
    )


def _flag(turn: Mapping[str, Any], key: str) -> bool:
    # Arrow makes null of a key that only some turns have.
    value = turn.get(key)
    return True if value is None else bool(value)


def _as_list(ids: int | Iterable[int] | None) -> list[int] | None:
    if ids is None or isinstance(ids, int):
        return None if ids is None else [ids]
    return list(ids)
