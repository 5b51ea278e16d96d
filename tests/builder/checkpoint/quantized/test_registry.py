"""Which method is whose, and the refusal of the others by name with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.checkpoint.quantized import find_reader
from plansmith.runtime.errors import CheckpointError
from tiny_models import make_tiny
from tiny_quantized import edit_json


def find(config: Any, side: Any = None) -> Any:
    return find_reader({"quantization_config": config}, Path("m"), side)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("bitsandbytes", "bitsandbytes' own kernels"),
        ("hqq", "zero points are not integers"),
        ("quanto", "quanto"),
        ("eetq", "interleaved"),
        ("aqlm", "codebook"),
        ("vptq", "codebook"),
        ("fbgemm_fp8", "clips inputs"),
        ("mxfp4", "powers of two"),
        ("higgs", "rotation"),
        ("torchao", "torchao"),
        ("marlin", "give the GPTQ checkpoint"),
        ("intel/auto-round", "export it with format"),
        ("tomorrow", "not known"),
        (7, "not known"),
        (None, "not known"),
        (["awq"], "not known"),
    ],
)
def test_other_methods_are_refused(method: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as e:
        find({"quant_method": method, "bits": 4})
    for word in (words, f"{method!r}", "quantization_config", "--precision", "modelopt, awq, gptq"):
        assert word in str(e.value)


def test_bitsandbytes_without_a_method() -> None:
    with pytest.raises(CheckpointError, match="'bitsandbytes'"):
        find({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})


def test_plain_ones_have_no_reader() -> None:
    assert find(None) is None and find_reader({}, Path("m"), None) is None


def test_what_is_no_object() -> None:
    for value in ("awq", ["awq"], 4, True):
        with pytest.raises(CheckpointError, match="must be an object"):
            find(value)


def test_two_that_contradict() -> None:
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    with pytest.raises(CheckpointError, match=r"'awq'.*hf_quant_config\.json"):
        find({"quant_method": "awq", "bits": 4, "group_size": 128}, side)
    with pytest.raises(CheckpointError, match=r"FP8.*NVFP4|NVFP4.*FP8"):
        find({"quant_method": "modelopt", "quant_algo": "NVFP4"}, side)
    assert find({"quant_method": "modelopt", "quant_algo": "FP8"}, side).producer == "modelopt"


def test_two_fields_that_contradict() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config = {"quantization_config": awq, "compression_config": {**awq, "group_size": 64}}
    with pytest.raises(CheckpointError, match="quantization_config and compression_config"):
        find_reader(config, Path("m"), None)
    assert find_reader({**config, "compression_config": awq}, Path("m"), None) is not None


def test_a_plain_checkpoint_has_no_quantization(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "m", num_hidden_layers=1)
    assert open_checkpoint(path).quantization is None
    edit_json(path / "config.json", lambda data: data.update(quantization_config=None))
    assert open_checkpoint(path).quantization is None


def test_a_plain_checkpoint_that_says_it_is_quantized(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "m", num_hidden_layers=1)
    quant = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    edit_json(path / "config.json", lambda data: data.update(quantization_config=quant))
    with pytest.raises(CheckpointError, match=r"q_proj.*plain float32.*FP8"):
        open_checkpoint(path)
