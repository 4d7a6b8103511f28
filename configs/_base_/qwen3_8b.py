# Qwen3-8B with LoRA in bfloat16. Needs an accelerator and the extra `lora`.
pretrained_model_name_or_path = "Qwen/Qwen3-8B"

tokenizer = dict(
    type="transformers.AutoTokenizer.from_pretrained",
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    padding_side="right",
)
model = dict(
    type="SupervisedFinetune",
    llm=dict(
        type="transformers.AutoModelForCausalLM.from_pretrained",
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        dtype="bfloat16",
    ),
    lora=dict(
        type="peft.LoraConfig",
        r=64,
        lora_alpha=16,
        lora_dropout=0.1,
        bias="none",
        task_type="CAUSAL_LM",
    ),
)
