# SPDX-License-Identifier: Apache-2.0
"""Rules about room: disk, how it is mounted, /dev/shm, memory of the host."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    GIB,
    INFO,
    WARN,
    Case,
    Hit,
    Map,
    inside,
    kernel,
    on_kernel,
    rule,
    spans,
)

SHM = "/dev/shm"  # noqa: S108 - named, not written to

MIN_CACHE = 2 * GIB  # compiled kernels of an instance
MIN_FILES = GIB // 16  # compiled Python of a start, records and files of instances
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "9p", "fuse.sshfs", "afs")


# engines/*/engine.yml: a venv unpacked, whatever the profile, and docs/releases.md: one of links.
SIZE = "8.6 GB on every profile (0.3 GB where sglang_venv_link_mode is symlink and its cache is on another file system)"


@rule(
    "disk-low",
    BLOCK,
    f"A release takes {SIZE}, and a new one is built beside the live one.",
    source="engines/sglang-0.5.11/engine.yml",
)
def disk_low(case: Case) -> Iterator[Hit]:
    """Room for the first release."""
    if not case.facts.get("current"):
        yield from _disk(case)


@rule(
    "disk-low-for-upgrade",
    WARN,
    f"A release takes {SIZE}; a change of engine, series or profile builds a new one beside the live one.",
    source="docs/releases.md",
)
def disk_low_for_upgrade(case: Case) -> Iterator[Hit]:
    """Room for the next release on a host that already serves one."""
    if case.facts.get("current") and case.facts["disk"]["free"] >= MIN_CACHE:
        yield from _disk(case)


@rule(
    "disk-none",
    BLOCK,
    "A start writes compiled Python and kernels there, and a file that is cut short by a full disk stays with the release.",
    source="docs/releases.md",
)
def disk_none(case: Case) -> Iterator[Hit]:
    """A host that serves can still write."""
    disk = case.facts["disk"]
    if case.facts.get("current") and disk["free"] < MIN_FILES:
        free = f"{disk['free'] >> 20} MiB free"
        least = f"{MIN_FILES >> 20} MiB to start again, {MIN_CACHE / GIB:g} GiB with kernels to compile"
        yield Hit(f"the file system of {disk['path']}", free, least, _free_room(disk["path"]))


@rule(
    "disk-full",
    WARN,
    "Kernels that are compiled at a start are kept in the release; without room the start fails, and so would a new release.",
    source="docs/releases.md",
)
def disk_full(case: Case) -> Iterator[Hit]:
    """Room for the caches of a host that already serves."""
    disk = case.facts["disk"]
    if case.facts.get("current") and MIN_FILES <= disk["free"] < MIN_CACHE:
        yield Hit(
            f"the file system of {disk['path']}",
            f"{disk['free'] / GIB:.1f} GiB free",
            f"{MIN_CACHE / GIB:g} GiB for caches, {float(case.wanted.get('min_disk_gib') or 0):g} GiB for a new release",
            _free_room(disk["path"]),
        )


def _free_room(path: str) -> str:
    return f'Free or add room; `du -xh --max-depth=3 "$(findmnt -no TARGET -T {path})" | sort -h | tail` shows what is large.'


def _disk(case: Case) -> Iterator[Hit]:
    disk, least = case.facts["disk"], float(case.wanted.get("min_disk_gib") or 0)
    if disk["free"] < least * GIB:
        yield Hit(
            f"the file system of {disk['path']}",
            f"{disk['free'] / GIB:.1f} GiB free",
            f"{least:g} GiB free",
            _free_room(disk["path"]),
        )


@rule(
    "root-read-only",
    BLOCK,
    "Releases are written there.",
    source="https://man7.org/linux/man-pages/man8/mount.8.html",
)
def root_read_only(case: Case) -> Iterator[Hit]:
    """The folder of releases can be written."""
    root, mount = root_mount(case)
    if "ro" in mount.get("options", ()):
        look = "see `dmesg | tail` for errors of the disk; without any, "
        yield Hit(root, "mounted read-only", "mounted read-write", f"{look.capitalize()}{remount(case, 'rw')}.")


@rule(
    "root-noexec",
    BLOCK,
    "Interpreter and libraries of a release, and the kernels it compiles, are executed from there.",
    source="https://man7.org/linux/man-pages/man8/mount.8.html",
)
def root_noexec(case: Case) -> Iterator[Hit]:
    """Files in the folder of releases may be executed."""
    root, mount = root_mount(case)
    if "noexec" in mount.get("options", ()):
        yield Hit(root, "mounted noexec", "mounted exec", f"{remount(case, 'exec')}.")


@rule(
    "root-network",
    WARN,
    "A start reads thousands of files and compiles into locked caches: slow over a network, and it hangs when the server does.",
    source="https://man7.org/linux/man-pages/man5/nfs.5.html",
)
def root_network(case: Case) -> Iterator[Hit]:
    """Releases lie on a disk of the host."""
    root, mount = root_mount(case)
    if mount.get("type") in NETWORK:
        yield Hit(
            root,
            f"on {mount['type']}",
            "a file system of the host's own",
            f"Mount a local disk at {root} (a line in /etc/fstab, then `mount {root}`) before the first release is built.",
        )


def remount(case: Case, option: str, point: str = "") -> str:
    """The command that mounts a file system with another option, by default that of the folder of releases."""
    there = case.facts["disk"]["path"]  # the folder of releases, or what is there of the way to it
    aim = shlex.quote(point) if point else f'"$(findmnt -no TARGET -T {there})"'
    fix = f"`mount -o remount,{option} {aim}`, and the same in its line of /etc/fstab"
    return f"{fix}; if that is refused, on the machine that runs this container" if inside(case) == "container" else fix


def root_mount(case: Case) -> tuple[str, Map]:
    """The folder of releases and its mount."""
    root = str(case.wanted.get("root") or "/opt/sglang-fleet")
    return root, (case.facts.get("mounts") or {}).get(root) or {}


@rule(
    "shm-low",
    WARN,
    "Engine processes hand tensors to each other through /dev/shm; when it is full they crash with a bus error.",
    source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
)
def shm_low(case: Case) -> Iterator[Hit]:
    """Room in /dev/shm, more for instances on several GPUs."""
    shm, least = case.facts.get("shm"), float(case.wanted.get("min_shm_gib") or 0)
    ranks = max((len(gpus) for _, _, gpus in spans(case)), default=0)
    least = max(least, float(ranks))  # NCCL's guide gives a container 1 GB; each rank has segments for its peers
    if shm is None:
        yield Hit(SHM, "missing", "a tmpfs", f"`mkdir -p {SHM} && mount -t tmpfs tmpfs {SHM}`")
    elif shm["total"] < least * GIB:
        size = f"{least * 1024:.0f}"
        line = f"tmpfs {SHM} tmpfs nosuid,nodev,size={size}M 0 0"
        fix = f"`mount -o remount,size={size}M {SHM}`; for later boots `echo '{line}' >> /etc/fstab`"
        if inside(case) == "container":
            fix = f"`mount -o remount,size={size}M {SHM}`; if that is refused, start the container with --shm-size={size}m"
        why = f", for an instance on {ranks} GPUs" if ranks and least == ranks else ""
        yield Hit(SHM, f"{shm['total'] / GIB:.2f} GiB in all", f"{least:g} GiB{why}", f"{fix}.")


@rule(
    "hugepages-idle",
    INFO,
    "Memory that is set aside as huge pages serves nothing else, and the engine does not ask for them.",
    source="https://docs.kernel.org/admin-guide/mm/hugetlbpage.html",
)
def hugepages_idle(case: Case) -> Iterator[Hit]:
    """Less than a tenth of the memory lies idle as reserved huge pages."""
    pages = kernel(case).get("hugepages") or {}
    free = (pages.get("free") or 0) * (pages.get("size") or 0)
    total = (case.facts.get("limits") or {}).get("memory_total") or 0
    if total and free > total / 10:
        where = "`grep -n hugepages /etc/sysctl.conf /etc/sysctl.d/* /etc/default/grub` shows what sets them at the next boot"
        fix = f"`sysctl -w vm.nr_hugepages=0`; {where}"
        yield Hit(
            "huge pages",
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB set aside and unused",
            "none that nobody uses",
            f"If no other program needs them: {on_kernel(case, fix)}.",
        )
