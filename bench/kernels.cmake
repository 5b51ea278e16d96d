# Benchmarks of the CPU executor: build with -DPLANSMITH_BUILD_BENCH=ON, run build/<dir>/bench_kernels [isa] [threads].
add_executable(bench_kernels ${CMAKE_CURRENT_LIST_DIR}/kernels.cc)
target_link_libraries(bench_kernels PRIVATE plansmith_core Threads::Threads)
target_include_directories(bench_kernels PRIVATE
  ${CMAKE_SOURCE_DIR}/runtime/src ${CMAKE_SOURCE_DIR}/tests/runtime ${CMAKE_SOURCE_DIR}/tests/runtime/cpu)
set_target_properties(bench_kernels PROPERTIES LINKER_LANGUAGE CXX)

# The machine's peaks alone: build/<dir>/bench_peaks [threads] [--json]. Of the core only these and the thread pool, so that it
# compiles in seconds.
add_executable(bench_peaks ${CMAKE_CURRENT_LIST_DIR}/peaks_main.cc
  ${CMAKE_SOURCE_DIR}/runtime/src/cpu/peaks.cc ${CMAKE_SOURCE_DIR}/runtime/src/cpu/thread_pool.cc ${CMAKE_SOURCE_DIR}/runtime/src/status.cc)
target_link_libraries(bench_peaks PRIVATE Threads::Threads)
target_compile_definitions(bench_peaks PRIVATE PLANSMITH_VERSION="${PROJECT_VERSION}")
target_include_directories(bench_peaks PRIVATE
  ${CMAKE_SOURCE_DIR}/runtime/src ${CMAKE_SOURCE_DIR}/runtime/include)
