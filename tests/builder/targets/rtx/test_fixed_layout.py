"""The same plan bytes from every compile, whatever the shell and the output directory look like."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plansmith.builder.targets import compiler_child
from plansmith.builder.targets.compiler_child import CompileFailed
from plansmith.builder.targets.rtx import child, fixed_layout, schedule
from plansmith.builder.targets.rtx.compile import compile_plan
from plansmith.runtime.errors import BuildError, InvalidArgumentError, UnsupportedError
from rtx_models import LIMITS, tiny_graph, tiny_spec

# Without one thread at a time, hardly two plans of this one are the same.
SPEC = tiny_spec(windows=(0, 0, 0), hidden_size=256, intermediate_size=512)
SOURCE = Path(__file__).parents[4] / "builder" / "targets" / "rtx" / "one_thread.c"


def may_fix_the_layout() -> bool:
    """Whether this process may turn the kernel's random addresses off; containers may forbid it."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).personality(ctypes.c_ulong(0x0040000)) < 0)"
    return (
        sys.platform == "linux" and subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    )


@pytest.fixture(scope="module")
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of one_thread.c, built now where it can be: what is installed may be of another source."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        library = fixed_layout.one_thread_library()
        return library or pytest.skip(
            "the library that orders threads is not here, and there is no C compiler"
        )
    built = tmp_path_factory.mktemp("one_thread") / "libplansmith_one_thread.so"
    words = [
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        str(SOURCE),
        "-o",
        str(built),
        "-ldl",
    ]
    subprocess.run([compiler, *words], check=True)
    return built


def run_preloaded(library: Path, code: str) -> str:
    environment = {"PATH": os.defpath, "LD_PRELOAD": str(library), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(not may_fix_the_layout(), reason="this container forbids personality(ADDR_NO_RANDOMIZE)")
def test_compiles_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: Path
) -> None:
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(one_thread.parent))
    monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", "1")
    digests = set()
    graph = tiny_graph(SPEC, recipe="int4")
    for folder, shell in (("a", "short"), ("a_directory_of_a_much_longer_name", "long" * 1000), ("b", "")):
        monkeypatch.setenv("SOMETHING_OF_THE_SHELL", shell)
        out = tmp_path / folder
        out.mkdir()
        compile_plan(graph, LIMITS, SPEC, "sm89", out / "model.plan", out / "build.log")
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
    monkeypatch.setattr(platform, "system", lambda: "Linux")
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


def test_a_thread_runs_until_it_waits(one_thread: Path) -> None:
    code = (
        "import sys, threading; sys.setswitchinterval(1e-6); seen = []; "
        "run = lambda n: [seen.append(n) for _ in range(100_000)]; "
        "threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]; "
        "[one.start() for one in threads]; [one.join() for one in threads]; "
        "print([n for i, n in enumerate(seen) if i == 0 or seen[i - 1] != n], len(seen))"
    )
    assert run_preloaded(one_thread, code) == "[0, 1, 2, 3] 400000\n"


def test_threads_that_hand_things_over_take_turns(one_thread: Path) -> None:
    code = (
        "import queue, threading; there, back = queue.Queue(), queue.Queue(); "
        "echo = lambda: [back.put(there.get() + 1) for _ in range(1000)]; "
        "thread = threading.Thread(target=echo); thread.start(); "
        "print(sum(there.put(n) or back.get() for n in range(1000))); thread.join(); import ctypes; "
        "print(ctypes.CDLL(None).plansmith_threads_take_turns())"
    )
    assert run_preloaded(one_thread, code) == "500500\n1\n"


def test_the_cores_and_the_clock_of_cpp_are_the_same_everywhere(one_thread: Path) -> None:
    code = (
        "import ctypes; libs = ctypes.CDLL(None); now = libs._ZNSt6chrono3_V212steady_clock3nowEv; "
        "now.restype = ctypes.c_int64; "
        "print(libs._ZNSt6thread20hardware_concurrencyEv(), now(), now())"
    )
    assert run_preloaded(one_thread, code) == "1 0 1000\n"


@pytest.mark.slow
def test_threads_that_wait_unseen_go_on_out_of_order(one_thread: Path) -> None:
    code = (
        "import os, threading; r, w = os.pipe(); "
        "threads = [threading.Thread(target=os.read, args=(r, 1)), threading.Thread(target=os.write, args=(w, b'x'))]; "
        "[one.start() for one in threads]; [one.join() for one in threads]; import ctypes; "
        "print('done', ctypes.CDLL(None).plansmith_threads_take_turns())"
    )
    output = run_preloaded(one_thread, code)
    assert output == "done 0\n[plansmith] the threads wait for one another; their order is given up\n"


class Personality:
    """A C library whose personality() takes fixed addresses, or refuses them as Docker's default profile does."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.value = 0

    def personality(self, value: ctypes.c_ulong) -> int:
        before = self.value
        if value.value == 0xFFFFFFFF:
            return before
        if value.value and not self.allowed:
            return -1
        self.value = value.value
        return before


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, str]]:
    """The environments that programs are started again with, on a Linux that allows it and has the library."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    libc = Personality(allowed=True)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
    monkeypatch.setattr(os, "execve", lambda _, __, environment: environments.append(environment))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libplansmith_one_thread.so").write_bytes(b"")
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path / "lib"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return environments


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_preloaded_unless_it_is_asked_for(
    value: str | None, started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("PLANSMITH_REPRODUCIBLE", raising=False)
    else:
        monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", value)
    fixed_layout.exec_with_fixed_layout()
    assert fixed_layout.check_reproducible() is None
    assert "LD_PRELOAD" not in started[0] and started[0]["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("LD_PRELOAD", "another.so")
    fixed_layout.exec_with_fixed_layout()
    assert started[1]["LD_PRELOAD"] == "another.so"


def test_the_library_is_preloaded_before_others(
    started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", "1")
    fixed_layout.exec_with_fixed_layout()
    monkeypatch.setenv("LD_PRELOAD", "another.so")
    fixed_layout.exec_with_fixed_layout()
    library = tmp_path / "lib" / "libplansmith_one_thread.so"
    assert [one["LD_PRELOAD"] for one in started] == [str(library), f"{library}:another.so"]
    assert [one["PLANSMITH_REPRODUCIBLE"] for one in started] == ["1", "1"]


@pytest.mark.parametrize("others", ["", "another.so", "another.so:third.so"])
def test_what_the_compiler_starts_does_not_preload_it(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANSMITH_FIXED_LAYOUT", "1")
    monkeypatch.setenv("LD_PRELOAD", ":".join(filter(None, ("/lib/libplansmith_one_thread.so", others))))
    fixed_layout.exec_with_fixed_layout()
    assert os.environ.get("LD_PRELOAD", "") == others
    monkeypatch.setenv("PLANSMITH_FIXED_LAYOUT", "1")
    fixed_layout.exec_with_fixed_layout()
    assert os.environ.get("LD_PRELOAD", "") == others


def test_checking_leaves_this_process_as_it_was(
    started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", "1")
    fixed_layout.check_reproducible()
    assert ctypes.CDLL(None).personality(ctypes.c_ulong(0xFFFFFFFF)) == 0


def test_where_plans_cannot_be_the_same_the_reason_is_told(
    started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", "1")
    assert fixed_layout.check_reproducible() is not None
    for folder, file in (("a lib", True), ("a:lib", True), ("empty", False)):
        (tmp_path / folder).mkdir()
        if file:
            (tmp_path / folder / "libplansmith_one_thread.so").write_bytes(b"")
        monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path / folder))
        with pytest.raises(
            UnsupportedError, match="has a blank or a colon" if file else "install plansmith again"
        ):
            fixed_layout.exec_with_fixed_layout()
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path / "lib"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Personality(allowed=False))
    with pytest.raises(UnsupportedError, match=r"this container forbids personality.*seccomp=unconfined"):
        fixed_layout.exec_with_fixed_layout()
    assert not started


@pytest.mark.parametrize("value", ["2", "yes", "true", "1 ", "-1"])
def test_other_values_are_refused_before_anything_is_compiled(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", value)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a compiler was started"))
    graph = tiny_graph(SPEC)
    plan, log = tmp_path / "model.plan", tmp_path / "build.log"
    message = rf"PLANSMITH_REPRODUCIBLE is {value!r}; set it to 1 .* to 0"
    with pytest.raises(InvalidArgumentError, match=message):
        compile_plan(graph, LIMITS, SPEC, "sm89", plan, log)
    with pytest.raises(InvalidArgumentError, match=message):
        schedule.compile_many([schedule.CompileJob(graph, LIMITS, SPEC, "sm89", plan, log)])
    assert not list(tmp_path.iterdir())


def test_threads_without_the_library_fail_what_is_to_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fixed_layout.threads_take_turns()
    monkeypatch.delenv("PLANSMITH_REPRODUCIBLE", raising=False)
    child._check_turns()
    monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", "1")
    with pytest.raises(CompileFailed, match="did not keep their order"):
        child._check_turns()


@pytest.mark.skipif(not may_fix_the_layout(), reason="this container forbids personality(ADDR_NO_RANDOMIZE)")
def test_a_library_that_the_loader_refuses_gives_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader takes what it cannot preload for a warning."""
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("PLANSMITH_REPRODUCIBLE", "1")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libplansmith_one_thread.so").write_bytes(b"no library")
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path / "lib"))
    with pytest.raises(BuildError, match="did not keep their order"):
        compile_plan(tiny_graph(SPEC), LIMITS, SPEC, "sm89", tmp_path / "model.plan", tmp_path / "build.log")
    assert not (tmp_path / "model.plan").exists()


def test_the_package_has_the_library_where_it_is_looked_for() -> None:
    from plansmith.runtime._native import native

    library = native().directory / "libplansmith_one_thread.so"
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or "build" in library.parts:
        pytest.skip("the library is of wheels for Linux with glibc")
    assert library.is_file(), "make build installs it"


def test_what_python_did_before_and_is_told_is_not_seen(tmp_path: Path) -> None:
    code = (
        "import sys; from plansmith.builder.targets.rtx.fixed_layout import exec_with_fixed_layout as again; again(); "
        "import late; "
        "print(sys.flags.hash_randomization, sys.flags.utf8_mode, late.__cached__.startswith('/dev/null/'))"
    )
    (tmp_path / "late.py").write_text("")
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)]),
        "PYTHONUTF8": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ("0 0 True\n" if sys.platform == "linux" else done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["late.py"] or sys.platform != "linux"


def test_what_is_told_of_memory_is_as_long_whatever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with path.open("w") as events:
        send = compiler_child.sender(events)
        send("step", phase="a", step=1, steps=2)
        held = b"x" * (300 << 20)
        send("step", phase="a", step=1, steps=2)
    first, second = path.read_text().splitlines()
    assert len(held) and len(first) == len(second)
    peaks = [json.loads(line)["peak_rss_bytes"] for line in (first, second)]
    assert json.loads(first) == {
        "event": "step",
        "phase": "a",
        "step": 1,
        "steps": 2,
        "peak_rss_bytes": peaks[0],
    }
    if sys.platform == "linux":
        assert peaks[1] >= 300 << 20 and peaks[1] >= peaks[0] > 0
