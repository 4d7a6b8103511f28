# The documentation of Python's standard library as a stream: eight JSONL files, tokenised in the
# workers while training goes on. Nothing is downloaded, and nothing is known beforehand.
cache_dir = "work_dirs/python_docs"

stream = dict(
    type="stream_hf_dataset",
    dataset=dict(
        type="datasets.load_dataset",
        path="json",
        data_files=dict(
            type="xlength.datasets.python_docs.python_docs_shards",
            cache_dir=cache_dir,
            num_shards=8,
        ),
        split="train",
        streaming=True,
    ),
    tokenizer=dict(
        type="xlength.datasets.python_docs.python_docs_tokenizer",  # a small BPE, trained once
        cache_dir=cache_dir,
        vocab_size=4096,
    ),
    max_length=2048,
    dataset_map_fn="openai_map_fn",
    template_map_fn=dict(type="template_map_fn_factory", template="qwen_chat"),
)
