"""What is asked for by which name, and what is said where the machine cannot compile it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
from plansmith.builder import build_key
from plansmith.builder.precision import of_checkpoint, precision
from plansmith.builder.targets.registry import Target, check_target, find_targets, kv_dtype
from plansmith.builder.targets.support import check_support
from plansmith.builder.targets.tensorrt import compile as compiling
from plansmith.builder.targets.tensorrt import device, targets
from plansmith.builder.targets.tensorrt.targets import TARGETS
from plansmith.runtime.errors import UnsupportedError
from quantized_weights import SCHEMES, quantization, quantized_spec
from rtx_models import LIMITS, tiny_graph, tiny_spec

SPEC = tiny_spec()


@pytest.mark.parametrize(
    ("typed", "name", "sm"),
    [
        ("sm90", "sm90", "sm90"),
        ("SM_90", "sm90", "sm90"),
        ("9.0", "sm90", "sm90"),
        ("sm90-tensorrt", "sm90", "sm90"),
        ("10.3", "sm103", "sm103"),
        ("sm89-tensorrt", "sm89-tensorrt", "sm89"),
        ("8.9-tensorrt", "sm89-tensorrt", "sm89"),
        ("sm120-TensorRT", "sm120-tensorrt", "sm120"),
    ],
)
def test_names(typed: str, name: str, sm: str) -> None:
    assert find_targets([typed]) == [Target(name, "tensorrt", (sm,))]


def test_the_plain_names_stay_tensorrt_rtxs() -> None:
    assert {target.compiler for target in find_targets(["sm80,sm86,sm89,sm120"])} == {"rtx"}
    with pytest.raises(UnsupportedError, match="cannot build for sm75-tensorrt: neither compiler"):
        find_targets(["sm75-tensorrt"])


def refusal(monkeypatch: pytest.MonkeyPatch, have: set[str], gpus: list[str] | str) -> str:
    """What is said of sm90 on a machine with these packages and GPUs, or a driver that says this."""

    def capabilities() -> list[str]:
        if isinstance(gpus, str):
            raise device.DriverError(gpus)
        return gpus

    monkeypatch.setattr(targets, "_has", lambda module: module in have)
    monkeypatch.setattr(targets, "device_capabilities", capabilities)
    with pytest.raises(UnsupportedError) as error:
        check_target(find_targets(["sm90"])[0], SPEC, precision("fp16"))
    return str(error.value)


ALL = {"tensorrt", "triton"}


def test_everything_that_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(monkeypatch, set(), "there is no NVIDIA driver")
    assert text.startswith(
        "sm90 (H100, H200) is compiled by TensorRT 11 on a machine with that GPU, but here TensorRT is not installed, "
        "and the Triton language is not installed, and there is no NVIDIA driver; on such a machine run: "
        "pip install 'plansmith[tensorrt,kernels,gpu]' && plansmith build "
        "CHECKPOINT --target sm90 -o ENGINE_DIR"
    )


def test_another_gpu_and_an_old_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "11.4.0.106")
    assert "but here there is no sm90 GPU, only sm89, sm80; on" in refusal(
        monkeypatch, ALL, ["sm89", "sm89", "sm80"]
    )
    assert "only none" in refusal(monkeypatch, ALL, [])
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "10.9.0.34")
    assert "but here TensorRT is 10.9.0.34, at least 11.0 is needed; on" in refusal(
        monkeypatch, ALL, ["sm90"]
    )


def test_a_machine_that_has_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_has", lambda module: True)
    monkeypatch.setattr(targets, "device_capabilities", lambda: ["sm80", "sm90"])
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "11.4.0.106")
    assert targets.check_available(TARGETS["sm90"]) == "11.4.0.106"


def test_compile_refuses_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_has", lambda module: False)
    with pytest.raises(UnsupportedError, match="TensorRT is not installed"):
        compiling.compile_plan(
            tiny_graph(SPEC), LIMITS, SPEC, TARGETS["sm90"], tmp_path / "plan", tmp_path / "log"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "scheme", "kv", "is_taken"),
    [
        ("sm90", "fp8", "fp8", True),
        ("sm90", "int8_sq", "int8", True),
        ("sm90", "nvfp4", "float", False),
        ("sm100", "nvfp4", "fp8", True),
        ("sm90", "fp8_blocks", "float", False),
        ("sm80-tensorrt", "int4_awq", "int8", True),
        ("sm80-tensorrt", "int4_awq", "fp8", False),
        ("sm89", "int8_wo", "fp8", False),
        ("sm89-tensorrt", "int8_wo", "fp8", True),
    ],
)
def test_what_is_taken(target: str, scheme: str, kv: str, is_taken: bool) -> None:
    spec = quantized_spec()
    found, held = find_targets([target])[0], quantization(spec, SCHEMES[scheme], kv=kv)  # type: ignore[arg-type]
    recipe = of_checkpoint(held, "float16")
    if is_taken:
        check_support(found, recipe, spec)
        quantized = {"float": "float16", "fp8": "float8_e4m3fn", "int8": "int8"}
        assert kv_dtype(found, spec, recipe) == quantized[kv]
        return
    with pytest.raises(
        UnsupportedError, match=rf"{target} \(.*\) has no .*; build it for .*cpu, or give {target} "
    ):
        check_support(found, recipe, spec)


def test_every_refusal_offers_what_is_then_taken() -> None:
    spec = quantized_spec()
    made = {"w4a8_awq": "w4a8"} | {name: name for name in SCHEMES} | {"int8_wo": "int8_wo"}
    for name in TARGETS:
        target = find_targets([name])[0]
        for scheme in SCHEMES:
            try:
                check_support(
                    target, of_checkpoint(quantization(spec, SCHEMES[scheme], name=scheme), "float16"), spec
                )
            except UnsupportedError as error:
                offered = str(error).split(f"give {name} ")[1].split(":")[0]
                recipe = (
                    of_checkpoint(quantization(spec, SCHEMES[made[offered]]), "float16")
                    if offered in made
                    else precision(offered)
                )
                check_support(target, recipe, spec)


def test_a_plans_key_has_what_compiled_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, names = precision("fp16"), ("sm90", "sm89", "cpu")
    found = {name: find_targets([name])[0] for name in names}
    versions = {"tensorrt": "11.4.0", "triton": "3.9.0"}
    monkeypatch.setattr(build_key.importlib.metadata, "version", lambda name: versions[name])
    monkeypatch.setattr(build_key, "compiler_version", lambda target: versions["tensorrt"])

    def keys() -> dict[str, str]:
        inputs = {
            name: build_key.target_inputs(one, "f", SPEC, recipe, LIMITS) for name, one in found.items()
        }
        return {name: build_key.inputs_key(one) for name, one in inputs.items()}

    before = keys()
    versions["triton"] = "3.9.1"
    after = keys()
    assert [name for name in names if before[name] != after[name]] == ["sm90"]


class FakeDriver:
    """libcuda's three functions, with the capabilities given."""

    def __init__(self, found: list[tuple[int, int]], init: int = 0) -> None:
        self.found, self.init = found, init

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, out: object) -> int:
        out._obj.value = len(self.found)  # type: ignore[attr-defined]
        return self.init

    def cuDeviceGetAttribute(self, out: object, attribute: int, ordinal: int) -> int:
        if not 0 <= ordinal < len(self.found):
            return 101
        out._obj.value = self.found[ordinal][{75: 0, 76: 1}[attribute]]  # type: ignore[attr-defined]
        return 0


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(driver: FakeDriver) -> None:
        monkeypatch.setattr(device, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: driver}))

    load(FakeDriver([(9, 0), (12, 0), (10, 3)]))
    assert device.device_capabilities() == ["sm90", "sm120", "sm103"]
    load(FakeDriver([], init=100))
    with pytest.raises(device.DriverError, match=r"finds no GPU \(cuInit gives 100\)"):
        device.device_capabilities()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_LIBRARY", "libcuda-of-nobody.so")
    with pytest.raises(device.DriverError, match="there is no NVIDIA driver"):
        device.device_capabilities()
