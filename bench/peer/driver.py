"""Runs the tests in rounds, one engine at a time, the machine's peaks between.

First each variant is started fresh some times, alone in memory. Then every variant is started once and stays, stopped
while others run; before the first round it runs each test once, untimed. With `Settings.reload`, for models of which
memory does not hold all variants at once, each is started and ended in every round, and its warm-up is short.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import cases
from .environment import BENCH
from .machine import Others, available_memory
from .session import PeerError, Session
from .variants import Variant

# Slower starts than this are measured once only.
_QUICK_START_S = 20.0
_START_ROUND = 1000
# What an engine may take beside its weights: 1 GB of KV cache, its libraries, and room for the system.
_SPARE_BYTES = 2_000_000_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run of all engines goes.

    varied : refuse outputs of one token again and again; a model of random weights may give them
    reload : start each engine in every round and end it after its tests, so that one alone is in memory
    """

    work: Path
    checkpoint: Path
    workload: cases.Workload
    tests: Sequence[str]
    threads: int
    varied: bool = True
    reload: bool = False
    start_timeout_s: float = 900.0
    run_timeout_s: float = 300.0

    def environment(self) -> dict[str, str]:
        """Return the environment of a session."""
        threads = str(self.threads)
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **quiet, "OMP_NUM_THREADS": threads}


class Driver:
    """The sessions of a run, and what came of them.

    samples  : one object a run: engine, round, test, metrics, loads
    facts    : of each variant: version, load time, bytes of weights, peak memory of its warm-up if that was every test
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
        self.variants: list[Variant] = []
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
        if variant in self.variants:
            self.variants.remove(variant)
        self.failures[variant.label] = f"{during}: {self._without_folders(str(error))}"
        self.say(f"{variant.label}: left out, {during} failed: {error}")

    def _without_folders(self, text: str) -> str:
        """Return a text for a report: paths of the work folder and the repository without where those lie."""
        work = self.settings.work.resolve()
        root = BENCH.parent
        shown = work.relative_to(root) if work.is_relative_to(root) else Path(work.name)
        return text.replace(f"{work}/", f"{shown}/").replace(f"{root}/", "")

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Install and convert each variant; what fails is left out."""
        for variant in variants:
            log = self._log(variant, "install")
            try:
                variant.module.install(self.settings.work, log)
                model = variant.module.convert(self.settings.checkpoint, self.settings.work, variant.name)
                self.facts[variant.label] = {"weight_bytes": variant.module.weight_bytes(model, variant.name)}
                self.variants.append(variant)
            except Exception as error:  # whatever a peer's tools raise: it is left out, the rest runs
                self._fail(variant, "installing or converting", _named(error, log))

    def fresh_starts(self, rounds: int, peaks: Callable[[], dict[str, Any]]) -> None:
        """Measure the start of a fresh process of each variant so many times, while no other is in memory.

        With `Settings.reload` the rounds do that.
        """
        slow: set[Variant] = set()
        for round_idx in range(0 if self.settings.reload else rounds):
            now = peaks()
            for variant in _rotated(self.variants, round_idx):
                if variant in slow:
                    continue
                session = self._fresh_start(variant, round_idx, now)
                if session is None or session.start_s >= _QUICK_START_S:
                    slow.add(variant)
                if session is not None:
                    session.close()

    def start_all(self) -> None:
        """Start each variant, unless `Settings.reload`; what fails is left out."""
        for variant in [] if self.settings.reload else list(self.variants):
            try:
                self._check_memory(variant)
                self._warm_up(variant, self._open(variant, "session"))
            except Exception as error:  # a peer may fail in any way
                self._fail(variant, "starting", _named(error, self._log(variant, "session")))

    def _open(self, variant: Variant, what: str) -> Session:
        settings = self.settings
        command = variant.module.command(settings.work, settings.checkpoint, variant.name, settings.threads)
        log = self._log(variant, what)
        return Session(command, log, settings.environment(), settings.start_timeout_s)

    def _check_memory(self, variant: Variant) -> None:
        """Raise PeerError where the variant would not fit beside what runs."""
        left, needed = self.available_bytes(), self.facts[variant.label]["weight_bytes"] + _SPARE_BYTES
        if left < needed:
            raise PeerError(
                f"{left / 1e9:.1f} GB of memory are left, its weights and what engines take besides are "
                f"{needed / 1e9:.1f} GB; run fewer at once with --variants, or one at a time with --reload"
            )

    def _warm_up(self, variant: Variant, session: Session) -> None:
        """Take a new session in, once it has answered the warm-up."""
        self.sessions[variant] = session
        settings, facts = self.settings, self.facts[variant.label]
        workload = settings.workload
        peak = 0
        for requests in workload.short_warm_up() if settings.reload else workload.warm_up(settings.tests):
            answer = session.run(requests, settings.run_timeout_s)
            cases.check(requests, answer, workload.vocab_size, varied=False)
            peak = answer["peak_rss_bytes"]
        facts |= {"version": session.version(settings.run_timeout_s), "load_s": session.load_s}
        if not settings.reload:
            facts["warm_up_peak_rss_bytes"] = peak
        self.say(f"{variant.label} {facts['version']}: ready after {session.start_s:.1f} s")

    def compare_outputs(self) -> None:
        """Note the greedy tokens of `single`, with the prompt as written, of each variant that runs."""
        for variant in list(self.sessions):
            self._compare_output(variant)

    def _compare_output(self, variant: Variant) -> None:
        requests = self.settings.workload.tests["single"]
        try:
            answer = self.sessions[variant].run(requests, self.settings.run_timeout_s)
            cases.check(requests, answer, self.settings.workload.vocab_size, self.settings.varied)
            self.outputs[variant.label] = answer["token_ids"][0]
        except PeerError as error:
            self._fail(variant, "greedy tokens", error)

    def round(self, round_idx: int, peaks: Callable[[], dict[str, Any]]) -> None:
        """Run every test of every variant once; each round begins with another variant.

        peaks : measures the machine's peaks; called before every test
        """
        if self.settings.reload:
            for variant in _rotated(self.variants, round_idx):
                self._alone(variant, round_idx, peaks)
            return
        for test in self.settings.tests:
            now = peaks()
            for variant in _rotated(self.variants, round_idx):
                self._run(variant, test, round_idx, now)

    def _alone(self, variant: Variant, round_idx: int, peaks: Callable[[], dict[str, Any]]) -> None:
        """Start one variant, run every test of it, and end it."""
        try:
            self._check_memory(variant)
        except PeerError as error:
            self._fail(variant, "starting", error)
            return
        session = self._fresh_start(variant, round_idx, peaks())
        if session is None:
            self._fail(variant, "starting", PeerError(f"see {self._log(variant, 'start')}"))
            return
        try:
            self._warm_up(variant, session)
        except PeerError as error:
            self._fail(variant, "the warm-up", error)
            return
        if round_idx == 0:
            self._compare_output(variant)
        for test in self.settings.tests:
            if variant in self.sessions:
                self._run(variant, test, round_idx, peaks())
        if variant in self.sessions:
            self.sessions.pop(variant).close()

    def _run(self, variant: Variant, test: str, round_idx: int, peaks: dict[str, Any]) -> None:
        settings = self.settings
        requests = settings.workload.requests(test, round_idx)
        load, others = os.getloadavg()[0], Others()
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

    def _fresh_start(self, variant: Variant, round_idx: int, peaks: dict[str, Any]) -> Session | None:
        """Return a new process, its time from the start to the first token noted; None where it fails."""
        # Ids of a round that is never run: the process may go on to the tests, which must find nothing cached.
        request = {**self.settings.workload.requests("single", _START_ROUND + round_idx)[0], "output_len": 1}
        load, others, begin = os.getloadavg()[0], Others(), time.perf_counter()
        session = None
        try:
            session = self._open(variant, "start")
            answer = session.run([request], self.settings.run_timeout_s)
            took_s = time.perf_counter() - begin
            cases.check([request], answer, self.settings.workload.vocab_size)
        except PeerError as error:
            self.say(f"{variant.label}: a fresh start failed: {error}")
            if session is not None:
                session.kill()
            return None
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
        return session


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
