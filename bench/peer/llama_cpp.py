"""llama.cpp's server, with weights of float32, bfloat16, Q8_0 and Q4_0, built from source for this machine.

The sources are those that the Python package of llama.cpp carries, because package registries have no build of the
server itself. The variants are GGUF files of its own converter and quantizer.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .environment import child_command, converted, make_environment, model_dir, num_values, run_logged
from .session import Record, Request, Run, end_with_parent, serve

VERSION = "0.3.36"  # of llama-cpp-python, which has the sources; the server built from them has its own
NAME = "llama.cpp"
VARIANTS = ("f32", "bf16", "q8_0", "q4_0")
_BYTES = {"f32": 4.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a weight
PACKAGE = f"llama_cpp_python-{VERSION}"
BUILD_REQUIREMENTS = ["cmake", "ninja"]
CONVERT_REQUIREMENTS = ["transformers==5.5.4", "gguf", "sentencepiece"]
TOOLS = ["llama-server", "llama-bench", "llama-batched-bench", "llama-quantize"]
CMAKE_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
]
SLOTS = 16
CONTEXT = 1024  # tokens of a slot
START_TIMEOUT_S = 120


def install(work: Path, log: Path) -> None:
    """Fetch the sources and compile the server and the tools; about 10 minutes on two cores."""
    home = work / "llama.cpp"
    home.mkdir(parents=True, exist_ok=True)
    make_environment(work / "venv-openvino-export", CONVERT_REQUIREMENTS, log, torch=True)
    if all((home / "build" / "bin" / tool).exists() for tool in TOOLS):
        return
    python = make_environment(work / "venv-llama-build", BUILD_REQUIREMENTS, log)
    archive = home / f"{PACKAGE}.tar.gz"
    if not archive.exists():
        options = ["--no-deps", "--no-binary", ":all:", "-d", home]
        run_logged([python, "-m", "pip", "download", "-q", *options, f"llama-cpp-python=={VERSION}"], log)
    if not sources(work).exists():
        with tarfile.open(archive) as tar:
            tar.extractall(home, filter="data")
    build = (home / "build").resolve()
    bin_dir = python.resolve().parent if not python.is_symlink() else python.parent
    ninja = bin_dir / "ninja"
    configure = [bin_dir / "cmake", "-S", sources(work), "-B", build, "-G", "Ninja", *CMAKE_FLAGS]
    run_logged([*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}"], log)
    run_logged([ninja, "-C", build, *TOOLS], log)


def install_bindings(work: Path, log: Path) -> Path:
    """Return the interpreter of an environment with the Python bindings, without a llama.cpp of their own."""
    path = work / "venv-llama"
    if not (path / ".ready").exists():
        run_logged([sys.executable, "-m", "venv", path], log)
        archive = work.resolve() / "llama.cpp" / f"{PACKAGE}.tar.gz"
        pip = [path / "bin" / "python", "-m", "pip", "install", "-q"]
        run_logged([*pip, archive, "numpy"], log, CMAKE_ARGS="-DLLAMA_BUILD=OFF")
        (path / ".ready").touch()
    return path / "bin" / "python"


def sources(work: Path) -> Path:
    """Return the folder of llama.cpp's sources."""
    return work / "llama.cpp" / PACKAGE / "vendor" / "llama.cpp"


def libraries(work: Path) -> Path:
    """Return the folder of its built libraries and programs."""
    return work.resolve() / "llama.cpp" / "build" / "bin"


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the GGUF file of `variant`: converted as floats, then quantized by its own tool."""
    log = work / "logs" / "llama.cpp-convert.log"
    floats = variant if variant in ("f32", "bf16") else _exact(checkpoint)
    values = num_values(checkpoint)

    def export() -> None:
        python = work / "venv-openvino-export" / "bin" / "python"
        script = sources(work) / "convert_hf_to_gguf.py"
        options = ["--outfile", _gguf(checkpoint, work, floats), "--outtype", floats]
        environment = {"PYTHONPATH": str(sources(work) / "gguf-py"), "HF_HUB_OFFLINE": "1"}
        run_logged([python, script, checkpoint.resolve(), *options], log, **environment)

    def quantize() -> None:
        run_logged([libraries(work) / "llama-quantize", exported(), out, variant], log)

    def exported() -> Path:
        gguf = _gguf(checkpoint, work, floats)
        return converted(gguf, f"{VERSION} {floats}", export, values * _BYTES[floats])

    out = _gguf(checkpoint, work, variant)
    if variant == floats:
        return exported()
    return converted(out, f"{VERSION} {variant}", quantize, values * _BYTES[variant])


def _exact(checkpoint: Path) -> str:
    """Return the floats that hold a checkpoint's weights as they are."""
    config = json.loads((checkpoint / "config.json").read_text())
    return "bf16" if config.get("torch_dtype", config.get("dtype")) == "bfloat16" else "f32"


def _gguf(checkpoint: Path, work: Path, variant: str) -> Path:
    folder = model_dir(work.resolve(), checkpoint, "llama.cpp", variant)
    return folder.with_name(folder.name + ".gguf")


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the file: the weights, and the vocabulary's 2 MB."""
    return model.stat().st_size


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session; the child needs the standard library alone."""
    program = libraries(work) / "llama-server"
    model = _gguf(checkpoint, work, variant)
    return child_command(sys.executable, "llama_cpp", program, model, str(threads))


# ---------------------------------------------------------------- the child


def server_arguments(program: str, model: str, threads: int, port: int) -> list[str]:
    """Return the server's command: 16 slots of 1,024 tokens, the given threads for prompts and for decoding.

    A slot goes on reusing the prefix it holds. What is switched off is the cache in host memory behind the slots: no
    prompt comes twice here, and with each request the server would copy the K and V of idle slots into it.
    """
    sizes = ["-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "--cache-ram", "0", "--no-cache-idle-slots"]
    speed = ["-t", str(threads), "-tb", str(threads)]
    return [program, "-m", model, *sizes, *speed, "--host", "127.0.0.1", "--port", str(port)]


def completion(request: Request) -> bytes:
    """Return the body of a greedy, streamed completion of token ids with a forced length."""
    body = {
        "prompt": request["prompt_ids"],
        "n_predict": request["output_len"],
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": True,
        "return_tokens": True,
    }
    return json.dumps(body).encode()


def streamed_tokens(lines: Iterable[bytes]) -> Iterator[list[int]]:
    """Yield the token ids of each event of a streamed completion, until the one that says stop.

    raises RuntimeError for an event that reports an error, and for a stream that ends before its stop
    """
    for line in lines:
        if line.startswith(b"error: "):
            raise RuntimeError(f"llama-server: {line[7:].decode(errors='replace').strip()}")
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"llama-server: {event['error']}")
        if event.get("stop"):
            return
        if event.get("tokens"):
            yield event["tokens"]
    raise RuntimeError("llama-server closed the stream before the completion ended")


def load(program: str, model: str, threads: int) -> Run:
    """Return what runs requests by the server, one connection and thread a request."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        server_arguments(program, model, threads, port),
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
        env={**os.environ, "LD_LIBRARY_PATH": str(Path(program).parent)},
    )
    _wait_until_healthy(server, port)

    def one(idx: int, request: Request, record: Record, errors: list[BaseException]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            connection.request(
                "POST", "/completion", completion(request), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server: status {response.status}: {response.read()[:500]!r}")
            for ids in streamed_tokens(response):
                record(idx, ids)
        except BaseException as error:  # raised again by the run
            errors.append(error)
        finally:
            connection.close()

    def run(requests: list[Request], record: Record) -> None:
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=one, args=(idx, request, record, errors))
            for idx, request in enumerate(requests)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    return run


def version(program: str) -> str:
    """Return what the server says its version is: `0.5.0-dev`; that of its package where it says none."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(program).parent)}
    said = subprocess.run([program, "--version"], env=environment, capture_output=True, text=True)
    return named_version(said.stdout + said.stderr)


def named_version(text: str) -> str:
    """Return the version in what `llama-server --version` prints, `version: 0.5.0-dev (build 0, commit unknown)`."""
    found = re.search(r"^version: (\S+)", text, re.MULTILINE)
    package = f"llama-cpp-python {VERSION}"
    return f"{found[1]} (of {package})" if found else package


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with code {server.returncode} before it was ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.02)
    server.kill()
    raise RuntimeError(f"llama-server was not ready within {START_TIMEOUT_S} s")


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3])), lambda: version(sys.argv[1]))
