# The CUDA backend: src/cuda, compiled ahead of time for MOESTRO_CUDA_ARCHITECTURES.
#
# wgmma and TMA (src/cuda/hopper) exist only in the architecture-specific 90a; everything else is built for
# the plain architectures, so that its PTX also serves newer cards.
include(CheckLanguage)
set(MOESTRO_WITH_CUDA OFF)
if(NOT MOESTRO_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(MOESTRO_WITH_CUDA ON)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
  elseif(MOESTRO_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOESTRO_CUDA=ON, but no CUDA compiler was found (looked for nvcc on PATH)")
  endif()
endif()

# What everything but src/cuda/hopper is built for.
set(MOESTRO_CUDA_PLAIN_ARCHITECTURES ${MOESTRO_CUDA_ARCHITECTURES})
list(TRANSFORM MOESTRO_CUDA_PLAIN_ARCHITECTURES REPLACE "^90a" "90")
list(REMOVE_DUPLICATES MOESTRO_CUDA_PLAIN_ARCHITECTURES)

# moestro_cuda_options(TARGET ARCHITECTURES): language level, warnings and architectures of a target with CUDA sources.
# CMake 3.25 does not know C++20 for nvcc 13, hence the flag.
function(moestro_cuda_options target architectures)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${architectures}" CUDA_RUNTIME_LIBRARY Static)
  set(flags -std=c++20 --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra -lineinfo)
  if(MOESTRO_WERROR)
    list(APPEND flags -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
endfunction()

function(moestro_add_cuda_part target part architectures)
  add_library(${part} OBJECT ${ARGN})
  target_include_directories(${part} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  moestro_compile_options(${part})
  moestro_cuda_options(${part} "${architectures}")
  target_link_libraries(${part} PRIVATE CUDA::cudart_static)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${part}>)
endfunction()

function(moestro_add_cuda_backend target)
  if(NOT MOESTRO_WITH_CUDA)
    return()
  endif()
  file(GLOB_RECURSE portable CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu ${PROJECT_SOURCE_DIR}/src/cuda/*.cpp)
  set(hopper ${portable})
  list(FILTER portable EXCLUDE REGEX "/src/cuda/hopper/")
  list(FILTER hopper INCLUDE REGEX "/src/cuda/hopper/")

  moestro_add_cuda_part(${target} moestro_cuda_portable "${MOESTRO_CUDA_PLAIN_ARCHITECTURES}" ${portable})
  if(hopper)
    moestro_add_cuda_part(${target} moestro_cuda_hopper "90a-real" ${hopper})
    # Spills and serialized wgmma fail the build.
    target_compile_options(moestro_cuda_hopper PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
    set(launcher ${PROJECT_SOURCE_DIR}/cmake/check_ptxas.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
    set_target_properties(moestro_cuda_hopper PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
  endif()

  target_compile_definitions(${target} PRIVATE MOESTRO_WITH_CUDA=1)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
