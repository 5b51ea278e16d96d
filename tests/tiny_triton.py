"""A small model repository without an engine, for tests of the server and of what watches over it."""

from __future__ import annotations

from pathlib import Path

_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "PAUSE_MS" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "INDEX" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
# Streams COUNT numbers, PAUSE_MS apart. COUNT = -1 ends the stub's process, with -2 nothing else is done for PAUSE_MS,
# -3 is an error.
_MODEL = """
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.streams = []
        if os.path.exists(os.path.join(args["model_repository"], "broken")):
            raise RuntimeError("the engine is not there: a planted failure")
        if os.path.exists(os.path.join(args["model_repository"], "slow")):
            time.sleep(60)

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            pause = pb_utils.get_input_tensor_by_name(request, "PAUSE_MS")
            pause_s = 0.0 if pause is None else int(pause.as_numpy()[0]) / 1000
            if count == -1:
                os._exit(9)
            if count == -2:
                time.sleep(pause_s)
                count, pause_s = 1, 0.0
            thread = threading.Thread(target=stream, args=(request.get_response_sender(), count, pause_s))
            thread.start()
            self.streams.append(thread)

    def finalize(self):
        for thread in self.streams:
            thread.join()


def stream(sender, count, pause_s):
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    if count < 0:
        sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError("a planted error")), flags=final)
        return
    for index in range(count):
        tensor = pb_utils.Tensor("INDEX", np.array([index], np.int32))
        last = index == count - 1
        sender.send(pb_utils.InferenceResponse([tensor]), flags=final if last else 0)
        time.sleep(pause_s)
"""
_ECHO_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
_ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in values]
"""
_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "PAUSE_MS" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "INDEX" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [ {
  model_name: "counter"  # the models beside it
  model_version: -1
  input_map { key: "COUNT" value: "COUNT" }
  input_map { key: "PAUSE_MS" value: "PAUSE_MS" }
  output_map { key: "INDEX" value: "counted" } }, {
  model_name: "echo"
  model_version: -1
  input_map { key: "IN" value: "counted" }
  output_map { key: "OUT" value: "INDEX" } } ] }
"""


def make_repository(folder: Path) -> Path:
    """Write a repository of the models `counter` and `echo` and the ensemble `all` of both, and return it."""
    for name, config, program in (
        ("counter", _CONFIG, _MODEL),
        ("echo", _ECHO_CONFIG, _ECHO),
        ("all", _ENSEMBLE, ""),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if program:
            (folder / name / "1" / "model.py").write_text(program)
    return folder
