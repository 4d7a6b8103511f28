"""Map functions: a row of a data set -> ``{'conversation': [turn, ...]}``.

A turn has ``output``, and as needed ``input``, ``system``, ``output_with_loss`` (True) and
``need_eos_token`` (True). A row without a conversation to learn from gives an empty list. A row of
another form raises; ``process_hf_dataset`` counts these and names the first.

The names and formats are XTuner's; each is registered in ``MAP_FUNC``, so a config can name it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xlength.registry import MAP_FUNC, register

Row = Mapping[str, Any]
Conversation = dict[str, list[dict[str, Any]]]


@register(MAP_FUNC)
def default_map_fn(example: Row) -> Conversation:
    """``input`` and ``output``."""
    return _single(_text(example, "input"), _text(example, "output"))


@register(MAP_FUNC)
def alpaca_map_fn(example: Row) -> Conversation:
    """Stanford Alpaca: ``instruction``, ``input``, ``output``; ``<nooutput>`` is left out."""
    if example.get("output") == "<nooutput>":
        return {"conversation": []}
    text = f"{_text(example, 'instruction')}\n{_text(example, 'input')}"
    return _single(text, _text(example, "output"))


@register(MAP_FUNC)
def alpaca_zh_map_fn(example: Row) -> Conversation:
    """The Chinese Alpaca: ``instruction_zh``, ``input_zh``, ``output_zh``."""
    text = f"{_text(example, 'instruction_zh')}\n{_text(example, 'input_zh')}"
    return _single(text, _text(example, "output_zh"))


@register(MAP_FUNC)
def openorca_map_fn(example: Row) -> Conversation:
    """OpenOrca: ``system_prompt``, ``question``, ``response``."""
    system = _text(example, "system_prompt")
    return _single(_text(example, "question"), _text(example, "response"), system=system)


@register(MAP_FUNC)
def stack_exchange_map_fn(example: Row) -> Conversation:
    """``question`` and ``response``."""
    return _single(_text(example, "question"), _text(example, "response"))


@register(MAP_FUNC)
def pretrain_map_fn(example: Row) -> Conversation:
    """``text``, all of it trained, with no end-of-sequence token."""
    return _single("", _text(example, "text").strip(), need_eos_token=False)


@register(MAP_FUNC)
def oasst1_map_fn(example: Row) -> Conversation:
    """OpenAssistant as one ``text``: ``### Human: ... ### Assistant: ...``; a last question without
    an answer is left away."""
    said = []
    for part in _text(example, "text").strip().split("###"):
        for name in ("Human:", "Assistant:"):
            if part.strip().startswith(name):
                said.append(part.strip()[len(name) :].strip())
    pairs = zip(said[::2], said[1::2], strict=False)
    return {"conversation": [{"input": question, "output": answer} for question, answer in pairs]}


@register(MAP_FUNC)
def openai_map_fn(example: Row) -> Conversation:
    """``messages`` of ``{'role', 'content'}``; an assistant's message may have ``loss``.

    A ``system`` (or ``developer``) message belongs to the next answer; what ``user`` and ``tool``
    (or ``function``) say up to it is its input. An assistant that speaks first is passed over, and
    so is a question without an answer. A ``loss`` of null means true: that is what Arrow makes of a
    key that only some messages have.
    """
    messages = _messages(example, "messages", "role", "content")
    conversation = []
    system = text = ""
    for role, content, message in _without_opening(messages, "assistant"):
        if role in ("system", "developer"):
            system = content
        elif role in ("user", "tool", "function"):
            text += content
        elif role == "assistant":
            loss = message.get("loss")
            conversation.append(
                {
                    "system": system,
                    "input": text,
                    "output": content,
                    "output_with_loss": loss is None or str(loss).lower() == "true",
                }
            )
            system = text = ""
        else:
            raise ValueError(f"unknown role {role!r}; known are system, user, assistant and tool")
    return {"conversation": conversation}


@register(MAP_FUNC)
def wizardlm_map_fn(example: Row) -> Conversation:
    """ShareGPT's form: ``conversations`` of ``{'from': 'human' | 'gpt', 'value'}``."""
    messages = _messages(example, "conversations", "from", "value")
    conversation = []
    text = ""
    for role, content, _ in _without_opening(messages, "gpt"):
        if role == "human":
            text += content
        elif role == "gpt":
            conversation.append({"input": text, "output": content})
            text = ""
        else:
            raise ValueError(f"unknown speaker {role!r}; known are human and gpt")
    return {"conversation": conversation}


def _single(text: str, answer: str, **more: Any) -> Conversation:
    return {"conversation": [{"input": text, "output": answer, **more}]}


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(
            f"no {key!r}; it has {list(row)}"
            if key not in row
            else f"{key!r} is {value!r}; it must be a string"
        )
    return value


def _messages(
    row: Row, key: str, role: str, content: str
) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(role, content, message) of each message."""
    messages = row.get(key)
    if key not in row:
        raise ValueError(f"no {key!r}; it has {list(row)}")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{key!r} is {messages!r}; it must be a list of messages")
    result: list[tuple[str, str, Row]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):  # quicker than Mapping, and what Arrow gives
            raise ValueError(f"message {i} is {message!r}; it must have {role!r} and {content!r}")
        who, said = message.get(role), message.get(content)
        if not isinstance(who, str) or not isinstance(said, str):
            raise ValueError(f"message {i}: {role!r} and {content!r} must be strings: {message!r}")
        result.append((who, said, message))
    return result


def _without_opening(
    messages: Sequence[tuple[str, str, Mapping[str, Any]]], role: str
) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    """The messages from the first on that is not the assistant's."""
    start = 0
    while start < len(messages) and messages[start][0] == role:
        start += 1
    return messages[start:]
