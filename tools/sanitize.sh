#!/usr/bin/env bash
# The CUDA tests on small shapes under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.
#   tools/sanitize.sh TESTS_PROGRAM [OUT_FOLDER]
# Environment: TOOLS (default all four), SECONDS_EACH (limit of one tool, default 240), FILTER (of the tests).
source "$(dirname "$0")/common.sh"
program=${1:?the tests program}
out=${2:-$ROOT/build/sanitizer}
command -v compute-sanitizer >/dev/null || fail "compute-sanitizer is not on PATH (it comes with the CUDA toolkit)"
mkdir -p "$out"
# One test of every stage; each runs shapes of a few rows, on the portable kernels and on Hopper's.
filter=${FILTER:-'*DispatchTest.GoldenExample/*:*DispatchTest.RowWeights/*:*RouterTest.Ties*/*:*UpTest.*Accumulates/*:*DownTest.*Accumulates/*:*LayerTest.EveryNumberOfTokensUpTo17/*:*CudaDeviceTest.GraphReplaysWithOtherData/*'}
check() { # TOOL
  local log=$out/$1.log start=$SECONDS outcome=clean code=0
  MOESTRO_TEST_BACKEND=cuda_portable,cuda timeout "${SECONDS_EACH:-240}" compute-sanitizer --tool "$1" \
    --error-exitcode 9 "$program" --gtest_brief=1 --gtest_filter="$filter" >"$log" 2>&1 || code=$?
  [ "$code" -eq 0 ] || outcome="FAILED ($code)"
  say "$(printf '%-10s %-12s %4d s  %s' "$1" "$outcome" $((SECONDS - start)) "$(tail -n 1 "$log")")"
  return "$code"
}

# The four run side by side: each keeps one core busy and the GPU hardly.
status=0
pids=()
for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
  check "$tool" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit "$status"
