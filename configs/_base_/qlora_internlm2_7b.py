# InternLM2-Chat-7B in 4 bits with LoRA, as in XTuner's QLoRA recipes. Needs an accelerator,
# bitsandbytes, and the extra `lora`.
pretrained_model_name_or_path = "internlm/internlm2-chat-7b"

tokenizer = dict(
    type="transformers.AutoTokenizer.from_pretrained",
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    trust_remote_code=True,
    padding_side="right",
)
model = dict(
    type="SupervisedFinetune",
    use_varlen_attn=False,
    llm=dict(
        type="transformers.AutoModelForCausalLM.from_pretrained",
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        trust_remote_code=True,
        dtype="float16",
        quantization_config=dict(
            type="transformers.BitsAndBytesConfig",
            load_in_4bit=True,
            llm_int8_threshold=6.0,
            bnb_4bit_compute_dtype="float16",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
        ),
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
