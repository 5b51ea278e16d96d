"""What each GPU takes, and what is said of those that no compiler here builds for."""

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
    assert (
        f"this version cannot build for {name}: that GPU needs TensorRT 11 on a machine that has it" in text
    )
    assert text.endswith("or cpu, which runs anywhere") and "nearest" not in text


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("h100", "--target 'h100' is sm90; this version cannot build for sm90"),
        ("H200", "--target 'H200' is sm90; this version cannot build for sm90"),
        ("b200", "--target 'b200' is sm100; this version cannot build for sm100"),
        ("L4", "--target 'L4' is sm89; give --target sm89"),
        ("RTX-4090", "--target 'RTX-4090' is sm89; give --target sm89"),
        ("rtx 5090", "--target 'rtx 5090' is sm120; give --target sm120"),
        ("T4", "--target 'T4' is sm75; give --target sm75"),
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
