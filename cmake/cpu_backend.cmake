# The CPU backend: src/cpu over OpenBLAS, one BLAS thread a worker.
find_package(Threads REQUIRED)

function(moestro_add_cpu_backend target)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cpu/*.cpp)
  target_sources(${target} PRIVATE ${sources})
  target_link_libraries(${target} PUBLIC Threads::Threads)
endfunction()
