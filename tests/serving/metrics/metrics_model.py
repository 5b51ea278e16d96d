"""A Python model for tests: an engine with its metrics, and nothing else."""

from __future__ import annotations

from pathlib import Path

_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "IDS" data_type: TYPE_INT32 dims: [ -1 ] },
        { name: "MAX_TOKENS" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "HOLD_MS" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "engine_dir" value: { string_value: "ENGINE_DIR" } }
"""
# The model `other` takes a name of ours for a gauge before the metrics are made.
_MODEL = """
import json
import os
import sys
import time

sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # stubs ignore it

import numpy as np
import triton_python_backend_utils as pb_utils
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import Error
from plansmith.serving.metrics.triton import TritonMetrics


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        if args["model_name"] == "other":
            kinds = pb_utils.MetricFamily
            self.taken = kinds(name="plansmith_pauses_total", description="another's", kind=kinds.GAUGE)
        self.engine = Engine.open(parameters["engine_dir"]["string_value"], num_threads=1)
        self.metrics = TritonMetrics(self.engine, args["model_name"], args["model_version"], period_ms=50)
        self.metrics.start()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids, max_tokens, hold_ms = (
            pb_utils.get_input_tensor_by_name(request, name) for name in ("IDS", "MAX_TOKENS", "HOLD_MS")
        )
        try:
            params = SamplingParams(
                max_tokens=int(max_tokens.as_numpy()[0]), temperature=0, ignore_eos=True, detokenize=False
            )
            done = self.engine.generate(ids.as_numpy().tolist(), params)[0]
        except Error as error:
            self.metrics.observe_error(error)
            return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))
        self.metrics.observe(done.stats, done.finish_reason)
        time.sleep(0 if hold_ms is None else int(hold_ms.as_numpy()[0]) / 1000)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(done.token_ids, np.int32))])

    def finalize(self):
        self.engine.close()
        self.metrics.stop()
"""


def make_repository(folder: Path, engine_dir: Path) -> Path:
    """Write a repository of the models `engine` and `other` and return it."""
    for name in ("engine", "other"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_CONFIG.replace("ENGINE_DIR", str(engine_dir)))
        (folder / name / "1" / "model.py").write_text(_MODEL)
    return folder
