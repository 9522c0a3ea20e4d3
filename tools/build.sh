#!/usr/bin/env bash
# Sets up and builds everything into build/: library, command-line tool, tests, torch operators.
# Environment: CUDA=ON|OFF|AUTO (AUTO builds the CUDA backend where nvcc and a GPU are), JOBS, BUILD.
source "$(dirname "$0")/common.sh"
tools/setup.sh

cuda=${CUDA:-AUTO}
if [ "$cuda" = AUTO ]; then
  cuda=OFF
  if command -v nvcc >/dev/null && nvidia-smi -L >/dev/null 2>&1; then cuda=ON; fi
fi

configure() {
  cmake --preset default -B "$BUILD" -DMOESTRO_CUDA="$cuda" -DMOESTRO_TORCH=ON \
    -DPython_EXECUTABLE="$VENV/bin/python"
}
# CMake itself notices changed CMake files; it is only asked again when what is passed here changes.
options="cuda $cuda torch $(cat "$VENV/.torch")"
if [ ! -f "$BUILD/build.ninja" ] || [ "$(cat "$BUILD/.options" 2>/dev/null)" != "$options" ]; then
  say "configure: $BUILD (CUDA backend $cuda)"
  quietly configure configure || fail "CMake could not configure the build"
  echo "$options" >"$BUILD/.options"
fi
say "build: $BUILD"
cmake --build "$BUILD" -j "$JOBS" || fail "the build failed"
