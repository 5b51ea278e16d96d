"""An engine of this GPU's targets runs on it: Engine.open on the real device gives the cpu target's tokens.

The same checks run on the double of the driver and of TensorRT in tests/runtime/executors/test_engine_check.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime.engine import Engine
from plansmith.runtime.errors import UnsupportedError
from plansmith.runtime.executors import opening
from plansmith.runtime.executors.cuda import Context

pytestmark = pytest.mark.gpu
_CHECKS = Path(__file__).parents[1] / "runtime" / "executors"


@dataclasses.dataclass(frozen=True)
class Built:
    """An engine directory with the cpu target and one of this GPU."""

    path: Path
    target: str
    has_kernels: bool


@pytest.fixture(scope="session")
def build(
    context: Context, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Built]:
    """Return compiler -> an engine with its target for this GPU; skips, and says why, where there can be none."""
    for module in ("torch", "transformers", "tokenizers", "onnx_ir"):
        pytest.importorskip(module, reason=f"building a tiny engine needs {module}; run make test-gpu")

    @functools.cache
    def get(compiler: str) -> Built:
        from plansmith.builder.build import build_engine, plan_build
        from plansmith.builder.targets.registry import Target, find_targets, target_names
        from tiny_engines import LIMITS

        pytest.importorskip(compiler, reason=f"{compiler} is not installed; see the extras rtx and tensorrt")
        names = {"tensorrt_rtx": "rtx", "tensorrt": "tensorrt"}

        def fits(one: Target) -> bool:
            return one.compiler == names[compiler] and one.sm == (context.device.sm,)

        target = next((one.name for one in find_targets(target_names()) if fits(one)), None)
        if target is None:
            pytest.skip(f"{compiler} builds no plan for {context.device.sm} ({context.device.name})")
        try:
            _load_core()
            plan = plan_build(
                tiny_checkpoint("llama"), ["cpu", target], precision="fp16", limits=dict(LIMITS)
            )
        except UnsupportedError as error:
            pytest.skip(str(error))
        out = tmp_path_factory.mktemp("engine") / "llama"
        report = build_engine(plan, out)
        has_kernels = importlib.util.find_spec("triton") is not None
        assert not has_kernels or report.targets[target].notes == ()
        return Built(out, target, has_kernels)

    return get


def _load_core() -> None:
    """Raise UnsupportedError where the C++ core is not built."""
    from plansmith.runtime._native import native

    native()


@pytest.mark.parametrize("device_sampling", [True, False])
@pytest.mark.parametrize("graphs", ["auto", "own", "off"])
@pytest.mark.parametrize("compiler", ["tensorrt_rtx", "tensorrt"])
def test_an_engine_gives_the_cpu_targets_tokens(
    build: Callable[[str], Built],
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    graphs: str,
    device_sampling: bool,
) -> None:
    built = build(compiler)
    if device_sampling and not built.has_kernels:
        pytest.skip("the Triton language is not installed, so the engine has no kernels that draw tokens")
    monkeypatch.syspath_prepend(str(_CHECKS))
    from executor_checks import check_engine_runs

    monkeypatch.setattr(opening, "open_tensorrt", _opened_with(opening.open_tensorrt, device_sampling))
    with Engine.open(built.path, built.target, cuda_graphs=graphs, kv_cache_bytes=16 << 20) as engine:
        check_engine_runs(built.path, engine, draws_on_device=device_sampling)


def _opened_with(open_tensorrt: Any, device_sampling: bool) -> Any:
    """Return open_tensorrt with an option that has no name in Engine.open, as nobody needs to choose it."""

    def opened(manifest: Any, target: str, options: Any, **more: Any) -> Any:
        return open_tensorrt(
            manifest, target, dataclasses.replace(options, device_sampling=device_sampling), **more
        )

    return opened
