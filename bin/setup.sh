# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by every door in bin/: makes the control environment and puts it on PATH.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
#   exec python -m fleet.smoke "$@"
#
# Sets fleet_root (the repository), PATH (.venv first), ANSIBLE_CONFIG, UV_CACHE_DIR. The environment is keyed by the
# locks, so a warm call only hashes two files. Callers at the same time wait for one another on .venv.lock.

fleet_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export UV_CACHE_DIR=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-$fleet_root}/.cache}/sglang-fleet/uv}
export ANSIBLE_CONFIG=$fleet_root/ansible.cfg

fleet_say() { printf '[setup] %s\n' "$*" >&2; }
fleet_die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# Installs the Debian packages whose command or file is missing; a call with nothing missing starts no process.
fleet_apt() {
  local need=() sudo=()
  command -v python3 >/dev/null || need+=(python3)
  command -v ssh >/dev/null || need+=(openssh-client)
  [ -e /etc/ssl/certs/ca-certificates.crt ] || need+=(ca-certificates)
  if command -v python3 >/dev/null && ! python3 -c 'import ensurepip, venv' 2>/dev/null; then need+=(python3-venv); fi
  [[ " ${need[*]-} " == *" python3 "* ]] && need+=(python3-venv)
  [ ${#need[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || fleet_die "missing: ${need[*]}; this is no Debian or Ubuntu, install them yourself and run again"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fleet_die "missing: ${need[*]}; install them as root (apt-get install ${need[*]}) and run again"
    sudo=(sudo)
  fi
  fleet_say "apt-get install ${need[*]}"
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
  if ! { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends -y "${need[@]}"; } >&2 </dev/null; then
    fleet_die "apt-get could not install ${need[*]}; see its message above"
  fi
}

# Prints the first Python of the supported versions that can make a virtual environment.
fleet_python() {
  local py
  for py in python3 python3.13 python3.12 python3.11; do
    if "$py" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$py"
      return
    fi
  done
  fleet_die "needs Python 3.11, 3.12 or 3.13 with venv, found $(python3 --version 2>&1); install e.g. python3.11 and python3.11-venv"
}

fleet_make_venv() {
  local venv=$fleet_root/.venv py
  if [ -L "$venv" ]; then
    fleet_die "$venv is a link: remaking it would empty another copy's environment; remove the link and try again"
  fi
  fleet_apt
  if ! "$venv/bin/python" -c 'import pip' 2>/dev/null || [ "$(cat "$venv/.root" 2>/dev/null)" != "$fleet_root" ]; then
    py=$(fleet_python) || exit 2
    fleet_say "new control environment in .venv with $("$py" --version)"
    "$py" -m venv --clear "$venv" >&2
    printf '%s' "$fleet_root" >"$venv/.root"
  fi
  fleet_say "installing the locked control environment"
  local locks=$fleet_root/requirements hint="could not be installed from its lock; see the message above"
  "$venv/bin/python" -m pip --disable-pip-version-check install -q --require-hashes --no-deps -r "$locks/uv.txt" >&2 ||
    fleet_die "uv $hint"
  VIRTUAL_ENV=$venv "$venv/bin/uv" pip install -q --require-hashes -r "$locks/control.txt" -r "$locks/uv.txt" >&2 ||
    fleet_die "the control environment $hint"
  # `python -m fleet.X` works from any folder, without PYTHONPATH leaking into engines and hosts.
  printf '%s\n' "$fleet_root" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_fleet.pth"
}

fleet_setup() {
  local stamp=$fleet_root/.venv/.stamp want
  want=$(cat "$fleet_root"/requirements/{control,uv}.txt "${BASH_SOURCE[0]}" | sha256sum)" $fleet_root"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    command -v flock >/dev/null || fleet_die "flock is missing; install util-linux"
    # The lock ends with the subshell, so no child of a door can hold it.
    (
      flock 9
      if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        fleet_make_venv 9>&-
        printf '%s' "$want" >"$stamp"
      fi
    ) 9>"$fleet_root/.venv.lock" || exit 2
  fi
  export VIRTUAL_ENV=$fleet_root/.venv PATH=$fleet_root/.venv/bin:$PATH
  unset PYTHONHOME
  # Ansible refuses a locale that is not UTF-8.
  [ "$(locale charmap 2>/dev/null)" = UTF-8 ] || export LC_ALL=C.UTF-8
}

fleet_setup
