#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The plays and doors against the machine that this runs on (ansible_connection: local), step by step, with a transcript.
#
#   tests/gpu/host.sh run FOLDER tests/gpu/plays.sh OUT VARS.yml [STEP...]
#
# VARS.yml holds the inventory variables of the host. Each step's output lies in OUT/STEP.txt; the first that fails ends it.
# The steps run in a session of their own and go on when the caller goes away; the same call then follows them again, steps.txt has what
# was said. To end them: kill -- -$(cat OUT/pid)
# PLAYS_CONTROL: folder of the control packages (bin/gpu-pack --host); without it, bin/setup.sh makes the usual environment.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
out=${1:?folder for transcripts} vars=$(realpath "${2:?variables of the host}")
shift 2
mkdir -p "$out/bin"
out=$(realpath "$out")
if [ -z "${PLAYS_APART:-}" ]; then
  if [ -e "$out/pid" ] && kill -0 "$(cat "$out/pid")" 2>/dev/null; then
    echo "plays.sh: steps are running in $out already; following them" >&2
  else
    rm -f "$out/code"
    PLAYS_APART=1 setsid "$0" "$out" "$vars" "$@" </dev/null >"$out/steps.txt" 2>&1 &
    echo $! >"$out/pid"
  fi
  tail -n +1 -f --pid="$(cat "$out/pid")" "$out/steps.txt"
  [ -e "$out/code" ] || { echo "plays.sh: the steps were ended from outside" >&2; exit 1; }
  exit "$(cat "$out/code")"
fi
trap 'code=$?; echo "$code" >"$out/code"' EXIT
cd "$root"
if [ -n "${PLAYS_CONTROL:-}" ]; then
  export PYTHONPATH=$PLAYS_CONTROL ANSIBLE_CONFIG=$root/ansible.cfg
  printf '#!/bin/sh\nexec python3 -m ansible playbook "$@"\n' >"$out/bin/ansible-playbook"
  printf '#!/bin/sh\nexec /usr/bin/python3 "$@"\n' >"$out/bin/python"
  chmod +x "$out/bin/"*
  export PATH=$out/bin:$PATH
else
  # shellcheck source=/dev/null
  source bin/setup.sh
fi
export ANSIBLE_NOCOLOR=1 PYTHONUNBUFFERED=1
mkdir -p "$out/inventory/host_vars"
printf 'all:\n  children:\n    gpu_hosts:\n      hosts:\n        here: {ansible_connection: local, ansible_python_interpreter: /usr/bin/python3}\n' \
  >"$out/inventory/hosts.yml"
cp "$vars" "$out/inventory/host_vars/here.yml"
inventory=(-i "$out/inventory/hosts.yml")
read -r name port < <(python -c 'import sys, yaml; i = yaml.safe_load(open(sys.argv[1]))["gpu_units_instances"][0]; print(i["name"], i["port"])' "$vars")
unit=sglang@$name.service

preflight() { python -m fleet.preflight "${inventory[@]}" -l here --json; }
check() { ansible-playbook site.yml "${inventory[@]}" --check --diff; }
site() { ansible-playbook site.yml "${inventory[@]}"; }
again() { ansible-playbook site.yml "${inventory[@]}" | tee "$out/recap" && grep -Eq ' changed=0 .*failed=0' "$out/recap"; }
smoke() { python -m fleet.smoke ddtree "${inventory[@]}" -l here --json; }
asked() { python3 tests/asked.py "http://127.0.0.1:$port"; }
unit() { systemctl show "$unit" -p ActiveState -p Result -p DevicePolicy -p DeviceAllow -p CPUAffinity -p NUMAPolicy && systemctl cat "$unit"; }
journal() { journalctl -u "$unit" --no-pager -o cat; }
security() { systemd-analyze security --no-pager "$unit"; }
memory() { if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=memory.used --format=csv; nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv; fi; }
mode_dflash() { python -m fleet.mode here "$name" dflash "${inventory[@]}"; }
mode_shadow() { python -m fleet.mode here "$name" ddtree-shadow "${inventory[@]}"; }
mode_back() { python -m fleet.mode here "$name" ddtree "${inventory[@]}"; }
killed() { # the engine dies under systemd: it comes back by itself
  local before
  before=$(systemctl show -P MainPID "$unit")
  kill -KILL "$before"
  timeout 300 sh -c "until [ \"\$(systemctl show -P MainPID '$unit')\" != $before ] && systemctl is-active -q '$unit'; do sleep 0.5; done"
  smoke
}
stop() { systemctl stop "$unit"; systemctl show "$unit" -p ActiveState -p Result; memory; }

steps=(preflight check site again smoke asked unit security memory mode_dflash mode_shadow mode_back killed journal stop)
[ $# -eq 0 ] || steps=("$@")
for step in "${steps[@]}"; do
  began=$(date +%s)
  code=0
  "$step" >"$out/$step.txt" 2>&1 </dev/null || code=$?
  printf '%-12s exit %d  %4d s\n' "$step" "$code" $(($(date +%s) - began))
  if [ "$code" -ne 0 ]; then
    tail -n 40 "$out/$step.txt"
    exit "$code"
  fi
done
