"""Prompt templates: how a conversation is written for a model, and the function that writes it.

A template has ``SYSTEM`` (with ``{system}``), ``INSTRUCTION`` (with ``{input}``, and ``{round}``
where rounds are counted from 1), and as needed ``SUFFIX`` (ends an answer, trained),
``SUFFIX_AS_EOS`` (no further end-of-sequence token after it), ``SEP`` (between turns, not trained)
and ``STOP_WORDS`` (for generation). Turn 0 is ``SYSTEM + INSTRUCTION``, answer + ``SUFFIX``,
``SEP``; the others have no ``SYSTEM``. The keys and names are XTuner's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial
from typing import Any

from mmengine.config import ConfigDict
from mmengine.utils.misc import get_object_from_string

from xlength.registry import MAP_FUNC, register


def _chatml(*more_stop_words: str) -> dict[str, Any]:
    return dict(
        SYSTEM="<|im_start|>system\n{system}<|im_end|>\n",
        INSTRUCTION="<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n",
        SUFFIX="<|im_end|>",
        SUFFIX_AS_EOS=True,
        SEP="\n",
        STOP_WORDS=["<|im_end|>", *more_stop_words],
    )


def _inst() -> dict[str, Any]:
    return dict(SYSTEM="[INST] {system} [/INST]\n", INSTRUCTION="[INST] {input} [/INST]", SEP="\n")


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. {system}\n "
)

PROMPT_TEMPLATE = ConfigDict(
    default=dict(
        SYSTEM="<|System|>:{system}\n", INSTRUCTION="<|User|>:{input}\n<|Bot|>:", SEP="\n"
    ),
    tokenizer=dict(CHAT_TEMPLATE=True),
    internlm_chat=dict(
        SYSTEM="<|System|>:{system}\n",
        INSTRUCTION="<|User|>:{input}<eoh>\n<|Bot|>:",
        SUFFIX="<eoa>",
        SUFFIX_AS_EOS=True,
        SEP="\n",
        STOP_WORDS=["<eoa>"],
    ),
    internlm2_chat=_chatml(),
    qwen_chat=_chatml("<|endoftext|>"),
    minicpm3=_chatml("<|endoftext|>"),
    llama3_chat=dict(
        SYSTEM="<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>",
        INSTRUCTION=(
            "<|start_header_id|>user<|end_header_id|>\n\n{input}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        SUFFIX="<|eot_id|>",
        SUFFIX_AS_EOS=True,
        STOP_WORDS=["<|eot_id|>"],
    ),
    phi3_chat=dict(
        SYSTEM="<|system|>\n{system}<|end|>\n",
        INSTRUCTION="<|user|>\n{input}<|end|>\n<|assistant|>\n",
        SUFFIX="<|end|>",
        SUFFIX_AS_EOS=True,
        SEP="\n",
        STOP_WORDS=["<|end|>"],
    ),
    gemma=dict(  # Gemma has no system message of its own; this is XTuner's
        SYSTEM="<start_of_turn>system\n{system}<end_of_turn>\n",
        INSTRUCTION="<start_of_turn>user\n{input}<end_of_turn>\n<start_of_turn>model\n",
        SUFFIX="<end_of_turn>",
        SUFFIX_AS_EOS=False,
        SEP="\n",
        STOP_WORDS=["<end_of_turn>"],
    ),
    cohere_chat=dict(
        SYSTEM="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{system}<|END_OF_TURN_TOKEN|>",
        INSTRUCTION=(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{input}<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        ),
        SUFFIX="<|END_OF_TURN_TOKEN|>",
        SUFFIX_AS_EOS=True,
        STOP_WORDS=["<|END_OF_TURN_TOKEN|>"],
    ),
    deepseek_v2=dict(
        SYSTEM="{system}\n\n",
        INSTRUCTION="User: {input}\n\nAssistant: ",
        SUFFIX="<｜end▁of▁sentence｜>",
        SUFFIX_AS_EOS=True,
        STOP_WORDS=["<｜end▁of▁sentence｜>"],
    ),
    deepseek_moe=_inst(),
    mistral=_inst(),
    mixtral=_inst(),
    code_llama_chat=dict(SYSTEM="{system}\n", INSTRUCTION="[INST] {input} [/INST]"),
    zephyr=dict(
        SYSTEM="<|system|>\n{system}\n",
        INSTRUCTION="<|user|>\n{input}\n<|assistant|>\n",
        SEP="\n",
    ),
    chatglm2=dict(
        SYSTEM="{system}\n", INSTRUCTION="[Round {round}]\n\n问：{input}\n\n答：", SEP="\n\n"
    ),
    chatglm3=dict(
        SYSTEM="<|system|>\n{system}",
        INSTRUCTION="<|user|>\n{input}<|assistant|>\n",
        SEP="\n",
    ),
    baichuan_chat=dict(
        SYSTEM="{system}\n", INSTRUCTION="<reserved_102>{input}<reserved_103>", SEP="\n"
    ),
    baichuan2_chat=dict(
        SYSTEM="{system}\n", INSTRUCTION="<reserved_106>{input}<reserved_107>", SEP="\n"
    ),
    minicpm=dict(INSTRUCTION="<用户> {input} <AI>", SEP="\n"),
    vicuna=dict(SYSTEM=_VICUNA, INSTRUCTION="USER: {input} ASSISTANT:", SEP="\n"),
    wizardlm=dict(SYSTEM=_VICUNA, INSTRUCTION="USER: {input} ASSISTANT:", SEP="\n"),
)
"""Templates by name. ``tokenizer`` stands for the tokenizer's own chat template."""


@register(MAP_FUNC)
def template_map_fn_factory(template: Mapping[str, Any] | str) -> partial[dict[str, Any]]:
    """The function that writes the conversations of rows with ``template``.

    Args:
        template: a template, the name of one in ``PROMPT_TEMPLATE``, or the path of one to import.

    Raises:
        ValueError: there is no such template, or it has no ``INSTRUCTION``.
    """
    if isinstance(template, str):
        template = PROMPT_TEMPLATE.get(template) or _imported(template)
    assert not isinstance(template, str)
    if not is_chat_template(template) and "{input}" not in template.get("INSTRUCTION", ""):
        raise ValueError(f"template {dict(template)} has no INSTRUCTION with {{input}} in it")
    return partial(template_map_fn, template=dict(template))


@register(MAP_FUNC)
def template_map_fn(example: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Write the turns of ``example['conversation']`` with a template.

    Args:
        example: its turns have ``output``, and as needed ``input`` and ``system``.
        template: see the head of this module.

    Returns:
        ``{'conversation': turns}``: ``input`` and ``output`` are what is tokenised, ``sep`` and
        ``need_eos_token`` are set, other keys are as they were.
    """
    turns = example.get("conversation") or []
    if is_chat_template(template):
        return {"conversation": turns}
    return {"conversation": [_written(turn, i, template) for i, turn in enumerate(turns)]}


def is_chat_template(template: Any) -> bool:
    """Whether it stands for the tokenizer's own chat template."""
    return isinstance(template, Mapping) and bool(template.get("CHAT_TEMPLATE"))


def _written(turn: Mapping[str, Any], i: int, template: Mapping[str, Any]) -> dict[str, Any]:
    text = template["INSTRUCTION"].format(input=turn.get("input") or "", round=i + 1)
    system = turn.get("system")
    if system:
        if not template.get("SYSTEM"):
            raise ValueError("there is a system message, and the template has no SYSTEM")
        text = template["SYSTEM"].format(system=system) + text
    written = {
        **turn,
        "input": text,
        "need_eos_token": not template.get("SUFFIX_AS_EOS", False),
        "sep": template.get("SEP", ""),
    }
    if template.get("SUFFIX"):
        written["output"] = (turn.get("output") or "") + template["SUFFIX"]
    return written


def _imported(name: str) -> Mapping[str, Any]:
    template = get_object_from_string(name) if "." in name else None
    if isinstance(template, Mapping):
        return template
    near = difflib.get_close_matches(name, PROMPT_TEMPLATE, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {sorted(PROMPT_TEMPLATE)}"
    raise ValueError(f"template={name!r} is not in PROMPT_TEMPLATE and cannot be imported: {hint}")
