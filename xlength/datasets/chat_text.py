"""Messages with images -> the text that a processor tokenises, and which of its characters are
trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mmengine.logging import print_log
from numpy.typing import NDArray

from xlength.datasets.json_rows import RowError

Message = Mapping[str, Any]
Part = str | list[int]
"""Text, or token ids that are ready."""

Ints = NDArray[np.int64]

_REWRITES = (
    "the chat template renders earlier answers otherwise when the conversation goes on, so what "
    "the assistant said cannot be found; give another chat_template"
)

_ENDLESS = (
    "The chat template writes nothing behind an answer, so the model will not learn to stop; a "
    "template that does can be given as template= or chat_template=."
)


class ChatText:
    """Renders conversations with the chat template of a processor (or of its tokenizer).

    Trained is what the assistant says, up to and with the mark that ends its turn: for each of its
    messages, what the template adds to the generation prompt. So the template must render the
    beginning of a conversation as the beginning of its text.

    Cost: 10 to 20 microseconds a conversation for the text alone; the spans render it twice for
        each answer.

    Args:
        processor: a transformers processor with ``image_token``.
        chat_template: a jinja template in place of the processor's.

    Raises:
        ValueError: there is no chat template, or it loses images or text.
    """

    def __init__(self, processor: Any, chat_template: str | None = None) -> None:
        self.image_token: str = processor.image_token
        self.tokenizer = processor.tokenizer
        # Models with positions in two dimensions tell images apart by what stands between them.
        self._must_part = bool(getattr(processor, "return_mm_token_type_ids", False))
        self.template = _chat_template(processor, chat_template)
        self._names = dict(processor.tokenizer.special_tokens_map)
        self._render: Callable[..., str] | None = None
        self._as_parts = True
        self._writes_newline = False
        self._check()
        self._one_answer = not self._keeps_answers()
        bos = processor.tokenizer.bos_token
        probe = self.text([{"role": "user", "content": [{"type": "text", "text": "a"}]}])
        self.add_special_tokens = not (bos and probe.startswith(bos))
        """Whether the tokenizer adds its own: not where the template writes the first of them."""

    def text(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """The text of a conversation, each image as one placeholder.

        Raises:
            RowError: the template refuses the messages, or their text holds the placeholder itself.
        """
        if self._render is None:
            self._render = _compiled(self.template)
        try:
            text = self._render(
                messages=self._prepared(messages),
                add_generation_prompt=generation_prompt,
                **self._names,
            )
        except Exception as error:
            raise RowError(f"the chat template refuses it: {error}") from error
        num_images = sum(
            part["type"] == "image" for message in messages for part in message["content"]
        )
        if self._writes_newline:
            text = text.replace(f"{self.image_token}\n\n", f"{self.image_token}\n")
        found = text.count(self.image_token)
        if found != num_images:
            raise RowError(
                f"its text has {found} placeholders {self.image_token!r} for {num_images} images"
            )
        if self._must_part and 2 * self.image_token in text:
            raise RowError(
                "two images with nothing between them, which this family cannot tell apart"
            )
        return text

    def parts(self, messages: Sequence[Message]) -> list[Part]:
        """What is tokenised, piece by piece: here the whole text."""
        if self._one_answer and sum(m["role"] == "assistant" for m in messages) > 1:
            raise RowError(_REWRITES)
        return [self.text(messages)]

    def ids(self, messages: Sequence[Message]) -> tuple[Ints, NDArray[np.bool_]]:
        """(t,) int64 token ids of a conversation, and (t,) bool, which of them are trained.

        Raises:
            RowError: as ``text`` and ``spans``.
        """
        text = self.text(messages)
        encoding = self.tokenizer(
            text,
            add_special_tokens=self.add_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        ids = np.asarray(encoding["input_ids"], dtype=np.int64)
        offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        trained = np.zeros(len(ids), dtype=bool)
        for start, stop in self.spans(messages, text):
            trained |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        return ids, trained

    def spans(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """First and last (exclusive) character of each trained stretch of ``text``.

        Raises:
            RowError: the template does not render the beginning of these messages as the
                beginning of ``text``.
        """
        result = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.text(messages[:i], generation_prompt=True) if i else ""
            answered = self.text(messages[: i + 1]).rstrip()
            if not (text.startswith(answered) and answered.startswith(prompt.rstrip())):
                raise RowError(_REWRITES)
            start = len(prompt) if answered.startswith(prompt) else len(prompt.rstrip())
            result.append((start, len(answered)))
        return result

    def fingerprint(self) -> str:
        """What the text depends on."""
        return self.template

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_render": None}

    def _prepared(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if self._as_parts:
            return [dict(message) for message in messages]
        return [
            {**message, "content": "".join(map(self._as_text, message["content"]))}
            for message in messages
        ]

    def _as_text(self, part: Message) -> str:
        return self.image_token if part["type"] == "image" else part["text"]

    def _keeps_answers(self) -> bool:
        """Whether an answer is rendered alike at the end and in the middle of a conversation."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": f"text {i}"}]}
            for i, role in enumerate(("user", "assistant", "user", "assistant"))
        ]
        try:
            return len(self.spans(messages, self.text(messages))) == 2
        except RowError:
            return False

    def _check(self) -> None:
        """Does the template take parts, or plain texts? It is asked with a small conversation."""
        parts = [{"type": "image"}, {"type": "text", "text": "PROBE"}]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": "ANSWER"}]},
        ]
        problem: Exception | None = None
        for self._as_parts in (True, False):
            try:
                text = self.text(messages)
            except RowError as error:
                problem = error
                continue
            if "PROBE" in text and "ANSWER" in text and "'type'" not in text:
                # LLaVA's "<image>\\n" brings a line end too; one is what the model knows.
                self._writes_newline = f"{self.image_token}\nPROBE" in text
                if text.rstrip().endswith("ANSWER"):
                    print_log(_ENDLESS, "current", logging.WARNING)
                return
        raise ValueError(
            f"the chat template cannot render an image with a text: {problem or 'the text is lost'}"
        )


def _chat_template(processor: Any, given: str | None) -> str:
    template = given or getattr(processor, "chat_template", None)
    template = template or getattr(processor.tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise ValueError(
            f"processor {type(processor).__name__} has no chat template: "
            "give chat_template or template"
        )
    return str(template)


def _compiled(template: str) -> Callable[..., str]:
    """transformers' own compiled template where it can be had; its public function copies each
    message deeply."""
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is not None:
        compiled = compile_template(template).environment.from_string(template)
        # Each call copies them, and of a chain of dicts that takes half of the time.
        compiled.globals = dict(compiled.globals)
        render: Callable[..., str] = compiled.render
        return render

    def render_one(messages: Any, **names: Any) -> str:
        rendered = chat_template_utils.render_jinja_template(
            conversations=[messages], chat_template=template, **names
        )
        return str(rendered[0][0])

    return render_one
