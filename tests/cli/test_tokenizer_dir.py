"""--tokenizer-dir: a checkpoint without a tokenizer, from the command line to an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_trtllm import write_trtllm

Run = Callable[..., Any]
SMALL = ("--sequences", 2, "--length", 24, "--threads", 1)


def test_a_tensorrt_llm_checkpoint_is_built_verified_and_run(
    plansmith: Run, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama3")
    checkpoint, engine = write_trtllm(source, tmp_path / "trtllm"), tmp_path / "engine"
    refused = plansmith("build", checkpoint, "-o", engine)
    assert refused.status == 1
    assert "--tokenizer-dir" in refused.err
    assert not engine.exists()
    result = plansmith("build", checkpoint, "-o", engine, "--tokenizer-dir", source, "-p", "fp32", "--json")
    assert result.status == 0, result.err
    result = plansmith("verify", checkpoint, "--tokenizer-dir", source, *SMALL)
    assert result.status == 0, result.out + result.err
    result = plansmith("verify", engine, *SMALL)  # which has the tokenizer
    assert result.status == 0, result.out + result.err
    refused = plansmith("verify", engine, "--against", "transformers", *SMALL)
    assert refused.status == 1
    assert "cannot open" in refused.err
    result = plansmith("generate", engine, "the quick", "--max-tokens", 4, "--threads", 1, "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)


def test_a_tensorrt_llm_checkpoint_cannot_be_calibrated(
    plansmith: Run, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = write_trtllm(tiny_checkpoint("llama3"), tmp_path / "trtllm")
    refused = plansmith("quantize", checkpoint, "-o", tmp_path / "out", "-r", "int8_wo")
    assert refused.status == 1
    assert "is a TensorRT-LLM checkpoint" in refused.err
