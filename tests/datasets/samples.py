"""Small tokenizers, templates and conversations for the tests of ``process_hf_dataset``."""

import functools
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"]
WORDS = ["the", "quick", "brown", "fox's", "jumps", "over", "12", "lazy", "dogs,", "naïve", "café"]
WORDS += ["你好", "世界", "🙂", "a\n\n", "", "b\t(c)", "#"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _backend(metaspace):
    tokenizer = Tokenizer(models.BPE())
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=[] if metaspace else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(random.Random(i)) for i in range(300)], trainer)
    return tokenizer.to_str()


def small_tokenizer(metaspace=False, **options):
    """A fast tokenizer of 400 tokens; ``metaspace`` puts a space before every text, as Llama 2."""
    options.setdefault("eos_token", "<|endoftext|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(metaspace)), **options
    )


def text(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(0, 12)))


def chats(count, seed=0):
    """``count`` rows of ``messages``, one to three turns, some with a system message."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        messages = [{"role": "system", "content": text(rng)}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": f"{i} {text(rng)}"})
            messages.append({"role": "assistant", "content": f"answer {text(rng)}"})
        rows.append({"messages": messages})
    return rows
