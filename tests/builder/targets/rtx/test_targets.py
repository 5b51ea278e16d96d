"""What each GPU takes, and what is said of those that the compilers do not build for."""

from __future__ import annotations

import pytest
from plansmith.builder.targets.registry import find_targets
from plansmith.builder.targets.rtx import targets
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from rtx_models import tiny_spec


@pytest.mark.parametrize("name", ["sm70", "sm90", "sm_90a", "sm100", "sm110"])
def test_gpu_without_a_code_generator(name: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        targets.find_target(name)
    text = str(error.value)
    assert f"TensorRT-RTX cannot build for {name}; choose one of sm75, sm80" in text
    assert text.endswith("or cpu, which runs anywhere") and "nearest" not in text


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("V100", "--target 'V100' is sm70; this version cannot build for sm70: neither compiler"),
        ("sm110", "this version cannot build for sm110: neither compiler"),
        ("h100", "--target 'h100' is sm90; give --target sm90"),
        ("B200", "--target 'B200' is sm100; give --target sm100"),
        ("L4", "--target 'L4' is sm89; give --target sm89"),
        ("RTX-4090", "--target 'RTX-4090' is sm89; give --target sm89"),
        ("rtx 5090", "--target 'rtx 5090' is sm120; give --target sm120"),
        ("T4", "--target 'T4' is sm75; give --target sm75"),
        # As nvidia-smi prints them.
        ("NVIDIA H100 80GB HBM3", "is sm90; give --target sm90"),
        ("NVIDIA H100 PCIe", "is sm90; give --target sm90"),
        ("H100 NVL", "is sm90; give --target sm90"),
        ("NVIDIA GH200 480GB", "is sm90; give --target sm90"),
        ("NVIDIA A100-SXM4-80GB", "is sm80; give --target sm80"),
        ("NVIDIA L40S", "is sm89; give --target sm89"),
        ("NVIDIA RTX 6000 Ada Generation", "is sm89; give --target sm89"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "is sm89; give --target sm89"),
        ("GeForce RTX 2080Ti", "is sm75; give --target sm75"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "is sm120; give --target sm120"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "is sm120; give --target sm120"),
        ("Tesla V100-SXM2-16GB", "is sm70; this version cannot build for sm70"),
        ("Quadro RTX 6000", "is not known"),
        ("TPU", "--target 'TPU' is not known; choose one or more of cpu, sm75"),
    ],
)
def test_names_of_gpus(typed: str, words: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as error:
        find_targets([f"cpu,{typed}"])
    assert words in str(error.value)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnsupportedError, match=r"'h100' is not known.*sm75, sm80, sm86, sm89, sm120, rtx"):
        targets.find_target("h100")


def test_gemma_computes_in_bfloat16_when_quantized() -> None:
    gemma = tiny_spec(family="gemma2", norm_offset=1.0, embed_scale=8.0)
    assert targets.compute_type(gemma, "int8") == "bfloat16"
    assert targets.compute_type(tiny_spec(), "int8") == "float16"
    assert targets.compute_type(gemma, "fp16") == "float16"


def test_missing_compiler_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'plansmith\[rtx\]'"):
        targets.check_installed()


def test_old_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "1.5.0.114")
    with pytest.raises(UnsupportedError, match=r"tensorrt_rtx is 1\.5\.0\.114, at least 1\.7 is needed"):
        targets.check_installed()
