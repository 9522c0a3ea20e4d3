#!/usr/bin/env bash
# Sets up, builds, and runs every C++ test (ctest) and every Python test (pytest). Arguments go to pytest.
# Results as JUnit XML: build/results/.
source "$(dirname "$0")/common.sh"
tools/build.sh
results=$BUILD/results
rm -rf "$results"
mkdir -p "$results"

status=0
say "C++ tests"
ctest --test-dir "$BUILD" -j "$JOBS" --output-on-failure --no-tests=error --output-junit "$results/cpp.xml" ||
  status=1
say "Python tests"
use_built_package
"$VENV/bin/python" -m pytest tests/python --junitxml "$results/python.xml" "$@" || status=1
python3 tools/count_tests.py "$results" || status=1
exit $status
