"""SupervisedFinetune: what it builds, computes and keeps."""

import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from mmengine.runner import load_checkpoint, save_checkpoint
from mmengine.runner.checkpoint import load_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import tests.tiny as tiny
from xlength.models.sft import SupervisedFinetune
from xlength.runtime.checkpoint import trust_checkpoints

LORA = dict(type="LoraConfig", r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM")


def build(**options):
    torch.manual_seed(0)
    options.setdefault("use_activation_checkpointing", False)
    return SupervisedFinetune(tiny.llama(), **options)


def batch(*lengths):
    return tiny.collate([tiny.sample(i, length) for i, length in enumerate(lengths)])


def step(model, data, lr=0.1):
    wrapper = OptimWrapper(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    )
    return model.train().train_step(data, wrapper)


def test_every_way_to_name_a_model_builds_it():
    config = {key: value for key, value in tiny.llama()["config"].items() if key != "type"}
    ways = [
        tiny.llama(),
        dict(type=LlamaForCausalLM, config=dict(type=LlamaConfig, **config)),
        dict(type="transformers.LlamaForCausalLM", config=LlamaConfig(**config)),
        LlamaForCausalLM(LlamaConfig(**config)),
    ]
    for llm in ways:
        model = MODELS.build(dict(type="SupervisedFinetune", llm=llm))
        assert isinstance(model.llm, LlamaForCausalLM)
        assert model.llm.config.use_cache is False


def test_a_saved_model_is_loaded_with_its_weights(tmp_path):
    model = build()
    model.llm.save_pretrained(tmp_path)
    llm = dict(
        type="AutoModelForCausalLM.from_pretrained", pretrained_model_name_or_path=str(tmp_path)
    )
    loaded = SupervisedFinetune(llm)
    for name, value in model.llm.state_dict().items():
        assert torch.equal(loaded.llm.state_dict()[name], value)


def test_the_loss_is_the_models_own_and_facts_of_the_batch_do_not_reach_it():
    model, data = build(), batch(5, 9)
    expected = model.llm(**data["data"]).loss
    data["data"] |= {"lengths": torch.tensor([5, 9]), "sample_ids": torch.tensor([0, 1])}
    losses = model(**data, mode="loss")
    assert type(losses) is dict
    assert torch.equal(losses["loss"], expected)
    assert losses["num_tokens"].item() == 4 + 8


def test_other_modes_give_logits():
    model, data = build(), batch(5, 9)
    rows = model(**data, mode="predict")
    assert [row["logits"].shape for row in rows] == [(9, tiny.VOCAB)] * 2
    assert torch.equal(model(**data, mode="tensor").logits[0], rows[0]["logits"])
    with pytest.raises(ValueError, match="mode must be"):
        model(**data, mode="los")


def test_training_makes_the_loss_fall():
    model, data = build().train(), batch(5, 9, 20)
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = [model.train_step(data, wrapper)["loss"].item() for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def test_activation_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = build(use_activation_checkpointing=checkpointing).train()
        assert model.llm.is_gradient_checkpointing == checkpointing
        model(**batch(5, 9), mode="loss")["loss"].backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_lora_trains_adapters_only_and_keeps_nothing_else():
    model = build(lora=dict(LORA))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert any("down_proj" in name for name in trained)  # all linear layers by default
    assert set(model.state_dict()) == set(trained)
    size = sum(value.numel() for value in model.state_dict().values())
    assert size < sum(p.numel() for p in model.parameters()) / 3


def test_modules_to_save_are_kept_too():
    model = build(lora=dict(LORA, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert any("lm_head" in name for name in model.state_dict())
    assert not any("embed_tokens" in name for name in model.state_dict())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_weights_are_saved_and_loaded_by_mmengine(checkpointing, tmp_path):
    model = build(lora=dict(LORA), use_activation_checkpointing=checkpointing)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # the first step leaves lora_A as it is, lora_B being zero
        step(model, batch(5, 9))
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    save_checkpoint({"state_dict": model.state_dict()}, str(tmp_path / "lora.pth"))
    trust_checkpoints([])
    other = build(lora=dict(LORA))
    load_checkpoint(other, str(tmp_path / "lora.pth"), strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    started = build(lora=dict(LORA), peft_model=str(tmp_path / "lora.pth"))
    assert torch.equal(
        started(**batch(7), mode="loss")["loss"], model(**batch(7), mode="loss")["loss"]
    )


@pytest.mark.parametrize("load", [load_state_dict, torch.nn.Module.load_state_dict])
def test_a_state_dict_that_lacks_an_adapter_or_has_a_stranger_is_refused(load):
    model = build(lora=dict(LORA))
    state = model.state_dict()
    load(model, state, strict=True)
    lacking = dict(state)
    gone = next(iter(lacking))
    del lacking[gone]
    with pytest.raises(RuntimeError, match="issing key"):
        load(model, lacking, strict=True)
    with pytest.raises(RuntimeError, match="stranger"):
        load(model, {**state, "stranger": torch.zeros(1)}, strict=True)


def test_without_lora_the_state_dict_is_whole():
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    with pytest.raises(RuntimeError, match="issing key"):
        model.load_state_dict({})


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="loss_reduction must be one of .* got 'sum'"):
        build(loss_reduction="sum")
    with pytest.raises(ValueError, match="peft_model needs lora"):
        build(peft_model="adapters.pth")
    with pytest.raises(ValueError, match="llm must be a module or a dict"):
        SupervisedFinetune("a-name")
    with pytest.raises(
        ValueError, match="type 'LlamaForCausalM' .* did you mean 'LlamaForCausalLM'"
    ):
        SupervisedFinetune(dict(type="LlamaForCausalM"))
    with pytest.raises(ValueError, match="lora must be a peft config"):
        build(lora=dict(r=4))
    with pytest.raises(ValueError, match="max_position_embeddings needs"):
        build(max_position_embeddings=4096)


def test_embeddings_grow_to_the_tokenizers_size():
    class Tokenizer:
        def __len__(self):
            return tiny.VOCAB + 3

    mean = build().llm.get_input_embeddings().weight.mean(dim=0)
    model = build(tokenizer=Tokenizer())
    weight = model.llm.get_input_embeddings().weight
    assert weight.shape[0] == 192  # the next multiple of 64
    assert model.llm.get_output_embeddings().weight.shape[0] == 192
    torch.testing.assert_close(weight[tiny.VOCAB :], mean.expand(64, -1))
    assert torch.isfinite(model(**batch(5), mode="loss")["loss"])


def test_positions_are_stretched_to_a_longer_length(tmp_path):
    build().llm.save_pretrained(tmp_path)
    llm = dict(
        type="AutoModelForCausalLM.from_pretrained", pretrained_model_name_or_path=str(tmp_path)
    )
    plain = SupervisedFinetune(dict(llm), max_position_embeddings=200)
    stretched = SupervisedFinetune(dict(llm), max_position_embeddings=1000)
    frequencies = [m.llm.model.rotary_emb.inv_freq for m in (plain, stretched)]
    torch.testing.assert_close(frequencies[1] * 4, frequencies[0])
