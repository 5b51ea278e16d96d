"""A repository made from an older one, with its names, relative paths and several instances, in a real tritonserver."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from old_repos import FILLED, edit, write_old
from plansmith.builder.build import build_engine, plan_build
from plansmith.serving.repository.carry import carry_over
from plansmith.serving.repository.old_repository import read_repository
from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.write import write_repository
from tiny_engines import LIMITS
from tiny_models import make_tiny
from triton_servers import RunningTriton, TritonServers

PROMPT = "the quick brown fox"
TOKENS = 1000
# Answers of a stream overtake each other here, unless the server puts them in order.
UNEVEN = """
import random
import time

from plansmith.serving.triton.postprocessing import TritonPythonModel as Own


class TritonPythonModel(Own):
    def execute(self, requests):
        time.sleep(random.random() * 0.02)
        return super().execute(requests)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    folder = tmp_path_factory.mktemp("carried")
    checkpoint = make_tiny("llama", folder / "checkpoint", max_position_embeddings=2048)
    limits = {**LIMITS, "max_seq_len": 2048}
    build_engine(plan_build(checkpoint, ["cpu"], precision="fp32", limits=limits), folder / "engine")
    values = {**FILLED, "tensorrt_llm_model_name": "llama_engine", "postprocessing_instance_count": "3"}
    old = write_old(folder / "old", values)
    for model, name in (("tensorrt_llm", "llama_engine"), ("ensemble", "llama")):
        edit(old, model, f'name: "{model}"', f'name: "{name}"')
        (old / model).rename(old / name)
    own = Overrides(
        parameters={("tensorrt_llm", "num_threads"): "1", ("tensorrt_llm", "stream_interval_ms"): "0"}
    )
    carried = carry_over(read_repository(old), folder / "engine", own)
    out = folder / "deep" / "models"
    plan = make_plan(folder / "engine", out, own.over(carried.overrides), relative=True)
    write_repository(plan, out)
    (out / "postprocessing" / "1" / "model.py").write_text(UNEVEN)
    (folder / "moved").mkdir()  # the engine goes with the repository
    for name in ("engine", "deep"):
        (folder / name).rename(folder / "moved" / name)
    servers = TritonServers(tmp_path_factory.mktemp("servers"))
    yield servers(folder / "moved" / "deep" / "models")
    servers.stop_all()


def post(server: RunningTriton, path: str, **body: object) -> str:
    request = urllib.request.Request(f"http://{server.http}/v2/models/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def test_clients_find_their_models(server: RunningTriton) -> None:
    texts = {
        json.loads(post(server, f"{model}/generate", text_input=PROMPT, max_tokens=8, temperature=0.0))[
            "text_output"
        ]
        for model in ("llama", "tensorrt_llm_bls")
    }
    assert len(texts) == 1 and not texts.pop().startswith(PROMPT)  # exclude_input_in_output was carried


def test_answers_of_a_stream_stay_in_order_with_three_instances(server: RunningTriton) -> None:
    asked = {"text_input": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "min_tokens": TOKENS}
    whole = json.loads(post(server, "llama/generate", **asked))["text_output"]
    count = 0
    for _ in range(4):
        events = post(server, "llama/generate_stream", stream=True, **asked)
        pieces = [
            json.loads(line[5:])["text_output"] for line in events.splitlines() if line.startswith("data:")
        ]
        assert "".join(pieces) == whole
        count += len(pieces)
    assert count > 4  # a busy machine sends more tokens at once, but not all of them


def test_types_and_sizes_are_the_older_ones(server: RunningTriton) -> None:
    with urllib.request.urlopen(f"http://{server.http}/v2/models/llama_engine/config", timeout=60) as answer:
        config = json.load(answer)
    assert config["max_batch_size"] == 8
    assert config["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 17
    kinds = {one["name"]: one["data_type"] for one in config["output"]}
    assert kinds["context_logits"] == "TYPE_FP16"


@pytest.mark.parametrize("model", ["llama", "tensorrt_llm_bls"])
def test_older_names_of_inputs_mean_the_same(server: RunningTriton, model: str) -> None:
    drawn = {"text_input": PROMPT, "max_tokens": 12, "top_k": 50, "temperature": 5.0}

    def text(**more: object) -> str:
        answer: str = json.loads(post(server, f"{model}/generate", **drawn, **more))["text_output"]
        return answer

    assert text(random_seed=7) == text(seed=7) != text(random_seed=8)
    assert text(random_seed=7, seed=8) == text(seed=8)
    end = {"seed": 7, "max_tokens": 400}
    drawn.pop("max_tokens")
    assert text(min_length=400, **end) == text(min_tokens=400, **end)
    assert len(text(**end)) < len(text(min_length=400, **end))
