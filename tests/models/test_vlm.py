"""Vision-language models in ``SupervisedFinetune``: what is trained, and steps without an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mmengine.optim import OptimWrapper

from tests import families
from tests.datasets.test_llava import folder, llava_row, make
from xlength import SupervisedFinetune, default_collate_fn
from xlength.models.inputs import model_inputs
from xlength.models.vlm import VisionLanguage, blank_image

__all__ = ["folder"]

LORA = {"type": "peft.LoraConfig", "r": 4, "lora_alpha": 8}
ROWS = [
    llava_row("0.png", "What colour?", "Green and blue."),
    llava_row(["1.png", "3.png"], "Which is larger?", "The first."),
    llava_row(None, "Say something.", "Something."),
]


def batch(folder: Path, family: str, *indices: int) -> dict[str, Any]:
    dataset = make(folder, ROWS, family)
    return default_collate_fn([dataset[i] for i in indices])["data"]


def finetune(family: str, **options: Any) -> SupervisedFinetune:
    torch.manual_seed(0)
    return SupervisedFinetune(families.model(family), **options).train()


def trained(model: SupervisedFinetune) -> set[str]:
    """Parts of the model in which something is trained."""
    parts = ("language_model", "lm_head", "projector", "merger", "vision_tower", "visual")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {next(part for part in parts if part in name) for name in names} - {"lm_head"}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_loss_falls_when_the_model_trains_on_real_images(folder: Path, family: str) -> None:
    model = finetune(family)
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=3e-3))
    mixed, text = batch(folder, family, 0, 1, 2), batch(folder, family, 2)
    losses = []
    for step in range(24):
        data = text if step % 6 == 5 else mixed
        losses.append(model.train_step({"data": data, "data_samples": None}, wrapper)["loss"])
    assert losses[-2] < 0.7 * losses[0]
    assert all(torch.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_trained_parameter_takes_part_in_steps_with_and_without_images(
    folder: Path, family: str, checkpointing: bool
) -> None:
    model = finetune(family, use_activation_checkpointing=checkpointing)
    for indices in ((2,), (0, 1), (0, 2)):
        model.zero_grad(set_to_none=True)
        model(batch(folder, family, *indices))["loss"].backward()
        without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert without == [], indices


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_step_without_an_image_leaves_the_vision_side_and_the_loss_as_they_are(
    folder: Path, family: str
) -> None:
    model = finetune(family)
    data = batch(folder, family, 2)
    loss = model(data)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(model(data, mode="tensor").loss.item(), abs=1e-6)
    vision = model.vision_language.trained()
    assert len(vision) > 4
    assert all(not parameter.grad.any() for parameter in vision)
    language = model.llm.get_decoder().parameters()
    assert any(parameter.grad.any() for parameter in language)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_weights_in_bfloat16_train_on_images_and_texts(folder: Path, family: str) -> None:
    model = SupervisedFinetune(families.model(family).to(torch.bfloat16)).train()
    for indices in ((0, 1, 2), (2,)):
        loss = model(batch(folder, family, *indices))["loss"]
        assert torch.isfinite(loss)
        loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_features_made_before_the_model_runs_give_the_same_loss_and_gradients(
    folder: Path, family: str
) -> None:
    model = finetune(family)
    inputs = model_inputs(batch(folder, family, 0, 1, 2))
    encoded = model.vision_language._encoded(inputs)
    assert "pixel_values" not in encoded
    gradients = []
    for each in (inputs, encoded):
        model.zero_grad(set_to_none=True)
        model.llm(**each).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    for plain, early in zip(*gradients, strict=True):
        assert torch.allclose(plain, early, atol=1e-6)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_blank_image_is_one_that_the_model_takes_and_is_small(family: str) -> None:
    model = families.model(family)
    blank = blank_image(model, torch.float32, torch.device("cpu"))
    assert model.get_image_features(**blank).pooler_output is not None
    assert blank["pixel_values"].numel() <= 5 * 3 * 32 * 32


@pytest.mark.parametrize("family", ["llava", "internvl", "qwen2_5_vl"])
def test_freezing_and_adapters_train_what_xtuner_trains(folder: Path, family: str) -> None:
    qwen = family == "qwen2_5_vl"
    tower, projector = ("visual", "merger") if qwen else ("vision_tower", "projector")
    assert trained(finetune(family)) == {tower, projector, "language_model"}
    assert trained(finetune(family, freeze_llm=True)) == {tower, projector}
    frozen = finetune(family, freeze_visual_encoder=True)
    assert trained(frozen) == {projector, "language_model"}
    both = finetune(family, freeze_llm=True, freeze_visual_encoder=True)
    assert trained(both) == {projector}
    adapters = finetune(family, llm_lora=LORA, visual_encoder_lora=LORA)
    names = [name for name, p in adapters.named_parameters() if p.requires_grad]
    assert {("lora_" in name) for name in names if "language_model" in name} == {True}
    outside = [name for name in names if "lora_" not in name]
    assert outside and all("projector" in name or "merger" in name for name in outside)
    assert any("lora_" in name and tower in name for name in names)
    on_frozen = finetune(family, freeze_llm=True, freeze_visual_encoder=True, llm_lora=LORA)
    assert trained(on_frozen) == {projector, "language_model"}
    for model in (both, adapters, on_frozen, finetune(family, lora=LORA)):
        for indices in ((2,), (0, 1)):
            model.zero_grad(set_to_none=True)
            model(batch(folder, family, *indices))["loss"].backward()
            parameters = [p for p in model.parameters() if p.requires_grad]
            assert all(p.grad is not None for p in parameters)


@pytest.mark.parametrize("family", ["llava", "internvl", "qwen2_5_vl"])
def test_a_state_dict_of_what_is_trained_loads_into_the_same_base(
    folder: Path, family: str
) -> None:
    options = {"freeze_llm": True, "visual_encoder_lora": LORA}
    model = finetune(family, **options)
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = batch(folder, family, 0, 1, 2)
    for _ in range(3):
        model.train_step({"data": data, "data_samples": None}, wrapper)
    state = model.state_dict()
    assert set(state) == {name for name, p in model.named_parameters() if p.requires_grad}
    other = finetune(family, **options)
    missing, unexpected = other.load_state_dict(state, strict=True)
    assert (missing, unexpected) == ([], [])
    with torch.no_grad():
        assert float(model(data)["loss"]) == pytest.approx(float(other(data)["loss"]), abs=1e-6)


def test_layers_that_no_image_reaches_are_frozen_and_named(log_lines: list[str]) -> None:
    model = families.model("llava")  # its features are those of the last layer but one
    VisionLanguage(model)
    last = model.get_encoder(modality="image").encoder.layers[-1]
    first = model.get_encoder(modality="image").encoder.layers[0]
    assert not any(parameter.requires_grad for parameter in last.parameters())
    assert all(parameter.requires_grad for parameter in first.parameters())
    assert any("18 parameters of the vision side are frozen" in line for line in log_lines)


@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl", "qwen3_vl"])
def test_nothing_is_frozen_where_images_reach_everything(family: str) -> None:
    model = families.model(family)
    VisionLanguage(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_looking_for_unreached_layers_draws_no_random_number() -> None:
    config = families.config("llava")
    config.vision_config.attention_dropout = 0.5
    model = transformers.AutoModelForImageTextToText.from_config(config).train()
    before = torch.get_rng_state()
    VisionLanguage(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_options_for_images_on_a_text_model_are_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    llm = transformers.LlamaForCausalLM(config)
    assert SupervisedFinetune(llm).vision_language is None
    with pytest.raises(ValueError, match="LlamaForCausalLM has no vision tower: freeze_llm"):
        SupervisedFinetune(llm, freeze_llm=True)
    with pytest.raises(ValueError, match="lora must be a peft config"):
        SupervisedFinetune(families.model("llava"), llm_lora={"r": 4})


def test_no_gradient_goes_through_a_frozen_tower(folder: Path) -> None:
    model = finetune("llava", freeze_visual_encoder=True, use_activation_checkpointing=True)
    tower = model.llm.get_encoder(modality="image")
    seen = []
    hook = tower.encoder.layers[0].register_forward_hook(
        lambda module, args, output: seen.append(output)
    )
    model(batch(folder, "llava", 0))["loss"].backward()
    hook.remove()
    outputs = [one[0] if isinstance(one, tuple) else one for one in seen]
    assert outputs and not any(output.requires_grad for output in outputs)
