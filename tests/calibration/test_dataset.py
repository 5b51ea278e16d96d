"""Calibration samples: packed, never padded, the same for the same seed; and what files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plansmith.calibration.dataset import (
    SHIPPED,
    Document,
    Samples,
    load_documents,
    make_samples,
    resolve_source,
)
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.tokenizer import Tokenizer

Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Tiny) -> Tokenizer:
    return Tokenizer.from_directory(tiny_checkpoint("llama"))


def _samples(documents: list[Document], tokenizer: Tokenizer, **given: int) -> Samples:
    options = {"size": 4, "length": 32, "seed": 1, "held_out": 0, "vocab_size": 320, **given}
    return make_samples(documents, tokenizer, source="here", **options)


def test_windows_are_the_documents_end_to_end(tokenizer: Tokenizer) -> None:
    documents: list[Document] = [f"number {n} of the documents" for n in range(60)]
    samples = _samples(documents, tokenizer, size=20, length=16)
    assert samples.ids.shape == (20, 16)
    text = tokenizer.decode(samples.ids.reshape(-1).tolist())
    order = [int(part.split(" ")[0]) for part in text.split("number ")[1:-1]]
    assert text.startswith("number ") and len(order) == len(set(order)) > 10
    assert all(f"number {n} of the documents" in text for n in order)
    assert order != sorted(order)


def test_no_token_is_padding(tokenizer: Tokenizer) -> None:
    samples = _samples(["abc"] * 400, tokenizer, size=16)
    assert samples.ids.shape == (16, 32) and not (samples.ids == 0).any()


def test_the_seed_decides(tokenizer: Tokenizer) -> None:
    documents: list[Document] = [f"number {n} of the documents" for n in range(60)]
    first, again, other = (_samples(documents, tokenizer, seed=seed).ids for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_held_out_windows_are_others(tokenizer: Tokenizer) -> None:
    documents: list[Document] = [f"number {n} of the documents" for n in range(60)]
    samples = _samples(documents, tokenizer, size=16, held_out=3)
    alone = _samples(documents, tokenizer, size=16)
    np.testing.assert_array_equal(samples.ids, alone.ids)
    assert samples.held_out.shape == (3, 32)
    rows = {row.tobytes() for row in samples.ids}
    assert not any(row.tobytes() in rows for row in samples.held_out)


def test_every_window_begins_with_bos_where_texts_do(tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_str(tokenizer.to_json())
    backend.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    with_bos = Tokenizer(backend)
    assert with_bos.encode("") == [1]
    samples = _samples(["the quick brown fox"] * 200, with_bos, size=16)
    assert (samples.ids[:, 0] == 1).all() and not (samples.ids[:, 1:] == 1).any()


def test_chats_go_through_the_template(tokenizer: Tokenizer) -> None:
    chat: Document = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    samples = _samples([chat] * 80, tokenizer, size=16)
    text = tokenizer.decode(samples.ids.reshape(-1).tolist(), skip_special_tokens=False)
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n" in text


def test_chats_without_a_template(tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend

    plain = Tokenizer(Backend.from_str(tokenizer.to_json()))
    chat: Document = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidArgumentError, match=r'"messages".*no chat template.*give "text"'):
        _samples([chat] * 80, plain)
    shipped = make_samples(
        load_documents(None), plain, size=64, length=256, seed=1, source=SHIPPED, vocab_size=320
    )
    assert shipped.ids.shape == (64, 256)


def test_the_shipped_set_suffices_without_repeats(tokenizer: Tokenizer) -> None:
    documents = load_documents(None)
    assert len({json.dumps(one) for one in documents}) == len(documents) > 80
    assert sum(isinstance(one, list) for one in documents) >= 15
    letters = "".join(one for one in documents if isinstance(one, str))
    assert all(mark in letters for mark in ("Каждое", "駅", "كان", "für", "def ", "SELECT", '{"order"'))
    # A real vocabulary has some 3.3 characters a token here: 64 + 4 windows of 256 take 57000.
    assert sum(len(json.dumps(one, ensure_ascii=False)) for one in documents) > 65000


def test_ids_beyond_the_vocabulary(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"token id \d+, the model's vocabulary has 200.*another model"
    ):
        _samples(["the quick brown fox"] * 200, tokenizer, vocab_size=200)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\n \n", "is empty"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.txt", b"\xff\xfe\x00", "is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y"', r"a\.jsonl:2: is not JSON"),
        ("a.jsonl", b'"text"\n', r":1: is a str, it must be an object"),
        ("a.jsonl", b'{"text": 4}\n', r':1: "text" is a int'),
        ("a.jsonl", b'\n{"txt": "x"}\n', r""":2: has neither "text" nor "messages", it has 'txt'"""),
        ("a.jsonl", b'{"messages": []}\n', r':1: "messages" must be a list'),
        ("a.jsonl", b'{"messages": [{"content": "x"}]}\n', r':1: "messages" must be a list'),
        ("a.jsonl", b'{"messages": "hello"}\n', r':1: "messages" must be a list'),
        ("a.jsonl", b"[" * 100000, r":1: is not JSON"),
    ],
)
def test_files_that_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message):
        load_documents(resolve_source(str(tmp_path / name)))


def test_half_characters_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n{"text": "\\ud800"}\n', encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"texts\.jsonl:2: has half of a character"):
        load_documents(path)


def test_one_long_document_is_read_as_far_as_it_is_needed(tokenizer: Tokenizer) -> None:
    asked = {"size": 4, "length": 32, "seed": 0, "source": "x", "vocab_size": 320}
    short, long = "the quick brown fox " * 200, "the quick brown fox " * 100_000
    made = [make_samples([text], tokenizer, **asked) for text in (short, long)]
    assert np.array_equal(made[0].ids, made[1].ids)


def test_too_few_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has \d+ tokens, too few.*--calib-data"):
        _samples(["short"], tokenizer)
    with pytest.raises(InvalidArgumentError, match="512 are the least"):
        _samples(["the quick brown fox"] * 40, tokenizer, size=64)


def test_fewer_samples_than_asked_for(tokenizer: Tokenizer) -> None:
    samples = _samples(["the quick brown fox"] * 120, tokenizer, size=500)
    assert 16 <= len(samples.ids) < 500 == samples.wanted


@pytest.mark.parametrize("name", ["cnn_dailymail", "ccdv/cnn_dailymail", "wikitext", "my-set"])
def test_data_sets_of_the_network(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nothing is fetched.*shipped set.*\.jsonl"):
        resolve_source(name)


def test_names_of_files(tmp_path: Path) -> None:
    assert resolve_source(None) is None and resolve_source("shipped") is None
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        resolve_source(str(tmp_path / "none.txt"))
    with pytest.raises(InvalidArgumentError, match="is no file"):
        resolve_source(str(tmp_path))
    (tmp_path / "texts.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidArgumentError, match=r"no \.txt or \.jsonl"):
        resolve_source(str(tmp_path / "texts.parquet"))
