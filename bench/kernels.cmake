# Benchmarks of the CPU executor: build with -DPLANSMITH_BUILD_BENCH=ON, run build/<dir>/bench_kernels [isa] [threads].
add_executable(bench_kernels ${CMAKE_CURRENT_LIST_DIR}/kernels.cc)
target_link_libraries(bench_kernels PRIVATE plansmith_core Threads::Threads)
target_include_directories(bench_kernels PRIVATE
  ${CMAKE_SOURCE_DIR}/runtime/src ${CMAKE_SOURCE_DIR}/tests/runtime ${CMAKE_SOURCE_DIR}/tests/runtime/cpu)
set_target_properties(bench_kernels PROPERTIES LINKER_LANGUAGE CXX)
