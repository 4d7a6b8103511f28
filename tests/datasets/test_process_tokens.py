"""Token ids and labels: those of one ``encode`` call a turn, as XTuner makes them."""

import random

import pytest
from datasets import Dataset

from tests.datasets.samples import SPECIAL, chats, small_tokenizer, text
from xlength import (
    PROMPT_TEMPLATE,
    openai_map_fn,
    process_hf_dataset,
    template_map_fn_factory,
)
from xlength.datasets.map_fns import pretrain_map_fn
from xlength.datasets.tokenize import boundary_ids, encode_texts

IGNORED = -100


def one_encode_a_turn(turns, tokenizer, max_length, bos, eos, with_output=True, images=False):
    """The rule, word for word: bos input output eos sep, each text encoded by itself."""

    def encode(string):
        return tokenizer.encode(string, add_special_tokens=False)

    ids, labels = [], []

    def add(tokens, trained):
        ids.extend(tokens)
        labels.extend(tokens if trained else [IGNORED] * len(tokens))

    needs_bos = True
    for turn in turns:
        if needs_bos:
            add(bos, False)
        if images and "<image>" in turn["input"]:
            before, after = turn["input"].split("<image>")
            add([*encode(before), -200, *encode(after)], False)
        else:
            add(encode(turn["input"]), False)
        if with_output:
            trained = turn.get("output_with_loss", True)
            add(encode(turn["output"]), trained)
            needs_bos = turn.get("need_eos_token", True)
            if needs_bos:
                add(eos, trained)
            if turn.get("sep", ""):
                add(encode(turn["sep"]), False)
    return ids[:max_length], labels[:max_length]


def process(rows, tokenizer, max_length=10_000, **options):
    return process_hf_dataset(
        Dataset.from_list(rows),
        tokenizer=tokenizer,
        max_length=max_length,
        pack_to_max_length=False,
        **options,
    )


def tokens_of(dataset):
    return list(zip(dataset["input_ids"][:], dataset["labels"][:], strict=True))


@pytest.mark.parametrize("name", sorted(set(PROMPT_TEMPLATE) - {"tokenizer"}))
@pytest.mark.parametrize("bos", [None, "<|begin|>"])
def test_every_template_gives_the_tokens_of_one_encode_call_a_turn(name, bos):
    rows = [row for row in chats(40) if row["messages"][0]["role"] != "system" or name != "minicpm"]
    tokenizer = small_tokenizer(bos_token=bos)
    template = template_map_fn_factory(PROMPT_TEMPLATE[name])
    dataset = process(rows, tokenizer, dataset_map_fn=openai_map_fn, template_map_fn=template)
    begin = [] if bos is None else [SPECIAL.index(bos)]
    expected = [
        one_encode_a_turn(
            template(openai_map_fn(row))["conversation"], tokenizer, 10_000, begin, [0]
        )
        for row in rows
    ]
    assert tokens_of(dataset) == expected
    trained = [sum(label >= 0 for label in labels) for _, labels in expected]
    assert min(trained) > 0 and sum(trained) < sum(len(ids) for ids, _ in expected)


def turns(rng):
    result = []
    for _ in range(rng.randint(1, 4)):
        turn = {"input": text(rng), "output": "o" + text(rng), "sep": rng.choice(["", "\n"])}
        turn["output_with_loss"] = rng.random() < 0.7
        turn["need_eos_token"] = rng.random() < 0.5
        result.append(turn)
    return result


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("max_length", [10_000, 20])
def test_flags_of_turns_and_the_cut_are_honoured(max_length, metaspace):
    rng = random.Random(1)
    tokenizer = small_tokenizer(metaspace, bos_token="<|begin|>")
    rows = [{"conversation": turns(rng)} for _ in range(200)]
    dataset = process(rows, tokenizer, max_length)
    expected = [
        one_encode_a_turn(row["conversation"], tokenizer, max_length, [3], [0]) for row in rows
    ]
    expected = [(ids, labels) for ids, labels in expected if any(i >= 0 for i in labels[1:])]
    assert 100 < len(expected) < 200
    assert tokens_of(dataset) == expected
    assert dataset["length"][:] == [len(ids) for ids, _ in expected] == dataset.length


def test_turns_without_flags_are_trained_and_ended():
    """Arrow fills what only some turns have with null, which must mean the default."""
    rows = [
        {"conversation": [{"input": "a", "output": "b", "output_with_loss": None, "sep": None}]},
        {"conversation": [{"input": "a", "output": "b", "output_with_loss": False}]},
        {"conversation": [{"input": None, "output": "b", "need_eos_token": None}]},
    ]
    tokenizer = small_tokenizer()
    a, b = (tokenizer.encode(x, add_special_tokens=False) for x in "ab")
    dataset = process(rows, tokenizer)
    assert tokens_of(dataset) == [(a + b + [0], [IGNORED] + b + [0]), (b + [0], b + [0])]


def test_an_image_mark_becomes_the_image_index_and_is_not_trained():
    tokenizer = small_tokenizer()
    conversation = [
        {"input": "<image>\nwhat is it", "output": "a fox"},
        {"input": "and now <image>", "output": "a <image>"},
    ]
    dataset = process([{"conversation": conversation}], tokenizer, with_image_token=True)
    expected = one_encode_a_turn(conversation, tokenizer, 10_000, [], [0], images=True)
    assert tokens_of(dataset) == [expected]
    assert expected[0].count(-200) == 2 and -200 not in expected[1]
    plain = process([{"conversation": conversation}], tokenizer)
    assert -200 not in plain[0]["input_ids"]


def test_without_outputs_only_the_inputs_are_tokenised_and_nothing_is_left_out():
    rows = [{"conversation": [{"input": f"{i} fox", "output": "dog"}]} for i in range(5)]
    tokenizer = small_tokenizer()
    dataset = process(rows, tokenizer, input_ids_with_output=False)
    expected = [
        one_encode_a_turn(row["conversation"], tokenizer, 99, [], [0], with_output=False)
        for row in rows
    ]
    assert tokens_of(dataset) == expected
    with pytest.raises(ValueError, match="takes one turn a row, got 2"):
        process(
            [{"conversation": 2 * rows[0]["conversation"]}], tokenizer, input_ids_with_output=False
        )


def test_pretraining_text_is_trained_from_its_first_token_on():
    tokenizer = small_tokenizer(bos_token="<|begin|>")
    dataset = process([{"text": " the quick fox "}], tokenizer, dataset_map_fn=pretrain_map_fn)
    ids = tokenizer.encode("the quick fox", add_special_tokens=False)
    assert tokens_of(dataset) == [([3, *ids], [IGNORED, *ids])]


def test_a_tokenizer_without_an_end_token_is_refused_unless_the_template_ends_answers():
    rows = [{"conversation": [{"input": "a", "output": "b"}]}]
    tokenizer = small_tokenizer(eos_token=None)
    with pytest.raises(ValueError, match="row 0: the tokenizer has no eos_token"):
        process(rows, tokenizer)
    template = template_map_fn_factory("qwen_chat")
    assert process(rows, tokenizer, template_map_fn=template)[0]["input_ids"][-1] != 0


def test_begin_and_end_ids_follow_the_kind_of_tokenizer():
    class Qwen2TokenizerFast:
        bos_token_id, eos_token_id = 5, 7

    class ChatGLMTokenizer(Qwen2TokenizerFast):
        pass

    class Other(Qwen2TokenizerFast):
        pass

    class WithoutAny:
        bos_token_id = eos_token_id = None

    kinds = [Qwen2TokenizerFast(), ChatGLMTokenizer(), Other(), WithoutAny()]
    assert [boundary_ids(kind) for kind in kinds] == [
        ([], [7]),
        ([64790, 64792], [7]),
        ([5], [7]),
        ([], None),
    ]


def test_batches_are_encoded_as_single_texts_also_after_padding_and_truncation_were_used():
    tokenizer = small_tokenizer(pad_token="<|endoftext|>")
    texts = [text(random.Random(i)) for i in range(50)] + ["", " ", "<|im_start|>x<|im_end|>"]
    expected = [tokenizer.encode(one, add_special_tokens=False) for one in texts]
    assert expected[-1][0] == SPECIAL.index("<|im_start|>") and expected[-3] == []
    tokenizer(["a b c d", "a"], padding=True, truncation=True, max_length=2)
    assert encode_texts(tokenizer, texts) == expected

    class Shouting(type(tokenizer)):
        """A tokenizer of its own kind, which must not be by-passed."""

        def _encode_plus(self, text, *args, **kwargs):
            upper = [t.upper() for t in text] if isinstance(text, list) else text.upper()
            return super()._encode_plus(upper, *args, **kwargs)

        def _batch_encode_plus(self, batch_text_or_text_pairs, **kwargs):  # of transformers 4
            upper = [t.upper() for t in batch_text_or_text_pairs]
            return super()._batch_encode_plus(upper, **kwargs)

    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    loud = [shouting.encode(one, add_special_tokens=False) for one in texts]
    assert loud != expected
    assert encode_texts(shouting, texts) == loud
    assert encode_texts(tokenizer, []) == []
