# Fails when an object file that is compiled for an instruction set defines a symbol that other files could be linked to
# (an inline function or a template of a shared header): such code would crash machines without that instruction set.
execute_process(COMMAND ${NM} -C --defined-only ${OBJECT} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "cannot read the symbols of ${OBJECT}")
endif()
string(REGEX REPLACE "[^\n]* V DW\\.ref\\.[^\n]*" "" symbols "${symbols}")  # data of the C++ runtime
string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
if(shared)
  message(FATAL_ERROR "${OBJECT} defines shared symbols:\n${shared}")
endif()
