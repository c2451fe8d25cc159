# SPDX-License-Identifier: Apache-2.0
"""What a foreign process belongs to, and the command that ends it without ending what gives access to the host. Pure.

A control group's path tells: systemd's services, sessions and users (systemd.io/CGROUP_DELEGATION), and the names that Docker,
Podman, the kubelet's runtimes, LXC and Slurm give to theirs (read 2026-12-01).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ansible.module_utils.gpu_host_rules import Map

# Services that give access to a host, or run other people's programs below themselves: only the process is ended.
_SHARED = re.compile(
    r"(sshd?|dropbear|systemd-.*|user|dbus(-broker)?|(serial-|console-)?getty|NetworkManager|networking|docker|containerd|crio|"
    r"kubelet|k3s.*|rke2.*|libvirtd|virt.*|lxcfs?|lxd|incus|cron|crond|atd|slurmd|salt-minion|tailscaled|wg-quick|openvpn.*)"
    r"(@.*)?\.service\Z"
)
_ID = r"([0-9a-f]{12})[0-9a-f]{52}"


class Owner(NamedTuple):
    """name: how a message calls it, empty where the process stands alone. end: the command in backquotes, with its reason."""

    name: str
    end: str


def owner(process: Map) -> Owner:
    """Of a process with a number: `{pid, unit, cgroup, user}`; an older recording has no cgroup, then its unit stands for it."""
    path, pid = str(process.get("cgroup") or process.get("unit") or ""), process["pid"]
    alone = f"`kill {pid}`"
    found = _container(path, process) or _job(path)
    if found:
        return found
    inner = re.search(
        r"(?:lxc\.payload\.|/lxc/|systemd-nspawn@|machine\.slice/machine-)([^/]+?)(?:\.service|\.scope)?(?:/|\Z)", path
    )
    if inner:  # services below it are its own: this host's systemctl knows none of them
        return Owner(f"container {inner[1]}", alone)
    last = path.rstrip("/").rpartition("/")[2]
    session = re.fullmatch(r"session-\w+\.scope", last)
    if session:
        return Owner(f"login session {session[0]}", f"{alone}, which leaves the login open")
    services = re.findall(r"([^/\s]+\.service)", path)
    if not services:
        return Owner("", alone)
    unit = services[-1]
    if len(services) > 1 and re.match(r"user@\d+\.service", services[0]):
        who = f"{process['user']}@.host" if process.get("user") else f"{services[0][5:-8]}@.host"
        return Owner(unit, f"`systemctl --user --machine={who} stop {unit}`")
    if _SHARED.match(unit):
        return Owner(unit, f"{alone}; the service itself stays")
    return Owner(unit, f"`systemctl stop {unit}`")


def _container(path: str, process: Map) -> Owner | None:
    if "kubepods" in path:
        found = re.search(r"([0-9a-f]{13})[0-9a-f]{51}(?:\.scope)?\Z", path)
        look = f"`crictl ps --id {found[1]}`" if found else "`crictl ps`"
        return Owner(
            "a Kubernetes pod",
            f"{look} names its pod; end that on the cluster with `kubectl delete pod`, and what would start it again",
        )
    found = re.search(rf"(?:docker[-/]){_ID}", path)
    if found:
        return Owner(f"Docker container {found[1]}", f"`docker stop {found[1]}`")
    found = re.search(rf"libpod-(?:conmon-)?{_ID}", path)
    if found:
        user = process.get("user")
        rootless = f"sudo -iu {user} " if "user.slice" in path and user not in (None, "root") else ""
        return Owner(f"Podman container {found[1]}", f"`{rootless}podman stop {found[1]}`")
    return None


def _job(path: str) -> Owner | None:
    found: Any = re.search(r"slurm.*/job_(\d+)", path)
    return Owner(f"Slurm job {found[1]}", f"`scancel {found[1]}`") if found else None
