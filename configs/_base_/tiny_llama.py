# A Llama of 1.3 million parameters with random weights: it trains on any machine.
model = dict(
    type="SupervisedFinetune",
    use_activation_checkpointing=False,
    llm=dict(
        type="transformers.LlamaForCausalLM",
        config=dict(
            type="transformers.LlamaConfig",
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        ),
    ),
)
