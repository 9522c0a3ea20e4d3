#!/usr/bin/env bash
# Everything that needs a GPU, in one go: builds what is missing, then the C++ suites on the CUDA backend (as the plans
# choose; portable kernels; Hopper's forced, where there are some), the Python suite on cuda, the sanitizers, a short
# training run, the benchmarks and the peers. Logs and results go to one folder.
#   tools/gpu_round.sh [OUT_FOLDER]
# Environment:
#   STEPS            which (default "tests python sanitize train bench peers")
#   BIN              folder with moestro_tests, moestro_stage_bench and libmoestro_torch.so (its .json beside it) that
#                    were built elsewhere; without it they are built into build-cuda
#   PYTHON           interpreter that has torch (default: .venv's, else python3)
#   SHAPES           of the peers step (default "7B-n256 30B-n1024 olmoe"); PEERS of it (default: all that import)
#   TEST_FILTER      of the C++ suites (default: all)
#   PYTHON_TESTS     files of the python step (default: tests/python/test_*.py)
#   JOBS             compilers at a time (default: a core each)
#   MPS              1: the suites run under an MPS server of the round's own, 0: not (default: 1 where one can be started)
#   GPU_JOBS         tests at a time (default 6, under MPS 14: without it processes get the GPU in turns)
#   COMMIT           written into the results (default: git's)
#   STEP_SECONDS     limit of one test, file or step (default 900)
source "$(dirname "$0")/common.sh"
out=${1:-$ROOT/build/gpu-round}
steps=${STEPS:-tests python sanitize train bench peers}
limit=${STEP_SECONDS:-900}
wants() { [[ " $steps " == *" $1 "* ]]; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
nvidia-smi -L >/dev/null 2>&1 || fail "no NVIDIA GPU here (nvidia-smi -L fails)"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
compute_capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
say "$gpu, commit $commit" | tee "$out/summary.txt"
note() { say "$*" | tee -a "$out/summary.txt"; }

if [ -z "${BIN:-}" ]; then
  cuda_build=$ROOT/build-cuda
  tools/setup.sh
  architecture=${compute_capability/./}
  [ "$architecture" != 90 ] || architecture=90a
  say "build: $cuda_build (sm_$architecture)"
  quietly cuda-configure cmake --preset cuda "-DMOESTRO_CUDA_ARCHITECTURES=$architecture-real" -DMOESTRO_TORCH=ON \
    "-DPython_EXECUTABLE=$VENV/bin/python" || fail "CMake could not configure the build"
  cmake --build "$cuda_build" -j "$JOBS" --target moestro_tests moestro_stage_bench moestro_torch ||
    fail "the build failed"
  BIN=$out/bin
  mkdir -p "$BIN"
  cp "$cuda_build/tests/moestro_tests" "$cuda_build/bench/moestro_stage_bench" \
    "$cuda_build"/python/csrc/libmoestro_torch.{so,json} "$BIN"
fi
BIN=$(cd "$BIN" && pwd)
if [ -z "${PYTHON:-}" ]; then PYTHON=$VENV/bin/python && [ -x "$PYTHON" ] || PYTHON=python3; fi
export MOESTRO_LIBRARY=$BIN/libmoestro_torch.so
export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
if wants python || wants train || wants bench || wants peers; then
  "$PYTHON" -c 'import moestro' || fail "$PYTHON cannot import moestro over $MOESTRO_LIBRARY"
fi

# MPS serves processes that share the GPU together; without it they get it in turns, and each small copy waits for all.
stop_mps() {
  [ "$mps" -eq 1 ] || return 0
  echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1 || true
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  mps=0
  trap - EXIT
}
cores=$JOBS
mps=0
if { wants tests || wants python; } && [ "${MPS:-1}" = 1 ] && command -v nvidia-cuda-mps-control >/dev/null; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  mps=1
  trap stop_mps EXIT
  { timeout 20 nvidia-cuda-mps-control -d && MOESTRO_TEST_BACKEND=cuda timeout 60 "$BIN/moestro_tests" \
    --gtest_filter='*CombineTest.*'; } >"$out/mps.log" 2>&1 || stop_mps
  note "$([ "$mps" -eq 1 ] && echo "the suites run under an MPS server" || echo "no MPS server could be used")"
fi
JOBS=${GPU_JOBS:-$((mps == 0 || cores < 6 ? 6 : cores < 14 ? cores : 14))}

failed=0
# outcome STEP START: how many tests passed by STEP.log, which did not, and which jobs of STEP.jobs did not end well.
outcome() {
  note "$1: $(grep -Eo '^\[  PASSED  \] [0-9]+|[0-9]+ passed' "$out/$1.log" | grep -Eo '[0-9]+' |
    awk '{n += $1} END {print n + 0}') passed, $((SECONDS - $2)) s"
  {
    awk -F '\t' '$2 != 0 {print "  " $1 ": status " $2 " after " $3 " s"}' "$out/$1.jobs"
    { grep -E '^\[  FAILED  \] .*, where|^(FAILED|ERROR) ' "$out/$1.log" || true; } |
      sed 's/, where.*//; s/ - .*//; s/^/  /' | sort -u
  } | tee -a "$out/summary.txt"
}

# Jobs of the tests step: the suites on one backend, in parts, since a process takes a second or two to start.
tests_of() { # LABEL ENVIRONMENT FILTER
  local parts=12 part
  for ((part = 0; part < parts; ++part)); do
    printf '%s\0' "$1, part $part of $parts" \
      "$2 GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$part MOESTRO_PROPERTY_COUNT=${MOESTRO_PROPERTY_COUNT:-500} \
        timeout $limit '$BIN/moestro_tests' --gtest_filter='$3'"
  done
}
if wants tests; then
  start=$SECONDS
  {
    tests_of cuda MOESTRO_TEST_BACKEND=cuda "${TEST_FILTER:-*}"
    tests_of cuda_portable MOESTRO_TEST_BACKEND=cuda_portable "${TEST_FILTER:-Backend/*}"
    [ "$compute_capability" != 9.0 ] ||
      tests_of "Hopper forced" "MOESTRO_PATH=hopper MOESTRO_TEST_BACKEND=cuda" "${TEST_FILTER:-Backend/*}"
  } | pool "$out" tests || failed=1
  outcome tests "$start"
fi

if wants python; then
  start=$SECONDS
  for file in ${PYTHON_TESTS:-tests/python/test_*.py}; do
    printf '%s\0' "$file" \
      "MOESTRO_TEST_DEVICE=cuda OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} timeout $limit '$PYTHON' -m pytest -q -p no:cacheprovider '$file'"
  done | pool "$out" python || failed=1
  outcome python "$start"
fi

stop_mps
if wants sanitize; then
  JOBS=${GPU_JOBS:-6} SECONDS_EACH=${SECONDS_EACH:-$limit} tools/sanitize.sh "$BIN/moestro_tests" "$out" | tee -a "$out/summary.txt" || failed=1
fi

if wants train; then
  start=$SECONDS
  timeout "$limit" "$PYTHON" -m moestro.train --preset tiny --steps 60 --device cuda --out "$out/runs" \
    >"$out/train.log" 2>&1 || failed=1
  note "train: $(grep -E '^step ' "$out/train.log" | tail -n 1), $((SECONDS - start)) s"
fi

if wants bench; then
  {
    printf '{"bench":"environment","gpu":"%s","commit":"%s","date":"%s"}\n' "$gpu" "$commit" "$(date -u +%Y-%m-%d)"
    timeout "$limit" "$BIN/moestro_stage_bench" --path portable --only router,dispatch,stages,layer &&
      timeout "$limit" "$BIN/moestro_stage_bench" --path auto --only stages,layer,host &&
      timeout "$limit" "$PYTHON" bench/host_time.py
  } >"$out/bench.jsonl" || failed=1
  note "bench: $out/bench.jsonl ($(wc -l <"$out/bench.jsonl") lines)"
fi

if wants peers; then
  arguments=()
  for shape in ${SHAPES:-7B-n256 30B-n1024 olmoe}; do arguments+=(--shape "$shape"); done
  for peer in ${PEERS:-}; do arguments+=(--peer "$peer"); done
  timeout "$limit" "$PYTHON" bench/peers "${arguments[@]}" --commit "$commit" --out "$out/peers.jsonl" \
    >"$out/peers.log" 2>&1 || failed=1
  tail -n 40 "$out/peers.log"
fi
note "$([ "$failed" -eq 0 ] && echo "all steps ended well" || echo "some steps FAILED")"
exit "$failed"
