# Run at build time: writes OUTPUT, a header with the commit that SOURCE_DIR is at, "-dirty" when tracked
# files differ from it, "unknown" without git. The file changes only when the commit does.
set(commit "${COMMIT}")
if(NOT commit)
  set(commit "unknown")
  find_program(git git)
  if(git)
    # A source archive unpacked inside somebody else's repository must not take that one's commit.
    execute_process(COMMAND ${git} rev-parse --show-toplevel WORKING_DIRECTORY ${SOURCE_DIR}
      OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      file(REAL_PATH "${top}" top)
      file(REAL_PATH "${SOURCE_DIR}" source)
      if(top STREQUAL source)
        execute_process(COMMAND ${git} describe --always --dirty --exclude=* --abbrev=12
          WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE
          ERROR_QUIET RESULT_VARIABLE failed)
        if(NOT failed)
          set(commit "${found}")
        endif()
      endif()
    endif()
  endif()
endif()
set(text "// Written by cli/commit.cmake.\n#define MOESTRO_COMMIT \"${commit}\"\n")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT "${before}" STREQUAL "${text}")
  file(WRITE ${OUTPUT} "${text}")
endif()
