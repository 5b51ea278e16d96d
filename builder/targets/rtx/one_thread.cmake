# What makes the compiler's process run one thread at a time, see one_thread.c. It is preloaded: what it defines is seen.
# It knows glibc's insides, and the compiler has no other library either; a sanitizer orders threads itself.
include(CheckSymbolExists)
check_symbol_exists(__GLIBC__ features.h PLANSMITH_HAS_GLIBC)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND PLANSMITH_HAS_GLIBC AND NOT PLANSMITH_SANITIZE)
  add_library(plansmith_one_thread MODULE builder/targets/rtx/one_thread.c)
  target_link_libraries(plansmith_one_thread PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  set_target_properties(plansmith_one_thread PROPERTIES C_VISIBILITY_PRESET default C_EXTENSIONS ON)
  install(TARGETS plansmith_one_thread LIBRARY DESTINATION plansmith/runtime)
endif()
