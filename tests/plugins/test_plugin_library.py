"""The C++ plugin compiled against TensorRT's headers and run over a driver that records, where both headers are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from plansmith.plugins.paged_attention.plugin_library import kernels_field

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "plugins/paged_attention" / name for name in ("plugin.cc", "plugin_fields.cc")]
ATTRIBUTES = {
    "num_heads": 8, "kv_num_heads": 2, "head_dim": 64, "scale": 0.125, "softcap": 0.0, "window": 0, "query_rows": 4,
    "split_len": 512,
}  # fmt: skip


def headers(name: str, *folders: str | None) -> Path:
    """The first folder with a header; without one the test is skipped."""
    for folder in folders:
        if folder and (Path(folder) / name).is_file():
            return Path(folder)
    pytest.skip(f"needs {name}: set PLANSMITH_TENSORRT_INCLUDE and CUDA_HOME to where the headers are")


@pytest.fixture(scope="module")
def compiler() -> list[str | Path]:
    """The compiler with warnings as errors, and the two include folders."""
    found = shutil.which("c++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    tensorrt = headers(
        "NvInfer.h",
        os.environ.get("PLANSMITH_TENSORRT_INCLUDE"),
        "/usr/include",
        "/usr/include/x86_64-linux-gnu",
    )
    home = os.environ.get("CUDA_HOME")
    cuda = headers(
        "cuda.h", home and f"{home}/include", "/usr/local/cuda/include", "/usr/local/cuda-13.0/include"
    )
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-g"]
    return [found, *flags, "-isystem", tensorrt, "-isystem", cuda]


def test_a_library_without_undefined_names_of_ours(compiler: list[str | Path], tmp_path: Path) -> None:
    library = tmp_path / "libplansmith_tensorrt.so"
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "-fvisibility=hidden", "-o", library, *SOURCES, "-ldl"], check=True
    )
    names = subprocess.run(["nm", "-DC", library], check=True, capture_output=True, text=True).stdout
    assert " T getCreators" in names and " T setLoggerFinder" in names
    assert "U plansmith::" not in names and "nvinfer1::" not in "".join(
        line for line in names.splitlines() if " U " in line
    )


def test_fields_types_shapes_and_launches(compiler: list[str | Path], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    kernels = tmp_path / "kernels"
    kernels.write_bytes(kernels_field(ATTRIBUTES, "fp16", "same", 32, 90, max_seq_len=4096))
    program = tmp_path / "plugin_test"
    test = Path(__file__).with_name("plugin_test.cc")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run([*compiler, *sanitize, "-o", program, test, *SOURCES, "-ldl"], check=True)
    run = subprocess.run([program, kernels], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "ok\n", run.stderr[-2000:]
