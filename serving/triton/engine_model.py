"""The model `tensorrt_llm`: an engine behind Triton's Python backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from ...runtime.engine import Engine
from ...runtime.errors import Error
from ...runtime.sampling import SamplingParams
from ..metrics.triton import TritonMetrics
from .host import EngineHost
from .inner_error import IS_INNER
from .note_log import NoteLog
from .parameters import read_model_config
from .read_row import is_stop, read_rows
from .row import RowDefaults
from .triton_reply import TritonReply, request_parameters, request_tensors
from .turns import TURN, TurnReader

__all__ = ["TritonPythonModel"]

# Triton waits for open requests before it finalizes; what is open even so has had its time.
_DRAIN_S = 5.0


class TritonPythonModel:
    """Opens an engine and hands it requests; `execute` never waits for it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine and run one token through it.

        args : Triton's: model_config (JSON), model_repository, model_name, model_version, ...
        raises TritonModelException with one sentence that names the parameter or the file
        """
        self._turns = TurnReader()
        try:
            self._open(args)
        except Error as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error

    def execute(self, requests: Sequence[Any]) -> None:
        """Start requests; their answers come from other threads. An error is that of its request alone."""
        for request in requests:
            reply = TritonReply(request, is_decoupled=self._settings.is_decoupled)
            try:
                self._take(request, reply)
            except Exception as error:
                self._metrics.observe_error(error)
                reply.fail(error)

    def finalize(self) -> None:
        """Let open requests end, then close the engine."""
        self._host.close(_DRAIN_S)
        self._metrics.stop()

    def _open(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._settings, notes = read_model_config(config, Path(args["model_repository"]).parent)
        for note in notes:
            pb_utils.Logger.log_info(f"{args['model_name']}: {note}")
        self._notes = NoteLog(lambda text: pb_utils.Logger.log_info(f"{args['model_name']}: {text}"))
        engine = Engine.open(**self._settings.open_arguments())
        try:
            _warm_up(engine)
            self._defaults = RowDefaults.of(self._settings, engine)
            self._metrics = TritonMetrics(
                engine, args["model_name"], args["model_version"], self._settings.stats_check_period_ms
            )
            self._host = EngineHost(engine, self._settings, self._metrics)
        except BaseException:
            engine.close()
            raise
        self._metrics.start()

    def _take(self, request: Any, reply: TritonReply) -> None:
        parameters = request_parameters(request)
        reply.is_inner = parameters.pop(IS_INNER, False) is True
        if (address := parameters.pop(TURN, None)) is not None and reply.is_inner:
            reply.take_turns(self._turns.open(address))
        reply.identify(request)
        tensors = request_tensors(request)
        if is_stop(tensors):
            self._host.stop(reply.request_id)
            reply.send({}, final=True)
            return
        rows = read_rows(tensors, parameters, self._defaults)
        self._notes.add(note for row in rows for note in row.notes)
        self._host.submit(rows, reply)


def _warm_up(engine: Engine) -> None:
    """Run one token, so that an engine that cannot is an error now and the first request is not the slow one."""
    engine.generate([0], SamplingParams(max_tokens=1, temperature=0, detokenize=False))
