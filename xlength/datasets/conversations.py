"""Rows of LLaVA's and OpenAI's format -> one form: messages with text and image parts, and the
images' sources."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xlength.datasets.json_rows import RowError

IMAGE = "<image>"
"""LLaVA's mark for an image in the text of a conversation."""

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
_PATH_KEYS = ("image", "path", "url", "image_url")


@dataclass
class Conversation:
    """One sample before it is rendered.

    Args:
        messages: dicts with ``role`` and ``content``, a list of ``{'type': 'image'}`` and
            ``{'type': 'text', 'text': ...}`` parts.
        images: source of each image, in the order of the parts.
        sizes: (height, width) in pixels of each image where the row says it, else None.
    """

    messages: list[dict[str, Any]]
    images: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int] | None] = field(default_factory=list)


def read_conversation(
    row: Mapping[str, Any], image_folder: str = "", image_first: bool = False
) -> Conversation:
    """The conversation of a row.

    LLaVA's format: ``conversations`` of ``{'from', 'value'}`` with ``<image>`` in the text, and
    ``image``: a path, a dict with ``path``, a list of these, or absent; None, an empty string and
    an empty list mean text only. Images without any mark in the text come before the first message
    of the user. Answers before the first question are left away, as in XTuner.

    OpenAI's format: ``messages`` of ``{'role', 'content'}``, where content is a text or a list of
    parts (``text``, ``image_url``, or transformers' ``image``). ``<image>`` marks with an ``image``
    key are understood here too.

    ``width`` and ``height`` (numbers, or lists with one for each image; on the row or on an image
    part) give the size of the images upright, so that the files need not be opened to measure the
    set.

    Args:
        row: one parsed row.
        image_folder: put before relative paths.
        image_first: move the image of a message with a single one before its text, as LLaVA and
            XTuner do.

    Raises:
        RowError: the row has no conversation, an empty one, unknown roles or parts, or another
            number of marks than images.
    """
    key = "conversations" if row.get("conversations") is not None else "messages"
    turns = row.get(key)
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise RowError(f"no 'conversations' and no 'messages', only {sorted(map(str, row))}")
    result = Conversation([])
    marks, llava = _paths(row.get("image")), key == "conversations"
    for turn in turns:
        result.messages.append(_message(turn, result, bool(marks) or llava, image_first))
    while result.messages and llava and result.messages[0]["role"] == "assistant":
        result.messages.pop(0)
    if not result.messages:
        raise RowError(f"'{key}' is empty")
    _place(result, marks, row)
    result.images = [_join(image_folder, source) for source in result.images]
    return result


def _message(
    turn: Any, conversation: Conversation, has_marks: bool, image_first: bool
) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowError(f"a message must be an object, got {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"unknown role {name!r}, expected one of {sorted(_ROLES)}")
    content = turn.get("content", turn.get("value"))
    parts: list[dict[str, Any]] = []
    if isinstance(content, str):
        parts = _split(content) if has_marks else [{"type": "text", "text": content}]
    elif isinstance(content, Sequence):
        for part in content:
            parts.extend(_part(part, conversation))
    elif content is not None:
        raise RowError(
            f"the content of a message must be a text or a list, got {type(content).__name__}"
        )
    if image_first and [part["type"] for part in parts].count("image") == 1:
        parts = _image_first(parts)
    extra = {k: v for k, v in turn.items() if k in ("tool_calls", "name", "reasoning_content")}
    return {"role": role, "content": parts, **extra}


def _split(text: str) -> list[dict[str, Any]]:
    """A text with ``<image>`` marks -> its parts."""
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(text.split(IMAGE)):
        if i:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _image_first(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = "".join(part.get("text", "") for part in parts).strip()
    return [{"type": "image"}, {"type": "text", "text": f"\n{text}" if text else ""}]


def _part(part: Any, conversation: Conversation) -> list[dict[str, Any]]:
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text"):
        text = part.get("text")
        if not isinstance(text, str | None):
            raise RowError(f"the text of a part must be a string, got {text!r:.80}")
        return [{"type": "text", "text": text or ""}]
    if kind not in ("image", "image_url"):
        raise RowError(f"unknown part of a message: {part!r:.80}")
    source = next((part[key] for key in _PATH_KEYS if part.get(key)), None)
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    if source is not None:
        conversation.images.append(_path(source))
        conversation.sizes.append(_size(part.get("width"), part.get("height")))
    return [{"type": "image"}]


def _place(conversation: Conversation, marks: list[str], row: Mapping[str, Any]) -> None:
    """Tie the ``image`` key of the row to the image parts."""
    if marks and conversation.images:
        raise RowError("images both in the parts of messages and under 'image'")
    if marks:
        conversation.images = marks
        conversation.sizes = _row_sizes(row, len(marks))
    parts = [part for message in conversation.messages for part in message["content"]]
    num_parts = sum(part["type"] == "image" for part in parts)
    if num_parts == 0 and conversation.images:
        first = next((m for m in conversation.messages if m["role"] == "user"), None)
        if first is None:
            raise RowError("images, but no message of the user")
        front = [{"type": "image"}] * len(conversation.images)
        first["content"] = [*front, {"type": "text", "text": "\n"}, *first["content"]]
    elif num_parts != len(conversation.images):
        raise RowError(
            f"{num_parts} places for images in the messages, but {len(conversation.images)} images"
        )


def _row_sizes(row: Mapping[str, Any], count: int) -> list[tuple[int, int] | None]:
    width, height = row.get("width"), row.get("height")
    if width is None or height is None:
        return [None] * count
    widths = width if _is_list(width) else [width]
    heights = height if _is_list(height) else [height]
    if len(widths) != count or len(heights) != count:
        raise RowError(f"{count} images, but {len(widths)} widths and {len(heights)} heights")
    return [_size(w, h) for w, h in zip(widths, heights, strict=True)]


def _size(width: Any, height: Any) -> tuple[int, int] | None:
    if width is None or height is None:
        return None
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (width, height))
    if not whole or min(width, height) < 1:
        raise RowError(
            f"width and height must be whole numbers of pixels, got {width!r}, {height!r}"
        )
    return height, width


def _paths(image: Any) -> list[str]:
    if image is None or image == "" or image == []:
        return []
    return [_path(one) for one in (image if _is_list(image) else [image])]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _path(source: Any) -> str:
    path = source.get("path") if isinstance(source, Mapping) else source
    if not isinstance(path, str) or not path:
        raise RowError(f"an image must be a path, got {source!r:.80}")
    return path.removeprefix("file://")


def _join(folder: str, source: str) -> str:
    if not folder or source.startswith("data:") or "://" in source:
        return source
    return os.path.join(folder, source)
