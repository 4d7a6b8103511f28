"""Byte-level BPE of plain English in half the time: words are looked up, not encoded again.

A byte-level tokenizer cuts text by a fixed regular expression and encodes each word by itself, and
of a million words few are new. Python's ``re`` cuts ASCII text by the same expression at a third of
the cost of the whole, and a dict does the rest. Everything else goes to the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

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

_MOST_WORDS = 1_000_000
_LONGEST_WORD = 64

Encode = Callable[[list[str]], list[list[int]]]


class WordTable:
    """Encodes texts like ``encode``, which is asked for each new word, and for what is not ASCII.

    Cost: some 100 bytes a word that is remembered, at most a million of them.

    Args:
        pattern: cuts ASCII text into words.
        added: tokens that are cut out first; one expression after the other.
        encode: the tokenizer, for many texts at once.
    """

    def __init__(self, pattern: str, added: Sequence[str], encode: Encode) -> None:
        self.words = re.compile(pattern).findall
        self.splits = [re.compile(f"({expression})").split for expression in added]
        self.encode = encode
        self.table: dict[str, list[int]] = {}
        self.long: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        cut = [self._cut(text) if text.isascii() else None for text in texts]
        self._learn(set().union(*(words for words in cut if words is not None)))
        others = [text for text, words in zip(texts, cut, strict=True) if words is None]
        rest = iter(self.encode(others) if others else [])
        find = self.table.__getitem__
        result = [
            next(rest) if words is None else list(chain.from_iterable(map(find, words)))
            for words in cut
        ]
        for word in self.long:
            del self.table[word]
        if len(self.table) > _MOST_WORDS:
            self.table.clear()
        return result

    def _cut(self, text: str) -> list[str] | None:
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

    def _learn(self, words: set[str]) -> None:
        new = list(words.difference(self.table))
        self.long = [word for word in new if len(word) > _LONGEST_WORD]
        if new:
            self.table.update(zip(new, self.encode(new), strict=True))


def word_table(tokenizer: Any, encode: Encode) -> WordTable | None:
    """A table for a fast tokenizer; None where it does more than cut and look up.

    That is: it normalises (but for NFC, which leaves ASCII alone), cuts by an expression that is
    not known here, drops merges at random, or has added tokens that look at what is beside them.
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
