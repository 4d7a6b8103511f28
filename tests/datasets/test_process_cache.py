"""What the cache depends on: the next start finds it, in another process too, and no stale one."""

import functools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset, disable_caching, enable_caching, load_dataset

from tests.datasets.samples import chats, small_tokenizer
from xlength import PROMPT_TEMPLATE, openai_map_fn, process_hf_dataset, template_map_fn_factory
from xlength.datasets import tokenize
from xlength.datasets.hashing import content_hash, tokenizer_hash

START = """
import sys, functools
from xlength import process_hf_dataset, template_map_fn_factory
from xlength.datasets.map_fns import openai_map_fn
from datasets import load_dataset
from transformers import AutoTokenizer
import xlength.datasets.tokenize as tokenize

calls = 0
encode = tokenize.TextEncoder.__call__
def counted(*args):
    global calls
    calls += 1
    return encode(*args)
tokenize.TextEncoder.__call__ = counted

map_fn = functools.partial(lambda row, shout: openai_map_fn(row), shout=True)
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
if "used" in sys.argv:
    tokenizer(["a b", "c"], padding="max_length", truncation=True, max_length=5)
for _ in range(2):
    dataset = process_hf_dataset(
        dict(type=load_dataset, path="json", data_files=folder + "/a.jsonl"),
        tokenizer=tokenizer, max_length=100, dataset_map_fn=map_fn,
        template_map_fn=template_map_fn_factory("qwen_chat"), pack_to_max_length=False)
from xlength.datasets.hashing import content_hash
strings = content_hash({"alpha", "beta", "gamma"}, lambda x: x in {"a", "b", "c"})
print("RESULT", calls, len(dataset), sum(dataset.length), dataset._fingerprint, strings)
"""


def start(folder, *words):
    """Prepare in a new process; (tokenizer calls, rows, tokens, fingerprint, a hash)."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder), *words], capture_output=True, text=True
    )
    found = re.search(r"RESULT (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    return found.group(1).split()


@pytest.fixture
def folder(tmp_path):
    small_tokenizer(pad_token="<|endoftext|>").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats(20)))
    return tmp_path


def test_the_second_start_in_a_new_process_does_not_tokenise_again(folder):
    first = start(folder)
    assert int(first[0]) > 0
    again = start(folder, "used")
    assert again == ["0", *first[1:]]
    with open(folder / "a.jsonl", "a") as file:
        file.write(json.dumps(chats(1)[0]) + "\n")
    source = dict(type=load_dataset, path="json", data_files=str(folder / "a.jsonl"))
    options = dict(tokenizer=small_tokenizer(), max_length=100, pack_to_max_length=False)
    longer = process_hf_dataset(source, dataset_map_fn=openai_map_fn, **options)
    assert len(longer) == int(first[1]) + 1


def prepare(rows=None, **options):
    options = {
        **dict(tokenizer=small_tokenizer(), max_length=100, dataset_map_fn="openai_map_fn"),
        **dict(template_map_fn=template_map_fn_factory("qwen_chat"), pack_to_max_length=False),
        **options,
    }
    dataset = process_hf_dataset(Dataset.from_list(rows or chats(9)), **options)
    return dataset._fingerprint


def test_whatever_changes_the_tokens_changes_the_place_in_the_cache():
    larger = small_tokenizer()
    larger.add_tokens(["fox jumps"])
    variants = {
        "same": {},
        "rows": dict(rows=chats(9, seed=1)),
        "max_length": dict(max_length=99),
        "template": dict(template_map_fn=template_map_fn_factory("internlm_chat")),
        "template edited": dict(
            template_map_fn=template_map_fn_factory({**PROMPT_TEMPLATE.qwen_chat, "SEP": " "})
        ),
        "map function": dict(dataset_map_fn=lambda row: openai_map_fn(row)),
        "tokenizer": dict(tokenizer=larger),
        "begin token": dict(tokenizer=small_tokenizer(bos_token="<|begin|>")),
        "images": dict(with_image_token=True),
        "columns": dict(remove_unused_columns=True),
        "sample": dict(max_dataset_length=5),
    }
    prints = {name: prepare(**options) for name, options in variants.items()}
    assert len(set(prints.values())) == len(prints)
    # What does not change them does not either: processes, and the template given by name.
    named = dict(type="template_map_fn_factory", template="qwen_chat")
    assert prepare(map_num_proc=1, template_map_fn=named) == prints["same"]


def test_a_tokenizer_hashes_the_same_after_its_use():
    tokenizer = small_tokenizer(pad_token="<|endoftext|>")
    before = tokenizer_hash(tokenizer)
    tokenizer(["a b c d", "a"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert (
        tokenizer_hash(tokenizer)
        == before
        == tokenizer_hash(small_tokenizer(pad_token="<|endoftext|>"))
    )
    tokenizer.chat_template = "x"
    assert tokenizer_hash(tokenizer) != before


LIMIT = 3


def helper(x):
    return x + LIMIT


def uses_helper(x):
    return helper(x)


def recursive(x):
    return recursive(x - 1) if x else uses_helper


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def test_a_function_hashes_by_its_code_and_what_the_code_uses(monkeypatch):
    def make(number, text="a"):
        return lambda x: (x + number, [text for _ in range(2)])

    functions = [
        make(1),
        make(2),
        make(1, "b"),
        uses_helper,
        recursive,
        Scale(2),
        Scale(3),
        Scale(2).__call__,
        functools.partial(uses_helper, 3),
        functools.partial(uses_helper, x=3),
        np.sin,
        len,
        {"a": 1},
        [1, "1", 1.0, None, b"1", {2, 3}],
        re.compile("a"),
        re.compile("a", re.IGNORECASE),
        np.arange(3),
        np.arange(3.0),
    ]
    hashes = [content_hash(function) for function in functions]
    assert len(set(hashes)) == len(hashes)
    assert content_hash(make(1)) == hashes[0] and content_hash(Scale(2)) == hashes[5]
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 4)
    changed = [content_hash(function) for function in functions]
    assert [i for i, (a, b) in enumerate(zip(hashes, changed, strict=True)) if a != b] == [
        3,
        4,
        8,
        9,
    ]


def test_what_cannot_be_hashed_is_never_found_again_and_says_so(log_lines):
    generator = (i for i in range(3))
    assert content_hash(generator) != content_hash(generator)
    assert any("cannot be hashed" in line for line in log_lines)


def test_nothing_is_read_from_the_cache_where_datasets_is_told_not_to(monkeypatch):
    calls = []

    def counted(*args):
        calls.append(1)
        return encode(*args)

    encode = tokenize.TextEncoder.__call__
    monkeypatch.setattr(tokenize.TextEncoder, "__call__", counted)
    rows = chats(4, seed=11)
    assert prepare(rows) == prepare(rows) and len(calls) == 1
    disable_caching()
    try:
        prepare(rows)
    finally:
        enable_caching()
    assert len(calls) == 2
    assert prepare(rows) and len(calls) == 2


def test_a_source_loaded_twice_is_found_again(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats(5)))
    source = load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train")
    config = dict(type="load_dataset", path="json", data_files=str(tmp_path / "a.jsonl"))
    options = dict(tokenizer=small_tokenizer(), max_length=99, pack_to_max_length=False)
    prints = {
        process_hf_dataset(data, dataset_map_fn=openai_map_fn, **options)._fingerprint
        for data in (source, config)
    }
    assert len(prints) == 1


OWN_CODE = """
from own import prompts
import own
class Writer:
    PREFIX = "{constant}"
    @staticmethod
    def static(): return "{static}"
    @classmethod
    def made(cls): return "{classmethod}"
    @property
    def shown(self): return "{property}"
    class Inner:
        END = "{inner}"
    def __call__(self, row): return row
def by_class(row): return Writer.PREFIX, Writer.static(), Writer.made(), Writer().shown
def by_module(row): return prompts.SYSTEM
def by_package(row): return own.prompts.SYSTEM
def by_import(row):
    from own.prompts import SYSTEM
    return SYSTEM
def by_relative_import(row):
    def inner():
        from . import prompts
        return prompts.SYSTEM
    return inner()
"""

OWN_SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from own import code
import alone
from xlength.datasets.hashing import content_hash
functions = [code.Writer(), code.by_class, code.Writer.made, code.by_module, code.by_package,
             code.by_import, code.by_relative_import, alone.by_file]
print(*[content_hash(function) for function in functions])
"""


def hashes_of_own_code(folder, **texts):
    """Hashes of an object, of functions in a package, and of one in a file, in a new process."""
    names = ["constant", "static", "classmethod", "property", "inner", "system", "beside"]
    texts = {**dict.fromkeys(names, "old"), **texts}
    (folder / "own").mkdir(exist_ok=True)
    code = re.sub(r"\{(\w+)\}", lambda match: texts[match[1]], OWN_CODE)
    (folder / "own/code.py").write_text(code)
    (folder / "own/prompts.py").write_text(f"SYSTEM = {texts['system']!r}\n")
    (folder / "beside.py").write_text(f"TEXT = {texts['beside']!r}\n")
    (folder / "alone.py").write_text("import beside\ndef by_file(row): return beside.TEXT\n")
    script = OWN_SCRIPT.format(folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-B", "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_an_edit_anywhere_in_the_users_own_code_changes_the_hashes_of_what_uses_it(tmp_path):
    before = hashes_of_own_code(tmp_path)
    assert hashes_of_own_code(tmp_path) == before

    def changed(**texts):
        after = hashes_of_own_code(tmp_path, **texts)
        return [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]

    for name in ("constant", "static", "classmethod", "property", "inner"):
        assert changed(**{name: "new"}) == [0, 1, 2], name
    assert changed(system="new") == [3, 4, 5, 6]
    assert changed(beside="new") == [7]


def test_a_function_that_logs_hashes_the_same_in_every_process(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/code.py").write_text(
        "import logging\nlogger = logging.getLogger(__name__)\n"
        "def function(row): logger.info('a'); return row\n"
    )
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from own.code import function\n"
        "from xlength.datasets.hashing import content_hash; print(content_hash(function))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
