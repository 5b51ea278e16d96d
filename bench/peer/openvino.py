"""OpenVINO GenAI's continuous batching, with weights of float32, bfloat16, int8 and int4.

Where the processor multiplies bfloat16, OpenVINO computes in it even with a float32 model, unless it is told not to. So
`fp32` asks for float32 and `bf16` for bfloat16, from the same model; at 8 and 4 bits it chooses what it thinks best.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from .environment import child_command, converted, make_environment, model_dir, num_values, run_logged
from .session import Record, Request, Run, installed, serve

VERSION = "2026.4.1"
NAME = "OpenVINO GenAI"
VARIANTS = ("fp32", "bf16", "int8", "int4")
RUN_REQUIREMENTS = [f"openvino-genai=={VERSION}.0", f"openvino=={VERSION}", "numpy"]
EXPORT_REQUIREMENTS = [
    "optimum-intel",
    f"openvino=={VERSION}",
    f"openvino-tokenizers=={VERSION}.0",
    "nncf==3.4.0",
]
# One scale a channel at 8 bits; groups of 64 at 4 bits, because the hidden size of 576 has no groups of 128.
MODES = {"int8": "mode=M.INT8_ASYM", "int4": "mode=M.INT4_SYM, group_size=64, ratio=1.0"}
HINTS = {"fp32": {"INFERENCE_PRECISION_HINT": "f32"}, "bf16": {"INFERENCE_PRECISION_HINT": "bf16"}}
COMPRESS = """
import sys, nncf, openvino
from nncf import CompressWeightsMode as M
source, target = sys.argv[1:]
model = nncf.compress_weights(openvino.Core().read_model(source), {})
openvino.save_model(model, target, compress_to_fp16=False)
"""


def install(work: Path, log: Path) -> None:
    """Make the environment that runs the models and the one that converts them."""
    make_environment(work / "venv-openvino", RUN_REQUIREMENTS, log)
    make_environment(work / "venv-openvino-export", EXPORT_REQUIREMENTS, log, torch=True)


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the folder with the model of `variant`: exported at float32, then its weights rounded by nncf."""
    log = work / "logs" / "openvino-convert.log"
    tools = work / "venv-openvino-export" / "bin"
    out = _model(work, checkpoint, variant)
    fp32 = out.with_name("openvino-fp32")
    values = num_values(checkpoint)

    def export() -> None:
        command = [
            tools / "optimum-cli",
            "export",
            "openvino",
            "-m",
            checkpoint.resolve(),
            "--weight-format",
            "fp32",
        ]
        run_logged([*command, "--task", "text-generation-with-past", fp32], log, HF_HUB_OFFLINE="1")

    def exported() -> Path:
        return converted(fp32, f"{VERSION} fp32", export, 4 * values)

    def compress() -> None:
        exported()
        out.mkdir(exist_ok=True)
        for file in fp32.iterdir():
            if not file.name.startswith("openvino_model."):
                shutil.copy(file, out / file.name)
        paths = [folder / "openvino_model.xml" for folder in (fp32, out)]
        run_logged([tools / "python", "-c", COMPRESS.replace("{}", MODES[variant]), *paths], log)

    if variant in HINTS:
        return exported()
    return converted(
        out, f"{VERSION} {MODES[variant]}", compress, values * {"int8": 1.0, "int4": 0.6}[variant]
    )


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the model's weights; in bfloat16 it keeps half of what the file has."""
    size = (model / "openvino_model.bin").stat().st_size
    return size // 2 if variant == "bf16" else size


def _model(work: Path, checkpoint: Path, variant: str) -> Path:
    return model_dir(work.resolve(), checkpoint, "openvino", "fp32" if variant in HINTS else variant)


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session."""
    python = work.resolve() / "venv-openvino" / "bin" / "python"
    return child_command(python, "openvino", _model(work, checkpoint, variant), variant, str(threads))


def load(model: str, variant: str, threads: int) -> Run:
    """Return what runs requests by one pipeline; it takes 16 sequences and steps of 512 tokens, and caches prefixes."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_seqs = 16
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": threads, **HINTS.get(variant, {})}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties, {})
    next_id = 0

    def run(requests: list[Request], record: Record) -> None:
        nonlocal next_id
        handles = []
        for request in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request["output_len"]
            config.ignore_eos = True
            config.do_sample = False
            ids = ov.Tensor(np.array([request["prompt_ids"]], dtype=np.int64))
            handles.append(pipeline.add_request(next_id, ids, config))
            next_id += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for idx, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        record(idx, output.generated_ids)

    return run


if __name__ == "__main__":
    serve(
        lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3])),
        lambda: installed("openvino-genai", VERSION),
    )
