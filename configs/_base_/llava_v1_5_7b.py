# LLaVA-1.5-7B in transformers' format: Vicuna-7B and CLIP-L at 336 pixels, 576 tokens an image.
# These are the weights after the second stage; to train it from its start, give the path of a
# LLaVA model of Vicuna-7B and a projector of the first stage. Needs an accelerator.
pretrained_model_name_or_path = "llava-hf/llava-1.5-7b-hf"

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
    freeze_visual_encoder=True,  # the projector is always trained
)
