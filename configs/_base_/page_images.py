# Real images without a download: 300 pages of the standard library's documentation, drawn with
# Pillow (extra `vlm`) at their natural sizes, and 300 texts without an image.
cache_dir = "work_dirs/page_images"

tokenizer = dict(
    type="xlength.datasets.page_images.page_tokenizer",  # a small BPE, trained once
    cache_dir=cache_dir,
    vocab_size=4096,
)
processor = dict(
    type="xlength.datasets.processors.images_only_processor",
    processor_class="Qwen2_5_VLProcessor",
    image_processor=dict(
        type="Qwen2VLImageProcessorPil",
        min_pixels=28 * 28 * 4,
        max_pixels=28 * 28 * 128,
    ),
    tokenizer=tokenizer,
)
train_dataset = dict(
    type="xlength.datasets.page_images.page_dataset",
    cache_dir=cache_dir,
    num_pages=300,
    num_texts=300,
    processor=processor,
    max_length=1024,
)
