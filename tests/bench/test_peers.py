"""The peers' modules, as far as they run without the peers: arguments, streamed answers, sizes, where things lie."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import random_checkpoint
from peer import ctranslate2, environment, llama_cpp, ort_genai, plansmith, transformers, vllm_cpu
from peer.environment import converted, num_values, run_logged
from peer.session import process_tree
from tiny_models import write_tokenizer

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
    arguments.remove("--no-cache-idle-slots")  # the one switch without a value
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


def test_the_server_keeps_no_prompts_beside_its_slots() -> None:
    arguments = llama_cpp.server_arguments("/x/llama-server", "/m.gguf", 3, 8123)
    assert arguments[arguments.index("--cache-ram") + 1] == "0"
    assert "--no-cache-idle-slots" in arguments
    # Within a slot a prefix is still reused.
    assert json.loads(llama_cpp.completion(REQUEST))["cache_prompt"] is True


def test_the_version_is_what_the_server_says() -> None:
    said = "version: 0.5.0-dev (build 0, commit unknown)\nbuilt with GNU 12 for x86_64\n"
    assert llama_cpp.named_version(said) == f"0.5.0-dev (of llama-cpp-python {llama_cpp.VERSION})"
    assert llama_cpp.named_version("") == f"llama-cpp-python {llama_cpp.VERSION}"


def test_vllm_is_bound_to_cores_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 4, 7})
    assert vllm_cpu.settings(2, "/cache")["VLLM_CPU_OMP_THREADS_BIND"] == "4,7"
    assert vllm_cpu.settings(3, "/cache")["VLLM_CPU_OMP_THREADS_BIND"] == "4,7,9"


def test_vllm_loads_first_what_is_there(tmp_path: Path) -> None:
    prefix, system = tmp_path / "venv", tmp_path / "system"
    assert vllm_cpu.libraries_first(prefix, [system]) == []
    for folder, name in ((prefix / "lib", "libiomp5.so"), (system, "libtcmalloc_minimal.so.4")):
        folder.mkdir(parents=True)
        (folder / name).touch()
    (system / "libtcmalloc.so.4").touch()
    found = vllm_cpu.libraries_first(prefix, [system])
    assert [path.name for path in found] == ["libiomp5.so", "libtcmalloc_minimal.so.4"]


def test_a_stamp_names_one_version_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(
        environment, "run_logged", lambda words, log, **env: ran.append([str(w) for w in words])
    )
    path = tmp_path / "venv"
    path.mkdir()
    for requirements in (["a==1", "b"], ["a==2", "c"]):
        environment.make_environment(path, requirements, tmp_path / "log")
    assert (path / ".ready").read_text().split() == ["a==2", "b", "c"]
    done = len(ran)
    environment.make_environment(path, ["b", "c"], tmp_path / "log")
    assert len(ran) == done
    environment.make_environment(path, ["a==1", "b"], tmp_path / "log")
    assert len(ran) > done


def test_plansmith_says_the_version_of_its_library() -> None:
    assert re.match(r"\d+\.\d+\.\d+ \(\w", plansmith.version())


def test_variants_of_a_model_lie_in_files_of_their_own(tmp_path: Path) -> None:
    models = {llama_cpp.command(tmp_path, tmp_path / "m", v, 1)[-2] for v in llama_cpp.VARIANTS}
    assert len(models) == len(llama_cpp.VARIANTS)


def test_the_float_table_beside_int8_weights_is_not_counted(tmp_path: Path) -> None:
    config = {"model": {"vocab_size": 10, "decoder": {"hidden_size": 4}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    (tmp_path / "model.onnx.data").write_bytes(bytes(1000))
    assert ort_genai.weight_bytes(tmp_path, "int8") == 1000 - 4 * 10 * 4
    assert ort_genai.weight_bytes(tmp_path, "int4") == 1000


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header = {"__metadata__": {"format": "pt"}} | {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_weights_are_counted_by_their_number_whatever_the_file_holds_them_in(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", {"a": [4, 8], "b": [8]})
    write_safetensors(tmp_path / "model-2.safetensors", {"c": [2, 5]})
    assert num_values(tmp_path) == 50
    assert vllm_cpu.weight_bytes(tmp_path, "float32") == transformers.weight_bytes(tmp_path, "fp32") == 200
    assert vllm_cpu.weight_bytes(tmp_path, "bfloat16") == transformers.weight_bytes(tmp_path, "bf16") == 100


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


def test_a_model_that_would_fill_the_disk_is_not_converted(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(
        RuntimeError, match=r"m takes about .* GB are free on the disk .* leave it out with --variants"
    ):
        converted(tmp_path / "m", "1", lambda: pytest.fail("converted"), size=free)


def test_a_conversion_that_is_interrupted_is_done_again(tmp_path: Path) -> None:
    out = tmp_path / "m"

    def convert() -> None:
        out.write_text("weights")

    def interrupted() -> None:
        out.write_text("half")
        raise KeyboardInterrupt

    converted(out, "1", convert)
    with pytest.raises(KeyboardInterrupt):
        converted(out, "2", interrupted)
    converted(out, "1", convert)
    assert out.read_text() == "weights"


def test_an_interrupted_step_ends_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    pids: list[int] = []

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if pids:
            return real(process, timeout)
        begun = time.monotonic()
        while len(process_tree(process.pid)) < 2:
            assert time.monotonic() < begun + 60
            time.sleep(0.01)
        pids.extend(process_tree(process.pid))
        raise KeyboardInterrupt

    real = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_logged([sys.executable, "-c", code], tmp_path / "log")
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process runs; not one that has ended and waits to be asked for its code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_step_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        run_logged([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")


def test_an_engine_that_cannot_be_added_to_is_built_again(tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        tokenizer = tmp_path / str(seed) / "tokenizer"
        tokenizer.mkdir(parents=True)
        write_tokenizer(tokenizer)
        folders.append(tmp_path / str(seed) / "tiny")
        random_checkpoint.write_checkpoint(folders[-1], "tiny", tokenizer, seed)
    one, other = folders

    def build(checkpoint: Path) -> tuple[Path, bytes]:
        engine = plansmith.convert(checkpoint, tmp_path, "int8")
        return engine / "manifest.json", (engine / "targets" / "cpu" / "model.plan").read_bytes()

    manifest, plan = build(one)
    # As a version left it whose manifest cannot be read any more; then an engine of another model of the same name.
    manifest.write_text("{}")
    (manifest.parent / "targets" / "cpu" / "model.plan").write_bytes(b"old" + plan[3:])
    assert build(one) == (manifest, plan)
    assert build(other)[1] != plan


def test_a_build_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        plansmith.convert(tmp_path / "none", tmp_path, "int8")
