"""A compile's process and its calls of TensorRT, over a package that has TensorRT's API and compiles nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import Limits
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import KvFormat, Quantization
from plansmith.builder.targets.compiler_process import CompileResult
from plansmith.builder.targets.tensorrt import contract, targets
from plansmith.builder.targets.tensorrt.compile import compile_plan
from plansmith.runtime.errors import BuildError
from quantized_weights import RandomQuantizedWeights, quantized_spec
from rtx_models import LIMITS, tiny_graph, tiny_spec

pytest.importorskip("tensorrt_rtx")

SPEC = tiny_spec()
DOUBLE = Path(__file__).parent / "double"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let compiles find the double; calling it says what goes wrong there."""
    monkeypatch.setattr(targets, "check_available", lambda target: "11.4.0.106")
    monkeypatch.setattr(sys, "path", [str(DOUBLE), *sys.path])

    def drive(**how: Any) -> None:
        monkeypatch.setenv("TENSORRT_DOUBLE", json.dumps(how))

    return drive


def compile_tiny(
    tmp_path: Path, model: Any = None, spec: Any = SPEC, limits: Limits = LIMITS, **options: Any
) -> CompileResult:
    steps: list[tuple[str, int, int]] = []
    done = compile_plan(
        model or tiny_graph(spec),
        limits,
        spec,
        targets.TARGETS["sm90"],
        tmp_path / "model.plan",
        tmp_path / "build.log",
        lambda *step: steps.append(step),
        **options,
    )
    assert ("Building Engine", 0, 2) in steps
    return done


def test_a_compile(double: Any, tmp_path: Path) -> None:
    done = compile_tiny(tmp_path)
    assert done.version == "11.4.0.106" and done.warnings == ()
    assert done.flags == ("compute_capability=sm90", "strongly_typed", "aliased_plugin_io", "profiles=packed")
    profile = json.loads((tmp_path / "model.plan").read_text())
    assert set(profile) > set(contract.STEP_INPUTS)
    # T at most max_num_tokens, kernels timed at a full batch that decodes; a table is as wide as the longest sequence.
    assert profile["input_ids"] == [[1], [4], [32]]
    assert profile["cu_query_lens"] == [[2], [5], [5]]
    assert profile["block_table"] == [[1, 1], [4, 4], [4, 8]]
    assert profile["logits_rows"] == [[1], [4], [4]]
    assert profile["k_pool.1"][:2] == [[1, 2, 8, 32], [8, 2, 8, 32]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build.log", "model.plan"]


def test_weights_that_may_stay_on_the_host(double: Any, tmp_path: Path) -> None:
    done = compile_tiny(tmp_path, weight_streaming=True)
    assert "weight_streaming" in done.flags
    assert json.loads((tmp_path / "model.plan").read_text())["flags"] == ["WEIGHT_STREAMING"]
    assert "weight_streaming" not in compile_tiny(tmp_path).flags
    assert json.loads((tmp_path / "model.plan").read_text())["flags"] == []


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_quantized_pools(kv: KvFormat, double: Any, tmp_path: Path) -> None:
    spec = quantized_spec()
    held = Quantization("test", "tests", (), kv)
    weights = RandomQuantizedWeights(spec, held)
    graph = build_graph(spec, weights, of_checkpoint(held, "float16"), LIMITS, compute="float16")
    assert compile_tiny(tmp_path, graph, spec).seconds > 0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"parse": True}, "cannot parse the graph: told not to parse"),
        ({"warning": "Unused Input: kv_lens"}, "the compiler changed the graph: Unused Input: kv_lens"),
        ({"drop": "kv_lens"}, "input kv_lens of the parsed network is missing"),
        ({"layers": 40}, r"the parsed network has \d plugin layers, the graph has 6"),
        ({"profile": True}, "refuses the optimization profile"),
        ({"fail": True}, "the compiler failed"),
    ],
)
def test_what_goes_wrong(how: dict[str, Any], words: str, double: Any, tmp_path: Path) -> None:
    double(**how)
    with pytest.raises(BuildError, match=f"TensorRT built no plan for sm90: .*{words}.*; the whole log is"):
        compile_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["build.log"]


def test_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(targets, "check_available", lambda target: "11.4.0.106")
    with pytest.raises(
        BuildError, match=r"the compiler for sm90 ended with exit code 1: .*No module named 'tensorrt'"
    ):
        compile_tiny(tmp_path)
