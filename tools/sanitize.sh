#!/usr/bin/env bash
# The CUDA tests on small shapes under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.
#   tools/sanitize.sh TESTS_PROGRAM [OUT_FOLDER]
# Environment: TOOLS (default all four), SECONDS_EACH (limit of one job, default 240), FILTER (of the tests, all in one
# job a tool), JOBS (side by side: each keeps one core busy and the GPU hardly).
source "$(dirname "$0")/common.sh"
program=$(realpath "${1:?the tests program}")
out=${2:-$ROOT/build/sanitizer}
command -v compute-sanitizer >/dev/null || fail "compute-sanitizer is not on PATH (it comes with the CUDA toolkit)"
mkdir -p "$out"

# Every kernel at least once, at shapes of a few rows; a line is a job. Hopper's kernels come as layers of a few tiles.
groups='*DispatchTest.GoldenExample/*:*DispatchTest.RowWeights/*:*DispatchTest.Ragged*/*
*RouterTest.Ties*/*:*RouterTest.TopP*/*:*RouterTest.GivenIds*/*
*RouterTest.SixteenBit*/cuda
*RouterTest.GroupTies*/cuda:*RoundingTest.FewTokens/cuda
*CombineTest.*/cuda:*ActivationTest.ClampStopsTheGradient/cuda
*UpTest.*Accumulates/*:*DownTest.*Accumulates/*:*LayerTest.EveryNumberOfTokensUpTo17/*
*CudaDeviceTest.GraphReplaysWithOtherData/cuda_portable'
# Too many launches for racecheck.
more_groups='*DispatchTest.EqualsStableSort*/*:*DispatchTest.ManyTokens/*:*RouterTest.WeightsAndGradients/*
*RouterTest.GroupsLimit*/cuda:*RoundingTest.AgreesWithTheReference/cuda'
small=$("$program" --gtest_list_tests --gtest_filter='*HopperSmallTest*' |
  sed -n 's/^  \([^ ]*\).*/*HopperSmallTest.\1/p')
jobs_of() { # TOOL
  local filter
  # racecheck takes seconds over each of Hopper's layers, the others over all of them.
  if [ -n "${FILTER:-}" ]; then echo "$FILTER"
  elif [ "$1" = racecheck ]; then printf '%s\n' "$small" "$groups"
  else printf '%s\n' '*HopperSmallTest*' "$groups" "$more_groups"; fi | while read -r filter; do
    printf '%s\0' "$1 $filter" "MOESTRO_TEST_BACKEND=cuda,cuda_portable timeout ${SECONDS_EACH:-240} \
      compute-sanitizer --tool $1 --error-exitcode 9 '$program' --gtest_brief=1 --gtest_filter='$filter' |
      awk '{ print } /^\[  (PASSED|SKIPPED) +\] [1-9]/ { ran = 1 } END { exit !ran }'
      codes=(\${PIPESTATUS[@]})
      exit \$((codes[0] ? codes[0] : codes[1]))"
  done
}
for tool in ${TOOLS:-memcheck synccheck initcheck racecheck}; do jobs_of "$tool"; done | pool "$out" sanitize || true

status=0
for tool in ${TOOLS:-memcheck synccheck initcheck racecheck}; do
  say "$(awk -F '\t' -v tool="$tool" '
    index($1, tool " ") == 1 { ++jobs; if ($2 != 0) { ++failed; names = names "\n  " $1 " (status " $2 ")" }
                               seconds += $3; if ($3 > longest) longest = $3 }
    END { printf "%-10s %d jobs, %d failed, %d s of work, the longest %d s%s", tool, jobs, failed, seconds, longest, names }
  ' "$out/sanitize.jobs")"
done
awk -F '\t' '$2 != 0 { bad = 1 } END { exit bad }' "$out/sanitize.jobs" || status=1
exit "$status"
