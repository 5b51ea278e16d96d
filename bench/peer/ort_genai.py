"""ONNX Runtime GenAI, with weights of float32, int8 and int4 (groups of 32)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .environment import child_command, converted, make_environment, model_dir, num_values, run_logged
from .session import Record, Request, Run, installed, serve

VERSION = "0.18.0"
RUNTIME = "onnxruntime==1.32.0"
NAME = "ONNX Runtime GenAI"
VARIANTS = ("fp32", "int8", "int4")
RUN_REQUIREMENTS = [f"onnxruntime-genai=={VERSION}", RUNTIME, "numpy"]
# What gives more tokens a second with 16 requests: a padded batch, or one after the other.
WAYS = {"fp32": "together", "int8": "together", "int4": "one by one"}
PAD = 2  # SmolLM2's, which is also its end of a message
MAX_BATCH = 16
CONVERT_REQUIREMENTS = [*RUN_REQUIREMENTS, "transformers==5.5.4", "onnx", "onnx-ir"]


def install(work: Path, log: Path) -> None:
    """Make the environment that runs the models and the one that converts them."""
    make_environment(work / "venv-ortgenai", RUN_REQUIREMENTS, log)
    make_environment(work / "venv-openvino-export", CONVERT_REQUIREMENTS, log, torch=True)


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the folder with the model of `variant`, by its own builder."""
    out = model_dir(work.resolve(), checkpoint, "ortgenai", variant)

    def export() -> None:
        python = work / "venv-openvino-export" / "bin" / "python"
        # -P: the builder imports modules of its own by names that the current folder may have, too.
        builder = [python, "-P", "-m", "onnxruntime_genai.models.builder", "-i", checkpoint.resolve()]
        options = ["-o", out, "-p", variant, "-e", "cpu", "-c", work.resolve() / "ortgenai-cache"]
        run_logged([*builder, *options], work / "logs" / "ortgenai-convert.log", HF_HUB_OFFLINE="1")

    # A table that is also the logits' weights is written twice, at int8 once of them as floats.
    bytes_each = {"fp32": 5.0, "int8": 3.0, "int4": 1.2}[variant]
    return converted(out, f"{VERSION} {variant}", export, num_values(checkpoint) * bytes_each)


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the weights that a step reads.

    At int8 the builder keeps the embedding at float32, beside the logits' weights; a step reads a row of it a token.
    """
    size = (model / "model.onnx.data").stat().st_size
    if variant != "int8":
        return size
    config = json.loads((model / "genai_config.json").read_text())["model"]
    return size - 4 * config["vocab_size"] * config["decoder"]["hidden_size"]


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session."""
    model = model_dir(work.resolve(), checkpoint, "ortgenai", variant)
    python = work.resolve() / "venv-ortgenai" / "bin" / "python"
    return child_command(python, "ort_genai", model, str(threads), WAYS[variant])


# ---------------------------------------------------------------- the child


def load(model: str, threads: int, way: str) -> Run:
    """Return what runs requests as `way` of WAYS says."""
    import numpy as np
    import onnxruntime_genai as og

    config = og.Config(model)
    session = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    loaded = og.Model(config)

    def batch(requests: list[Request], first: int, record: Record) -> None:
        """Run requests together, padded on the left, until the longest has ended; the pads are masked."""
        prompt_len = max(len(request["prompt_ids"]) for request in requests)
        steps = max(request["output_len"] for request in requests)
        ids = np.full((len(requests), prompt_len), PAD, np.int32)
        for row, request in zip(ids, requests, strict=True):
            row[prompt_len - len(request["prompt_ids"]) :] = request["prompt_ids"]
        params = og.GeneratorParams(loaded)
        length = prompt_len + steps
        params.set_search_options(
            batch_size=len(requests), do_sample=False, max_length=length, min_length=length
        )
        generator = og.Generator(loaded, params)
        generator.append_tokens(ids if len(requests) > 1 else ids[0])
        for step in range(steps):
            generator.generate_next_token()
            for idx, token in enumerate(generator.get_next_tokens()):
                if step < requests[idx]["output_len"]:
                    record(first + idx, [token])

    def run(requests: list[Request], record: Record) -> None:
        # The mask is made from pads, so a prompt with one in it cannot be in a batch.
        together = way == "together" and not any(PAD in request["prompt_ids"] for request in requests)
        size = MAX_BATCH if together else 1
        for at in range(0, len(requests), size):
            batch(requests[at : at + size], at, record)

    return run


if __name__ == "__main__":
    serve(
        lambda: load(sys.argv[1], int(sys.argv[2]), sys.argv[3]),
        lambda: installed("onnxruntime-genai", VERSION),
    )
