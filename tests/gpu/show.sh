#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The figures of docs/benchmarks.md in one go, on a GPU machine: pairs of 7 B, every arm, ten rounds, soak, negative control.
#
#   tests/gpu/run.sh .pack/series -- tests/gpu/show.sh start /tmp/show [PART...]     begins in the background, returns at once
#   tests/gpu/run.sh .pack/series -- tests/gpu/show.sh wait /tmp/show 570 ["$OUT"]   follows it for so many seconds, then copies logs
#                                                                  and the reports that are ready into the last folder, if one is named
# Exit codes of wait: 0 every part is done and well, 1 one failed or the run was ended, 2 misuse, 4 still running.
#
# Parts, in this order if none is named: ranks (needs two GPUs), dense, hybrid, hybrid16, leak. On an H200 with empty JIT caches hybrid wants
# about 15 minutes by the rounds of run G, hybrid16 and leak some 5 each, dense more than 20. With two GPUs the dense pair takes the first, and all
# others the second, at the same time.
# A machine that is lent command by command keeps what was begun in an earlier one. Reports: DIR/PART; DIR also holds the pairs (13 GB each).
set -euo pipefail
verb=${1:?start or wait} dir=${2:?folder}
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
[ "$verb" = wait ] || [ -n "${GPU_PAIRS_FROM:-}${GPU_HOME:-}" ] || {
  echo "show.sh: no folder of pairs; call it behind tests/gpu/run.sh, or set GPU_PAIRS_FROM" >&2; exit 2; }
pairs=${GPU_PAIRS_FROM:-${GPU_HOME:-}/pairs}
size=(--hidden 6144 --layers 24 --intermediate 8192 --vocab 65536)
new=256

inflate() { # NAME FLAGS..: from the small pair, once
  local name=$1; shift
  [ -d "$dir/$name-7b" ] || python3 models/inflate_pair.py "$pairs/small-$name" "$dir/$name-7b" "${size[@]}" "$@"
}

speed() { # NAME PART ARGUMENTS..: the arms of a pair
  local name=$1 part=$2; shift 2
  python3 -m fleet.bench --pair "$dir/$name-7b" --out "$dir/$part" --new "$new" "$@"
}

dense() {
  inflate dense &&
    speed dense dense --rounds 10 --concurrency 1,4,8,16 --requests 1:6,4:8,8:16,16:16 --arms baseline,dflash:16,ddtree-shadow:15,ddtree:15,ddtree:auto \
    --arm 'ddtree:63=--speculative-ddtree-linear off' --start-wave 2 --timing --soak ddtree:auto
}

# A recurrent state for every slot and request: eight requests are what five arms leave room for.
hybrid() {
  inflate hybrid "${experts[@]}" &&
    speed hybrid hybrid --rounds 10 --concurrency 1,8 --requests 1:6,8:8 --max-running 8 --latency-rounds 1 \
    --arms baseline,dflash:16,ddtree-shadow:15,ddtree:15,ddtree:auto --start-wave 5 --soak ddtree:auto
}

hybrid16() {
  inflate hybrid "${experts[@]}" &&
    speed hybrid hybrid16 --rounds 10 --concurrency 16 --requests 16 --max-running 16 --latency-rounds 0 --arms baseline,dflash:16,ddtree:auto
}

leak() {
  inflate hybrid "${experts[@]}" &&
    speed hybrid leak --concurrency 1 --rounds 2 --count 12 --max-running 1 --latency-rounds 0 --arms baseline \
    --arm 'ddtree:15@leak=--speculative-ddtree-linear off --speculative-ddtree-allow-hybrid-unsafe' --negative ddtree:15@leak
}

ranks() {
  GPU_PAIRS="$pairs/small-dense,$pairs/small-hybrid" GPU_OUT="$dir/ranks" GPU_ALONE=8 GPU_BATCH=16 GPU_NEW=96 \
    python3 -m pytest -q tests/gpu/test_modes.py -k two_ranks -p no:cacheprovider
}

one() { # GPUS PART...: one part after the other; a part that fails does not end the rest
  local failed=0 part
  export CUDA_VISIBLE_DEVICES=$1; shift
  for part in "$@"; do
    "$part" >"$dir/$part.log" 2>&1 || failed=1
  done
  return "$failed"
}

everything() { # PART...
  local failed=0 two='' first=() others=()
  [ "$(nvidia-smi -L | wc -l)" -lt 2 ] || two=yes
  for part in "$@"; do
    case $part in
      ranks) if [ -n "$two" ]; then one 0,1 ranks || failed=1; else echo 'left out: it needs two GPUs' >"$dir/ranks.log"; fi ;;
      dense) first=(dense) ;;
      *) others+=("$part") ;;
    esac
  done
  if [ -n "$two" ]; then
    one 0 "${first[@]}" &
    one 1 "${others[@]}" || failed=1
    wait $! || failed=1
  else
    one 0 "${first[@]}" "${others[@]}" || failed=1
  fi
  echo "$failed" >"$dir/done"
}

known=(ranks dense hybrid hybrid16 leak)
experts=(--moe-intermediate 1024 --shared-intermediate 1024)
cd "$root"
case $verb in
  start)
    [ $# -gt 0 ] || set -- "${known[@]}"
    for part in "$@"; do
      [[ " ${known[*]} " == *" $part "* ]] || { echo "show.sh: no part $part; known: ${known[*]}" >&2; exit 2; }
    done
    mkdir -p "$dir"
    [ ! -e "$dir/begun" ] || { echo "show.sh: $dir was begun already; take another folder" >&2; exit 2; }
    touch "$dir/begun"
    setsid "$0" run "$dir" "$@" </dev/null >"$dir/run.log" 2>&1 &
    ;;
  run)
    echo $$ >"$dir/pid"
    everything "$@"
    ;;
  wait)
    [ -e "$dir/begun" ] || { echo "show.sh: nothing was begun in $dir; call it with start first" >&2; exit 2; }
    state=running
    for ((i = 0; i < ${1:-570}; i++)); do
      # Asked before done is looked for: between the two it may end.
      [ ! -e "$dir/pid" ] || kill -0 "$(cat "$dir/pid")" 2>/dev/null || state=ended
      [ ! -e "$dir/done" ] || { state=whole; break; }
      [ "$state" = running ] || break
      sleep 1
    done
    tail -n 4 "$dir"/*.log
    if [ -n "${2:-}" ]; then
      mkdir -p "$2"
      for name in "$dir"/*.log "${known[@]/#/$dir/}"; do
        [ ! -e "$name" ] || cp -R "$name" "$2"
      done
    fi
    case $state in
      running) echo "show.sh: still running"; exit 4 ;;
      ended) echo "show.sh: it was ended from outside before all parts were done" >&2; exit 1 ;;
    esac
    exit "$(cat "$dir/done")"
    ;;
  *) echo "show.sh: start or wait, got $verb" >&2; exit 2 ;;
esac
