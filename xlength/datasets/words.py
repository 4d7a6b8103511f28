"""Byte-level BPE in a fraction of the time: words are looked up, not encoded again.

A byte-level tokenizer cuts text by a fixed regular expression and encodes each word by itself, and
of a million words few are new. None of the expressions in use sees across a single space between
two other characters: a word may begin with it, none goes on behind it. So text is cut there, which
is cheap, and the pieces are remembered. A new piece is cut further by the same expression if it is
ASCII, and the words are remembered as well; a new word goes to the tokenizer, and so does a new
piece with other letters.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, count, islice
from typing import Any
from unicodedata import is_normalized

import numpy as np
from numpy.typing import NDArray

_SPACE = r"\t\n\v\f\r "
_OTHER = rf"[^{_SPACE}A-Za-z0-9]"  # [^\s\p{L}\p{N}]
_END = rf"[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"  # \s+(?!\S)|\s+
_NEAR = r"[^\r\nA-Za-z0-9]?[A-Za-z]+"  # [^\r\n\p{L}\p{N}]?\p{L}+
_LINES = rf" ?{_OTHER}+[\r\n]*|[{_SPACE}]*[\r\n]+"  # ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?{_OTHER}+|{_END}"
_LIKE_GPT4 = {
    numbers: (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
}
_ON_ASCII = {
    original: (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
        + f"{_NEAR}|{numbers.replace(chr(92) + 'p{N}', '[0-9]')}|{_LINES}|{_END}"
    )
    for numbers, original in _LIKE_GPT4.items()
}
"""Expressions of tokenizers (Llama 3, Qwen 2 to 3) -> what they mean on ASCII text."""

# No white space: ASCII, Latin, Greek, Cyrillic, quotes and dashes, Chinese characters.
_SOLID = r"!-~\u00a1-\u024f\u0370-\u052f\u2010-\u2027\u4e00-\u9fff"
_BORDER = f" (?=[{_SOLID}])(?<=[{_SOLID}] )"
_TOUCHES_BORDER = re.compile(f"(?<![^{_SOLID}]) (?![^{_SOLID}])")

_MOST_UNITS = 1_000_000
_MOST_LETTERS = 8_000_000

Ids = NDArray[np.int32]
Sizes = NDArray[np.int64]
Encode = Callable[[list[str]], list[list[int]]]


class Memory:
    """Token ids of units of text, asked for once; a full memory starts anew.

    Args:
        encode: units -> the token ids of all, end to end, and how many each has.
    """

    def __init__(self, encode: Callable[[list[str]], tuple[Ids, Sizes]]) -> None:
        self.encode = encode
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.numbers: defaultdict[str, int] = defaultdict(count().__next__)
        """Unit -> its place in the order of first sight."""
        self.letters = 0
        self.ids = array("i")
        """Token ids of all units, end to end."""
        self.ends = array("q", [0])

    def __call__(self, texts: list[list[str]]) -> tuple[Ids, Sizes]:
        """Token ids of texts that are cut into units, end to end, and how many each text has."""
        before = len(self.numbers)
        try:
            find = map(self.numbers.__getitem__, chain.from_iterable(texts))
            units = np.fromiter(find, dtype=np.int64)
            self._learn(list(islice(reversed(self.numbers), len(self.numbers) - before))[::-1])
        except BaseException:
            self.forget()
            raise
        ends = np.frombuffer(self.ends, dtype=np.int64)
        tokens = np.diff(ends)[units]
        places = np.append(0, np.cumsum(tokens))
        steps = np.arange(places[-1]) + np.repeat(ends[units] - places[:-1], tokens)
        ids = np.frombuffer(self.ids, dtype=np.int32)[steps]
        if len(self.numbers) > _MOST_UNITS or self.letters > _MOST_LETTERS:
            self.forget()
        sizes = np.cumsum(np.fromiter(map(len, texts), dtype=np.int64))
        return ids, np.diff(places[sizes], prepend=0)

    def _learn(self, units: list[str]) -> None:
        if units:
            ids, sizes = self.encode(units)
            self.ids.frombytes(ids.tobytes())
            self.ends.frombytes((self.ends[-1] + np.cumsum(sizes)).tobytes())
            self.letters += sum(map(len, units))


class WordTable:
    """Encodes texts like ``encode``, which is asked for what is new.

    Cost: some 100 bytes and its letters for a piece or word that is remembered; at most a million
    of each, and eight million letters.

    Args:
        pattern: cuts ASCII text into words.
        added: tokens that are cut out first; one expression after the other.
        encode: the tokenizer, for many texts at once.
    """

    def __init__(self, pattern: str, added: Sequence[str], encode: Encode) -> None:
        self.words = re.compile(pattern).findall
        self.pieces = re.compile(_BORDER).split
        self.splits = [re.compile(f"({expression})").split for expression in added]
        self.has_added = re.compile("|".join(added) or "(?!)").search
        self.known_words = Memory(lambda words: flattened(encode(words)))
        self.known_pieces = Memory(lambda pieces: self.known_words(list(map(self._cut, pieces))))

    def __call__(self, texts: list[str]) -> list[Ids]:
        cut = [self.pieces(text) for text in texts]
        for pieces in cut:
            pieces[0] = f" {pieces[0]}"  # no other piece begins with a space: it is left away
        return cut_after(*self.known_pieces(cut))

    def _cut(self, piece: str) -> list[str]:
        """The words of a piece of text."""
        text = piece[1:] if piece.startswith(" ") else f" {piece}"
        if not text.isascii():
            return [text]
        if not self.has_added(text):
            return self.words(text)
        parts = [text]
        for split in self.splits:
            # Every second part is an added token; those of an earlier expression stay whole.
            parts = [
                piece
                for i, part in enumerate(parts)
                for piece in (split(part) if i % 2 == 0 else [part])
            ]
        words: list[str] = []
        for i, part in enumerate(parts):
            if i % 2:
                words.append(part)
            else:
                words += self.words(part)
        return words


def flattened(lists: Sequence[Sequence[int]]) -> tuple[Ids, Sizes]:
    """The lists end to end, and their sizes."""
    sizes = np.fromiter(map(len, lists), dtype=np.int64)
    return np.fromiter(chain.from_iterable(lists), dtype=np.int32), sizes


def cut_after(ids: Ids, sizes: Sizes) -> list[Ids]:
    """What ``flattened`` laid end to end, as views."""
    return np.split(ids, np.cumsum(sizes)[:-1]) if len(sizes) else []


def word_table(tokenizer: Any, encode: Encode) -> WordTable | None:
    """A table for a fast tokenizer; None where it does more than cut and look up.

    That is: it normalises (but for NFC, which leaves ASCII alone), cuts by an expression that is
    not known here, drops merges at random, or has added tokens that look at what is beside them,
    have a space between words, or are other text once they are normalised.
    """
    backend = tokenizer.backend_tokenizer
    pattern = _pattern(_state(backend.pre_tokenizer))
    model = backend.model
    if pattern is None or type(model).__name__ != "BPE" or model.dropout:
        return None
    if _state(backend.normalizer) not in ({}, {"type": "NFC"}):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if getattr(tokenizer, "split_special_tokens", False):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    if any(_TOUCHES_BORDER.search(token.content) for token in added):
        return None
    if any(token.normalized and not is_normalized("NFC", token.content) for token in added):
        return None
    return WordTable(pattern, _expressions(added), encode)


def _state(step: Any) -> dict[str, Any]:
    """The JSON of a normaliser or pre-tokeniser; empty where there is none."""
    state: dict[str, Any] = {} if step is None else json.loads(step.__getstate__())
    return state


def _pattern(pre_tokenizer: dict[str, Any]) -> str | None:
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2 if last.get("use_regex") else None
    first = steps[0]
    known = first.get("type") == "Split" and first.get("behavior") == "Isolated"
    if len(steps) != 2 or not known or first.get("invert") or last.get("use_regex"):
        return None
    return _ON_ASCII.get(first["pattern"].get("Regex"))


def _expressions(added: Sequence[Any]) -> list[str]:
    """Added tokens as expressions: first those that are looked for before normalisation."""
    result = []
    for normalized in (False, True):
        texts = [token.content for token in added if token.normalized == normalized]
        if texts:
            # The longest that fits at the first place where one does.
            result.append("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    return result
