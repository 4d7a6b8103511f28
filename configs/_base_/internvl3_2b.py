# InternVL3-2B in transformers' format: tiles of 448 pixels, up to 12 and a thumbnail, 256 tokens
# each. (The checkpoints of InternVL-2 need code of their own that today's transformers has not; the
# architecture and the recipe are the same.) Needs an accelerator.
pretrained_model_name_or_path = "OpenGVLab/InternVL3-2B-hf"

processor = dict(
    type="transformers.AutoProcessor.from_pretrained",
    pretrained_model_name_or_path=pretrained_model_name_or_path,
)
model = dict(
    type="SupervisedFinetune",
    llm=dict(
        type="transformers.AutoModelForImageTextToText.from_pretrained",
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        dtype="bfloat16",
    ),
    freeze_llm=False,
    freeze_visual_encoder=True,  # or False
)
