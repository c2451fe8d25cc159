#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On a GPU machine without a network: unpacks what bin/gpu-pack made and runs a command beside it, the GPU tests if none is named.
#
#   tests/gpu/run.sh DIR/series                                   pytest tests/gpu with the engine
#   tests/gpu/run.sh DIR/series -- python3 -m fleet.bench ...     anything else with the engine
#   tests/gpu/run.sh --to /tmp/engine --keep-caches "$OUT/caches.tar.xz" DIR/series [-- COMMAND...]
#
# DIR/series may be followed by more folders of the pack (DIR/load-1 ...), the engine's and pairs' pieces may also have been
# unpacked earlier. The command runs from the repository's root; pairs lie in $GPU_HOME/pairs, JIT caches in $GPU_HOME/caches.
# Exit codes: the command's, 2 for misuse, 3 if pieces are missing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
home=/tmp/engine keep=
loads=()
while [ $# -gt 0 ]; do
  case $1 in
    --to) home=${2:?--to needs a folder}; shift 2 ;;
    --keep-caches) keep=${2:?--keep-caches needs a file}; shift 2 ;;
    --) shift; break ;;
    -*) echo "run.sh: unknown option $1" >&2; exit 2 ;;
    *) loads+=("$1"); shift ;;
  esac
done
[ ${#loads[@]} -gt 0 ] || { echo "run.sh: name a folder of the pack, e.g. .pack/series (bin/gpu-pack made it)" >&2; exit 2; }
[ $# -gt 0 ] || set -- python3 -m pytest tests/gpu -q
exports='' code=0
for load in "${loads[@]}"; do
  [ -f "$load/unpack.py" ] || { echo "run.sh: $load has no unpack.py; bin/gpu-pack makes it" >&2; exit 2; }
  code=0
  exports=$(python3 "$load/unpack.py" "$home") || code=$?
done
[ "$code" -eq 0 ] || exit "$code"
eval "$exports"
cd "$root"
export PYTHONUNBUFFERED=1
"$@" || code=$?
if [ -n "$keep" ] && [ -d "$GPU_HOME/caches" ]; then
  tar -C "$GPU_HOME/caches" -cf - . | xz -T0 -1 >"$keep"
  echo "run.sh: JIT caches in $keep, $(stat -c %s "$keep") bytes; bin/gpu-pack --caches takes them along next time" >&2
fi
exit "$code"
