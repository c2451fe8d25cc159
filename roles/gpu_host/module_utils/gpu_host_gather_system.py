# SPDX-License-Identifier: Apache-2.0
"""The system around the kernel: distribution, systemd, memory nodes, limits, the clock, Secure Boot."""

from __future__ import annotations

import ctypes
import os
import platform
import pwd
import re
import sys
import time
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts, read, run, table, which, whole

UNSYNCHRONIZED = 0x40  # STA_UNSYNC of <sys/timex.h>
CLOCK_SERVICES = {
    "chronyd": "chrony",
    "systemd-timesyn": "systemd-timesyncd",  # the kernel cuts names at 15 letters
    "ntpd": "ntpd",
    "ntpsec": "ntpd",
    "phc2sys": "phc2sys",
}
BUILD_FILES = ("/etc/os-release", "/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/etc/machine-id")
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def gather_platform() -> Facts:
    """`{arch, glibc, kernel, os, apt, euid, user, python, interpreter}`; glibc is None on another C library.

    euid, user, python, interpreter: of this process, which runs as every module does.
    """
    library, version = platform.libc_ver()
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return {
        "arch": platform.machine(),
        "glibc": version if library == "glibc" else None,
        "kernel": platform.release(),
        "os": f"{release.get('ID', 'unknown')} {release.get('VERSION_ID', '')}".strip(),
        "apt": which("apt-get") is not None,
        "euid": os.geteuid(),
        "user": _user(os.geteuid()),
        "python": platform.python_version(),
        "interpreter": sys.executable,
    }


def _user(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def parse_systemd(text: str) -> int | None:
    """252 from the first line of `systemctl --version`."""
    found = re.match(r"systemd (\d+)", text)
    return int(found.group(1)) if found else None


def gather_systemd() -> Facts:
    """`{version, running, pid1, journal}`; running is false where process 1, named pid1, is something else."""
    running = Path("/run/systemd/system").is_dir()
    return {
        "version": parse_systemd(run(["systemctl", "--version"])[1]),
        "running": running,
        "pid1": read("/proc/1/comm"),
        "journal": gather_journal() if running else None,
    }


JOURNAL_UNITS = ("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket")
SYSLOG = "systemd-journald-dev-log.socket"  # for programs that write to /dev/log; output of units takes another way


def parse_journal(text: str) -> Facts:
    """`{masked, active}` from `systemctl show` of JOURNAL_UNITS; a live socket starts the service at the next message."""
    blocks = [dict(re.findall(r"^(\w+)=(.*)$", block, re.MULTILINE)) for block in text.strip().split("\n\n")]
    return {
        "masked": [block["Id"] for block in blocks if block.get("LoadState") == "masked"],
        "active": any(block.get("ActiveState") == "active" for block in blocks if block["Id"] != SYSLOG),
    }


def parse_storage(text: str) -> Facts | None:
    """`{value, file}` of the Storage= that holds, from `systemd-analyze cat-config systemd/journald.conf`; None without."""
    found, file = None, ""
    for line in text.splitlines():
        if head := re.fullmatch(r"# (/\S+)", line):
            file = head[1]
        elif row := re.fullmatch(r"\s*Storage\s*=\s*(\w+)\s*", line):
            found = {"value": row[1].lower(), "file": file}
    return found


def gather_journal() -> Facts | None:
    """`{masked, active, kept, storage}`: masked units, whether messages are taken, whether any is kept to be read, and how.

    Old messages outlive the setting that ends their keeping, so `storage` may know more than `kept`.
    """
    show = ["systemctl", "show", *JOURNAL_UNITS, "--property=Id,LoadState,ActiveState"]
    status, out, _ = run(show)
    if status != 0:
        return None
    # With Storage=none, or without a folder to write to, journald runs and keeps nothing.
    last = run(["journalctl", "--quiet", "--no-pager", "--boot", "--lines=1", "--output=cat"])[1]
    # To others than root it may show nothing of what it keeps.
    kept = bool(last.strip()) or (None if os.geteuid() else False)
    storage = parse_storage(run(["systemd-analyze", "cat-config", "systemd/journald.conf"])[1])
    return {**parse_journal(out), "kept": kept, "storage": storage}


def gather_numa() -> list[Facts]:
    """`[{node, cpus, memory_total, memory_free}]` in order of the nodes."""
    nodes = []
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        memory = table(read(folder / "meminfo"))
        nodes.append(
            {
                "node": int(folder.name.removeprefix("node")),
                "cpus": read(folder / "cpulist") or "",
                "memory_total": memory.get("MemTotal"),
                "memory_free": memory.get("MemFree"),
            }
        )
    return sorted(nodes, key=lambda one: one["node"])


# --- limits -------------------------------------------------------------------------------------


def parse_limit(text: str | None, name: str) -> int | None:
    """The hard limit of a row of /proc/PID/limits, -1 for unlimited: what root can raise a unit's limit to."""
    found = re.search(rf"^{re.escape(name)}\s+\S+\s+(\S+)", text or "", re.MULTILINE)
    if not found:
        return None
    return -1 if found.group(1) == "unlimited" else whole(found.group(1))


def gather_limits() -> Facts:
    """Limits of process 1, which units inherit, and those of the whole system; memory in bytes."""
    first = read("/proc/1/limits")
    memory = table(read("/proc/meminfo"))
    tasks = [whole(read("/sys/fs/cgroup/pids.max")), whole(read("/proc/sys/kernel/pid_max"))]
    return {
        "pid1_nofile": parse_limit(first, "Max open files"),
        "pid1_memlock": parse_limit(first, "Max locked memory"),
        "fs_nr_open": whole(read("/proc/sys/fs/nr_open")),
        "fs_file_max": whole(read("/proc/sys/fs/file-max")),
        "pids_max": min((number for number in tasks if number is not None), default=None),
        "map_count": whole(read("/proc/sys/vm/max_map_count")),
        "swap_total": memory.get("SwapTotal"),
        "memory_total": memory.get("MemTotal"),
        "memory_available": memory.get("MemAvailable"),
        "overcommit": whole(read("/proc/sys/vm/overcommit_memory")),
    }


# --- clock --------------------------------------------------------------------------------------


class Timex(ctypes.Structure):
    """struct timex of <sys/timex.h> on 64-bit Linux, as far as its status, with room for the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]


def kernel_synchronized() -> bool | None:
    """Whether something disciplines the kernel's clock; asks only, as modes is 0."""
    timex = Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
        return None
    return not timex.status & UNSYNCHRONIZED


def clock_service(names: set[str]) -> str | None:
    """The clock service among process names."""
    return next((service for name, service in CLOCK_SERVICES.items() if name in names), None)


def gather_clock() -> Facts:
    """`{synchronized, source, year, before_build}`; before_build: the clock is earlier than this system's own files."""
    names = {name for name in (read(path) for path in Path("/proc").glob("[0-9]*/comm")) if name}
    times = [Path(path).stat().st_mtime for path in BUILD_FILES if Path(path).exists()]
    now = time.time()
    return {
        "synchronized": kernel_synchronized(),
        "source": clock_service(names),
        "year": time.gmtime(now).tm_year,
        "before_build": now < max(times) if times else None,
    }


def parse_secure_boot(variable: bytes | None) -> bool | None:
    """Secure Boot from its EFI variable: four bytes of attributes, then 1 or 0."""
    return bool(variable[4]) if variable is not None and len(variable) == 5 else None


def gather_secure_boot() -> bool | None:
    """Whether the kernel loads signed modules only; None without EFI or the right to look."""
    try:
        return parse_secure_boot(Path(SECURE_BOOT).read_bytes())
    except OSError:
        return None
