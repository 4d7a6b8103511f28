# A Qwen2.5-VL of 1.6 million parameters with random weights: it trains on any machine.
model = dict(
    type="SupervisedFinetune",
    use_activation_checkpointing=False,
    llm=dict(
        type="transformers.Qwen2_5_VLForConditionalGeneration",
        config=dict(
            type="transformers.Qwen2_5_VLConfig",
            text_config=dict(
                vocab_size=4160,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=2048,
                rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]),
                bos_token_id=None,
                eos_token_id=0,
                tie_word_embeddings=True,
            ),
            vision_config=dict(
                depth=2,
                hidden_size=96,
                intermediate_size=256,
                num_heads=4,
                out_hidden_size=128,
                fullatt_block_indexes=[1],
            ),
            vision_start_token_id=4096,  # the ids that page_tokenizer gives
            vision_end_token_id=4097,
            image_token_id=4098,
            video_token_id=4099,
            tie_word_embeddings=True,
        ),
    ),
)
