#!/usr/bin/env bash
# Compiles the CUDA backend and its tests, warnings as errors, for sm_80 and (src/cuda/hopper) sm_90a,
# and runs the tests that need no GPU. Where nvcc or the sources are missing it says so and ends well.
source "$(dirname "$0")/common.sh"
build=$ROOT/build-cuda
if ! command -v nvcc >/dev/null; then say "CUDA: no nvcc on PATH, nothing compiled"; exit; fi
if [ -z "$(git ls-files 'src/cuda/*.cu')" ]; then say "CUDA: no sources yet"; exit; fi
tools/setup.sh
say "configure: $build"
quietly cuda-configure cmake --preset cuda -DMOESTRO_CUDA_ARCHITECTURES=80-real ||
  fail "CMake could not configure the build"
cmake --build "$build" -j "$JOBS" || fail "the CUDA sources do not compile"
"$build/tests/moestro_tests" --gtest_brief=1 --gtest_filter='CudaPlanTest.*' || fail "plans of the CUDA kernels are wrong"
