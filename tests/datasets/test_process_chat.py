"""The template ``tokenizer``: the tokenizer's own chat template, labels on the assistant only."""

import pytest
from datasets import Dataset

from tests.datasets.samples import CHATML, CHATML_MARKED, chats, small_tokenizer
from xlength import process_hf_dataset
from xlength.datasets.map_fns import default_map_fn

# Writes the last answer with an empty thought, earlier ones without, as Qwen3 does.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Its prompt opens a thought that the conversation does not keep.
OPENING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"
)
COUNTING = "{{ messages|length }}" + CHATML
LOSING = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
REFUSING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    + CHATML
)

CHAT = [
    {"role": "system", "content": "dogs"},
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "jumps\nover"},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "lazy"},
]


def process(rows, template=CHATML, metaspace=False, **options):
    tokenizer = small_tokenizer(metaspace, chat_template=template)
    options = {"dataset_map_fn": "openai_map_fn", "max_length": 10_000, **options}
    dataset = process_hf_dataset(
        Dataset.from_list(rows),
        tokenizer=tokenizer,
        template_map_fn=dict(type="template_map_fn_factory", template="tokenizer"),
        pack_to_max_length=False,
        **options,
    )
    return dataset, tokenizer


def trained_texts(row, tokenizer):
    """The stretches of a row that have labels, decoded."""
    texts, stretch = [], []
    for token, label in [*zip(row["input_ids"], row["labels"], strict=True), (0, -100)]:
        assert label in (-100, token)
        if label >= 0:
            stretch.append(token)
        elif stretch:
            texts.append(tokenizer.decode(stretch))
            stretch = []
    return texts


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_ids_are_those_of_the_chat_template_and_the_answers_are_trained(template, metaspace):
    rows = [{"messages": CHAT}, *chats(30)]
    dataset, tokenizer = process(rows, template, metaspace)
    for row, made in zip(rows, dataset, strict=True):
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        assert made["input_ids"] == whole
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        texts = trained_texts(made, tokenizer)
        assert len(texts) == len(answers)
        for answer, text in zip(answers, texts, strict=True):
            assert text.endswith("<|im_end|>")
            if not metaspace:  # which cannot tell every space and letter when it decodes
                assert text == answer + "<|im_end|>"


def test_marks_of_the_template_and_its_generation_prompt_agree():
    rows = chats(30)
    marked, _ = process(rows, CHATML_MARKED)
    found, _ = process(rows, CHATML)
    assert marked["labels"][:] == found["labels"][:]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_answers_without_loss_are_not_trained(template):
    chat = [dict(m, loss=None) for m in CHAT]
    chat[2]["loss"] = False
    dataset, tokenizer = process([{"messages": chat}], template)
    assert trained_texts(dataset[0], tokenizer) == ["lazy<|im_end|>"]


def test_an_answer_is_found_where_the_last_one_is_written_otherwise():
    dataset, tokenizer = process([{"messages": CHAT}], THINKING)
    assert trained_texts(dataset[0], tokenizer) == [
        "jumps\nover<|im_end|>",
        "<think></think>lazy<|im_end|>",
    ]


def test_an_answer_is_found_where_the_prompt_opens_a_thought():
    dataset, tokenizer = process([{"messages": CHAT}], OPENING)
    assert trained_texts(dataset[0], tokenizer) == ["jumps\nover<|im_end|>", "lazy<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (COUNTING, "row 0: the chat template writes what comes before message 2 otherwise"),
        (REFUSING, "row 0: the chat template refuses it: no system here"),
        (LOSING, "the chat template loses a plain text: 'QUESTION' gives 'userassistant'"),
        (None, "has no chat template; choose another one of PROMPT_TEMPLATE"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, message):
    with pytest.raises(ValueError, match=message):
        process([{"messages": CHAT}], template)


def test_opening_answers_and_open_questions_are_left_away_and_silent_rows_left_out(log_lines):
    opening = {"role": "assistant", "content": "hello"}
    question = {"role": "user", "content": "and?"}
    rows = [{"messages": [opening, *CHAT, question]}, {"messages": [question]}, {"messages": CHAT}]
    dataset, _ = process(rows)
    assert len(dataset) == 2
    assert dataset[0]["input_ids"] == dataset[1]["input_ids"]
    assert any("1 rows without a conversation" in line and "row 1" in line for line in log_lines)


def test_tools_and_keys_that_are_null_reach_the_template_as_they_should():
    template = (
        "{% if tools %}tools {{ tools[0]['name'] }}\n{% endif %}"
        "{% for m in messages %}{{ m.keys()|list|sort|join(',') }}:{{ m['content'] }}<|im_end|>"
        "{% endfor %}"
    )
    chat = [dict(m, name=None) for m in CHAT[1:3]]
    rows = [{"messages": chat, "tools": '[{"name": "dogs"}]'}, {"messages": chat, "tools": None}]
    dataset, tokenizer = process(rows, template, dataset_map_fn=None)
    texts = [tokenizer.decode(ids) for ids in dataset["input_ids"]]
    body = "content,role:the fox?<|im_end|>content,role:jumps\nover<|im_end|>"
    assert texts == ["tools dogs\n" + body, body]


def test_turns_of_another_map_function_are_written_by_it_too():
    dataset, tokenizer = process(
        [{"input": "the fox", "output": "dogs"}], dataset_map_fn=default_map_fn
    )
    assert tokenizer.decode(dataset[0]["input_ids"]) == (
        "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\ndogs<|im_end|>\n"
    )
    assert trained_texts(dataset[0], tokenizer) == ["dogs<|im_end|>"]


def test_rows_that_are_conversations_already_need_no_map_function():
    rows = [{"conversation": [{"system": "s", "input": "fox", "output": "dogs"}]}]
    dataset, tokenizer = process(rows, dataset_map_fn=None)
    assert tokenizer.decode(dataset[0]["input_ids"]).count("<|im_start|>") == 3
    with pytest.raises(ValueError, match="needs input_ids_with_output=True"):
        process(rows, dataset_map_fn=None, input_ids_with_output=False)


@pytest.mark.parametrize("metaspace", [False, True])
def test_image_marks_in_questions_become_the_image_index(metaspace):
    chat = [
        {"role": "user", "content": "<image>the fox <image>"},
        {"role": "assistant", "content": "jumps"},
    ]
    dataset, tokenizer = process([{"messages": chat}], metaspace=metaspace, with_image_token=True)
    ids, labels = dataset[0]["input_ids"], dataset[0]["labels"]
    places = [i for i, token in enumerate(ids) if token == -200]
    assert len(places) == 2 and all(labels[i] == -100 for i in places)
    assert tokenizer.decode(ids[places[0] + 1 : places[1]]).strip() == "the fox"
    assert len(trained_texts(dataset[0], tokenizer)) == 1


def test_long_conversations_are_cut_at_max_length():
    rows = chats(30)
    whole, _ = process(rows)
    dataset, _ = process(rows, max_length=40)
    kept = [i for i, labels in enumerate(whole["labels"]) if max(labels[1:40]) >= 0]
    assert 0 < len(kept) < 30
    assert dataset["labels"][:] == [whole["labels"][i][:40] for i in kept]
