"""The peers' modules, as far as they run without the peers: arguments, streamed answers, sizes, where things lie."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from peer import ctranslate2, llama_cpp, ort_genai, vllm_cpu
from peer.environment import converted

REQUEST = {"prompt_ids": [5, 6, 7], "output_len": 2}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n"


def test_a_stream_gives_its_tokens_until_the_stop() -> None:
    lines = [event(tokens=[11], stop=False), b"\n", event(tokens=[12, 13], stop=False), b": ping\n"]
    last = [event(tokens=[], stop=True, timings={}), event(tokens=[99], stop=False)]
    assert list(llama_cpp.streamed_tokens([*lines, *last])) == [[11], [12, 13]]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([event(tokens=[11], stop=False)], "closed the stream before"),
        ([event(error={"message": "no slot"})], "no slot"),
        ([b'error: {"message": "too long"}\n'], "too long"),
    ],
)
def test_a_stream_that_breaks_is_an_error(lines: list[bytes], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        list(llama_cpp.streamed_tokens(lines))


def test_a_completion_is_greedy_of_a_forced_length_and_by_token_ids() -> None:
    body = json.loads(llama_cpp.completion(REQUEST))
    assert body["prompt"] == [5, 6, 7] and body["n_predict"] == 2 and body["ignore_eos"] is True
    assert body["stream"] is True and body["return_tokens"] is True and body["top_k"] == 1


def test_the_server_gets_a_context_for_every_slot_and_listens_on_loopback() -> None:
    arguments = llama_cpp.server_arguments("/x/llama-server", "/m.gguf", 3, 8123)
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert int(given["-c"]) == int(given["-np"]) * llama_cpp.CONTEXT
    assert given["-t"] == given["-tb"] == "3" and given["--host"] == "127.0.0.1" and given["--port"] == "8123"


@pytest.mark.parametrize("module", [llama_cpp, ctranslate2, ort_genai, vllm_cpu])
def test_a_session_runs_the_module_with_the_model_that_is_there(module, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    for variant in module.VARIANTS:
        command = module.command(Path("work"), Path("some/checkpoint"), variant, 7)
        name = module.__name__.rpartition(".")[2]
        assert command[1:3] == ["-m", f"peer.{name}"] and "7" in command
        # The child runs in another folder: every path is absolute.
        assert all(Path(part).is_absolute() for part in command if "/" in part), command


def test_variants_of_a_model_lie_in_files_of_their_own(tmp_path: Path) -> None:
    models = {llama_cpp.command(tmp_path, tmp_path / "m", v, 1)[-2] for v in llama_cpp.VARIANTS}
    assert len(models) == len(llama_cpp.VARIANTS)


def test_the_float_table_beside_int8_weights_is_not_counted(tmp_path: Path) -> None:
    config = {"model": {"vocab_size": 10, "decoder": {"hidden_size": 4}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    (tmp_path / "model.onnx.data").write_bytes(bytes(1000))
    assert ort_genai.weight_bytes(tmp_path, "int8") == 1000 - 4 * 10 * 4
    assert ort_genai.weight_bytes(tmp_path, "int4") == 1000


def test_vllm_holds_a_checkpoint_at_half_its_size_in_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    assert vllm_cpu.weight_bytes(tmp_path, "float32") == 2 * vllm_cpu.weight_bytes(tmp_path, "bfloat16")


def test_the_end_token_is_one_that_texts_do_not_hold() -> None:
    assert ctranslate2.unused_token(["<|end|>", "<empty_output>", "!", "a"]) == "<empty_output>"
    with pytest.raises(ValueError, match="no token"):
        ctranslate2.unused_token(["a", "b"])


def test_what_was_converted_with_other_settings_is_converted_again(tmp_path: Path) -> None:
    out, made = tmp_path / "models" / "m", []

    def convert() -> None:
        made.append(1)
        out.write_text("weights")

    for key in ("1 int8", "1 int8", "2 int8"):
        assert converted(out, key, convert) == out
    assert len(made) == 2
