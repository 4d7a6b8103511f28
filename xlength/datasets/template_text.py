"""Messages with images, written with one of XTuner's prompt templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.datasets.chat_text import Ints, Message, Part
from xlength.datasets.json_rows import RowError
from xlength.datasets.templates import is_chat_template, template_map_fn, template_map_fn_factory
from xlength.datasets.tokenize import TurnEncoder, encode_texts


class TemplateText:
    """Writes conversations with a prompt template, in place of ``ChatText``.

    Turns, ids and labels are those of ``process_hf_dataset``: each text is tokenised by itself.
    What several messages say up to an answer is joined, with the images at their places.

    Args:
        processor: a transformers processor with ``image_token``.
        template: a template, or the name of one in ``PROMPT_TEMPLATE``.

    Raises:
        ValueError: there is no such template, or it stands for a chat template.
    """

    add_special_tokens = False

    def __init__(self, processor: Any, template: Any) -> None:
        self.template = template_map_fn_factory(template).keywords["template"]
        if is_chat_template(self.template):
            raise ValueError(f"template={template!r} means the processor's own: leave it away")
        self.encoder = TurnEncoder(processor.tokenizer, max_length=0)
        self.tokenizer, self.image_token = processor.tokenizer, processor.image_token
        self.image_text = _around_image(processor)

    def parts(self, messages: Sequence[Message]) -> list[Part]:
        """What is tokenised, piece by piece.

        Raises:
            RowError: the template cannot write it, or its text holds the placeholder itself.
        """
        return [part for part, _ in self._pieces(messages)]

    def ids(self, messages: Sequence[Message]) -> tuple[Ints, NDArray[np.bool_]]:
        """(t,) int64 token ids of a conversation, and (t,) bool, which of them are trained."""
        pieces = self._pieces(messages)
        tokens = iter(encode_texts(self.tokenizer, [p for p, _ in pieces if isinstance(p, str)]))
        rows = [next(tokens) if isinstance(part, str) else part for part, _ in pieces]
        ids = np.array([token for row in rows for token in row], dtype=np.int64)
        flags = np.array([trained for _, trained in pieces], dtype=bool)
        return ids, np.repeat(flags, [len(row) for row in rows])

    def fingerprint(self) -> str:
        """What the text depends on."""
        return repr(sorted(self.template.items()))

    def _pieces(self, messages: Sequence[Message]) -> list[tuple[Part, bool]]:
        turns: list[dict[str, str]] = []
        text = system = ""
        for message in messages:
            said = "".join(map(self._as_text, message["content"]))
            if message["role"] == "system":
                system = said
            elif message["role"] == "assistant":
                turns.append({"system": system, "input": text, "output": said})
                text = system = ""
            else:
                text += said
        if self.image_token in text:
            raise RowError("an image behind the last answer, where the template writes nothing")
        try:
            written = template_map_fn({"conversation": turns}, self.template)["conversation"]
            return list(self.encoder.prepare({}, written))
        except ValueError as error:
            raise RowError(str(error)) from error

    def _as_text(self, part: Message) -> str:
        if part["type"] == "image":
            return self.image_text
        if self.image_token in part["text"]:
            raise RowError(f"its text has a placeholder {self.image_token!r} that is no image")
        return str(part["text"])


def _around_image(processor: Any) -> str:
    """How an image is written: Qwen's models set marks around it."""
    marks = [f"<|vision_{side}|>" for side in ("start", "end")]
    vocabulary = processor.tokenizer.get_vocab()
    if not all(mark in vocabulary for mark in marks):
        return str(processor.image_token)
    return f"{marks[0]}{processor.image_token}{marks[1]}"
