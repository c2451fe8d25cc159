# SPDX-License-Identifier: Apache-2.0
"""Rules about room: disk and /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, GIB, WARN, Case, Hit, rule

SHM = "/dev/shm"  # noqa: S108 - named, not written to


@rule(
    "disk-low",
    BLOCK,
    "A release holds about 9 GB, and a new one is built beside the live one.",
    source="engines/sglang-0.5.11/files.json",
)
def disk_low(case: Case) -> Iterator[Hit]:
    """Room for the first release."""
    if not case.facts.get("current"):
        yield from _disk(case)


@rule(
    "disk-low-for-upgrade",
    WARN,
    "A release holds about 9 GB; a change of engine, series or profile builds a new one beside the live one.",
    source="docs/releases.md",
)
def disk_low_for_upgrade(case: Case) -> Iterator[Hit]:
    """Room for the next release on a host that already serves one."""
    if case.facts.get("current"):
        yield from _disk(case)


def _disk(case: Case) -> Iterator[Hit]:
    disk, least = case.facts["disk"], float(case.wanted.get("min_disk_gib") or 0)
    if disk["free"] < least * GIB:
        yield Hit(
            f"the file system of {disk['path']}",
            f"{disk['free'] / GIB:.1f} GiB free",
            f"{least:g} GiB free",
            "Free or add room there (`du -xh --max-depth=2 / | sort -h | tail`).",
        )


@rule(
    "shm-low",
    WARN,
    "Engine processes hand tensors to each other through /dev/shm; when it is full they crash with a bus error.",
    source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
)
def shm_low(case: Case) -> Iterator[Hit]:
    """Room in /dev/shm."""
    shm, least = case.facts.get("shm"), float(case.wanted.get("min_shm_gib") or 0)
    if shm is None:
        yield Hit(SHM, "missing", "a tmpfs", "mount -t tmpfs tmpfs /dev/shm")
    elif shm["total"] < least * GIB:
        yield Hit(
            SHM,
            f"{shm['total'] / GIB:.2f} GiB in all",
            f"{least:g} GiB",
            f"mount -o remount,size={least:g}G /dev/shm, and the same in /etc/fstab.",
        )
