#!/usr/bin/env bash
# Builds the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer into build-asan/ and runs them.
source "$(dirname "$0")/common.sh"
tools/setup.sh
build=$ROOT/build-asan
say "configure: $build"
quietly asan-configure cmake --preset asan || fail "CMake could not configure the build"
cmake --build "$build" -j "$JOBS" || fail "the build failed"
mkdir -p "$build/results"
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
status=0
ctest --test-dir "$build" -j "$JOBS" --output-on-failure --no-tests=error \
  --output-junit "$build/results/cpp-asan.xml" || status=1
exit $status
