"""The executor's tests without a GPU: a CUDA driver and a TensorRT of our own (fake_cuda.py, fake_tensorrt.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Device kernels run in the interpreter, which is chosen when triton is first imported.
os.environ["TRITON_INTERPRET"] = "1"
_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "builder" / "targets" / "rtx")]  # the latter for rtx_numpy

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python, see the extra gpu")
pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx, see the extra rtx")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what this user's own engines have cached out of the tests, and the tests' out of there."""
    # Not the test's monkeypatch: what that changes has to be undone before other fixtures are.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user_cache")))
        yield


@pytest.fixture
def cuda() -> Iterator[Any]:
    """Return a driver with a current context; its test must leave nothing behind."""
    from fake_cuda import FakeCuda

    made = FakeCuda()
    made.cuInit(0)
    _, context = made.cuDevicePrimaryCtxRetain(0)
    made.cuCtxPushCurrent(context)
    yield made
    made.cuDevicePrimaryCtxRelease(0)
    assert made.problems() == []


@pytest.fixture(scope="session")
def rtx_engine(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Return (family, precision, draft) -> an engine with a real TensorRT-RTX plan; do not change its files."""
    from fake_engines import build_rtx
    from tiny_engines import LIMITS

    made: dict[Any, Any] = {}

    def get(family: str = "llama", precision: str = "fp16", draft: str | None = None) -> Any:
        key = (family, precision, draft)
        if key not in made:
            out = tmp_path_factory.mktemp("rtx") / family
            made[key] = build_rtx(tiny_checkpoint(family), out, LIMITS, precision=precision, draft=draft)
        return made[key]

    return get
