# SPDX-License-Identifier: Apache-2.0
"""Room: free space where releases and shared memory live, and how those file systems are mounted."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts, read

SHM = "/dev/shm"  # noqa: S108 - looked at, not written to
TMP = "/tmp"  # noqa: S108 - likewise
# Where a run writes beside the releases.
PLACES = ("/etc", "/etc/systemd/system", "/etc/sglang-fleet", "/var/lib/sglang-fleet")


def gather_room(root: str) -> Facts:
    """Room of the file system that holds `root` (or its nearest existing parent) and of /dev/shm, and the live release."""
    folder = _existing(root)
    disk = os.statvfs(folder)
    current = Path(root) / "current"
    facts: Facts = {
        "disk": {"path": str(folder), "free": disk.f_bavail * disk.f_frsize, "total": disk.f_blocks * disk.f_frsize},
        "current": current.readlink().name if current.is_symlink() and current.exists() else None,
        "shm": None,
    }
    if Path(SHM).is_dir():
        shm = os.statvfs(SHM)
        facts["shm"] = {"free": shm.f_bavail * shm.f_frsize, "total": shm.f_blocks * shm.f_frsize}
    return facts


def _existing(path: str) -> Path:
    return next(folder for folder in (Path(path), *Path(path).parents) if folder.is_dir())


def parse_mountinfo(text: str) -> list[tuple[str, str, list[str]]]:
    """(mount point, type, options) of every mount in /proc/self/mountinfo, in the order they were made.

    Options are those of the mount and of the file system below it: either can be read-only.
    """
    found = []
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        cells, rest = head.split(), tail.split()
        if len(cells) >= 6 and len(rest) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), cells[4])  # a blank is written as \040
            found.append((point, rest[0], sorted({*cells[5].split(","), *rest[2].split(",")})))
    return found


def mount_of(path: str, mounts: list[tuple[str, str, list[str]]]) -> Facts | None:
    """`{point, type, options}` of the mount that holds a path; of several on one point the last one is seen."""
    best: tuple[str, str, list[str]] | None = None
    for mount in mounts:
        point = mount[0].rstrip("/")
        holds = path == point or path.startswith(f"{point}/")
        if holds and (best is None or len(point) >= len(best[0].rstrip("/"))):
            best = mount
    return {"point": best[0], "type": best[1], "options": best[2]} if best else None


def gather_mounts(paths: list[str]) -> Facts:
    """`{path: mount}` of the given paths, PLACES, /tmp and /dev/shm; of a path that is not there that of its nearest parent."""
    mounts = parse_mountinfo(read("/proc/self/mountinfo") or "")
    found = {path: mount_of(str(_existing(path).resolve()), mounts) for path in (*paths, *PLACES, TMP, SHM)}
    return {path: mount for path, mount in found.items() if mount}
