#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A machine without systemd becomes a host of its own: systemd boots over the machine's root, in own mount, process and control
# group namespaces, with the machine's devices and network. What the plays write lands in memory and is gone with it.
#
#   tests/gpu/host.sh up FOLDER SYSTEMD.TAR      boot; returns once it runs (FOLDER: empty, a tmpfs is mounted there)
#   tests/gpu/host.sh run FOLDER COMMAND...      inside, as root; its exit code
#   tests/gpu/host.sh down FOLDER                everything in it ends, the memory is free again
#
# Needs root, unshare, nsenter, overlayfs and cgroup version 2 (mounted for it where the machine has another).
set -euo pipefail
verb=${1:?up, run or down} home=$(realpath -m "${2:?folder}")
root=$home/root

# Units that need hardware, a terminal, the clock or a bus that is not there.
masked=(
  systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-udev-trigger.service
  systemd-networkd.service systemd-networkd.socket systemd-resolved.service systemd-timesyncd.service systemd-logind.service
  systemd-modules-load.service systemd-remount-fs.service systemd-machine-id-commit.service systemd-firstboot.service
  getty.target console-getty.service sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount dev-hugepages.mount
  dev-mqueue.mount systemd-sysctl.service systemd-hwdb-update.service
)

up() { # TAR: outside
  local tar=$1
  [ "$(id -u)" = 0 ] || { echo "host.sh: needs root" >&2; exit 2; }
  [ -f "$tar" ] || { echo "host.sh: $tar is missing; bin/gpu-pack --host makes it, unpack.py unpacks it" >&2; exit 2; }
  [ ! -e "$home/pid" ] || { echo "host.sh: $home is up already; call down first" >&2; exit 2; }
  mkdir -p "$home"
  mount -t tmpfs -o mode=755,size=80% fleet-host "$home"
  mkdir "$home/upper" "$home/work" "$root"
  mount -t overlay -o "lowerdir=/,upperdir=$home/upper,workdir=$home/work" fleet-host "$root"
  # What the machine has stays its own: links of /bin and /lib, libraries, users.
  tar -C "$root" --skip-old-files --keep-directory-symlink -xf "$tar"
  for name in systemd-journal systemd-network; do chroot "$root" getent group $name >/dev/null || chroot "$root" groupadd -r $name; done
  rm -f "$root/etc/machine-id" && : >"$root/etc/machine-id"
  mkdir -p "$root/var/log/journal" "$root/etc/systemd/system" "$root/etc/systemd/journald.conf.d"
  printf '[Journal]\nStorage=persistent\nSystemMaxUse=500M\n' >"$root/etc/systemd/journald.conf.d/10-fleet-host.conf"
  for unit in "${masked[@]}"; do ln -sfn /dev/null "$root/etc/systemd/system/$unit"; done
  ln -sfn /usr/lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
  local groups=/sys/fs/cgroup
  if [ "$(stat -fc %T $groups)" != cgroup2fs ]; then # a machine with version 1: its second hierarchy, without controllers
    groups=$home/cgroup
    mkdir "$groups"
    mount -t cgroup2 cgroup2 "$groups"
  fi
  local controllers
  mapfile -t controllers < <(tr ' ' '\n' <"$groups/cgroup.controllers" | sed '/^$/d') # may be none
  for controller in "${controllers[@]}"; do echo "+$controller" >"$groups/cgroup.subtree_control"; done
  mkdir "$groups/fleet-host"
  echo "$groups/fleet-host" >"$home/group"
  # The namespace of control groups begins where its first process is.
  sh -c "echo \$\$ >'$groups/fleet-host/cgroup.procs'; exec unshare --cgroup --mount --pid --ipc --fork --propagation private \
    '$0' boot '$home'" </dev/null >"$home/console" 2>&1 &
  disown
  local child='' runs=
  for ((i = 0; i < 300; i++)); do
    child=$(pgrep -P $! -x systemd) || child='' # not yet
    if [ -n "$child" ] && inside "$child" systemctl is-system-running 2>/dev/null | grep -Eqx 'running|degraded'; then
      runs=yes
      break
    fi
    kill -0 $! 2>/dev/null || { echo "host.sh: systemd did not start:" >&2; tail -n 20 "$home/console" >&2; exit 1; }
    sleep 0.1
  done
  [ -n "$runs" ] || { echo "host.sh: systemd did not come up in 30 s:" >&2; tail -n 20 "$home/console" >&2; exit 1; }
  echo "$child" >"$home/pid"
  echo "host.sh: systemd $(inside "$child" systemctl --version | sed -n '1s/systemd //p') runs over this machine's root"
}

boot() { # in the new namespaces, becomes their process 1
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  umount --lazy --recursive "$root/sys/fs/cgroup"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  # File systems of the machine that are mounted below its root: drivers, data.
  while read -r _ where kind _; do
    case $where in / | /proc* | /sys* | /dev* | /run* | /tmp | "$home"*) continue ;; esac
    case $kind in overlay | autofs) continue ;; esac
    [ ! -d "$where" ] || [ ! -d "$root$where" ] || mount --rbind "$where" "$root$where"
  done <"/proc/self/mounts"
  chroot "$root" ldconfig # now that the driver's libraries are there
  mount -t tmpfs -o mode=755 tmpfs "$root/run"
  mount -t tmpfs tmpfs "$root/tmp"
  mkdir -p "$root/run/lock" "$root/mnt/machine-tmp"
  mount --rbind /tmp "$root/mnt/machine-tmp"
  exec env -i container=fleet-host PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" /usr/lib/systemd/systemd --system
}

inside() { # PID COMMAND...
  local pid=$1; shift
  nsenter --target "$pid" --mount --pid --ipc --cgroup --root --wdns=/ -- "$@"
}

case $verb in
  up) up "$(realpath -m "${3:?systemd.tar}")" ;;
  boot) boot ;;
  run)
    [ -e "$home/pid" ] || { echo "host.sh: $home is not up" >&2; exit 2; }
    shift 2
    inside "$(cat "$home/pid")" "$@"
    ;;
  down)
    [ ! -e "$home/pid" ] || kill -KILL "$(cat "$home/pid")"
    group=$(cat "$home/group")
    while grep -q "populated 1" "$group/cgroup.events"; do sleep 0.1; done
    find "$group" -depth -type d -exec rmdir {} \;
    umount -R "$home"
    ;;
  *) echo "host.sh: up, run or down, got $verb" >&2; exit 2 ;;
esac
