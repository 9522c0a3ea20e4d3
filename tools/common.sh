# Shared by the scripts beside it: source it first.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

VENV=$ROOT/.venv
BUILD=${BUILD:-$ROOT/build}
# The Python package is used from its source folder, over the operators of this build.
export MOESTRO_LIBRARY=$BUILD/python/csrc/libmoestro_torch.so
LOGS=$ROOT/build/logs
JOBS=${JOBS:-$(nproc)}

# The Python package of this checkout over the operators of its build.
use_built_package() {
  export MOESTRO_LIBRARY=$BUILD/python/csrc/libmoestro_torch.so
  export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
}

say() { printf '%s\n' "$*"; }
fail() {
  printf 'moestro: %s\n' "$*" >&2
  exit 1
}

# quietly LABEL COMMAND…: runs COMMAND with its output in a log, says how long it has been at work, and
# on failure shows the log's end and returns the command's status.
quietly() {
  local label=$1 log start pid status=0
  shift
  mkdir -p "$LOGS"
  log=$LOGS/${label//[^a-zA-Z0-9]/-}.log
  start=$SECONDS
  "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    if (((SECONDS - start) >= 15 && (SECONDS - start) % 15 == 0)) && [ "${last:-}" != "$SECONDS" ]; then
      last=$SECONDS
      say "      … $label: $((SECONDS - start)) s so far"
    fi
  done
  wait "$pid" || status=$?
  if [ "$status" -ne 0 ]; then
    tail -n 15 "$log" >&2
    say "      (the whole output is in ${log#"$ROOT"/})" >&2
  fi
  return "$status"
}
