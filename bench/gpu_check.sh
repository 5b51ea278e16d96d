#!/usr/bin/env bash
# One call that checks and measures the GPU kernels on this machine; see bench/gpu/check.py and docs/gpu.md.
#   bench/gpu_check.sh [--dry-run] [--stages a,b] [--ops a,b] [--output FILE] [--seed N] [--budget-s S]
# PYTHON: the interpreter to use (default: the first of the clone's .venv and python3 whose torch has CUDA).
# PLANSMITH_LIBRARY: the folder of the built core (default: that of a plansmith installed in that Python, if any).
# PLANSMITH_TREE: a folder with the package plansmith to check (default: this clone, nothing installed).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  # `make test` leaves a CPU build of torch in .venv, `make demo` none.
  dry=
  for word in "$@"; do [[ $word == --dry-run ]] && dry=--dry-run; done
  for one in "$root/.venv/bin/python" python3; do
    command -v "$one" >/dev/null || continue
    if said=$("$one" "$root/bench/gpu/torch_here.py" $dry 2>/dev/null); then
      PYTHON=$one
      echo "gpu_check: $one ($said)" >&2
      break
    fi
    echo "gpu_check: not $one: ${said:-it does not start}" >&2
  done
  PYTHON=${PYTHON:-python3}  # which says what is missing, behind what is wrong with the options
fi
if [[ -z ${PLANSMITH_LIBRARY:-} ]]; then
  # The core of an installed plansmith (`make build`), without which stage `tests` opens no engine.
  find='import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("plansmith").origin).parent / "runtime")'
  core=$(cd / && "$PYTHON" -c "$find" 2>/dev/null) && [[ -e $core/plansmith.cdef ]] && export PLANSMITH_LIBRARY=$core
fi
tree=${PLANSMITH_TREE:-}
if [[ -z $tree ]]; then
  # The package as an installation would have it, without one: folders of this clone under one name.
  tree=$(mktemp -d -t plansmith_tree.XXXXXX)
  trap 'rm -rf "$tree"' EXIT
  mkdir "$tree/plansmith"
  touch "$tree/plansmith/py.typed"
  printf '"""plansmith: compile and serve TensorRT engines."""\n__version__ = "0"\n' >"$tree/plansmith/__init__.py"
  for folder in builder runtime plugins calibration serving triton_repo cli; do
    ln -s "$root/$folder" "$tree/plansmith/$folder"
  done
fi
export PYTHONPATH=$tree${PYTHONPATH:+:$PYTHONPATH} PLANSMITH_ROOT=$root
"$PYTHON" "$root/bench/gpu/check.py" "$@"
