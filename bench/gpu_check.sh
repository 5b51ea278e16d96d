#!/usr/bin/env bash
# One call that checks and measures the GPU kernels on this machine; see bench/gpu/check.py and docs/gpu.md.
#   bench/gpu_check.sh [--dry-run] [--stages a,b] [--output FILE] [--seed N] [--budget-s S]
# PYTHON: the interpreter to use (default: the clone's .venv where there is one, else python3).
# PLANSMITH_TREE: a folder with the package plansmith to check (default: this clone, nothing installed).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && "$root/.venv/bin/python" -c '' 2>/dev/null && PYTHON=$root/.venv/bin/python
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
