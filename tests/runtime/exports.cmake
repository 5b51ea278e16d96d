# Fails unless the shared library exports every function of the header and nothing else.
execute_process(COMMAND ${NM} -D --defined-only --format=posix --without-symbol-versions ${LIBRARY}
  OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "cannot read the symbols of ${LIBRARY}")
endif()
string(REGEX REPLACE "PLANSMITH_[0-9]+ A[^\n]*\n" "" symbols "${symbols}")  # the version node itself
string(REGEX MATCHALL "[^ \n]+ [A-Za-z] [^\n]*" exported "${symbols}")
list(TRANSFORM exported REPLACE " .*" "")

file(READ ${CDEF} declarations)
string(REGEX MATCHALL "psm_[a-z_]+\\(" declared "${declarations}")
list(TRANSFORM declared REPLACE "\\(" "")
list(LENGTH declared num_declared)
if(num_declared LESS 15)
  message(FATAL_ERROR "${CDEF} declares only ${num_declared} functions; is it the header's preprocessed form?")
endif()

set(missing ${declared})
list(REMOVE_ITEM missing ${exported})
set(surplus ${exported})
list(REMOVE_ITEM surplus ${declared})
if(missing OR surplus)
  message(FATAL_ERROR "${LIBRARY} lacks [${missing}] and exports beyond the header [${surplus}]")
endif()
