# Qwen2.5-VL-7B with LoRA in the language model, the vision tower frozen. Needs an accelerator and
# the extra `lora`.
pretrained_model_name_or_path = "Qwen/Qwen2.5-VL-7B-Instruct"

processor = dict(
    type="transformers.AutoProcessor.from_pretrained",
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    max_pixels=28 * 28 * 1280,  # at most 1,280 tokens an image
)
model = dict(
    type="SupervisedFinetune",
    llm=dict(
        type="transformers.AutoModelForImageTextToText.from_pretrained",
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        dtype="bfloat16",
    ),
    freeze_visual_encoder=True,
    llm_lora=dict(
        type="peft.LoraConfig",
        r=64,
        lora_alpha=128,
        lora_dropout=0.05,
        bias="none",
    ),
)
