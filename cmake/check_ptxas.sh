#!/bin/sh
# Runs a compilation and fails it when ptxas reports what makes a wgmma kernel slow: accumulators that spill
# to memory, or matrix instructions that wait for each other.
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
grep -v -E '^ptxas info +: (Compiling|Used|Function properties|[0-9]+ bytes gmem|Overriding|Compile time)|^ +0 bytes stack|^$' "$log" >&2
if grep -q -E 'wgmma.*serialized|warpgroup.*injected|[1-9][0-9]* bytes spill|setmaxnreg.*ignored' "$log"; then
  echo "error: ptxas reports spills or serialized wgmma (above)" >&2
  exit 1
fi
exit $status
