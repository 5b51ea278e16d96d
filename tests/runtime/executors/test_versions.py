"""Which library runs a plan: our rule, and that it is TensorRT-RTX's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorrt_rtx
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorRt
from plansmith.runtime.errors import UnsupportedError
from plansmith.runtime.executors.trt import Library
from plansmith.sizing.releases import COMPILERS, is_same_release

HEADER_BYTES = 64


def library(compiler: str, version: str) -> Library:
    is_rtx = compiler == "tensorrt_rtx"
    return Library(FakeTensorRt(FakeCuda(), is_rtx=is_rtx, version=version), compiler)


@pytest.mark.parametrize(
    ("compiler", "made", "there", "runs"),
    [
        ("tensorrt_rtx", "1.7.1.116", "1.7.1.116", True),
        ("tensorrt_rtx", "1.7.1.116", "1.7.1.120", True),
        ("tensorrt_rtx", "1.7.1.116", "1.7.2.1", False),
        ("tensorrt_rtx", "1.7.1.116", "1.8.1.116", False),
        ("tensorrt", "11.4.0.106", "11.4.0.106", True),
        ("tensorrt", "11.4.0.106", "11.4.0.107", False),
        ("tensorrt", "11.4.0.106", "11.4.1.106", False),
        ("tensorrt", "unknown", "11.4.1.106", True),
    ],
)
def test_versions(compiler: str, made: str, there: str, runs: bool) -> None:
    if runs:
        library(compiler, there).check_version(made, "build it")
        return
    with pytest.raises(UnsupportedError) as error:
        library(compiler, there).check_version(made, "build it")
    package = COMPILERS[compiler].package
    assert f"{there} is installed, and plans run on their own release alone" in str(error.value)
    assert str(error.value).endswith(f"install {package}=={made}, or rebuild with: build it")


def test_drivers_by_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(cuda_major: int | None, driver: tuple[int, int]) -> str | None:
        monkeypatch.setattr(Library, "cuda_major", cuda_major)
        try:
            library("tensorrt", "11.4.0.106").check_driver(driver)
        except UnsupportedError as error:
            return str(error)
        return None

    assert (
        refusal(13, (13, 0)) is refusal(13, (14, 1)) is refusal(12, (13, 0)) is refusal(None, (11, 0)) is None
    )
    assert "install a driver of r580 or later, or the library for CUDA 12: tensorrt-cu12" in str(
        refusal(13, (12, 9))
    )
    assert "install a driver of r535 or later" in str(refusal(12, (11, 8)))
    assert "install a newer driver, or" in str(refusal(99, (13, 0)))


class Lines(tensorrt_rtx.ILogger):  # type: ignore[misc, unused-ignore]
    """Keeps what the library says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, severity: Any, text: str) -> None:
        """Take a line; called by the library."""
        self.lines.append(text)


def test_the_rule_is_the_librarys_own(rtx_engine: Any) -> None:
    """The library reads the version in a plan's header, and says whether it wants the plan built again.

    It does so before it looks for a GPU, so this needs none.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", tensorrt_rtx.__version__))[:4]
    plan = rtx_engine().plan_bytes
    place = plan[:HEADER_BYTES].find(bytes(version)) if max(version) < 256 else -1
    if place < 0:
        pytest.skip(
            f"TensorRT-RTX {tensorrt_rtx.__version__} does not have its version in the header as bytes"
        )
    logger = Lines()
    runtime = tensorrt_rtx.Runtime(logger)
    for number in range(4):
        for step in (0, 1):
            changed = bytearray(plan)
            changed[place + number] += step
            logger.lines.clear()
            runtime.get_engine_validity(changed)
            refused = any("Rebuild the engine with the same version" in line for line in logger.lines)
            made = ".".join(map(str, changed[place : place + 4]))
            assert refused == (not is_same_release("tensorrt_rtx", made, tensorrt_rtx.__version__))
