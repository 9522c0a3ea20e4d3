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

# pool FOLDER LABEL: runs jobs side by side, JOBS of them at a time. A job is two strings on standard input, each
# ended by NUL: its name and a bash command. What it prints goes to FOLDER/LABEL.log in the order in which jobs end;
# name, exit status and seconds of each to FOLDER/LABEL.jobs. Its status: 0 when every job's is 0.
pool() {
  local logs failed
  logs=$(mktemp -d)
  rm -f "$1/$2.log" "$1/$2.jobs"
  cat >"$logs/jobs"
  say "$2: $(($(tr -cd '\0' <"$logs/jobs" | wc -c) / 2)) jobs, $JOBS at a time"
  LOGS=$logs ALL=$1/$2 xargs -0 -n 2 -P "$JOBS" -a "$logs/jobs" bash -c '
    start=$SECONDS status=0 log=$LOGS/$$
    bash -c "$1" >"$log" 2>&1 </dev/null || status=$?
    exec 9>>"$ALL.jobs"
    flock 9
    printf "%s\t%s\t%s\n" "$0" "$status" $((SECONDS - start)) >&9
    { printf "== %s (status %s)\n" "$0" "$status"; cat "$log"; } >>"$ALL.log"
    rm "$log"'
  rm -r "$logs"
  failed=$(awk -F '\t' '$2 != 0' "$1/$2.jobs" | wc -l)
  [ "$failed" -eq 0 ]
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
