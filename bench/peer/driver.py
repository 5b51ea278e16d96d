"""Starts every variant once and runs the tests in rounds, one engine at a time, the machine's peaks between."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import cases
from .session import PeerError, Session

MODULES = ("plansmith", "llama_cpp", "openvino", "ort_genai", "ctranslate2", "vllm_cpu", "transformers")
# Slower starts than this are measured in the first round only.
_QUICK_START_S = 20.0
# What an engine may take beside its weights: 1 GB of KV cache, its libraries, and room for the system.
_SPARE_BYTES = 2_000_000_000


@dataclasses.dataclass(frozen=True)
class Variant:
    """One engine with one kind of weights."""

    module: ModuleType
    name: str

    @property
    def label(self) -> str:
        """Return `<engine> <variant>`."""
        return f"{self.module.NAME} {self.name}"

    @property
    def slug(self) -> str:
        """Return what names the variant on the command line and in files: `<module>:<variant>`."""
        return f"{self.module.__name__.rpartition('.')[2]}:{self.name}"

    @property
    def is_ours(self) -> bool:
        """Return whether this is plansmith itself."""
        return self.slug.startswith("plansmith:")


def all_variants(modules: Iterable[str] = MODULES) -> list[Variant]:
    """Return every variant of the modules, ours first."""
    loaded = [importlib.import_module(f"peer.{name}") for name in modules]
    return [Variant(module, name) for module in loaded for name in module.VARIANTS]


def chosen(variants: Sequence[Variant], wanted: str) -> list[Variant]:
    """Return those that a list like `plansmith,llama_cpp:q8_0` names; SystemExit for a name there is not."""
    if not wanted:
        return list(variants)
    names = [name for name in wanted.split(",") if name]
    for name in names:
        if not any(name in (v.slug, v.slug.split(":")[0]) for v in variants):
            raise SystemExit(f"no variant {name!r}; there are {', '.join(v.slug for v in variants)}")
    return [v for v in variants if v.slug in names or v.slug.split(":")[0] in names]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run of all engines goes.

    varied : refuse outputs of one token again and again; a model of random weights may give them
    """

    work: Path
    checkpoint: Path
    workload: cases.Workload
    tests: Sequence[str]
    threads: int
    varied: bool = True
    start_timeout_s: float = 900.0
    run_timeout_s: float = 300.0

    def environment(self) -> dict[str, str]:
        """Return the environment of a session."""
        threads = str(self.threads)
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **quiet, "OMP_NUM_THREADS": threads}


def available_memory() -> int:
    """Return the bytes that processes can still take without swapping, as Linux estimates it."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


class Driver:
    """The sessions of a run, and what came of them.

    samples  : one object a run: engine, round, test, metrics, loads
    facts    : of each variant: version, load time, bytes of weights
    failures : of variants that were left out, and why
    """

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        available_bytes: Callable[[], int] = available_memory,
    ) -> None:
        """Keep the settings; `say` is told each result."""
        self.settings = settings
        self.say = say
        self.available_bytes = available_bytes
        self.sessions: dict[Variant, Session] = {}
        self.samples: list[dict[str, Any]] = []
        self.facts: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.outputs: dict[str, list[int]] = {}

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self.sessions.values():
            session.kill()

    def _log(self, variant: Variant, what: str) -> Path:
        return self.settings.work.resolve() / "logs" / f"{variant.slug.replace(':', '-')}-{what}.log"

    def _fail(self, variant: Variant, during: str, error: Exception) -> None:
        """Leave the variant out from here on."""
        session = self.sessions.pop(variant, None)
        if session is not None:
            session.kill()
        self.failures[variant.label] = f"{during}: {error}"
        self.say(f"{variant.label}: left out, {during} failed: {error}")

    def prepare(self, variants: Sequence[Variant], start: bool = True) -> None:
        """Install, convert and, with `start`, start each variant; what fails is left out."""
        for variant in variants:
            log = self._log(variant, "install")
            try:
                variant.module.install(self.settings.work, log)
                model = variant.module.convert(self.settings.checkpoint, self.settings.work, variant.name)
                self.facts[variant.label] = {"weight_bytes": variant.module.weight_bytes(model, variant.name)}
                if start:
                    self._start(variant)
            except Exception as error:  # whatever a peer's tools raise: it is left out, the rest runs
                self._fail(variant, "installing, converting or starting", _named(error, log))

    def _open(self, variant: Variant, what: str) -> Session:
        settings = self.settings
        command = variant.module.command(settings.work, settings.checkpoint, variant.name, settings.threads)
        log = self._log(variant, what)
        return Session(command, log, settings.environment(), settings.start_timeout_s)

    def _start(self, variant: Variant) -> None:
        needed = self.facts[variant.label]["weight_bytes"] + _SPARE_BYTES
        if self.available_bytes() < needed:
            raise PeerError(
                f"{self.available_bytes() / 1e9:.1f} GB of memory are left, its weights and what engines take besides "
                f"are {needed / 1e9:.1f} GB; run fewer at once with --variants"
            )
        session = self._open(variant, "session")
        self.sessions[variant] = session
        warm = session.run(self.settings.workload.warm_up(), self.settings.run_timeout_s)
        cases.check(self.settings.workload.warm_up(), warm, self.settings.workload.vocab_size, varied=False)
        self.facts[variant.label] |= {"version": session.version, "load_s": session.load_s}
        self.say(f"{variant.label} {session.version}: ready after {session.start_s:.1f} s")

    def compare_outputs(self) -> None:
        """Note each variant's greedy tokens of `single` with the prompt as written."""
        requests = self.settings.workload.tests["single"]
        for variant, session in list(self.sessions.items()):
            try:
                answer = session.run(requests, self.settings.run_timeout_s)
                cases.check(requests, answer, self.settings.workload.vocab_size, self.settings.varied)
                self.outputs[variant.label] = answer["token_ids"][0]
            except PeerError as error:
                self._fail(variant, "greedy tokens", error)

    def round(self, round_idx: int, peaks: Callable[[], dict[str, Any]], starts: bool) -> None:
        """Run every test of every variant once; each round begins with another variant.

        peaks  : measures the machine's peaks; called before every test
        starts : measure also the start of a fresh process of each variant
        """
        for test in self.settings.tests:
            now = peaks()
            for variant in _rotated(list(self.sessions), round_idx):
                self._run(variant, test, round_idx, now)
        if starts:
            now = peaks()
            for variant in _rotated(list(self.sessions), round_idx):
                if round_idx == 0 or self.sessions[variant].start_s < _QUICK_START_S:
                    self._fresh_start(variant, round_idx, now)

    def _run(self, variant: Variant, test: str, round_idx: int, peaks: dict[str, Any]) -> None:
        settings = self.settings
        requests = settings.workload.requests(test, round_idx)
        load, others = os.getloadavg()[0], _Others()
        try:
            answer = self.sessions[variant].run(requests, settings.run_timeout_s)
            cases.check(requests, answer, settings.workload.vocab_size, settings.varied)
        except PeerError as error:
            self._fail(variant, test, error)
            return
        metrics = cases.metrics(test, requests, answer)
        self.samples.append(
            {
                "engine": variant.label,
                "round": round_idx,
                "test": test,
                "metrics": metrics,
                "cpu_s": answer["cpu_s"],
                "wall_s": answer["wall_s"],
                "peak_rss_bytes": answer["peak_rss_bytes"],
                "load_average": load,
                "others_cpu_s": others.seconds(answer["cpu_s"]),
                "peaks": peaks,
            }
        )
        name, value = next(iter(metrics.items()))
        self.say(f"round {round_idx}  {test:9s} {variant.label:32s} {name} {value:.4g}")

    def _fresh_start(self, variant: Variant, round_idx: int, peaks: dict[str, Any]) -> None:
        """Note how long a new process takes from its start to its first token; the files are in memory by now."""
        request = {**self.settings.workload.requests("single", round_idx)[0], "output_len": 1}
        load, others, begin = os.getloadavg()[0], _Others(), time.perf_counter()
        try:
            session = self._open(variant, "start")
            answer = session.run([request], self.settings.run_timeout_s)
            took_s = time.perf_counter() - begin
            session.close()
        except PeerError as error:
            self.say(f"{variant.label}: a fresh start failed: {error}")
            return
        self.samples.append(
            {
                "engine": variant.label,
                "round": round_idx,
                "test": "start",
                "metrics": {"start_to_first_token_s": took_s},
                "load_average": load,
                "others_cpu_s": others.seconds(answer["cpu_s"]),
                "peaks": peaks,
            }
        )
        self.say(f"round {round_idx}  start     {variant.label:32s} first token after {took_s:.2f} s")


class _Others:
    """CPU time of the machine from here on, to tell what processes besides the measured one took."""

    def __init__(self) -> None:
        self.begin = _busy_s()

    def seconds(self, own_s: float) -> float:
        return max(0.0, _busy_s() - self.begin - own_s)


def _busy_s() -> float:
    """Return the seconds in which the machine's cores worked, since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields]
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _rotated(variants: list[Variant], by: int) -> list[Variant]:
    by %= max(1, len(variants))
    return variants[by:] + variants[:by]


def _named(error: Exception, log: Path) -> Exception:
    """Return an error whose text names a log."""
    text = str(error)
    return error if str(log.parent) in text else RuntimeError(f"{text}; logs are in {log.parent}")


def say(text: str) -> None:
    """Print a line of progress to stderr, the time of day before it."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
