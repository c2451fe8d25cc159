#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The figures of docs/benchmarks.md in one go, on a GPU machine: two pairs of 7 B, every arm, ten rounds, timers, soak.
#
#   tests/gpu/run.sh .pack/series -- tests/gpu/show.sh start /tmp/show          begins in the background, returns at once
#   tests/gpu/run.sh .pack/series -- tests/gpu/show.sh wait /tmp/show 570       follows it for so many seconds; 0 once all is done
#
# With two GPUs the dense pair takes the first and the hybrid pair the second, at the same time; with one GPU one comes after the other.
# A machine that is lent command by command keeps what was begun in an earlier one. Reports: DIR/dense, DIR/hybrid, DIR/tp2.
set -euo pipefail
verb=${1:?start or wait} dir=${2:?folder} seconds=${3:-570}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
pairs=${GPU_PAIRS_FROM:-$GPU_HOME/pairs}
size=(--hidden 6144 --layers 24 --intermediate 8192 --vocab 65536)
new=256

inflate() { # NAME FLAGS..: from the small pair, once
  local name=$1; shift
  [ -d "$dir/$name-7b" ] || python3 models/inflate_pair.py "$pairs/small-$name" "$dir/$name-7b" "${size[@]}" "$@"
}

speed() { # NAME ARMS..: every arm of a pair
  local name=$1; shift
  python3 -m fleet.bench --pair "$dir/$name-7b" --out "$dir/$name" --new "$new" --rounds 10 --start-wave 2 --timing \
    --soak ddtree:auto "$@"
}

dense() {
  inflate dense
  speed dense --concurrency 1,4,8,16 --requests 1:6,4:8,8:16,16:16 --arms baseline,dflash:16,ddtree-shadow:15,ddtree:15,ddtree:auto \
    --arm 'ddtree:63=--speculative-ddtree-linear off'
}

hybrid() {
  inflate hybrid --moe-intermediate 1024 --shared-intermediate 1024
  # A recurrent state for every slot and request: eight requests are what six arms leave room for.
  speed hybrid --concurrency 1,8 --requests 1:6,8:16 --max-running 8 --arms baseline,dflash:16,ddtree-shadow:15,ddtree:15,ddtree:auto \
    --arm 'ddtree:15@leak=--speculative-ddtree-linear off --speculative-ddtree-allow-hybrid-unsafe' --negative ddtree:15@leak
}

ranks() {
  GPU_PAIRS="$pairs/small-dense,$pairs/small-hybrid" GPU_OUT="$dir/tp2" GPU_ALONE=8 GPU_BATCH=16 GPU_NEW=96 \
    python3 -m pytest -q tests/gpu/test_modes.py -k two_ranks -p no:cacheprovider
}

everything() {
  local failed=0 gpus
  gpus=$(nvidia-smi -L | wc -l)
  if [ "$gpus" -ge 2 ]; then
    ranks >"$dir/tp2.log" 2>&1 || failed=1
    CUDA_VISIBLE_DEVICES=0 dense >"$dir/dense.log" 2>&1 &
    local first=$!
    CUDA_VISIBLE_DEVICES=1 hybrid >"$dir/hybrid.log" 2>&1 || failed=1
    wait "$first" || failed=1
  else
    dense >"$dir/dense.log" 2>&1 || failed=1
    hybrid >"$dir/hybrid.log" 2>&1 || failed=1
  fi
  echo "$failed" >"$dir/done"
}

cd "$root"
case $verb in
  start)
    mkdir -p "$dir"
    [ ! -e "$dir/begun" ] || { echo "show.sh: $dir was begun already; take another folder" >&2; exit 2; }
    touch "$dir/begun"
    setsid "$0" run "$dir" </dev/null >"$dir/run.log" 2>&1 &
    ;;
  run) everything ;;
  wait)
    [ -e "$dir/begun" ] || { echo "show.sh: nothing was begun in $dir; call it with start first" >&2; exit 2; }
    for ((i = 0; i < seconds; i++)); do
      [ ! -e "$dir/done" ] || break
      sleep 1
    done
    tail -n 4 "$dir"/*.log
    [ -e "$dir/done" ] || { echo "show.sh: still running"; exit 4; }
    exit "$(cat "$dir/done")"
    ;;
  *) echo "show.sh: start or wait, got $verb" >&2; exit 2 ;;
esac
