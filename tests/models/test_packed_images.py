"""Packs with images: logits and gradients are those of the samples alone, for every family."""

import itertools

import pytest
import torch
from torch import nn

from tests import families
from tests.datasets.test_llava import folder, llava_row, make
from xlength.collate import default_collate_fn
from xlength.collate_packed import packed_collate_fn
from xlength.models.borders import attention_inputs
from xlength.models.by_sample import register_sdpa_by_sample
from xlength.models.inputs import model_inputs

__all__ = ["folder"]

ROWS = [
    llava_row("0.png", "What colour?", "Green and blue."),
    llava_row(None, "Say something.", "Something."),
    llava_row(["1.png", "3.png"], "Which is larger?", "The first."),
    llava_row("2.png", "And this?", "Red."),
]


def model(family, attention="sdpa"):
    register_sdpa_by_sample()
    torch.manual_seed(0)
    result = families.model(family).train()
    result.set_attn_implementation(attention)
    for name, parameter in result.named_parameters():
        if "norm" not in name and parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)  # so that attention matters
    return result


def run(llm, data):
    inputs = {**model_inputs(data), **attention_inputs(llm, data)}
    labels = inputs.pop("labels")
    logits = llm(**inputs, use_cache=False) if "use_cache" not in inputs else llm(**inputs)
    logits = logits.logits
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return logits, losses / (labels[:, 1:] != -100).sum(), (labels[:, 1:] != -100).sum()


def gradients(llm, loss):
    llm.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in llm.named_parameters() if p.grad is not None}


def alone(llm, samples):
    parts = [run(llm, default_collate_fn([sample])["data"]) for sample in samples]
    total = sum(count for _, _, count in parts)
    loss = sum(loss * count for _, loss, count in parts) / total
    return [logits[0] for logits, _, _ in parts], gradients(llm, loss)


def spans(data):
    ends = data["cu_seqlens"].tolist()
    lengths = data["lengths"].tolist()
    pairs = list(itertools.pairwise(ends))
    width = data["input_ids"].shape[1]
    real = [
        (a, b)
        for a, b in pairs
        if not (b % width == 0 and (data["labels"].flatten()[a:b] == -100).all())
    ]
    assert [b - a for a, b in real] == lengths
    return real


@pytest.mark.parametrize("attention", ["sdpa", "eager", "sdpa_by_sample"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_pack_with_images_gives_the_logits_of_its_samples_alone(folder, family, attention):
    dataset = make(folder, ROWS, family)
    samples = [dataset[i] for i in range(len(ROWS))]
    llm = model(family, attention)
    reference = model(family, "eager")
    reference.load_state_dict(llm.state_dict())
    expected, expected_gradients = alone(reference, samples)
    half = max(
        len(samples[0]["input_ids"]) + len(samples[1]["input_ids"]),
        len(samples[2]["input_ids"]) + len(samples[3]["input_ids"]),
    )
    for options in ({}, {"pad_to_multiple_of": 64}, {"max_length": half}):
        data = packed_collate_fn(samples, **options)["data"]
        assert data["num_images"].tolist() == [1, 0, 2, 1]
        logits, loss, _ = run(llm, data)
        flat = logits.flatten(0, 1)
        for (begin, end), wanted in zip(spans(data), expected, strict=True):
            torch.testing.assert_close(flat[begin:end], wanted, rtol=0, atol=1e-5)
        found = gradients(llm, loss)
        assert found.keys() == expected_gradients.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected_gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_without_borders_the_logits_would_differ(folder, family):
    dataset = make(folder, ROWS, family)
    samples = [dataset[i] for i in range(len(ROWS))]
    llm = model(family)
    expected, _ = alone(llm, samples)
    data = packed_collate_fn(samples)["data"]
    inputs = model_inputs(data)
    inputs.pop("labels")
    inputs.pop("position_ids")
    logits = llm(**inputs, use_cache=False).logits[0]
    begin, end = spans(data)[-1]
    assert (logits[begin:end] - expected[-1]).abs().max() > 1e-3


def test_an_image_is_not_cut_and_a_pack_with_images_is_refused(folder):
    dataset = make(folder, ROWS, "llava")
    with pytest.raises(ValueError, match="instance 0 of the batch has .* tokens, more than"):
        packed_collate_fn([dataset[0]], max_length=5, truncate=True)
    with pytest.raises(ValueError, match="is a pack with images"):
        packed_collate_fn([{**dataset[0], "cumulative_len": [0, len(dataset[0]["input_ids"])]}])
