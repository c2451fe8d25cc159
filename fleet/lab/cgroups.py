# SPDX-License-Identifier: Apache-2.0
"""One control group per host, in every hierarchy the machine has.

Without an own group two hosts share one and spoil each other's process lists. The group also says which processes
belong to a host, so nothing depends on pid files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from fleet.lab.shell import LabError, until

PARENT = "fleet-lab"
_V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids")


@dataclass(frozen=True)
class Layout:
    """The machine's hierarchies. `unified`: version 2 only. `tracking` is the one that names processes for systemd."""

    unified: bool
    roots: tuple[Path, ...]
    tracking: Path
    memory: Path | None
    cpusets: tuple[Path, ...]

    def groups(self, lab: str, host: str) -> list[Path]:
        return [root / PARENT / lab / host for root in self.roots]


def detect(mountinfo: str) -> Layout:
    """Layout from the text of /proc/self/mountinfo. LabError if there is no hierarchy that systemd could use.

    v1 and hybrid: each mount is one hierarchy. v2 only: one tree whose controllers have to be handed down.
    """
    v1: dict[Path, set[str]] = {}
    v2: list[Path] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if not right:
            continue
        fields, (fstype, _, options) = left.split(), right.split(" ", 2)
        # A bind of a part of a hierarchy, as containers show it, is no root to work in.
        if fields[3] != "/" or not fields[4].startswith("/sys/fs/cgroup"):
            continue
        if fstype == "cgroup2" and Path(fields[4]) not in v2:
            v2.append(Path(fields[4]))
        elif fstype == "cgroup":
            v1[Path(fields[4])] = set(options.split(","))
    if not v1 and v2:
        return Layout(True, (v2[0],), v2[0], v2[0], ())
    named = [p for p, o in v1.items() if "name=systemd" in o]
    if not named:
        raise LabError(
            "no control group hierarchy for systemd under /sys/fs/cgroup: expected cgroup2 there, or v1 with name=systemd; "
            "mount one (mount -t cgroup2 none /sys/fs/cgroup) or use a machine that boots with systemd"
        )
    return Layout(
        False,
        (*v1, *v2),
        named[0],
        next((p for p, o in v1.items() if "memory" in o), None),
        tuple(p for p, o in v1.items() if "cpuset" in o),
    )


def machine_layout() -> Layout:
    return detect(Path("/proc/self/mountinfo").read_text())


def create(layout: Layout, lab: str, host: str, memory: int | None) -> None:
    """Make the groups of a host, repeatable. `memory` in bytes limits the whole host."""
    for root in layout.roots:
        group = root
        for part in (PARENT, lab, host):
            if layout.unified:
                _hand_down(group)
            group = group / part
            group.mkdir(exist_ok=True)
            if root in layout.cpusets:  # a v1 cpuset takes no process before both are filled
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if not (group / name).read_text().strip():
                        (group / name).write_text((group.parent / name).read_text())
    _limit_memory(layout, layout.memory / PARENT / lab / host if layout.memory else None, host, memory)


def _limit_memory(layout: Layout, group: Path | None, host: str, memory: int | None) -> None:
    """Set the limit of a whole host. Without a memory controller only a host without a limit is possible."""
    limit = group / ("memory.max" if layout.unified else "memory.limit_in_bytes") if group else None
    if not group or not limit or not limit.exists():
        if memory:
            raise LabError(f"{host}: --memory needs the memory controller, which this machine's kernel does not offer")
        return
    if not layout.unified:
        with contextlib.suppress(OSError):  # kernels that always account hierarchically refuse or lack it
            (group / "memory.use_hierarchy").write_text("1")
    limit.write_text(str(memory or ("max" if layout.unified else -1)))


def _hand_down(group: Path) -> None:
    """v2: let the children of a group use what it has. The groups above a host hold no process, so this is allowed."""
    have = (group / "cgroup.controllers").read_text().split()
    for controller in _V2_CONTROLLERS:
        if controller in have:
            (group / "cgroup.subtree_control").write_text(f"+{controller}")


def processes(layout: Layout, lab: str, host: str) -> list[int]:
    """Every live process of a host, nspawn itself among them."""
    pids: set[int] = set()
    for folder, _, files in os.walk(layout.tracking / PARENT / lab / host):
        if "cgroup.procs" in files:
            with contextlib.suppress(OSError):  # a group may go while we look
                pids.update(int(p) for p in (Path(folder) / "cgroup.procs").read_text().split())
    return sorted(p for p in pids if p and _alive(p))


def _alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def leader(layout: Layout, lab: str, host: str) -> int | None:
    """The host's PID 1 as this machine numbers it; None if it is not running."""
    for pid in processes(layout, lab, host):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    inside = line.split()[1:]
                    if len(inside) == 2 and inside[1] == "1":
                        return pid
    return None


def supervised(layout: Layout, lab: str, host: str) -> bool:
    """Whether the nspawn of a host is there. If it was killed, its PID 1 lives on and holds disk and network."""
    for pid in processes(layout, lab, host):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (Path("/proc") / str(pid) / "comm").read_text().strip() == "systemd-nspawn":
                return True
    return False


def kill_all(layout: Layout, lab: str, host: str, seconds: float = 10) -> None:
    """Kill every process of a host, as often as new ones appear. LabError if some can't be killed."""

    def done() -> bool:
        pids = processes(layout, lab, host)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    if not until(done, seconds):
        raise LabError(
            f"{host}: processes {processes(layout, lab, host)} do not die; look at them with ps, then run down again"
        )


def memory_used(layout: Layout, lab: str, host: str) -> int | None:
    """Bytes the host uses now, page cache included."""
    if not layout.memory:
        return None
    name = "memory.current" if layout.unified else "memory.usage_in_bytes"
    try:
        return int((layout.memory / PARENT / lab / host / name).read_text())
    except FileNotFoundError:
        return None


def hosts_of(layout: Layout, lab: str) -> list[str]:
    """Hosts that have a group in any hierarchy."""
    found = {p.name for root in layout.roots for p in (root / PARENT / lab).glob("*/")}
    return sorted(found)


def remove(layout: Layout, lab: str, host: str | None = None) -> list[Path]:
    """Remove the groups of a host, or of a lab with no host given; returns what could not be removed."""
    left = []
    for root in layout.roots:
        top = root / PARENT / lab / host if host else root / PARENT / lab

        def gone(top: Path = top) -> bool:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # a dying process keeps a group for some milliseconds
                    Path(folder).rmdir()
            return not top.exists()

        if not until(gone, 5):
            left.append(top)
        if not host:
            try:
                (root / PARENT).rmdir()
            except OSError as e:  # another lab is there, or nothing is
                if e.errno not in (errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY):
                    raise
    return left
