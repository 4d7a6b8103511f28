import copy
import itertools

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from xlength.collate import default_collate_fn
from xlength.collate_packed import packed_collate_fn
from xlength.models import borders
from xlength.models.borders import attention_inputs, block_causal_mask
from xlength.models.by_sample import register_sdpa_by_sample
from xlength.models.inputs import model_inputs
from xlength.models.sft import SupervisedFinetune

TINY = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
# InternLM3 is Llama with biases in transformers; older InternLMs need remote code.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "internlm3": {"qkv_bias": True, "bias": True},
    "mistral": {"sliding_window": 4},
}


def varlen_attention(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs
):
    """What flash attention computes from ``cu_seq_lens_q``, sample by sample, on any device."""
    assert attention_mask is None
    if cu_seq_lens_q is None:  # without borders, each row is one sample
        rows, length = query.shape[0], query.shape[2]
        cu_seq_lens_q = torch.arange(rows + 1) * length
    else:
        assert torch.equal(cu_seq_lens_q, kwargs["cu_seq_lens_k"])
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == cu_seq_lens_q.diff().max()
    groups = query.shape[1] // key.shape[1]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    parts = []
    for begin, end in itertools.pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (x[begin:end].transpose(0, 1) for x in flat)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        parts.append(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        )
    out = torch.cat(parts, dim=1).transpose(0, 1)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


@pytest.fixture(scope="module", autouse=True)
def varlen():
    """An attention implementation that takes borders as flash attention does."""
    ALL_ATTENTION_FUNCTIONS.register("varlen_on_cpu", varlen_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("varlen_on_cpu", flash_attention_mask)
    register_sdpa_by_sample()


def test_the_reference_does_not_share_its_attention_with_the_model():
    llm = language_model("llama", "varlen_on_cpu")
    with_plain_attention(llm)
    assert borders.attention_of(llm) == "varlen_on_cpu"


def language_model(family, attention, seed=0, **options):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES.get(family, {}), **options})
    # Larger weights than the usual ones, so that attention matters.
    config.initializer_range = 0.2
    llm = AutoModelForCausalLM.from_config(config)
    llm.set_attn_implementation(attention)
    return llm


def samples(lengths=(5, 1, 9, 3), seed=0):
    generator = torch.Generator().manual_seed(seed)
    result = []
    for length in lengths:
        ids = torch.randint(1, 96, (length,), generator=generator).tolist()
        result.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return result


def packed(rows, **options):
    return packed_collate_fn(rows, return_hf_format=True, **options)


def run(llm, data):
    inputs = model_inputs(data)
    labels = inputs.pop("labels")
    logits = llm(**inputs, **attention_inputs(llm, data)).logits
    loss = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    return logits.flatten(0, 1), loss


def gradients(llm, loss):
    llm.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in llm.named_parameters() if p.grad is not None}


def alone(llm, rows):
    """Logits and gradients of samples run one by one, without any packing; of the mean loss."""
    logits, loss, num_tokens = [], 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor(row["labels"])
        logits.append(llm(input_ids=ids).logits[0])
        if len(labels) > 1:
            loss = loss + nn.functional.cross_entropy(
                logits[-1][:-1], labels[1:], ignore_index=-100, reduction="sum"
            )
            num_tokens += int((labels[1:] != -100).sum())
    return torch.cat(logits), gradients(llm, loss / num_tokens)


def assert_same(llm, rows, data):
    expected, expected_gradients = alone(with_plain_attention(llm), rows)
    logits, loss = run(llm, data)
    real = torch.cat([logits[a:b] for a, b in real_spans(data)])
    torch.testing.assert_close(real, expected, rtol=0, atol=1e-5)
    found = gradients(llm, loss)
    assert found.keys() == expected_gradients.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected_gradients[name], rtol=1e-5, atol=1e-5)


def with_plain_attention(llm):
    """The same weights under transformers' reference attention."""
    twin = AutoModelForCausalLM.from_config(copy.deepcopy(llm.config))
    twin.set_attn_implementation("eager")
    twin.load_state_dict(llm.state_dict())
    return twin


def real_spans(data):
    ends, labels = data["cu_seqlens"].tolist(), iter(data["lengths"].tolist())
    spans, expected = [], next(labels)
    ids = data["input_ids"].flatten()
    for begin, end in itertools.pairwise(ends):
        if (ids[begin:end] == 0).all():
            continue
        assert end - begin == expected
        spans.append((begin, end))
        expected = next(labels, None)
    return spans


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen_on_cpu", "sdpa_by_sample"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_and_gradients_of_a_pack_are_those_of_its_samples_alone(family, attention):
    if family == "mistral" and attention == "varlen_on_cpu":
        pytest.skip("the stand-in for flash attention has no sliding window")
    rows = samples()
    assert_same(language_model(family, attention), rows, packed(rows))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen_on_cpu", "sdpa_by_sample"])
def test_padding_and_several_rows_change_nothing(attention):
    rows = samples((5, 1, 9, 3, 4, 2))
    llm = language_model("qwen3", attention)
    data = packed(rows, max_length=12, pad_to_multiple_of=8)
    assert data["input_ids"].shape == (3, 16)
    assert_same(llm, rows, data)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_made_here_keeps_samples_apart_too(attention, monkeypatch):
    monkeypatch.setattr(borders, "_ways", lambda llm, attention: [borders._by_mask])
    rows = samples((5, 1, 8, 3, 4))
    llm = language_model("llama", attention)
    data = packed(rows, max_length=14)
    assert attention_inputs(llm, data)["attention_mask"].shape == (2, 1, 14, 14)
    assert_same(llm, rows, data)


@pytest.mark.parametrize("broken", ["positions", "mask", "borders"])
def test_the_proof_fails_where_the_borders_are_broken(broken, monkeypatch):
    rows = samples()
    attention = "varlen_on_cpu" if broken == "borders" else "sdpa"
    llm = language_model("llama", attention)
    data = packed(rows)
    monkeypatch.setitem(borders._chosen, llm, borders._ways(llm, attention)[0])
    assert_same(llm, rows, data)
    if broken == "positions":
        data["position_ids"] = torch.arange(18)[None]
    elif broken == "mask":
        monkeypatch.setitem(
            borders._chosen,
            llm,
            lambda *_: {"attention_mask": torch.ones(1, 18), "use_cache": False},
        )
    else:
        data["cu_seqlens"] = torch.tensor([0, 6, 15, 18], dtype=torch.int32)
        data["lengths"] = torch.tensor([6, 9, 3])
    with pytest.raises(AssertionError, match="not close"):
        assert_same(llm, rows, data)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padded_rows_are_those_of_sdpa_in_sdpa_by_sample(family):
    rows = samples((5, 1, 9, 3))
    data = default_collate_fn(rows, return_hf_format=True)
    mask = data["attention_mask"]
    llm = language_model(family, "sdpa_by_sample")
    expected = with_plain_attention(llm)(**data)
    found = llm(**data, use_cache=False)
    torch.testing.assert_close(found.logits[mask], expected.logits[mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss)


def test_sdpa_by_sample_is_for_training():
    llm = language_model("llama", "sdpa_by_sample").eval()
    with pytest.raises(ValueError, match="does not take a cache"):
        llm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)


def test_a_cache_would_undo_the_borders_and_is_turned_off():
    rows = samples()
    llm = language_model("llama", "sdpa")
    llm.config.use_cache = True
    data = packed(rows)
    good = run(llm.eval(), data)[0]
    inputs = model_inputs(data)
    inputs.pop("labels")
    assert not torch.allclose(llm(**inputs).logits.flatten(0, 1), good, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {"num_heads": 4, "state_size": 4}),
        ("bloom", {"n_head": 4}),
        ("qwen3_next", {}),
    ],
)
def test_a_model_that_would_let_samples_see_each_other_is_refused_by_name(family, options):
    llm = language_model(family, "eager", **options)
    with pytest.raises(ValueError, match=f"{type(llm).__name__} with attn_implementation='eager'"):
        attention_inputs(llm, packed(samples()))


def test_an_attention_implementation_without_a_known_mask_is_refused():
    def blind(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return varlen_attention(module, query, key, value, None, scaling)

    ALL_ATTENTION_FUNCTIONS.register("no_borders", blind)
    llm = language_model("llama", "no_borders")
    with pytest.raises(ValueError, match="'no_borders' cannot keep the samples of a pack apart"):
        attention_inputs(llm, packed(samples()))


def test_the_trial_leaves_the_model_and_the_random_state_as_they_were():
    llm = language_model("llama", "sdpa").train()
    llm.model.layers[0].eval()
    torch.manual_seed(3)
    attention_inputs(llm, packed(samples()))
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert llm.training and not llm.model.layers[0].training
    assert all(p.grad is None for p in llm.parameters())


def test_the_mask_made_here_lets_a_token_see_its_own_sample_up_to_itself():
    mask = block_causal_mask(torch.tensor([0, 2, 3, 4, 6]), 2, 3)
    assert mask[:, 0].int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(1, 18)}, "must not have an attention_mask"),
        ({"position_ids": None}, "needs position_ids"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "borders end at 9, but the batch has 1 x 18"),
        ({"cu_seqlens": None, "cumulative_len": [1, 2]}, "cumulative_len has 2 rows"),
    ],
)
def test_a_batch_that_contradicts_its_borders_is_refused(change, message):
    data = {**packed(samples()), **change}
    with pytest.raises(ValueError, match=message):
        attention_inputs(language_model("llama", "sdpa"), data)


def test_an_unpacked_batch_needs_nothing():
    assert attention_inputs(nn.Linear(1, 1), {"input_ids": torch.ones(1, 2)}) == {}


class TestSupervisedFinetune:
    def build(self, **options):
        llm = language_model("llama", "sdpa")
        return SupervisedFinetune(llm, use_activation_checkpointing=False, **options)

    def test_is_found_by_name(self):
        assert MODELS.get("xlength.SupervisedFinetune") is SupervisedFinetune

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_the_loss_of_a_pack_is_the_mean_over_the_tokens_of_its_samples(self, checkpointing):
        rows = samples((5, 9, 3, 7))
        model = self.build()
        if checkpointing:
            model.activation_checkpointing_enable()
        out = model(packed(rows))
        parts = [model(packed([row])) for row in rows]
        tokens = sum(part["num_tokens"] for part in parts)
        mean = sum(part["loss"] * part["num_tokens"] for part in parts) / tokens
        assert out["num_tokens"] == tokens
        torch.testing.assert_close(out["loss"], mean, rtol=1e-6, atol=1e-6)

    def test_xtuners_batch_of_one_pack_gives_the_same_loss(self):
        rows = samples((5, 9, 3, 7))
        model = self.build(use_varlen_attn=True)
        data = packed(rows)
        xtuner = {**data, "cumulative_len": [data["cu_seqlens"]]}
        del xtuner["cu_seqlens"]
        assert torch.equal(model(xtuner)["loss"], model(data)["loss"])

    def test_a_batch_without_borders_is_refused_where_packs_are_promised(self):
        model = self.build(use_varlen_attn=True)
        data = {k: v for k, v in packed(samples()).items() if k != "cu_seqlens"}
        with pytest.raises(ValueError, match="use_varlen_attn=True, but the batch has neither"):
            model(data)

    def test_lora_keeps_the_borders(self):
        pytest.importorskip("peft")
        rows = samples((5, 9))
        model = self.build(lora=dict(type="LoraConfig", r=2))
        with torch.no_grad():
            logits = model(packed(rows), mode="tensor").logits[0]
            expected = [model(packed([row]), mode="tensor").logits[0] for row in rows]
        torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-5)
