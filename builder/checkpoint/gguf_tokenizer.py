"""A GGUF file's tokenizer as tokenizer.json: byte-level BPE, built with the `tokenizers` package."""

from __future__ import annotations

import json
from typing import Any

from .gguf_file import GgufFile

# How text is cut before merging, as the tokenizers of these models publish it.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_SPLIT = ""  # ByteLevel's own

# tokenizer.ggml.pre -> split. 'smollm' is cut as transformers cuts it; llama.cpp first sets each digit apart, which
# gives other ids only for two or more blanks before a digit.
_SPLITS = {
    "gpt-2": _GPT2_SPLIT,
    "gpt2": _GPT2_SPLIT,
    "smollm": _GPT2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_files_from_gguf(file: GgufFile) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json (and the chat template inside).

    raises CheckpointError for a tokenizer model or pre-tokenizer that is not supported, by name, or bad metadata.
    """
    meta = file.metadata
    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise file.error(
            f"has a tokenizer of model {model!r}, readable is 'gpt2' (byte-level BPE); give the model's Hugging Face "
            "directory instead"
        )
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise file.error(
            f"has a tokenizer with pre-tokenizer {pre!r}, readable are {', '.join(_SPLITS)}; give the model's "
            "Hugging Face directory instead"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    special = _special_tokens(file, tokens)
    return {
        "tokenizer.json": _tokenizer_json(file, tokens, pre, special.get("bos_token")),
        "tokenizer_config.json": _json(_tokenizer_config(file, special)),
        "generation_config.json": _json(_generation_config(file)),
    }


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise file.error(f"{key} is missing or no list of strings; convert it again with its tokenizer")
    return value


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for name, key in keys.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise file.error(f"tokenizer.ggml.{key}_token_id is {token_id!r}, there are {len(tokens)} tokens")
        found[name] = tokens[token_id]
    return found


def _tokenizer_json(file: GgufFile, tokens: list[str], pre: str, bos: str | None) -> bytes:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    pairs = [merge.partition(" ") for merge in _strings(file, "tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: n for n, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or not all(left and right for left, right in merges):
        raise file.error("has a token twice, or a merge that is no pair; convert it again with its tokenizer")
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3)
    except Exception as e:  # the package raises plain Exception for a merge outside the vocabulary
        raise file.error(
            f"has a tokenizer that cannot be built ({e}); convert it again with its tokenizer"
        ) from e
    tokenizer = Tokenizer(bpe)
    if _SPLITS[pre]:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise file.error(f"tokenizer.ggml.token_type is no list of {len(tokens)} numbers; convert it again")
    kinds = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in kinds if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, k in kinds if k == _USER_DEFINED]
    )
    return str(tokenizer.to_str()).encode()


def _tokenizer_config(file: GgufFile, special: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _generation_config(file: GgufFile) -> dict[str, Any]:
    from .gguf_config import token_ids

    return {name: value for name, value in token_ids(file).items() if value is not None}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
