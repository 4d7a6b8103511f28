"""Costs: of samples, of padded batches, from configs; the crossover of real model configs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from xlength.plan import Cost, Groups, padded_costs
from xlength.plan.cost import make_cost
from xlength.plan.crossover import crossover_of
from xlength.plan.specs import TokenBudget

LLAMA_7B = dict(
    model_type="llama",
    hidden_size=4096,
    num_attention_heads=32,
    num_hidden_layers=32,
    intermediate_size=11008,
    vocab_size=32000,
)
TABLE = np.array([[10, 0], [-4, 8], [6, 2]])


def test_attention_costs_as_much_as_the_rest_at_the_crossover():
    assert Cost(100).of(np.array([100, -200])).tolist() == [200, 600]
    assert Cost().of(np.array([100, -200])).tolist() == [100, 200]


def test_a_batch_is_padded_to_its_longest_sample():
    groups = Groups.from_lists([[0, 1], [2]])
    assert padded_costs(np.array([5, -10, 7]), groups, Cost(10)).tolist() == [2 * 20, 7 + 4.9]


def test_columns_are_weighed_and_only_the_first_is_padded():
    cost = make_cost(dict(type="multimodal", weights=(1, 0.5)))
    assert cost.of(TABLE).tolist() == [10, 8, 7]
    assert cost.sizes(TABLE).tolist() == [10, 4, 6]
    assert cost.padded(TABLE, Groups.from_lists([[0, 1], [2]])).tolist() == [2 * 10 + 4, 7]


def test_patches_count_in_the_sequence_where_it_is_said_so():
    cost = make_cost(dict(type="multimodal", weights=(1, 0.5), sequence=(1, 0.25)))
    assert cost.sizes(TABLE).tolist() == [10, 6, 7]
    assert cost.of(TABLE).tolist() == [10, 6 + 4, 7 + 1]


def test_lengths_of_the_wrong_shape_are_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"\(n, 2\), a column per weight .* got \(3,\)"):
        make_cost(dict(type="multimodal", weights=(1, 1))).of(np.array([1, 2, 3]))
    with pytest.raises(ValueError, match=r"\(n,\) for attention\(12288\), got \(3, 2\)"):
        make_cost("attention").of(TABLE)


def test_text_and_images_are_both_balanced_over_ranks():
    random = np.random.RandomState(0)
    tokens = np.clip(np.exp(random.normal(5, 0.8, 20000)), 8, 4096).astype(int)
    patches = random.choice([0, 576, 1152], 20000)
    lengths = np.stack([tokens, patches], axis=1)

    def balances(cost):
        plan = TokenBudget(8192, cost=cost).build(lengths, seed=0, epoch=0, world_size=8)
        patches_of = plan.groups.sums(patches)[plan.steps]
        sums = padded_costs(lengths, plan.groups, both)[plan.steps]
        return [(x.mean(axis=1) / x.max(axis=1)).mean() for x in (patches_of, sums)]

    both = make_cost(dict(type="multimodal", weights=(1, 0.2)))
    text_only = make_cost(dict(type="multimodal", weights=(1, 0)))
    of_images, of_sums = balances(both)
    assert of_images > balances(text_only)[0] + 0.04
    assert of_images > 0.96 and of_sums > 0.98


def test_the_crossover_of_a_llama_is_its_parameters_over_its_attention_width():
    projections, feed_forward, head = 4 * 4096**2, 3 * 4096 * 11008, 4096 * 32000
    by_hand = (32 * (projections + feed_forward) + head) / (2 * 32 * 4096)
    assert crossover_of(LLAMA_7B) == pytest.approx(by_hand, abs=0.1)
    assert crossover_of(LLAMA_7B) == pytest.approx(25204)


def test_fewer_key_value_heads_make_projections_smaller():
    grouped = LLAMA_7B | dict(num_key_value_heads=8)
    saved = 32 * 2 * 4096 * 128 * 24 / (2 * 32 * 4096)
    assert crossover_of(LLAMA_7B) - crossover_of(grouped) == pytest.approx(saved)


def test_of_experts_those_count_that_a_token_meets():
    experts = LLAMA_7B | dict(num_experts_per_tok=2, moe_intermediate_size=5504, num_experts=64)
    assert crossover_of(experts) == crossover_of(LLAMA_7B)


def test_a_config_may_be_an_object_a_dict_a_file_or_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    expected = crossover_of(LLAMA_7B)
    assert crossover_of(SimpleNamespace(**LLAMA_7B)) == expected
    assert crossover_of(tmp_path) == expected
    assert crossover_of(str(tmp_path / "config.json")) == expected
    assert crossover_of(dict(text_config=LLAMA_7B, hidden_size=1)) == expected
    assert make_cost(dict(type="attention", config=str(tmp_path))) == Cost(expected)


def test_configs_of_transformers_give_the_same_as_objects_and_as_dicts():
    from transformers import GPT2Config, LlamaConfig, Qwen2_5_VLConfig, Qwen3MoeConfig

    for config in (LlamaConfig(), GPT2Config(), Qwen3MoeConfig(), Qwen2_5_VLConfig()):
        assert crossover_of(config) == crossover_of(config.to_dict()) > 1000
    assert crossover_of(GPT2Config()) == pytest.approx((12 * 12 * 768 + 50257) / (2 * 12), abs=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "lacks num_attention_heads"),
        ({**LLAMA_7B, "intermediate_size": None}, "lacks intermediate_size"),
        ("no/such/folder", "'no/such/folder' is no config.json and no folder"),
    ],
)
def test_a_config_without_sizes_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        crossover_of(config)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("atention", "unknown cost type: 'atention'; did you mean 'attention'"),
        (dict(type="attention", crosover=3), "unknown key .* 'crosover'; did you mean 'crossover'"),
        (dict(type="tokens", crossover=3), "unknown key of cost 'tokens': 'crossover'"),
        (dict(type="attention", crossover=0), "crossover must be a positive length"),
        (dict(type="attention", crossover=1, config={}), "either crossover=1 or config"),
        (dict(type="multimodal"), "needs weights"),
        (dict(type="multimodal", weights=(1, -1)), "weights must be positive"),
        (dict(type="multimodal", weights=(1, 1), sequence=(1,)), "one number per weight"),
        (dict(crossover=3), "unknown cost type: 'None'"),
        (None, "cost must be one of 'tokens', 'attention', 'multimodal', or a dict .* got None"),
        (["tokens"], r"cost must be one of .* got \['tokens'\]"),
        (dict(type="attention", crossover="12k"), "crossover must be a positive .* got '12k'"),
        (dict(type="multimodal", weights=0.2), "weights must be one number per column .* got 0.2"),
        (dict(type="multimodal", weights="12"), "weights must be one number .* got '12'"),
        (dict(type="multimodal", weights=(1, "2")), r"weights must be .* got \(1, '2'\)"),
    ],
)
def test_a_bad_cost_is_refused_and_the_misspelt_word_named(spec, message):
    with pytest.raises(ValueError, match=message):
        make_cost(spec)


def test_names_of_costs_stand_for_their_classes():
    assert make_cost("tokens") == Cost()
    assert (
        make_cost("attention") == make_cost(dict(type="attention", crossover=12288)) == Cost(12288)
    )
    assert repr(make_cost("attention")) == "attention(12288)"
    assert make_cost(Cost(7)) == Cost(7)
