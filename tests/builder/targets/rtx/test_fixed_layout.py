"""The same plan bytes from two compiles, whatever the shell and the output directory look like."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plansmith.builder.targets.rtx import fixed_layout
from plansmith.builder.targets.rtx.compile import compile_plan
from rtx_models import LIMITS, tiny_graph, tiny_spec

SPEC = tiny_spec(windows=(0,))


def may_fix_the_layout() -> bool:
    """Whether this process may turn the kernel's random addresses off; containers may forbid it."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).personality(ctypes.c_ulong(0x0040000)) < 0)"
    return (
        sys.platform == "linux" and subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    )


@pytest.mark.skipif(not may_fix_the_layout(), reason="this container forbids personality(ADDR_NO_RANDOMIZE)")
def test_two_compiles_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    digests = set()
    for folder, shell in (("a", "short"), ("a_directory_of_a_much_longer_name", "long" * 1000)):
        monkeypatch.setenv("SOMETHING_OF_THE_SHELL", shell)
        out = tmp_path / folder
        out.mkdir()
        compile_plan(tiny_graph(SPEC), LIMITS, SPEC, "sm89", out / "model.plan", out / "build.log")
        digests.add(hashlib.sha256((out / "model.plan").read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.skipif(not may_fix_the_layout(), reason="this container forbids personality(ADDR_NO_RANDOMIZE)")
def test_the_program_is_started_again_with_its_stack_and_heap_at_the_same_place() -> None:
    code = (
        "import ctypes, sys; from plansmith.builder.targets.rtx.fixed_layout import exec_with_fixed_layout as again;"
        "again();"
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p;"
        "print(libc.personality(ctypes.c_ulong(0xFFFFFFFF)) & 0x40000 > 0, ctypes.addressof(ctypes.c_char.in_dll(libc,"
        " 'environ')), sys.argv[1:])"
    )
    environment = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", code, "an argument", ""]
    outputs = [
        subprocess.run(words, env={**environment, **more}, capture_output=True, text=True, check=True).stdout
        for more in ({}, {"A": "x"}, {"B": "y" * 5000, "C": ""})
    ]
    assert len(set(outputs)) == 1
    assert outputs[0].startswith("True") and outputs[0].endswith("['an argument', '']\n")


@pytest.mark.parametrize("count", [0, 1, 61, 200])
@pytest.mark.parametrize("length", [0, 1, 70_000])
def test_environments_of_every_size_take_a_round_number_of_bytes(count: int, length: int) -> None:
    environment = {f"NAME{i}": "x" * length for i in range(count)}
    arguments = ["python", "-m", "module"]
    padded = fixed_layout.padded(environment, arguments)
    texts = [*arguments, arguments[0], *(f"{name}={value}" for name, value in padded.items())]
    assert sum(len(text) + 1 for text in texts) % (64 << 10) == 0
    assert (len(padded) + len(arguments)) % 64 == 0
    assert environment.items() <= padded.items()


def test_where_fixed_addresses_are_forbidden_the_allocator_is_set_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forbidden:
        def personality(self, _: object) -> int:
            return -1

    started: list[dict[str, str]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Forbidden())
    monkeypatch.setattr(os, "execve", lambda _, __, environment: started.append(environment))
    monkeypatch.setenv("SOMETHING_OF_THE_SHELL", "x")
    fixed_layout.exec_with_fixed_layout()
    assert int(started[0]["MALLOC_MMAP_THRESHOLD_"]) > 0
    assert "SOMETHING_OF_THE_SHELL" not in started[0]


def test_a_program_that_was_started_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANSMITH_FIXED_LAYOUT", "1")
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    fixed_layout.exec_with_fixed_layout()
    assert "PLANSMITH_FIXED_LAYOUT" not in os.environ
