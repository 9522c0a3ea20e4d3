#!/usr/bin/env bash
# Everything that needs a GPU, in one go: builds what is missing, then the C++ suites on the CUDA backend, the Python
# suite on cuda, the sanitizers, a short training run, the benchmarks and the peers. Logs and results go to one folder.
#   tools/gpu_round.sh [OUT_FOLDER]
# Environment:
#   STEPS            which (default "tests python sanitize train bench peers")
#   BIN              folder with moestro_tests, moestro_stage_bench and libmoestro_torch.so (its .json beside it) that
#                    were built elsewhere; without it they are built into build-cuda
#   PYTHON           interpreter that has torch (default: .venv's, else python3)
#   SHAPES           of the peers step (default "7B-n256 30B-n1024 olmoe"); PEERS of it (default: all that import)
#   TEST_FILTER      of the C++ suites (default: all); SHARDS of them that run side by side (default: JOBS, at most 12)
#   PYTHON_TESTS     files of the python step (default: tests/python/test_*.py)
#   STEP_SECONDS     limit of one step (default 900)
source "$(dirname "$0")/common.sh"
out=${1:-$ROOT/build/gpu-round}
steps=${STEPS:-tests python sanitize train bench peers}
limit=${STEP_SECONDS:-900}
wants() { [[ " $steps " == *" $1 "* ]]; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
nvidia-smi -L >/dev/null 2>&1 || fail "no NVIDIA GPU here (nvidia-smi -L fails)"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
say "$gpu, commit $commit" | tee "$out/summary.txt"
note() { say "$*" | tee -a "$out/summary.txt"; }

if [ -z "${BIN:-}" ]; then
  cuda_build=$ROOT/build-cuda
  tools/setup.sh
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
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

failed=0
# finish STEP START: waits for the step's jobs, joins their logs (STEP.*.log) into STEP.log, and says how many failed.
pids=()
finish() {
  local step=$1 start=$2 broken=0 pid passed
  for pid in "${pids[@]}"; do wait "$pid" || broken=$((broken + 1)); done
  cat "$out/$step".*.log >"$out/$step.log"
  rm "$out/$step".*.log
  [ "$broken" -eq 0 ] || failed=1
  # Of gtest's and pytest's logs: how many tests passed, and the names of those that did not.
  passed=$(grep -Eo '^\[  PASSED  \] [0-9]+|[0-9]+ passed' "$out/$step.log" | grep -Eo '[0-9]+' |
    awk '{n += $1} END {print n + 0}' || true)
  note "$step: $passed passed, $broken of ${#pids[@]} runs failed, $((SECONDS - start)) s"
  note "$(grep -E '^\[  FAILED  \] .*/|^(FAILED|ERROR) ' "$out/$step.log" | sed 's/ (.*//; s/,.*//; s/^/  /' | sort -u |
    head -n 20 || true)"
  pids=()
}

if wants tests; then
  start=$SECONDS
  shards=${SHARDS:-$((JOBS > 12 ? 12 : JOBS))}
  for ((shard = 0; shard < shards; ++shard)); do
    MOESTRO_TEST_BACKEND=cuda,cuda_portable GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
      timeout "$limit" "$BIN/moestro_tests" --gtest_brief=1 ${TEST_FILTER:+"--gtest_filter=$TEST_FILTER"} \
      >"$out/tests.$shard.log" 2>&1 &
    pids+=($!)
  done
  finish tests "$start"
fi

if wants python; then
  start=$SECONDS
  for file in ${PYTHON_TESTS:-tests/python/test_*.py}; do
    MOESTRO_TEST_DEVICE=cuda timeout "$limit" "$PYTHON" -m pytest -q -p no:cacheprovider "$file" \
      >"$out/python.$(basename "$file" .py).log" 2>&1 &
    pids+=($!)
  done
  finish python "$start"
fi

if wants sanitize; then
  SECONDS_EACH=${SECONDS_EACH:-$limit} tools/sanitize.sh "$BIN/moestro_tests" "$out/sanitizer" | tee -a "$out/summary.txt" ||
    failed=1
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
