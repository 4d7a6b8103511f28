"""Words that are looked up give the ids of the tokenizer itself, wherever they are used."""

import pickle
import random
import string

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.models.qwen2 import tokenization_qwen2

from tests.datasets.samples import small_tokenizer
from xlength.datasets import words
from xlength.datasets.tokenize import TextEncoder, encode_texts

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
STEPS = {
    "gpt2": lambda: ByteLevel(add_prefix_space=False),
    "llama3": lambda: split(LLAMA3),
    "qwen": lambda: split(QWEN),
}
# Letters, numbers and what the expressions tell apart: spaces of every kind, quotes, control
# characters, and some that are not ASCII.
LETTERS = "abcdeXYZsStTdDmMlLrRvVeE"
ODD = "''''  \t\n\r\v\f\x00\x1c\x1f\x7f.,;:!?-_/\\()[]{}<>|\"#$%&*+=@^`~0123456789\n\n   "


def split(expression):
    steps = [
        Split(Regex(expression), "isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


def scribble(rng, alphabet, size=40):
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(0, size)))


def tokenizer(step, normalizer=None):
    """A tokenizer that merges whatever the expression lets it merge."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = step()
    backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    rng = random.Random(0)
    backend.train_from_iterator([scribble(rng, LETTERS + ODD, 200) for _ in range(400)], trainer)
    result = PreTrainedTokenizerFast(tokenizer_object=backend)
    result.add_special_tokens({"eos_token": "<|end|>", "pad_token": "<|end|><|x|>"})
    marks = [AddedToken(text, normalized=False) for text in ("<|", "   ")]
    result.add_tokens([AddedToken("tool", normalized=True), *marks])
    return result


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_looked_up_words_give_the_ids_of_the_tokenizer(step, normalizer):
    own = tokenizer(step, normalizer)
    rng = random.Random(1)
    alphabets = (
        LETTERS + ODD,
        LETTERS + "   ",
        ODD,
        string.printable,
        LETTERS + ODD + "é中🙂\u2028",
    )
    texts = [scribble(rng, alphabets[i % 5]) for i in range(3000)]
    marks = ["<|end|>", "<|end|><|x|>", "tool", " tool ", "<|", "too", " ", "   "]
    texts += [
        "".join(scribble(rng, LETTERS + ODD, 6) + rng.choice(marks) for _ in range(5))
        for _ in range(500)
    ]
    texts += ["", "it's IT'S we'LL", "a\r\n\r\n b", "x" * 100, " " * 99 + "y", "don't\u017f 's"]
    encoder = TextEncoder(own)
    for start in range(0, len(texts), 700):
        part = texts[start : start + 700]
        assert [ids.tolist() for ids in encoder(part)] == encode_texts(own, part)
    assert encoder.table is not None and len(encoder.table.known_words.numbers) > 500
    assert encode_texts(own, texts[:9]) == [
        own.encode(t, add_special_tokens=False) for t in texts[:9]
    ]


def test_the_expressions_are_those_of_the_tokenizers_in_use():
    assert tokenization_qwen2.PRETOKENIZE_REGEX == QWEN
    assert set(words._ON_ASCII) == {QWEN, LLAMA3}


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_mostly_ascii_texts_with_some_foreign_letters_give_the_ids_of_the_tokenizer(
    step, normalizer
):
    own = tokenizer(step, normalizer)
    rng = random.Random(2)
    foreign = ["é", "e\u0301", "\u0301", "’", "\u00a0", "\u2028", "中文", "🙂"]
    foreign += ["½", "Ⅷ", "\x85", "ſ", "б", "\u0483", "”", "\u3000"]
    foreign += [letter + letter for letter in foreign]
    pieces = ["the", " the", "dog's", "a.", "<|end|>", "tool", "1,000", "<|"]
    pieces += [" ", "  ", "\n", "\r\n "]
    texts = []
    for i in range(4000):
        parts = rng.choices(pieces, k=rng.randint(0, 30))
        for _ in range(rng.randint(0, 1 + i % 4)):
            parts.insert(rng.randint(0, len(parts)), rng.choice(foreign))
        texts.append("".join(parts))
    encoder = TextEncoder(own)
    for part in (texts[:2000], texts[2000:]):
        assert [ids.tolist() for ids in encoder(part)] == encode_texts(own, part)


def test_few_texts_reach_the_tokenizer_twice():
    own = tokenizer(STEPS["qwen"])
    asked = []
    table = words.word_table(own, lambda texts: asked.extend(texts) or encode_texts(own, texts))
    table(["the fox jumps", "the dog"])
    table(["the dog “café” jumps", "the dog", "fox  dog"])
    assert sorted(asked) == [" ", " dog", " fox", " jumps", " “café”", "fox", "the"]


@pytest.mark.parametrize("limit", ["_MOST_UNITS", "_MOST_LETTERS"])
def test_a_full_memory_of_words_starts_anew(limit, monkeypatch):
    own = tokenizer(STEPS["qwen"])
    table = words.word_table(own, lambda texts: encode_texts(own, texts))
    monkeypatch.setattr(words, limit, 3)
    for texts in (["one more word, please"], ["the dog, and it", "x" * 100, "a b c d e"]):
        assert [ids.tolist() for ids in table(texts)] == encode_texts(own, texts)
        for memory in (table.known_pieces, table.known_words):
            assert not memory.numbers and not memory.ids and not memory.letters


def test_an_encoder_that_has_learned_words_can_be_sent_to_a_worker():
    encoder = TextEncoder(tokenizer(STEPS["qwen"]))
    before = encoder(["the fox jumps"])[0].tolist()
    sent = pickle.loads(pickle.dumps(encoder))
    assert sent.table is None and encoder.table is not None
    assert sent(["the fox jumps"])[0].tolist() == before


def test_a_table_whose_tokenizer_fails_knows_no_half_learned_words():
    own = tokenizer(STEPS["qwen"])
    answers = [RuntimeError("no memory"), None]

    def encode(texts):
        if error := answers.pop(0):
            raise error
        return encode_texts(own, texts)

    table = words.word_table(own, encode)
    with pytest.raises(RuntimeError, match="no memory"):
        table(["the dog"])
    assert table(["the dog"])[0].tolist() == encode_texts(own, ["the dog"])[0]


def changed(**changes):
    def change():
        own = small_tokenizer()
        for name, value in changes.items():
            setattr(own.backend_tokenizer, name, value)
        return own

    return change


def with_added(token="fox", **flags):
    own = small_tokenizer()
    own.add_tokens([AddedToken(token, **flags)])
    return own


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_tokenizer(metaspace=True),
        changed(pre_tokenizer=ByteLevel(add_prefix_space=True)),
        changed(pre_tokenizer=ByteLevel(add_prefix_space=False, use_regex=False)),
        changed(pre_tokenizer=split(r"\s+|\S+")),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(pre_tokenizer=None),
        changed(normalizer=normalizers.Lowercase()),
        changed(model=models.BPE(dropout=0.1)),
        changed(model=models.WordLevel({"a": 0}, unk_token="a")),
        lambda: with_added(lstrip=True),
        lambda: with_added(rstrip=True),
        lambda: with_added(single_word=True),
        lambda: with_added(token="fox jumps"),
        lambda: with_added(token=" fox"),
        lambda: with_added(token="fox "),
        lambda: with_added(token="\u212a", normalized=True),  # NFC makes a K of it
        lambda: small_tokenizer(split_special_tokens=True),
    ],
)
def test_tokenizers_that_do_more_than_look_up_are_asked_for_every_text(make):
    own = make()
    assert words.word_table(own, lambda texts: encode_texts(own, texts)) is None
    encoder = TextEncoder(own)
    texts = ["the fox  jumps", " over<|im_end|> 12"]
    if not getattr(own.backend_tokenizer.model, "dropout", None):
        expected = [own.encode(text, add_special_tokens=False) for text in texts]
        assert [ids.tolist() for ids in encoder(texts)] == expected
    assert encoder.table is None
