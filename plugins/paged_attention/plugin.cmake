# The TensorRT plugin as a library that trtexec --dynamicPlugins and IPluginRegistry::loadLibrary take. It links neither
# TensorRT nor CUDA: the one calls it, the other's driver is loaded when the first kernel is.
find_path(PLANSMITH_CUDA_INCLUDE cuda.h HINTS $ENV{CUDA_HOME}/include /usr/local/cuda/include REQUIRED)
add_library(plansmith_tensorrt MODULE
  plugins/paged_attention/plugin.cc
  plugins/paged_attention/plugin_fields.cc)
target_include_directories(plansmith_tensorrt SYSTEM PRIVATE ${PLANSMITH_TENSORRT_INCLUDE} ${PLANSMITH_CUDA_INCLUDE})
target_link_libraries(plansmith_tensorrt PRIVATE ${CMAKE_DL_LIBS})
