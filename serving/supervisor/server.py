"""A server with its models loaded and canaries flying: what the supervisor starts, and starts again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from .api import NoAnswer, TritonApi, TritonError
from .calls import called_by_code, steps
from .canary import Canary, canary_inputs, try_model, try_server
from .install import TritonInstall
from .loading import StartError, load_all, touch
from .log_files import last_lines
from .options import SupervisorOptions
from .ports import Ports
from .process import ServerOptions, ServerProcess
from .stubs import kill_stubs, living_stubs, num_wanted

LIVE_TIMEOUT_S = 60.0  # from the start until the ports are open, on a busy machine
SERVER_INTERVAL_S = 5.0
_CALL_S = 5.0  # for questions that the server answers by itself


class Server:
    """One tritonserver's life. One thread at a time; the canaries have their own.

    names : the models, in the order of loading
    canaries : model -> its canary, for models that can be tried
    answers : the canary of the server itself
    """

    def __init__(self, options: SupervisorOptions, process: ServerProcess, names: list[str]) -> None:
        self.process = process
        self.names = names
        self.api = TritonApi(options.host, process.ports.http, process.ports.metrics)
        self.canaries: dict[str, Canary] = {}
        self.answers: Canary | None = None
        self.is_loaded = False  # all models were, once
        self.has_hung = False  # streams of a model's dead process may wait for ever
        self.num_stubs: dict[str, int] = {}  # of each model, as its configuration says
        self._options = options
        self._steps: dict[str, list[str]] = {}
        self._called: dict[str, frozenset[str]] = {}  # by a model's program

    @classmethod
    def start(
        cls, options: SupervisorOptions, install: TritonInstall, ports: Ports, names: list[str], token: str
    ) -> Server:
        """Start the program and return at once."""
        log = None if options.is_foreground else options.state_dir / "triton.log"
        server_options = ServerOptions(
            repositories=options.repositories,
            folder=options.state_dir,
            host=options.host,
            log_path=log,
            exit_timeout_s=options.exit_timeout_s,
            max_request_bytes=options.max_request_bytes,
            arguments=options.arguments,
        )
        return cls(options, ServerProcess.start(install, ports, server_options, token), names)

    def load(self, report: Callable[[str], None]) -> None:
        """Wait until it answers, load the models one by one, and let the canaries fly.

        raises : LoadError, StartError; the server is left to the caller to end
        """
        deadline = time.monotonic() + LIVE_TIMEOUT_S
        while not self.api.is_live(1.0):
            if self.process.poll() is not None:
                raise StartError(f"tritonserver ended while it started{self._log_text()}")
            if time.monotonic() > deadline:
                raise StartError(f"tritonserver does not answer {LIVE_TIMEOUT_S:g} s after its start")
            time.sleep(0.05)
        for name in self.names:
            report(f"loading {name}")
            load_all(
                self.api,
                [name],
                timeout_s=self._options.load_timeout_s,
                is_running=lambda: self.process.poll() is None,
            )
            self._watch(name)
        attempt = functools.partial(try_server, self.api, self._options.canary_timeout_s)
        self.answers = Canary(attempt, SERVER_INTERVAL_S)
        self.is_loaded = True

    def reload(self, name: str) -> list[str]:
        """End a model's stubs and load it anew, and so those that call it; return these.

        Its running requests never end: their clients must give up. Those of a model that called it would wait in
        that model for ever, a thread each.
        raises : TritonError or NoAnswer when that did not help
        """
        callers = [one for one in self.names if name in self._called.get(one, ()) and one != name]
        self.has_hung = True
        for one in (name, *callers):
            if one in self.canaries:
                self.canaries.pop(one).stop()
            kill_stubs(self.process.pid, self.process.token, one)
        for one in (name, *callers):
            if not touch(self._options.repositories, one):  # without a newer file loading does nothing
                self.api.unload(one, _CALL_S)
            self.api.load(one, self._options.load_timeout_s)
            self._watch(one)
        return callers

    def is_short_of_stubs(self, name: str, living: dict[str, list[int]]) -> bool:
        """Whether a model that counts as ready has fewer processes than it should."""
        return len(living.get(name, ())) < self.num_stubs.get(name, 0)

    def living_stubs(self) -> dict[str, list[int]]:
        """Return model -> pids."""
        return living_stubs(self.process.pid, self.process.token)

    def refresh(self, name: str) -> None:
        """Read a model's configuration again: someone may have loaded another one."""
        try:
            self.num_stubs[name] = num_wanted(self.api.config(name, _CALL_S))
        except (TritonError, NoAnswer):
            self.num_stubs[name] = 0

    def ready_models(self) -> dict[str, str]:
        """Return model -> "" where it is ready, else the reason; raises NoAnswer."""
        states: dict[str, str] = dict.fromkeys(self.names, "not loaded")
        for one in self.api.index(_CALL_S):
            if states.get(one.name):
                states[one.name] = (
                    "" if one.state == "READY" else one.reason or one.state.lower() or "not loaded"
                )
        return states

    def describe(self, num_heals: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return model -> what State.models holds of it; raises NoAnswer."""
        found = {}
        for name, reason in self.ready_models().items():
            canary = self.canaries.get(name)
            last = canary.last if canary is not None else None
            found[name] = {
                "ready": not reason,
                "reason": reason,
                "heals": num_heals.get(name, 0),
                "canary": last.to_json() if last is not None else None,
            }
        return found

    def stop_canaries(self) -> None:
        """End the canaries."""
        for canary in self.canaries.values():
            canary.stop()
        if self.answers is not None:
            self.answers.stop()

    def _watch(self, name: str) -> None:
        config = self.api.config(name, _CALL_S)
        self.num_stubs[name] = num_wanted(config)
        self._steps[name] = steps(config)
        self._called[name] = called_by_code(config)
        inputs = canary_inputs(name, config, self._options.canaries)
        if inputs is not None:
            timeout_s = self._options.canary_timeout_s
            attempt = functools.partial(try_model, self.api, name, inputs, timeout_s, self._steps[name])
            self.canaries[name] = Canary(attempt, self._options.canary_interval_s)

    def is_ensemble(self, name: str) -> bool:
        """Whether a model is made of others and has no process of its own."""
        return bool(self._steps.get(name))

    def _log_text(self) -> str:
        lines = last_lines(self._options.state_dir / "triton.log", 12)
        return "".join(f"\n    {line}" for line in lines) if lines and not self._options.is_foreground else ""
