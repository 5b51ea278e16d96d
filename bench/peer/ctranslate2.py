"""CTranslate2's generator, with weights of float32 and int8 (one scale an output, inputs rounded a row).

By itself the library multiplies by Intel's MKL on Intel's processors alone and by oneDNN on others, and CT2_USE_MKL=1
chooses MKL anywhere. On AMD that is slower: tried on a Zen 4, one request at float32 had 20 tokens/s instead of 34, at
int8 6 instead of 37.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .environment import child_command, converted, make_environment, model_dir, num_values, run_logged
from .session import Record, Request, Run, installed, serve

VERSION = "4.8.5"
NAME = "CTranslate2"
VARIANTS = ("float32", "int8")
RUN_REQUIREMENTS = [f"ctranslate2=={VERSION}", "numpy"]
CONVERT_REQUIREMENTS = [f"ctranslate2=={VERSION}", "transformers==5.5.4"]
MAX_BATCH = 16


def install(work: Path, log: Path) -> None:
    """Make the environment that runs the models and the one that converts them."""
    make_environment(work / "venv-ctranslate2", RUN_REQUIREMENTS, log)
    make_environment(work / "venv-openvino-export", CONVERT_REQUIREMENTS, log, torch=True)


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the folder with the model of `variant`."""
    out = model_dir(work.resolve(), checkpoint, "ctranslate2", variant)

    def export() -> None:
        program = work / "venv-openvino-export" / "bin" / "ct2-transformers-converter"
        command = [program, "--model", checkpoint.resolve(), "--output_dir", out, "--force"]
        log = work / "logs" / "ctranslate2-convert.log"
        run_logged([*command, "--quantization", variant], log, HF_HUB_OFFLINE="1")

    size = num_values(checkpoint) * {"float32": 4, "int8": 1}[variant]
    return converted(out, f"{VERSION} {variant}", export, size)


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the model's weights."""
    return (model / "model.bin").stat().st_size


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session."""
    model = model_dir(work.resolve(), checkpoint, "ctranslate2", variant)
    python = work.resolve() / "venv-ctranslate2" / "bin" / "python"
    return child_command(python, "ctranslate2", model, variant, str(threads))


# ---------------------------------------------------------------- the child


def unused_token(vocabulary: list[str]) -> str:
    """Return the token that is named as the end of a sequence; a request that chose it would end early.

    The generator has no switch to ignore the end, so a token is named that no text holds: the last special one.
    raises ValueError where a vocabulary has no such token
    """
    for token in reversed(vocabulary):
        if token.startswith("<") and token.endswith(">") and len(token) > 2:
            return token
    raise ValueError(
        f"no token like <...> among the {len(vocabulary)} of the vocabulary; name one that texts do not hold"
    )


def load(model: str, variant: str, threads: int) -> Run:
    """Return what runs requests in batches of at most 16; a request is stopped at its own length."""
    import ctranslate2

    generator = ctranslate2.Generator(
        model, device="cpu", compute_type=variant, intra_threads=threads, inter_threads=1
    )
    vocabulary = json.loads((Path(model) / "vocabulary.json").read_text())
    end_token = unused_token(vocabulary)

    def run(requests: list[Request], record: Record) -> None:
        lengths = [request["output_len"] for request in requests]
        seen = [0] * len(requests)

        def on_token(step: Any) -> bool:
            idx = step.batch_id
            record(idx, [step.token_id])
            seen[idx] += 1
            return seen[idx] >= lengths[idx]

        generator.generate_batch(
            [[vocabulary[i] for i in request["prompt_ids"]] for request in requests],
            max_batch_size=MAX_BATCH,
            beam_size=1,
            sampling_topk=1,
            max_length=max(lengths),
            min_length=0,
            end_token=[end_token],
            include_prompt_in_result=False,
            callback=on_token,
        )

    return run


if __name__ == "__main__":
    serve(
        lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3])),
        lambda: installed("ctranslate2", VERSION),
    )
