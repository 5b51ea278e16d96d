#!/usr/bin/env bash
# Packs what bench/gpu_check.sh needs on a machine with a GPU, and checks that it is small enough to be carried.
# Writes build/gpu/ (cubins of SM 90, a tiny TensorRT-RTX plan) and build/gpu_check.tar.gz: what git tracks, with build/gpu/.
# LIMIT_MIB: the most that these files may have, unpacked (default 64).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
python=${PYTHON:-$root/.venv/bin/python}
limit=$((${LIMIT_MIB:-64} * 1024 * 1024))
carried=build/gpu
mkdir -p "$carried"
tree=$(mktemp -d -t plansmith_tree.XXXXXX)
trap 'rm -rf "$tree"' EXIT

size_of() { # bytes of the clone's files and of what is carried
  { git ls-files -z; find "$carried" -type f -print0; } |
    xargs -0 stat -c %s 2>/dev/null | awk '{ s += $1 } END { print s + 0 }'
}
mib() { awk -v b="$1" 'BEGIN { printf "%.1f MiB", b / 1048576 }'; }

mkdir "$tree/plansmith"
touch "$tree/plansmith/__init__.py"
for folder in builder runtime plugins; do ln -s "$root/$folder" "$tree/plansmith/$folder"; done
echo "cubins of SM 90 ..." >&2
PYTHONPATH=$tree "$python" bench/gpu/carry.py cubins "$carried"
echo "a tiny TensorRT-RTX plan ..." >&2
PYTHONPATH=$tree "$python" bench/gpu/carry.py plan "$carried"
total=$(size_of)
if ((total > limit)); then
  rm -f build/gpu_check.tar.gz
  echo "too large by $(mib $((total - limit))): its files $(mib "$total"), limit $(mib "$limit")" >&2
  exit 1
fi
{ git ls-files -z; find "$carried" -type f -print0; } |
  tar --null --no-recursion --ignore-failed-read -czf build/gpu_check.tar.gz -T -
echo "build/gpu_check.tar.gz: $(mib "$(stat -c %s build/gpu_check.tar.gz)"); its files $(mib "$total"), limit $(mib "$limit")"
