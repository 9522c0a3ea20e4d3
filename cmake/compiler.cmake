# Language level and warnings, the same for every target of the project.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

find_program(MOESTRO_CCACHE ccache)
if(MOESTRO_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${MOESTRO_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${MOESTRO_CCACHE})
endif()

function(moestro_compile_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${MOESTRO_WERROR}>>:-Werror>)
endfunction()
