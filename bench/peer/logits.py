"""The logits that a peer's model gives for windows of tokens: run in the peer's own environment, in `bench/`.

    python -m peer.logits <engine> <model> <variant> <threads> <windows.json> <out.npy>

windows.json : list of lists of token ids, all equally long
out.npy      : float32 (windows, tokens, V), the logits behind every token
Every library is called with the settings that it has in its session, so that what it rounds there it rounds here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

# one window's token ids -> its logits (tokens, V)
Logits = Callable[[list[int]], Any]


def llama_cpp(model: str, variant: str, threads: int) -> Logits:
    """Return llama.cpp's logits, by its own Python bindings on the libraries of the built server."""
    from llama_cpp import Llama

    context = Llama(
        model,
        n_ctx=1024,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )

    def logits(window: list[int]) -> Any:
        context.reset()
        context.eval(window)
        return context.scores[: len(window)]

    return logits


def ctranslate2(model: str, variant: str, threads: int) -> Logits:
    """Return CTranslate2's logits."""
    from .ctranslate2 import choose_backend, compute_type

    choose_backend(variant)
    from ctranslate2 import Generator

    generator = Generator(model, device="cpu", compute_type=compute_type(variant), intra_threads=threads)
    return lambda window: np.array(generator.forward_batch([window]))[0]


def ort_genai(model: str, variant: str, threads: int) -> Logits:
    """Return the logits of the model that ONNX Runtime GenAI's builder wrote, by ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(f"{model}/model.onnx", options, ["CPUExecutionProvider"])
    names = {one.name for one in session.get_inputs()}
    decoder = json.loads(Path(model, "genai_config.json").read_text())["model"]["decoder"]
    none = np.zeros((1, decoder["num_key_value_heads"], 0, decoder["head_size"]), np.float32)
    empty = {name: none for name in names if name.startswith("past_key_values")}

    def logits(window: list[int]) -> Any:
        ids = np.array([window], np.int64)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        if "position_ids" in names:
            feeds["position_ids"] = np.arange(len(window), dtype=np.int64)[None]
        return session.run(["logits"], {**feeds, **empty})[0][0]

    return logits


def openvino(model: str, variant: str, threads: int) -> Logits:
    """Return the exported model's logits; the CPU plugin's defaults but for what a session asks for."""
    import openvino as ov

    from .openvino import HINTS

    options = {"INFERENCE_NUM_THREADS": threads, **HINTS.get(variant, {})}
    compiled = ov.Core().compile_model(f"{model}/openvino_model.xml", "CPU", options)
    names = ("INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION")
    print({name: str(compiled.get_property(name)) for name in names}, file=sys.stderr)
    request = compiled.create_infer_request()

    def logits(window: list[int]) -> Any:
        request.reset_state()
        ids = np.array([window], np.int64)
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(window), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return request.infer(feeds)["logits"][0]

    return logits


ENGINES = {
    "llama_cpp": llama_cpp,
    "ctranslate2": ctranslate2,
    "ort_genai": ort_genai,
    "openvino": openvino,
}


def all_logits(logits: Logits, windows: list[list[int]]) -> Iterator[Any]:
    """Yield the logits (tokens, V) of each window; ValueError where an engine leaves rows out."""
    for window in windows:
        rows = logits(window)
        if len(rows) != len(window):
            raise ValueError(f"{len(rows)} rows of logits of {len(window)} tokens")
        yield rows


def main(engine: str, model: str, variant: str, threads: str, windows_file: str, out: str) -> None:
    """Write the logits of an engine's model to a file."""
    windows = json.loads(Path(windows_file).read_text())
    written = None
    rows = all_logits(ENGINES[engine](model, variant, int(threads)), windows)
    for at, one in enumerate(rows):
        if written is None:
            shape = (len(windows), *one.shape)
            written = np.lib.format.open_memmap(out, "w+", np.float32, shape)
        written[at] = one
    assert written is not None
    written.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
