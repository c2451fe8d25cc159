# SPDX-License-Identifier: Apache-2.0
"""The kernel: boot parameters, IOMMU and ACS, huge pages, modules, kind of machine, and the GPU errors in its log."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts, read, run, table, whole
from ansible.module_utils.gpu_host_gather_pci import gather_acs, gather_iommu, long_address

# `man systemd-detect-virt`; what it names and is not here is a virtual machine.
CONTAINERS = ("openvz", "lxc", "lxc-libvirt", "systemd-nspawn", "docker", "podman", "rkt", "wsl", "proot", "pouch")
KEPT_XIDS = 50
LOG_LIMIT = 64 << 20  # bytes; a kernel log is at most some MiB


def boot_time() -> float | None:
    """Seconds since the epoch at which the kernel started."""
    found = re.search(r"^btime (\d+)$", read("/proc/stat") or "", re.MULTILINE)
    return float(found.group(1)) if found else None


def stamp(seconds: float | None) -> str | None:
    """`2026-12-01T00:15:00Z`."""
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017


def virt_of(name: str, hypervisor: bool, marks: list[str]) -> tuple[str | None, str | None]:
    """(metal, vm or container; its kind) from `systemd-detect-virt`, or without it from the CPU's flag and known files.

    name: what that program prints, empty where it is missing. marks: container kinds that files of the machine tell of.
    """
    if name:
        kind = "metal" if name == "none" else "container" if name in CONTAINERS else "vm"
        return kind, name
    if marks:
        return "container", marks[0]
    return ("vm", None) if hypervisor else (None, None)


def gather_virt() -> tuple[str | None, str | None]:
    """What this is, seen from inside: the innermost layer, as a container in a VM is a container."""
    name = run(["systemd-detect-virt"])[1].strip()
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", read("/proc/cpuinfo") or "", re.MULTILINE)
    first = (read("/proc/1/environ") or "").split("\0")
    marks = [value.removeprefix("container=") for value in first if value.startswith("container=")]
    marks += [
        kind for path, kind in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")) if Path(path).exists()
    ]
    return virt_of(name, bool(flags), marks)


def parse_thp(text: str | None) -> str | None:
    """`madvise` from `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found.group(1) if found else None


def gather_hugepages() -> Facts:
    """`{total, free, size, thp}`: counts of the default size's pages, that size in bytes, the transparent ones' mode."""
    memory = table(read("/proc/meminfo"))
    return {
        "total": memory.get("HugePages_Total"),
        "free": memory.get("HugePages_Free"),
        "size": memory.get("Hugepagesize"),
        "thp": parse_thp(read("/sys/kernel/mm/transparent_hugepage/enabled")),
    }


def parse_module_version(text: str | None) -> str | None:
    """`580.159.04` from the first line of /proc/driver/nvidia/version."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text or "")
    return found.group(1) if found else None


def cgroup_version(mounts: str) -> int | None:
    """2 when the unified tree is the one at /sys/fs/cgroup, 1 when a controller of the old kind is mounted there."""
    kinds = dict(re.findall(r" (/sys/fs/cgroup\S*) \S+ .*?- (\S+)", mounts))
    if kinds.get("/sys/fs/cgroup") == "cgroup2":
        return 2
    return 1 if "cgroup" in kinds.values() else None


def gather_kernel(gpus: list[str]) -> Facts:
    """Facts of the running kernel; gpus are PCI addresses, as its IOMMU and bridges matter for them alone."""
    cmdline = read("/proc/cmdline") or ""
    virt, name = gather_virt()
    version = read("/sys/module/nvidia/version") or parse_module_version(read("/proc/driver/nvidia/version"))
    return {
        "release": platform.release(),
        "cmdline": cmdline,
        "boot": stamp(boot_time()),
        "iommu": gather_iommu(gpus, cmdline),
        "acs": gather_acs(gpus),
        "hugepages": gather_hugepages(),
        "virt": virt,
        "virt_name": name,
        "cgroup": cgroup_version(read("/proc/self/mountinfo") or ""),
        "nouveau": Path("/sys/module/nouveau").exists(),
        "modules": {"nvidia": version},
    }


# --- GPU errors -----------------------------------------------------------------------------------


def parse_xids(records: str, boot: float | None) -> list[Facts]:
    """`[{pci, xid, when, text}]` from /dev/kmsg's records, oldest first; the newest KEPT_XIDS."""
    found = []
    for line in records.splitlines():
        head, _, text = line.partition(";")
        hit = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", text)
        if hit:
            cells = head.split(",")
            since = whole(cells[2]) if len(cells) > 2 else None
            when = None if boot is None or since is None else boot + since / 1e6
            words = text[hit.start() :].strip()
            found.append({"pci": long_address(hit[1]), "xid": int(hit[2]), "when": stamp(when), "text": words[:300]})
    return found[-KEPT_XIDS:]


def kernel_log() -> str | None:
    """What the kernel's ring buffer still holds of this boot; None when it is not ours to read."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records: list[bytes] = []
    size = 0
    try:
        while size < LOG_LIMIT:
            try:
                record = os.read(handle, 8192)
            except BlockingIOError:
                break  # the end
            except BrokenPipeError:
                continue  # the record was overwritten meanwhile; the next read goes on behind it
            records.append(record)
            size += len(record)
    except OSError:
        return None
    finally:
        os.close(handle)
    return b"".join(records).decode("utf-8", errors="replace")


def gather_xids() -> list[Facts] | None:
    """Errors that the driver reported since boot; None when the log is not readable."""
    log = kernel_log()
    return None if log is None else parse_xids(log, boot_time())
