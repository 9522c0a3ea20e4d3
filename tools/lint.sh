#!/usr/bin/env bash
# Checks formatting (C++, CUDA, Python), shell syntax and docs; with --fix formats in place; with --tidy runs
# clang-tidy too, over a build's compile commands (minutes).
source "$(dirname "$0")/common.sh"
tools/setup.sh
bin=$VENV/bin
fix=0
tidy=0
for argument in "$@"; do
  case $argument in
    --fix) fix=1 ;;
    --tidy) tidy=1 ;;
    *) fail "lint.sh takes --fix and --tidy, not $argument" ;;
  esac
done

mapfile -t cpp < <(git ls-files -co --exclude-standard '*.hpp' '*.cpp' '*.cuh' '*.cu')
mapfile -t shell < <(git ls-files -co --exclude-standard '*.sh' .ci/run)
if [ "$fix" -eq 1 ]; then
  "$bin/clang-format" -i "${cpp[@]}"
  "$bin/ruff" check --fix --quiet .
  "$bin/ruff" format --quiet .
  exit
fi

status=0
"$bin/clang-format" --dry-run --Werror "${cpp[@]}" 2>&1 | grep -E '^[^ ]+:[0-9]+:[0-9]+: (error|warning)' | cut -d: -f1 | sort | uniq -c |
  sed 's/^ *\([0-9]*\) \(.*\)/\2: \1 places differ from clang-format (make format)/' | tee "$ROOT/.lint" || true
[ ! -s "$ROOT/.lint" ] || status=1
rm -f "$ROOT/.lint"
"$bin/ruff" check --quiet --output-format concise . || status=1
"$bin/ruff" format --check --output-format concise . || status=1
for script in "${shell[@]}"; do bash -n "$script" || status=1; done
python3 tools/check_docs.py || status=1
if [ "$tidy" -eq 1 ]; then
  command -v clang-tidy >/dev/null || fail "missing package: clang-tidy"
  tools/build.sh
  git ls-files 'src/core/*.cpp' 'src/reference/*.cpp' 'src/cpu/*.cpp' 'cli/*.cpp' |
    xargs -P "$JOBS" -n 1 clang-tidy -p "$BUILD" --quiet || status=1
fi
[ "$status" -eq 0 ] && say "lint: nothing to complain about" || say "lint: failed"
exit $status
