"""What an upgrade makes stale, and what it does not."""

from __future__ import annotations

from typing import Any

import plansmith
import pytest
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.manifest import GRAPH_CONTRACT_VERSION, SCHEMA_VERSION
from plansmith.runtime.manifest_entries import FileEntry, TargetEntry
from plansmith.sizing.portability import stale_after, upgrade_notes
from plansmith.sizing.releases import CPU_PLAN_FORMAT

FORMAT = f"format-{CPU_PLAN_FORMAT}"


def entry(compiler: str, version: str, *sms: str) -> TargetEntry:
    fields: dict[str, Any] = {
        "token_layout": "packed",
        "compute_dtype": "float16",
        "kv_dtype": "float16",
        "activation_quantization": "none",
        "row_alignment": "none",
        "inputs": (),
        "profiles": (),
        "files": (FileEntry(path="targets/x/model.plan", size=1, sha256="0" * 64),),
        "flags": (),
        "key": "0" * 64,
        "seconds": 1.0,
    }
    return TargetEntry(compiler=compiler, compiler_version=version, sm=sms, **fields)


RTX = entry("tensorrt_rtx", "1.7.1.116", "sm86", "sm120")
TRT = entry("tensorrt", "11.4.0.106", "sm90")
CPU = entry("plansmith-cpu", FORMAT)
OLD_CPU = entry("plansmith-cpu", "format-1")


@pytest.mark.parametrize(
    ("one", "upgrades", "words"),
    [
        (RTX, {}, []),
        (
            RTX,
            {"tensorrt_rtx": "1.8.0"},
            ["TensorRT-RTX 1.8.0 does not run plans of 1.7.1.116: they are tied to 1.7.1"],
        ),
        (RTX, {"tensorrt_rtx": "1.7.1.200"}, []),
        (RTX, {"tensorrt": "12.0"}, []),
        (RTX, {"driver": "590.44"}, []),
        (RTX, {"driver": "570"}, []),  # no build changes that
        (RTX, {"plansmith": plansmith.__version__}, []),
        (RTX, {"plansmith": "99.0"}, []),
        (RTX, {"cpu_plan": "99"}, []),
        (RTX, {"graph_contract": str(GRAPH_CONTRACT_VERSION)}, []),
        (RTX, {"graph_contract": "99"}, ["it has graph contract 1, what reads it then takes 99"]),
        (RTX, {"schema": str(SCHEMA_VERSION)}, []),
        (RTX, {"schema": "99", "tensorrt_rtx": "2"}, ["TensorRT-RTX 2 does not", "it has manifest schema 1"]),
        (TRT, {"tensorrt": "11.4.0.107"}, ["tied to 11.4.0.106"]),
        (TRT, {"tensorrt": "11.4.0.106", "tensorrt_rtx": "9"}, []),
        (CPU, {"tensorrt": "99", "tensorrt_rtx": "99", "driver": "999"}, []),
        (CPU, {"cpu_plan": FORMAT}, []),
        (CPU, {"cpu_plan": "99"}, [f"it has plan format {CPU_PLAN_FORMAT}, what reads it then takes 99"]),
        (CPU, {"plansmith": plansmith.__version__}, []),
        (OLD_CPU, {"plansmith": plansmith.__version__}, ["it has plan format 1"]),
        (OLD_CPU, {"plansmith": "99.0"}, []),
        (entry("plansmith-cpu", "unknown"), {"cpu_plan": "3"}, ["it has plan format unknown"]),
        (entry("other", "1", "sm89"), {"tensorrt": "99"}, []),
    ],
)
def test_reasons(one: TargetEntry, upgrades: dict[str, str], words: list[str]) -> None:
    found = stale_after(one, upgrades)
    assert len(found) == len(words)
    assert all(want in got for want, got in zip(words, found, strict=True))


def test_notes() -> None:
    (again,) = upgrade_notes(RTX, {"driver": "590.44"})
    assert "compiled again at the next" in again
    assert (
        upgrade_notes(RTX, {"driver": "590.44", "tensorrt_rtx": "1.8"}) == []
    )  # a new plan starts anew anyhow
    assert upgrade_notes(TRT, {"driver": "590.44"}) == []
    assert upgrade_notes(CPU, {"driver": "400.1"}) == []
    old = upgrade_notes(TRT, {"driver": "r570"})
    assert old == [
        "a driver of r570 is too old for it on sm90, which asks for r580 or later; no build changes that"
    ]
    assert len(upgrade_notes(RTX, {"driver": "570"})) == 3  # sm86, sm120, and the kernels
    (ask,) = upgrade_notes(CPU, {"plansmith": "99.0"})
    assert f"plan format {CPU_PLAN_FORMAT}" in ask and "--upgrade plansmith=99.0" in ask
    assert upgrade_notes(CPU, {"plansmith": plansmith.__version__}) == []


@pytest.mark.parametrize(
    ("upgrades", "words"),
    [
        (
            {"cudnn": "9"},
            "'cudnn' is not known; give one or more of tensorrt_rtx, tensorrt, driver, plansmith",
        ),
        ({"driver": "13.0"}, "no version of an NVIDIA driver"),
        ({"tensorrt": "new"}, "tensorrt has version 'new'; give one such as 1.8.0"),
        ({"plansmith": ""}, "plansmith has version ''"),
    ],
)
def test_what_is_refused(upgrades: dict[str, str], words: str) -> None:
    for ask in (stale_after, upgrade_notes):
        with pytest.raises(InvalidArgumentError, match=words):
            ask(RTX, upgrades)
