#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the C++ suites on the CUDA backend, the sanitizers, the benchmarks,
# and the Python suite on cuda where the torch operators are built. Logs and results go to one folder.
#   tools/gpu_round.sh [OUT_FOLDER]
# Environment: BIN (folder with moestro_tests and moestro_stage_bench; built into build-cuda when not given),
# STEPS (default "tests sanitize bench python"), JOBS, PYTHON, MOESTRO_LIBRARY (the torch operators; build/'s
# when not given).
source "$(dirname "$0")/common.sh"
out=${1:-$ROOT/build/gpu-round}
steps=${STEPS:-tests sanitize bench python}
mkdir -p "$out"
nvidia-smi -L >/dev/null 2>&1 || fail "no NVIDIA GPU here (nvidia-smi -L fails)"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/gpu.txt"

if [ -z "${BIN:-}" ]; then
  cuda_build=$ROOT/build-cuda
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  [ "$architecture" != 90 ] || architecture=90a
  say "build: $cuda_build (sm_$architecture)"
  quietly cuda-configure cmake --preset cuda "-DMOESTRO_CUDA_ARCHITECTURES=$architecture-real" ||
    fail "CMake could not configure the build"
  cmake --build "$cuda_build" -j "$JOBS" --target moestro_tests moestro_stage_bench || fail "the build failed"
  BIN=$out/bin
  mkdir -p "$BIN"
  cp "$cuda_build/tests/moestro_tests" "$cuda_build/bench/moestro_stage_bench" "$BIN"
fi

failed=0
wants() { [[ " $steps " == *" $1 "* ]]; }

if wants tests; then
  start=$SECONDS
  shards=$((JOBS > 12 ? 12 : JOBS))
  pids=()
  for ((shard = 0; shard < shards; ++shard)); do
    MOESTRO_TEST_BACKEND=cuda,cuda_portable GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
      timeout "${TEST_SECONDS:-400}" "$BIN/moestro_tests" --gtest_brief=1 >"$out/tests.$shard.log" 2>&1 &
    pids+=($!)
  done
  broken=0
  for pid in "${pids[@]}"; do wait "$pid" || broken=$((broken + 1)); done
  cat "$out"/tests.[0-9]*.log >"$out/tests.log"
  rm "$out"/tests.[0-9]*.log
  say "tests: $(grep -Eo '^\[  PASSED  \] [0-9]+' "$out/tests.log" | awk '{n += $4} END {print n + 0}') passed," \
    "$broken of $shards shards failed, $((SECONDS - start)) s"
  grep -E '^\[  FAILED  \] .*/' "$out/tests.log" | sed 's/ (.*//' | sort -u || true
  [ "$broken" -eq 0 ] || failed=1
fi

if wants sanitize; then
  tools/sanitize.sh "$BIN/moestro_tests" "$out/sanitizer" || failed=1
fi

if wants bench; then
  {
    printf '{"bench":"environment","gpu":"%s","commit":"%s","date":"%s"}\n' "$(head -n 1 "$out/gpu.txt")" \
      "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" "$(date -u +%Y-%m-%d)"
    "$BIN/moestro_stage_bench" --path portable --only router,dispatch,stages,layer &&
      "$BIN/moestro_stage_bench" --path auto --only stages,layer,host
  } >"$out/bench.jsonl" || failed=1
  say "bench: $out/bench.jsonl ($(wc -l <"$out/bench.jsonl") lines)"
fi

if wants python; then
  if [ -z "${MOESTRO_LIBRARY:-}" ] && [ -f "$BUILD/python/csrc/libmoestro_torch.so" ]; then use_built_package; fi
  python=${PYTHON:-$VENV/bin/python}
  if [ -n "${MOESTRO_LIBRARY:-}" ]; then
    MOESTRO_TEST_DEVICE=cuda "$python" -m pytest -q tests/python >"$out/python.log" 2>&1 || failed=1
    say "python: $(tail -n 1 "$out/python.log")"
  else
    say "python: not run (the torch operators are not built here: CUDA=ON make build)"
  fi
fi
exit "$failed"
