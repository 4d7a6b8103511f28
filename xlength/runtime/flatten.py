"""A config and its ``_base_`` files as the text of one file, to be edited."""

from __future__ import annotations

import ast
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH = 100


@dataclass
class Statement:
    """One statement of a config file.

    Args:
        name: what it assigns, None where it is no assignment to one name.
        text: its lines, with the comments before and behind it.
        value: what is assigned.
    """

    name: str | None
    text: str
    value: ast.expr | None

    def is_setting(self, used: set[str]) -> bool:
        """Whether it is a plain number or string that other statements use."""
        return self.name in used and isinstance(self.value, ast.Constant)


@dataclass
class Part:
    """One file of a config.

    Args:
        heading: the comment at its head.
        statements: in order, without ``_base_``.
    """

    heading: str
    statements: list[Statement]


def flat_text(file: Path) -> str:
    """The config without ``_base_``, comments kept, plain settings first.

    The text is executed and compared with the original; where a rare construction makes them
    differ, mmengine's own dump is returned, which has the same values without names and comments.

    Args:
        file: a config in mmengine's text style, or a lazy one, which is returned as it is unless it
            reads a base.

    Returns:
        Python source whose config equals that of ``file``.
    """
    from mmengine.config import Config

    text = file.read_text(encoding="utf-8")
    if "_base_" not in text and "read_base" not in text:
        return text
    original = Config.fromfile(file)
    flat = None if "read_base" in text else _joined(file)
    if flat is not None and _same(flat, original):
        return flat
    heading = _split(text)[0]
    return f"{heading}\n{original.pretty_text}" if heading else str(original.pretty_text)


def _same(text: str, original: Any) -> bool:
    from mmengine.config import Config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "flat.py"
        file.write_text(text, encoding="utf-8")
        try:
            config = Config.fromfile(file)
        except Exception:  # whatever the text does, the dump is the answer
            return False
    return bool(config.to_dict() == original.to_dict())


def _joined(file: Path) -> str:
    parts = _parts(file)
    own = parts[-1]
    used = {name for part in parts for statement in part.statements for name in _names(statement)}
    _merge_overridden(parts)
    settings = [s for part in parts[::-1] for s in part.statements if s.is_setting(used)]
    sections = [own.heading, "".join(s.text for s in settings)]
    for part in parts:
        rest = "".join(s.text for s in part.statements if not s.is_setting(used)).strip("\n")
        heading = part.heading if part is not own else ""
        sections.append(f"{heading}{rest}" if rest else "")
    text = "\n\n".join(section.strip("\n") for section in sections if section.strip())
    return re.sub(r"\b_base_\.", "", text) + "\n"


def _names(statement: Statement) -> list[str]:
    """Names that its value uses, as they are or as ``_base_.name``."""
    nodes = list(ast.walk(statement.value)) if statement.value is not None else []
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return names + [node.attr for node in nodes if isinstance(node, ast.Attribute)]


def _parts(file: Path) -> list[Part]:
    """The files that a config is made of, itself last."""
    text = file.read_text(encoding="utf-8")
    heading, statements = _split(text)
    parts: list[Part] = []
    for statement in statements:
        if statement.name == "_base_" and statement.value is not None:
            bases = ast.literal_eval(statement.value)
            for base in [bases] if isinstance(bases, str) else bases:
                parts += _parts((file.parent / base).resolve())
    return [*parts, Part(heading, [s for s in statements if s.name != "_base_"])]


def _split(text: str) -> tuple[str, list[Statement]]:
    """The comment at the head of a file, and its statements."""
    lines = text.splitlines(keepends=True)
    begin = 0
    while begin < len(lines) and lines[begin].startswith("#"):
        begin += 1
    heading = "".join(lines[:begin])
    statements = []
    for node in ast.parse(text).body:
        assert node.end_lineno is not None
        name, value = None, None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                name, value = target.id, node.value
        statements.append(Statement(name, "".join(lines[begin : node.end_lineno]), value))
        begin = node.end_lineno
    return heading, statements


def _merge_overridden(parts: list[Part]) -> None:
    """Where a later file assigns a name again, keep one statement: dicts are merged, as mmengine
    does, other values replaced."""
    seen: dict[str, tuple[Part, Statement]] = {}
    for part in parts:
        for statement in list(part.statements):
            if statement.name is None or statement.value is None:
                continue
            if statement.name in seen:
                earlier_part, earlier = seen[statement.name]
                if _is_dict(earlier.value) and _is_dict(statement.value):
                    merged = _merge(earlier.value, statement.value)
                    statement.value = merged
                    statement.text = f"{statement.name} = {_source(merged)}\n"
                earlier_part.statements.remove(earlier)
            seen[statement.name] = part, statement


def _is_dict(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"


def _merge(base: Any, child: Any) -> ast.expr:
    """``dict(...)`` updated by ``dict(...)``, dicts in it likewise; ``_delete_`` replaces."""
    values = {keyword.arg: keyword.value for keyword in base.keywords}
    for keyword in child.keywords:
        if keyword.arg == "_delete_":
            return child  # type: ignore[no-any-return]
        inner = values.get(keyword.arg)
        if _is_dict(inner) and _is_dict(keyword.value):
            values[keyword.arg] = _merge(inner, keyword.value)
        else:
            values[keyword.arg] = keyword.value
    keywords = [ast.keyword(arg=name, value=value) for name, value in values.items()]
    return ast.Call(func=base.func, args=[], keywords=keywords)


def _source(node: ast.expr, indent: int = 0) -> str:
    """Source of an expression; ``dict(...)`` that does not fit a line has one key a line."""
    line = ast.unparse(node)
    if not _is_dict(node) or len(line) + indent < _WIDTH - 20:
        return line
    assert isinstance(node, ast.Call)
    inner = " " * (indent + 4)
    rows = [f"{inner}{k.arg}={_source(k.value, indent + 4)},\n" for k in node.keywords]
    return f"dict(\n{''.join(rows)}{' ' * indent})"
