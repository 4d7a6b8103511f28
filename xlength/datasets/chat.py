"""Conversations -> token ids and labels by the tokenizer's own chat template."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xlength.datasets.tokenize import (
    IGNORE_INDEX,
    IMAGE_TOKEN_INDEX,
    Ids,
    Piece,
    TextEncoder,
    encode_pieces,
    with_image_ids,
)

Message = dict[str, Any]
Span = tuple[int, int]

_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


class ChatEncoder:
    """Token ids and labels of conversations, written by the tokenizer's chat template.

    Trained is what the assistant says, with the token that ends its turn. A template with
    ``{% generation %}`` marks says itself what that is. Of another one it is what it writes behind
    the generation prompt, or behind what it keeps of it in a conversation that goes on. The text up
    to a message of the assistant must be the beginning of the whole text.

    Text and answers are tokenised apart, as they are when a model answers a prompt. A tokenizer
    that puts a space before every text (SentencePiece's way) gets the whole text, and labels by the
    place of each token.

    Cost: the template is rendered once for a conversation, and twice more for each answer where it
    has no marks.

    Args:
        tokenizer: of transformers, with a chat template.
        max_length: longer rows are cut at their end.
        with_image_token: put -200 where a message that is not trained has ``<image>``.
        messages_column: take the ``messages`` of the rows as they are, and their ``tools``, where
            they have them, instead of turns.

    Raises:
        ValueError: there is no chat template, it loses plain text, or the tokenizer is of neither
            kind.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        with_image_token: bool = False,
        messages_column: bool = False,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"template 'tokenizer': {type(tokenizer).__name__} has no chat template; choose "
                "another one of PROMPT_TEMPLATE, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        self.texts = TextEncoder(tokenizer)
        self.max_length = max_length
        self.with_image_token = with_image_token
        self.messages_column = messages_column
        self.special = tuple(map(str, tokenizer.get_added_vocab()))
        self.in_pieces = _same_in_pieces(tokenizer)
        if not self.in_pieces and not tokenizer.is_fast:
            raise ValueError(
                f"template 'tokenizer' needs a fast tokenizer, got {type(tokenizer).__name__}"
            )
        self._check()

    def _check(self) -> None:
        """A template that wants a list of parts may render a plain text as nothing."""
        roles = {"user": "QUESTION", "assistant": "ANSWER"}
        probe = [{"role": role, "content": content} for role, content in roles.items()]
        text = self._render(probe, None)
        lost = [content for content in roles.values() if content not in text]
        if lost:
            raise ValueError(f"the chat template loses a plain text: {lost[0]!r} gives {text!r}")

    def prepare(self, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """The text of a row in pieces that are trained and not; none where nobody answers.

        Raises:
            ValueError: the row cannot be written; the message says why.
        """
        if self.messages_column and ("messages" in row or not turns):
            messages, tools = _messages(row), _tools(row)
        else:
            messages, tools = _from_turns(turns), None
        if not messages:
            return []
        text, spans = self._text(messages, tools)
        answers = [message for message in messages if message["role"] == "assistant"]
        trained = [_trained(message) for message in answers]
        if len(spans) == len(answers):
            spans = [span for span, flag in zip(spans, trained, strict=True) if flag]
        elif not all(trained):
            raise ValueError(
                f"the chat template marks {len(spans)} stretches for {len(answers)} answers, so "
                "those without loss cannot be told"
            )
        return self._pieces(text, spans)

    def _text(self, messages: list[Message], tools: Any) -> tuple[str, list[Span]]:
        template = self.tokenizer.get_chat_template(tools=tools)
        if _MARK.search(template):
            marked = _render_marked(self.tokenizer, messages, tools, template)
            if marked is not None:
                return marked
        text = self._render(messages, tools)
        starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins = [self._begin(text, messages, i, tools) for i in starts]
        limits = [*begins[1:], len(text)]
        spans = [
            (begin, self._end(text, messages, i, begin, limit, tools))
            for i, begin, limit in zip(starts, begins, limits, strict=True)
        ]
        return text, spans

    def _begin(self, text: str, messages: list[Message], i: int, tools: Any) -> int:
        """Where the answer that is message ``i`` begins."""
        prompt = self._render(messages[:i], tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # A prompt may open a thought that is not kept: the answer begins where the two part.
        if text.startswith(self._render(messages[:i], tools)):
            return len(os.path.commonprefix([text, prompt]))
        raise ValueError(
            f"the chat template writes what comes before message {i} otherwise when the "
            "conversation goes on, so the answer cannot be found in it; give the template "
            "{% generation %} marks, or choose another one of PROMPT_TEMPLATE"
        )

    def _end(
        self, text: str, messages: list[Message], i: int, start: int, limit: int, tools: Any
    ) -> int:
        """Where the answer that begins at ``start`` ends, with the token that ends its turn."""
        answered = self._render(messages[: i + 1], tools)
        if text.startswith(answered):
            end = len(answered)
        else:
            # Qwen3 writes the last answer otherwise than earlier ones: look for its words.
            words = str(messages[i].get("content") or "").strip()
            place = text.find(words, start, limit)
            if not words or place < 0:
                raise ValueError(
                    f"the chat template changes message {i}, so its end cannot be found; give the "
                    "template {% generation %} marks, or choose another one of PROMPT_TEMPLATE"
                )
            end = place + len(words)
            rest = text[end:limit]
            skipped = len(rest) - len(rest.lstrip())
            token = next((t for t in self.special if rest.lstrip().startswith(t)), "")
            end += skipped + len(token) if token else 0
        stripped = text[:end].rstrip()
        return len(stripped) if stripped.endswith(self.special) else end

    def _render(self, messages: list[Message], tools: Any, prompt: bool = False) -> str:
        if not messages:
            return ""
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        return text

    def _pieces(self, text: str, spans: list[Span]) -> list[Piece]:
        pieces: list[Piece] = []
        place = 0
        for start, end in spans:
            pieces += self._untrained(text[place:start])
            pieces.append((text[start:end], True))
            place = end
        return pieces + self._untrained(text[place:])

    def _untrained(self, text: str) -> list[Piece]:
        if not text:
            return []
        return with_image_ids(text) if self.with_image_token else [(text, False)]

    def encode(self, rows: Sequence[Sequence[Piece]]) -> list[tuple[Ids, Ids, int]]:
        """(input_ids, labels, tokens cut off) of each row."""
        if self.in_pieces:
            return encode_pieces(self.texts, rows, self.max_length)
        return [self._encode_whole(row) for row in rows]

    def _encode_whole(self, pieces: Sequence[Piece]) -> tuple[Ids, Ids, int]:
        ids: list[int] = []
        labels: list[int] = []
        for number, stretch in enumerate(_between_images(pieces)):
            if number:
                ids.append(IMAGE_TOKEN_INDEX)
                labels.append(IGNORE_INDEX)
            whole = "".join(part for part, _ in stretch)
            batch = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
            flags = [flag for part, flag in stretch for _ in range(len(part))]
            for token, (start, end) in zip(
                batch["input_ids"], batch["offset_mapping"], strict=True
            ):
                ids.append(token)
                labels.append(token if start < end and flags[start] else IGNORE_INDEX)
        kept = slice(0, self.max_length)
        cut = max(0, len(ids) - self.max_length)
        return np.array(ids[kept], np.int32), np.array(labels[kept], np.int32), cut


def _between_images(pieces: Sequence[Piece]) -> list[list[tuple[str, bool]]]:
    stretches: list[list[tuple[str, bool]]] = [[]]
    for text, trained in pieces:
        if isinstance(text, str):
            stretches[-1].append((text, trained))
        else:
            stretches.append([])
    return stretches


def _render_marked(
    tokenizer: Any, messages: list[Message], tools: Any, template: str
) -> tuple[str, list[Span]] | None:
    """The text and what its template marks; None where this transformers cannot tell the place."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        return None
    try:
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:
        raise ValueError(f"the chat template refuses it: {error}") from error
    texts, spans = rendered
    return texts[0], [(int(start), int(end)) for start, end in spans[0]]


def _messages(row: Mapping[str, Any]) -> list[Message]:
    """The messages from the first question to the last answer, without nulls."""
    messages = row.get("messages")
    if "messages" not in row:
        raise ValueError(f"no 'messages'; it has {list(row)}")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"'messages' is {messages!r}; it must be a list of messages")
    result: list[Message] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} is {message!r}; it must have a 'role'")
        message = {key: value for key, value in message.items() if value is not None}
        if "content" not in message and not message.get("tool_calls"):
            raise ValueError(f"message {i} has no 'content': {message!r}")
        if result or message["role"] != "assistant":
            result.append(message)
    while result and result[-1]["role"] != "assistant":
        result.pop()
    return result


def _tools(row: Mapping[str, Any]) -> Any:
    tools = row.get("tools")
    return (json.loads(tools) if isinstance(tools, str) else tools) or None


def _from_turns(turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        if not isinstance(turn.get("output"), str):
            raise ValueError(f"turn {i} has no 'output': {dict(turn)!r}")
        if turn.get("system"):
            messages.append({"role": "system", "content": turn["system"]})
        if turn.get("input"):
            messages.append({"role": "user", "content": turn["input"]})
        answer = {"role": "assistant", "content": turn["output"]}
        messages.append({**answer, "loss": turn.get("output_with_loss")})
    return messages


def _trained(message: Message) -> bool:
    loss = message.get("loss")
    return loss is None or str(loss).lower() == "true"


def _same_in_pieces(tokenizer: Any) -> bool:
    """Whether a text may be tokenised in pieces; not where each gets a space of its own."""

    def ids(text: str) -> list[int]:
        result: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return result

    return ids("a b\nc") == ids("a") + ids(" b\n") + ids("c")
