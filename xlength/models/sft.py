"""``SupervisedFinetune``: a transformers model of text, or of images and text, in mmengine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.model import BaseModel
from mmengine.runner import load_checkpoint
from torch import Tensor, nn

from xlength.losses import TokenWeightedLoss, count_predicted
from xlength.models.borders import attention_inputs, batch_borders
from xlength.models.inputs import model_inputs
from xlength.models.language_model import build_language_model, fit_embeddings
from xlength.models.lora import add_lora, trained_names
from xlength.models.vlm import vision_language
from xlength.registry import MODELS, register

LOSS_REDUCTIONS = ("tokens", "mean")


@register(MODELS)
class SupervisedFinetune(BaseModel):
    """Fine-tune a causal language model of transformers, whole or through LoRA.

    Or a vision-language model (``AutoModelForImageTextToText``), on the batches of
    ``LLaVADataset``; see ``VisionLanguage`` for what happens to batches without an image.

    XTuner's arguments, batch (``dict(data=..., data_samples=None)``) and modes, with a loss that
    weighs all tokens of an optimiser step alike; see ``TokenWeightedLoss`` for its price.

    Args:
        llm: a model, or a dict that builds one: ``dict(type=AutoModelForCausalLM.from_pretrained,
            pretrained_model_name_or_path=...)``, or with random weights ``dict(type=
            'AutoModelForCausalLM.from_config', config=dict(type='LlamaConfig', ...))``.
        lora: a peft config or a dict of one; then only adapters are trained, and the state dict
            holds nothing else. Needs the extra ``lora``.
        peft_model: checkpoint whose adapters to start from.
        use_activation_checkpointing: recompute activations in the backward pass: about a third
            more time, far less memory.
        use_varlen_attn: refuse batches that are no packs. Samples of a pack are kept apart anyway;
            see ``attention_inputs``.
        tokenizer: a tokenizer or a dict of one; the embeddings grow to hold its tokens, new ones
            start at the mean of the old.
        max_position_embeddings: tokens; stretches rotary positions linearly to this length
            (``from_pretrained`` only).
        loss_reduction: ``'tokens'``, or ``'mean'`` for XTuner's: the mean of each rank's each
            micro-step.
        data_preprocessor: as in mmengine.
        freeze_llm: vision-language models: do not train the language model. What is frozen is not
            in the state dict.
        freeze_visual_encoder: do not train the vision tower; the projector is trained.
        llm_lora: as ``lora``, in the language model alone.
        visual_encoder_lora: as ``lora``, in the vision tower alone.

    Raises:
        ValueError: an argument is none of the above.
    """

    def __init__(
        self,
        llm: Any,
        lora: Any = None,
        peft_model: str | None = None,
        use_activation_checkpointing: bool = True,
        use_varlen_attn: bool = False,
        tokenizer: Any = None,
        max_position_embeddings: int | None = None,
        loss_reduction: str = "tokens",
        data_preprocessor: Any = None,
        freeze_llm: bool = False,
        freeze_visual_encoder: bool = False,
        llm_lora: Any = None,
        visual_encoder_lora: Any = None,
    ) -> None:
        super().__init__(data_preprocessor)
        if loss_reduction not in LOSS_REDUCTIONS:
            raise ValueError(
                f"loss_reduction must be one of {LOSS_REDUCTIONS}, got {loss_reduction!r}"
            )
        self.loss_reduction = loss_reduction
        self.token_weighted_loss = TokenWeightedLoss()
        self.use_varlen_attn = use_varlen_attn
        self.use_lora = any(each is not None for each in (lora, llm_lora, visual_encoder_lora))
        if peft_model is not None and not self.use_lora:
            raise ValueError("peft_model needs lora, the config of the adapters it holds")
        self.saves_trained_only = self.use_lora or freeze_llm or freeze_visual_encoder
        self.llm = build_language_model(llm, max_position_embeddings)
        if tokenizer is not None:
            fit_embeddings(self.llm, tokenizer)
        self.vision_language = vision_language(
            self.llm, freeze_llm, freeze_visual_encoder, llm_lora, visual_encoder_lora
        )
        if use_activation_checkpointing:
            self.activation_checkpointing_enable()
        if lora is not None:
            self.llm = add_lora(self.llm, lora, use_activation_checkpointing)
            if self.vision_language is not None:
                self.vision_language.freeze_unreachable()
        if self.saves_trained_only:
            self.register_load_state_dict_post_hook(_only_trained_are_missing)
        if peft_model is not None:
            load_checkpoint(self, peft_model)

    def init_weights(self) -> None:
        """Nothing: the weights are those that ``llm`` came with."""

    def activation_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass."""
        if self.vision_language is None:
            self.llm.enable_input_require_grads()
        _renamed(self.llm, "checkpointing_enable")({"use_reentrant": False})
        if self.vision_language is not None:  # gradients would go all through a frozen tower
            self.llm.disable_input_require_grads()

    def activation_checkpointing_disable(self) -> None:
        """Keep activations for the backward pass."""
        _renamed(self.llm, "checkpointing_disable")()

    gradient_checkpointing_enable = activation_checkpointing_enable
    gradient_checkpointing_disable = activation_checkpointing_disable

    def forward(self, data: Mapping[str, Any], data_samples: Any = None, mode: str = "loss") -> Any:
        """Run the language model on a batch.

        Args:
            data: ``input_ids``, ``attention_mask``, ``position_ids``, ``labels``, each (rows,
                length), and facts about the batch, which are passed over.
            data_samples: ignored.
            mode: ``'loss'``, ``'predict'`` or ``'tensor'``.

        Returns:
            ``'loss'``: dict of ``loss``, the mean over this batch's predicted tokens, and
            ``num_tokens``, their number; ``'predict'``: a list of dicts with each row's
            ``logits``; ``'tensor'``: the model's output.
        """
        if mode not in ("loss", "predict", "tensor"):
            raise ValueError(f"mode must be 'loss', 'predict' or 'tensor', got {mode!r}")
        if self.use_varlen_attn and batch_borders(data) is None:
            raise ValueError(
                "use_varlen_attn=True, but the batch has neither cu_seqlens nor cumulative_len: "
                "its samples would see each other; collate with packed_collate_fn"
            )
        inputs, zero = {**model_inputs(data), **attention_inputs(self.llm, data)}, None
        if self.vision_language is not None:
            inputs, zero = self.vision_language.prepare(inputs)
        outputs = self.llm(**inputs)
        if mode == "tensor":
            return outputs
        if mode == "predict":
            return [{"logits": logits} for logits in outputs.logits]
        loss = outputs.loss if zero is None else outputs.loss + zero
        return {"loss": loss, "num_tokens": count_predicted(data["labels"])}

    def parse_losses(self, losses: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to go backward from, and what to log; called once for each micro-step.

        Args:
            losses: what ``forward`` returned.
        """
        losses = dict(losses)
        num_tokens = losses.pop("num_tokens")
        if self.loss_reduction == "mean":
            return super().parse_losses(losses)
        trained = (p for p in self.parameters() if p.requires_grad)
        loss, reported = self.token_weighted_loss(losses.pop("loss"), num_tokens, trained)
        return loss, {"loss": reported, **losses}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """All weights; with LoRA or frozen parts only those that are trained."""
        state = super().state_dict(*args, **kwargs)
        if not self.saves_trained_only:
            return state
        prefix = kwargs.get("prefix", "")
        trained = {prefix + name for name in trained_names(self)}
        for name in [name for name in state if name.startswith(prefix) and name not in trained]:
            del state[name]
        return state


def _renamed(llm: Any, name: str) -> Any:
    """A method that transformers calls ``gradient_...`` before and ``activation_...`` from 5.24."""
    return getattr(llm, f"activation_{name}", None) or getattr(llm, f"gradient_{name}")


def _only_trained_are_missing(module: nn.Module, incompatible_keys: Any) -> None:
    """A state dict without the frozen weights is whole."""
    trained = trained_names(module)
    missing = incompatible_keys.missing_keys
    missing[:] = [name for name in missing if name in trained]
