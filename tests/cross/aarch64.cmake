# Cross-compiles static programs for aarch64 Linux with the clang of ziglang's wheel, and has ctest run them on the
# processor that tools/run_aarch64.py emulates. `make test-cross` makes the environment that has both.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(PLANSMITH_CROSS_VENV "" CACHE PATH "a Python environment with ziglang and unicorn")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES PLANSMITH_CROSS_VENV)

file(GLOB zig ${PLANSMITH_CROSS_VENV}/lib/python*/site-packages/ziglang/zig)
if(NOT zig)
  message(FATAL_ERROR "PLANSMITH_CROSS_VENV is \"${PLANSMITH_CROSS_VENV}\", which has no ziglang; run make test-cross")
endif()
set(CMAKE_C_COMPILER ${zig} cc -target aarch64-linux-musl)
set(CMAKE_CXX_COMPILER ${zig} c++ -target aarch64-linux-musl)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # each kind of program would have a C++ library compiled for it
# This clang takes features behind a processor's name, not behind an architecture's.
set(PLANSMITH_NEON_FLAGS -mcpu=generic+v8_2a+dotprod CACHE STRING "")

set(CMAKE_CROSSCOMPILING_EMULATOR
  ${PLANSMITH_CROSS_VENV}/bin/python ${CMAKE_CURRENT_LIST_DIR}/../../tools/run_aarch64.py)
