# Real text that is on every machine with Python: the documentation of its standard library, some
# 8,500 pairs of signature and docstring from 7 to 16,000 tokens. Nothing is downloaded.
cache_dir = "work_dirs/python_docs"

tokenizer = dict(
    type="xlength.datasets.python_docs.python_docs_tokenizer",  # a small BPE, trained once
    cache_dir=cache_dir,
    vocab_size=4096,
)
train_dataset = dict(
    type="process_hf_dataset",
    dataset=dict(type="xlength.datasets.python_docs.python_docs", cache_dir=cache_dir),
    tokenizer=tokenizer,
    max_length=2048,
    dataset_map_fn="openai_map_fn",
    template_map_fn=dict(type="template_map_fn_factory", template="qwen_chat"),
    remove_unused_columns=True,
    pack_to_max_length=False,
)
