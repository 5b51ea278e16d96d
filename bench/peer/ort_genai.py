"""ONNX Runtime GenAI, with weights of float32, int8 and int4 (groups of 32)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .environment import child_command, converted, make_environment, model_dir, run_logged
from .session import Record, Request, Run, serve

VERSION = "0.18.0"
RUNTIME = "onnxruntime==1.32.0"
NAME = "ONNX Runtime GenAI"
VARIANTS = ("fp32", "int8", "int4")
RUN_REQUIREMENTS = [f"onnxruntime-genai=={VERSION}", RUNTIME, "numpy"]
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

    return converted(out, f"{VERSION} {variant}", export)


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
    return child_command(
        work.resolve() / "venv-ortgenai" / "bin" / "python", "ort_genai", model, str(threads)
    )


# ---------------------------------------------------------------- the child


def load(model: str, threads: int) -> Run:
    """Return what runs requests one after the other, each by a generator of its own."""
    import numpy as np
    import onnxruntime_genai as og

    config = og.Config(model)
    session = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    loaded = og.Model(config)

    def run(requests: list[Request], record: Record) -> None:
        for idx, request in enumerate(requests):
            prompt = np.array(request["prompt_ids"], dtype=np.int32)
            length = len(prompt) + request["output_len"]
            params = og.GeneratorParams(loaded)
            params.set_search_options(batch_size=1, do_sample=False, max_length=length, min_length=length)
            generator = og.Generator(loaded, params)
            generator.append_tokens(prompt)
            for _ in range(request["output_len"]):
                generator.generate_next_token()
                record(idx, generator.get_next_tokens())

    return run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], int(sys.argv[2])), VERSION)
