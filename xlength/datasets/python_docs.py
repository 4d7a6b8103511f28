"""Real text that every Python machine has: the documentation in its standard library's source.

Used by ``configs/quickstart``. Nothing is imported or downloaded: the source files are parsed.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_docs_pairs() -> list[dict[str, Any]]:
    """Signatures and docstrings of the standard library, and ``help()`` topics, as chat rows.

    Each row is ``{"messages": [{"role": "user", "content": name and signature},
    {"role": "assistant", "content": docstring}]}``, in a fixed order; about
    nine thousand rows from a handful to thousands of tokens, by Python version. Takes seconds.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    rows, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            for question, answer in _documented(path, root):
                if (question, answer) not in seen:
                    seen.add((question, answer))
                    rows.append(_messages(question, answer))
    rows += [_messages(f"help {name}", text.strip()) for name, text in sorted(topics.items())]
    if not seen:
        raise FileNotFoundError(f"no source files of the standard library under {root}")
    return rows


def _documented(path: Path, root: Path) -> Iterator[tuple[str, str]]:
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # templates and fixtures, not modules
        return
    if text := ast.get_docstring(tree):
        yield f"module {module}", text
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        prefix, parent = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Documented):
                name = f"{prefix}.{node.name}"
                stack.append((name, node))
                if text := ast.get_docstring(node):
                    yield _signature(name, node), inspect.cleandoc(text)


def _signature(name: str, node: Documented) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {name}({ast.unparse(node.args)}){returns}"


def _messages(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def python_docs(cache_dir: str, part: str = "train") -> Any:
    """The pairs as a ``datasets.Dataset``, written once to ``cache_dir/python_docs.jsonl``.

    Args:
        cache_dir: folder, made where it is missing.
        part: ``'validation'`` is every twentieth pair, ``'train'`` the others.
    """
    from datasets import load_dataset

    if part not in ("train", "validation"):
        raise ValueError(f"part must be 'train' or 'validation', got {part!r}")
    path = Path(cache_dir) / "python_docs.jsonl"
    if not path.exists():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in python_docs_pairs())
        _write(path, "".join(lines))
    rows = load_dataset("json", data_files=str(path), split="train")
    held_out = part == "validation"
    return rows.select([i for i in range(len(rows)) if (i % 20 == 19) == held_out])


def python_docs_shards(cache_dir: str, num_shards: int = 8) -> list[str]:
    """The pairs dealt to ``num_shards`` JSONL files in ``cache_dir``, once; returns their paths."""
    folder = Path(cache_dir)
    paths = [folder / f"shard{i}_of_{num_shards}.jsonl" for i in range(num_shards)]
    if not all(path.exists() for path in paths):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in python_docs_pairs()]
        for i, path in enumerate(paths):
            _write(path, "".join(lines[i::num_shards]))
    return [str(path) for path in paths]


def python_docs_tokenizer(cache_dir: str, vocab_size: int = 4096) -> Any:
    """A byte-level BPE tokenizer trained on the pairs, once, kept in ``cache_dir/tokenizer``.

    Args:
        cache_dir: folder, made where it is missing.
        vocab_size: tokens, special ones included.

    Returns:
        A ``PreTrainedTokenizerFast`` with ``<|endoftext|>`` as its end and padding token.
    """
    from transformers import PreTrainedTokenizerFast

    path = Path(cache_dir) / f"tokenizer_{vocab_size}.json"
    if not path.exists():
        _write(path, _train(vocab_size).to_str())
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token=SPECIAL_TOKENS[0], pad_token=SPECIAL_TOKENS[0]
    )


def _train(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (turn["content"] for row in python_docs_pairs() for turn in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all, also where several ranks do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
