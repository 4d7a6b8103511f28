# The data of LLaVA-1.5's second stage, as its authors publish them: 665 thousand rows in LLaVA's
# format, some 40 thousand of them without an image.
data_root = "data/llava_data/"
data_path = data_root + "LLaVA-Instruct-150K/llava_v1_5_mix665k.json"
image_folder = data_root + "llava_images"
