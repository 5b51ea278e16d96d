"""Tensors of every kind through a real tritonserver: types, ranks and buffers as its Python backend hands them over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_requests import request as lora_request
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams
from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.write import write_repository
from plansmith.serving.triton.word_lists import make_word_list
from tiny_engines import build_tiny
from triton_servers import TritonServers

httpclient = pytest.importorskip("tritonclient.http")

PROMPT = [5, 9, 23, 41]
LENGTH = 12
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, detokenize=False)
TYPES = {
    "int32": "INT32",
    "uint64": "UINT64",
    "float32": "FP32",
    "float16": "FP16",
    "bool": "BOOL",
    "object": "BYTES",
}

Send = Callable[..., list[int]]


def ints(*values: int) -> Any:
    return np.array([values], np.int32)


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("wire") / "engine")


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(engine_dir, num_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def send(
    engine_dir: Path, triton_server: TritonServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Send]:
    """Return tensors, parameters -> the tokens of one request, by HTTP; raises the server's error."""
    folder = tmp_path_factory.mktemp("wire_repository") / "models"
    chosen = {("tensorrt_llm", "num_threads"): "1", ("tensorrt_llm", "max_adapters"): "2"}
    write_repository(make_plan(engine_dir, folder, Overrides({"decoupled_mode": "false"}, chosen)), folder)
    client = httpclient.InferenceServerClient(triton_server(folder, ["tensorrt_llm"]).http)

    def tokens(parameters: dict[str, Any] | None = None, **tensors: Any) -> list[int]:
        base = {
            "input_ids": ints(*PROMPT),
            "input_lengths": ints(len(PROMPT)),
            "request_output_len": ints(LENGTH),
        }
        flags = {"exclude_input_in_output": np.array([[True]]), "end_id": ints(-1)}
        inputs = []
        for name, array in (base | flags | tensors).items():
            inputs.append(httpclient.InferInput(name, array.shape, TYPES[array.dtype.name]))
            inputs[-1].set_data_from_numpy(array)
        result = client.infer("tensorrt_llm", inputs, parameters=parameters)
        return list(result.as_numpy("output_ids")[0, 0].tolist())

    yield tokens
    client.close()


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Callable[..., list[int]]:
    """Return fields of SamplingParams -> the tokens of the same request, by an engine of its own."""

    def tokens(**params: Any) -> list[int]:
        return list(engine.generate([PROMPT], dataclasses.replace(GREEDY, **params))[0].token_ids)

    return tokens


def test_words_biases_and_seeds(send: Send, expected: Callable[..., list[int]], engine: Engine) -> None:
    plain = send()
    assert plain == expected()
    word = plain[3:5]
    assert send(stop_words_list=make_word_list([[1, 2, 3], word])[None]) == expected(stop_words=[word])
    assert send(bad_words_list=make_word_list([word, plain[:1]])[None]) == expected(
        bad_words=[word, plain[:1]]
    )
    empty = np.empty((1, 2, 0), np.int32)
    assert send(stop_words_list=empty, bad_words_list=empty) == plain
    bias = np.zeros((1, engine.model_info.vocab_size - 5), np.float32)
    bias[0, 77] = 1e4
    assert send(embedding_bias=bias) == [77] * LENGTH
    assert send(embedding_bias=np.empty((1, 0), np.float32)) == plain
    seed = 2**64 - 3
    drawn = send(
        seed=np.array([[seed]], np.uint64),
        runtime_top_k=ints(50),
        runtime_top_p=np.array([[0.75]], np.float32),
        temperature=np.array([[2]], np.float32),
    )
    assert drawn == expected(seed=seed, top_k=50, top_p=0.75, temperature=2.0, min_tokens=1) != plain


def test_drafts_the_cache_and_texts(send: Send) -> None:
    plain = send()
    logits = np.zeros((1, 3, 320), np.float32)
    assert send(draft_input_ids=ints(*plain[:3]), draft_logits=logits) == plain
    retention = {
        "retention_token_range_starts": ints(0),
        "retention_token_range_ends": ints(-1),
        "retention_token_range_priorities": ints(90),
        "retention_decode_priority": ints(80),
    }
    salt = {"cache_salt": np.array([["tenant \u00fc".encode()]], object)}
    assert send(**retention, **salt) == plain
    ngrams = {f"lookahead_{name}": ints(3) for name in ("window_size", "ngram_size", "verification_set_size")}
    assert send(**ngrams, early_stopping=np.array([[True]]), priority=np.array([[1]], np.float32)) == plain
    with pytest.raises(Exception, match="guided_decoding_guide is missing, which the guide type regex needs"):
        send(guided_decoding_guide_type=np.array([[b"regex"]], object))
    with pytest.raises(Exception, match="cache_salt has bytes that are no UTF-8"):
        send(cache_salt=np.array([[b"\xff"]], object))


def test_adapters(send: Send, engine: Engine) -> None:
    plain = send()
    want = {}
    for task_id in (1, 2, 3):
        one = lora_request(engine, task_id)
        assert one.config is not None and one.weights is not None
        engine.load_adapter_arrays(str(task_id), one.config, one.weights)
        params = dataclasses.replace(GREEDY, adapter=str(task_id))
        want[task_id] = list(engine.generate([PROMPT], params)[0].token_ids)
        arrays = {"lora_weights": one.weights[None], "lora_config": one.config[None]}
        assert send(lora_task_id=np.array([[task_id]], np.uint64), **arrays) == want[task_id] != plain
    for task_id in (1, 3, 2, 1):  # two fit into the engine; the third comes back from host memory
        assert send(lora_task_id=np.array([[task_id]], np.uint64)) == want[task_id]
    with pytest.raises(
        Exception, match="lora_task_id 9 is not in the cache; send lora_weights and lora_config"
    ):
        send(lora_task_id=np.array([[9]], np.uint64))


def test_request_parameters_stand_for_inputs(send: Send, expected: Callable[..., list[int]]) -> None:
    hot = {"temperature": 2.0, "runtime_top_k": 50, "seed": 7}
    assert send({**hot, "unknown": "x"}) == expected(temperature=2.0, top_k=50, seed=7, min_tokens=1)
    with pytest.raises(Exception, match="the request parameter runtime_top_k is 'many'"):
        send({"runtime_top_k": "many"})
    with pytest.raises(Exception, match="request_type is 'context_only'"):
        send({"request_type": "context_only"})
