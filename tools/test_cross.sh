#!/usr/bin/env bash
# The tests of the cpu target's kernels for aarch64 Linux, run in an emulated processor, and its kernels compiled for
# macOS on arm64. `make test-cross` calls it with the environment that has the compiler and the processor.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PLANSMITH_CROSS_VENV:?folder of a Python environment with ziglang and unicorn; make test-cross sets it}"
bin=${PYTHON_BIN:?folder of cmake, ctest and ninja; make test-cross sets it}
export ZIG_GLOBAL_CACHE_DIR=$PLANSMITH_CROSS_VENV/zig-cache ZIG_LOCAL_CACHE_DIR=$PLANSMITH_CROSS_VENV/zig-cache
build=build/cross

"$bin/cmake" -S . -B $build -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPLANSMITH_BUILD_TESTS=ON \
  -DCMAKE_TOOLCHAIN_FILE=tests/cross/aarch64.cmake -DPLANSMITH_CROSS_VENV="$PLANSMITH_CROSS_VENV"
"$bin/cmake" --build $build --target cross_tests
"$bin/ctest" --test-dir $build --output-on-failure -L cross

zig=$(echo "$PLANSMITH_CROSS_VENV"/lib/python*/site-packages/ziglang/zig)
for name in kernels kernels_neon kernels_portable; do
  "$zig" c++ -target aarch64-macos -std=c++17 -O2 -Wall -Wextra -Werror -Iruntime/src -Iruntime/include \
    -c runtime/src/cpu/$name.cc -o $build/$name.macos.o
done
echo "macOS arm64: kernels compiled"
