"""Small tokenizers of every kind a language model has, trained on a few lines."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "the quick brown fox jumps over the lazy dog, then it sleeps; and the dog wakes up.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich — daß es eine Freude ist.",
    "今日はいい天気ですね。散歩に行きましょう。中文字符也在这里。",
    "emoji 👩‍👩‍👧 🏳️‍🌈 👍🏽 and  double  spaces\n\nnew lines\ttabs",
]
SPECIALS = ["<s>", "</s>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """Return a byte-level BPE as of GPT-2, Llama 3, Qwen and SmolLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("größe 😀", special=False)])
    return tokenizer


def _sentencepiece(pieces: list[str], decoder: decoders.Decoder, *, prepend: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *SPECIALS, *BYTES],
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in pieces], trainer)
    # Byte tokens are ordinary ones in these models; the trainer only takes them as special.
    import json

    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    data["model"]["byte_fallback"] = True
    made = Tokenizer.from_str(json.dumps(data))
    made.decoder = decoder
    return made


def llama() -> Tokenizer:
    """Return a SentencePiece BPE with byte fallback as of Llama 2, Mistral and Phi 3: the first space is stripped."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _sentencepiece(TEXT, decoder, prepend=True)


def gemma() -> Tokenizer:
    """Return a SentencePiece BPE with byte fallback as of Gemma: no space is stripped."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _sentencepiece(TEXT, decoder, prepend=False)


def strips_both_ends() -> Tokenizer:
    """Return one whose decoder strips up to two spaces at either end of the text."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 2)])
    return _sentencepiece(TEXT, decoder, prepend=True)


def unigram(prepend_scheme: str = "always") -> Tokenizer:
    """Return a unigram model with the metaspace decoder, as of T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """Return a word-level model without a decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


MAKERS = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "strips_both_ends": strips_both_ends,
    "unigram": unigram,
    "unigram_never": lambda: unigram("never"),
    "word_level": word_level,
}
