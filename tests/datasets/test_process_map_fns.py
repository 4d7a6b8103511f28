"""Map functions and prompt templates: rows in XTuner's formats -> turns, and what is refused."""

import pytest
from datasets import Dataset

from tests.datasets.samples import small_tokenizer
from xlength import (
    MAP_FUNC,
    PROMPT_TEMPLATE,
    alpaca_map_fn,
    default_map_fn,
    oasst1_map_fn,
    openai_map_fn,
    process_hf_dataset,
    template_map_fn_factory,
)
from xlength.datasets.build import find_callable
from xlength.datasets.map_fns import (
    alpaca_zh_map_fn,
    openorca_map_fn,
    pretrain_map_fn,
    stack_exchange_map_fn,
    wizardlm_map_fn,
)


def turn(question, answer, **more):
    return {"input": question, "output": answer, **more}


def chat(*messages):
    return [{"role": role, "content": content} for role, content in messages]


OASST1 = "### Human: Why?### Assistant: So.\n### Human: Really?### Assistant: Yes.### Human: And"
CASES = [
    (default_map_fn, {"input": "q", "output": "a"}, [turn("q", "a")]),
    (alpaca_map_fn, {"instruction": "do", "input": "q", "output": "a"}, [turn("do\nq", "a")]),
    (alpaca_map_fn, {"instruction": "do", "input": "q", "output": "<nooutput>"}, []),
    (
        alpaca_zh_map_fn,
        {"instruction_zh": "做", "input_zh": "", "output_zh": "好"},
        [turn("做\n", "好")],
    ),
    (oasst1_map_fn, {"text": OASST1}, [turn("Why?", "So."), turn("Really?", "Yes.")]),
    (oasst1_map_fn, {"text": "### Human: alone"}, []),
    (
        openorca_map_fn,
        {"system_prompt": "s", "question": "q", "response": "a"},
        [turn("q", "a", system="s")],
    ),
    (stack_exchange_map_fn, {"question": "q", "response": "a"}, [turn("q", "a")]),
    (pretrain_map_fn, {"text": " all of it\n"}, [turn("", "all of it", need_eos_token=False)]),
    (
        wizardlm_map_fn,
        {
            "conversations": [
                {"from": who, "value": said}
                for who, said in [("gpt", "hi"), ("human", "a"), ("human", "b"), ("gpt", "c")]
            ]
        },
        [turn("ab", "c")],
    ),
]


@pytest.mark.parametrize(("map_fn", "row", "turns"), CASES)
def test_rows_become_turns(map_fn, row, turns):
    assert map_fn(row) == {"conversation": turns}
    assert find_callable(map_fn.__name__, "dataset_map_fn") is map_fn
    assert MAP_FUNC.get(map_fn.__name__) is map_fn


def test_openai_messages_become_turns():
    messages = chat(
        ("assistant", "welcome"),
        ("system", "be kind"),
        ("user", "a"),
        ("user", "b"),
        ("assistant", "call"),
        ("tool", "result"),
        ("assistant", "so"),
        ("user", "open"),
    )
    messages[4]["loss"] = False
    messages[6]["loss"] = None
    assert openai_map_fn({"messages": messages})["conversation"] == [
        turn("ab", "call", system="be kind", output_with_loss=False),
        turn("result", "so", system="", output_with_loss=True),
    ]
    for loss, trained in [("True", True), ("false", False), (True, True), (0, False)]:
        messages[6]["loss"] = loss
        assert (
            openai_map_fn({"messages": messages})["conversation"][1]["output_with_loss"] is trained
        )
    assert openai_map_fn({"messages": []}) == {"conversation": []}


@pytest.mark.parametrize(
    ("map_fn", "row", "message"),
    [
        (openai_map_fn, {"text": "x"}, r"no 'messages'; it has \['text'\]"),
        (openai_map_fn, {"messages": None}, "'messages' is None"),
        (openai_map_fn, {"messages": "hello"}, "'messages' is 'hello'; it must be a list"),
        (openai_map_fn, {"messages": ["hello"]}, "message 0 is 'hello'"),
        (openai_map_fn, {"messages": chat(("alien", "x"))}, "unknown role 'alien'"),
        (openai_map_fn, {"messages": chat(("user", None))}, "message 0: .* must be strings"),
        (wizardlm_map_fn, {"conversations": [{"from": "cat", "value": ""}]}, "speaker 'cat'"),
        (alpaca_map_fn, {"instruction": "do", "output": "a"}, "no 'input'"),
        (alpaca_map_fn, {"instruction": "do", "input": 3, "output": "a"}, "'input' is 3"),
        (oasst1_map_fn, {"text": None}, "'text' is None; it must be a string"),
    ],
)
def test_rows_of_another_form_are_refused_with_a_reason(map_fn, row, message):
    with pytest.raises(ValueError, match=message):
        map_fn(row)


def test_a_template_writes_system_instruction_suffix_and_separator():
    turns = [turn("q {x}", "a", system="s"), turn(None, "b"), turn("r", "c", system="t")]
    write = template_map_fn_factory("qwen_chat")
    assert write({"conversation": turns})["conversation"] == [
        turn(
            "<|im_start|>system\ns<|im_end|>\n"
            "<|im_start|>user\nq {x}<|im_end|>\n<|im_start|>assistant\n",
            "a<|im_end|>",
            system="s",
            need_eos_token=False,
            sep="\n",
        ),
        turn(
            "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
            "b<|im_end|>",
            need_eos_token=False,
            sep="\n",
        ),
        turn(
            "<|im_start|>system\nt<|im_end|>\n"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n",
            "c<|im_end|>",
            system="t",
            need_eos_token=False,
            sep="\n",
        ),
    ]
    assert turns[0] == turn("q {x}", "a", system="s"), "the row itself was changed"
    rounds = template_map_fn_factory(PROMPT_TEMPLATE.chatglm2)({"conversation": turns[:2]})
    assert "[Round 2]" in rounds["conversation"][1]["input"]
    default = template_map_fn_factory("default")({"conversation": turns[:1]})["conversation"][0]
    assert default["output"] == "a" and default["need_eos_token"] is True


@pytest.mark.parametrize("name", sorted(set(PROMPT_TEMPLATE) - {"tokenizer"}))
def test_every_template_is_complete(name):
    template = PROMPT_TEMPLATE[name]
    assert set(template) <= {
        "SYSTEM",
        "INSTRUCTION",
        "SUFFIX",
        "SUFFIX_AS_EOS",
        "SEP",
        "STOP_WORDS",
    }
    assert "{system}" in template.get("SYSTEM", "{system}")
    if template.get("SUFFIX"):
        assert template.SUFFIX in template.STOP_WORDS


def test_a_template_can_be_given_by_path_and_unknown_or_broken_ones_are_refused():
    path = "xlength.datasets.templates.PROMPT_TEMPLATE.qwen_chat"
    rows = {"conversation": [turn("q", "a")]}
    expected = template_map_fn_factory("qwen_chat")(rows)
    assert template_map_fn_factory(path)(rows) == expected
    assert template_map_fn_factory("xlength.PROMPT_TEMPLATE.qwen_chat")(rows) == expected
    with pytest.raises(ValueError, match="'llama3' .* did you mean llama3_chat"):
        template_map_fn_factory("llama3")
    with pytest.raises(ValueError, match="no INSTRUCTION"):
        template_map_fn_factory({"SYSTEM": "{system}"})
    with pytest.raises(ValueError, match="the template has no SYSTEM"):
        template_map_fn_factory("minicpm")({"conversation": [turn("q", "a", system="s")]})


def talk(row, **more):
    return {"conversation": [{"input": "q", "output": row["text"]}], **more}


def with_late_source(row):
    return talk(row, source=None if row["i"] < 60 else "web")


def with_late_fraction(row):
    return talk(row, score=1 if row["i"] < 60 else 0.5)


def with_one_fraction(row):
    return talk(row, score=0.5 if row["i"] == 125 else 1)


def with_one_text(row):
    return talk(row, source="web" if row["i"] == 125 else None)


def with_two_types(row):
    return talk(row, source=1 if row["i"] % 2 else "web")


def with_one_more_column(row):
    return talk(row, **({"extra": 1, "more": "x"} if row["i"] in (125, 127) else {"source": "a"}))


def prepare_made(map_fn, **options):
    rows = Dataset.from_list([{"text": f"words {i}", "i": i} for i in range(300)])
    return process_hf_dataset(
        rows,
        tokenizer=small_tokenizer(),
        max_length=64,
        dataset_map_fn=map_fn,
        pack_to_max_length=False,
        **options,
    )


def test_columns_that_a_map_function_makes_late_have_the_type_of_all_rows():
    assert prepare_made(with_late_source)["source"][59:61] == [None, "web"]
    assert prepare_made(with_late_fraction)["score"][59:61] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("map_fn", "message"),
    [
        (with_one_fraction, "dataset_map_fn: column 'score' is 0.5 in row 125, which is no int64"),
        (with_one_text, "dataset_map_fn: column 'source' is 'web' in row 125, which is no null"),
        (with_two_types, "dataset_map_fn: column 'source' has no type: "),
    ],
)
def test_a_value_of_another_type_than_its_column_is_named(map_fn, message):
    with pytest.raises(ValueError, match=rf"{message}.*remove_unused_columns=True$"):
        prepare_made(map_fn)
    assert len(prepare_made(map_fn, remove_unused_columns=True)) == 300


def test_a_column_that_only_some_rows_have_is_warned_about_where_it_is_lost(log_lines):
    kept = prepare_made(with_one_more_column)
    assert "extra" not in kept.column_names and kept["source"][124:126] == ["a", None]
    said = "not kept: extra, more, which dataset_map_fn makes of 2 rows only, the first is row 125"
    assert sum(said in line for line in log_lines) == 1
    prepare_made(with_one_more_column)  # from the cache
    assert sum(said in line for line in log_lines) == 2
    prepare_made(with_one_more_column, remove_unused_columns=True)
    assert sum("not kept" in line for line in log_lines) == 2
