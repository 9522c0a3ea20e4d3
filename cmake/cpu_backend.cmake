# The CPU backend: src/cpu over OpenBLAS, one BLAS thread a worker.
#
# OpenBLAS is linked statically where it can be: PyTorch and NumPy bring BLAS libraries of their own into a process,
# and a private copy neither answers their calls nor takes a thread count from them.
find_package(Threads REQUIRED)

find_library(MOESTRO_OPENBLAS NAMES libopenblas.a openblas
  PATH_SUFFIXES openblas-serial openblas-pthread openblas openblas-openmp
  DOC "OpenBLAS, libopenblas.a if possible")
find_path(MOESTRO_OPENBLAS_INCLUDE NAMES openblas_config.h
  PATH_SUFFIXES ${CMAKE_LIBRARY_ARCHITECTURE}/openblas-serial ${CMAKE_LIBRARY_ARCHITECTURE}/openblas-pthread
    openblas-serial openblas-pthread openblas
  DOC "Folder of OpenBLAS's cblas.h and openblas_config.h")
if(NOT MOESTRO_OPENBLAS OR NOT MOESTRO_OPENBLAS_INCLUDE)
  message(FATAL_ERROR "OpenBLAS was not found: install it (Debian and Ubuntu: libopenblas-dev) or set "
    "MOESTRO_OPENBLAS to libopenblas.a and MOESTRO_OPENBLAS_INCLUDE to the folder of its cblas.h")
endif()
message(STATUS "OpenBLAS: ${MOESTRO_OPENBLAS}")

function(moestro_add_cpu_backend target)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cpu/*.cpp)
  target_sources(${target} PRIVATE ${sources})
  # Loops over arrays are vectorised only where the compiler may ignore errno and floating-point traps.
  set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "-O3;-fno-math-errno;-fno-trapping-math")
  target_include_directories(${target} SYSTEM PRIVATE ${MOESTRO_OPENBLAS_INCLUDE})
  target_link_libraries(${target} PRIVATE ${MOESTRO_OPENBLAS} PUBLIC Threads::Threads ${CMAKE_DL_LIBS} m)
  target_link_options(${target} INTERFACE "LINKER:--exclude-libs,libopenblas.a")
endfunction()
