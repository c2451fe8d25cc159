# SPDX-License-Identifier: Apache-2.0
"""Whether the engine's user can read a model. Mode bits say so, as this process runs as root, which may read everything."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts
from ansible.module_utils.gpu_host_gather_child import ChildError, in_child

LINKS = 40  # as the kernel follows
PROOF_SECONDS = 20.0
WORDS = {stat.S_IXOTH: "search", stat.S_IROTH: "read", stat.S_IROTH | stat.S_IXOTH: "read and search"}


def engine_user(name: str, groups: list[str]) -> Facts:
    """`{name, uid, gid, groups: [ids]}`; uid and gid are None before the user is made, and it is judged as one of the others."""
    known = {entry.gr_name: entry.gr_gid for entry in grp.getgrall()}
    more = {known[group] for group in groups if group in known}
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        return {"name": name, "uid": None, "gid": None, "groups": sorted(more)}
    more |= set(os.getgrouplist(name, user.pw_gid))
    return {"name": name, "uid": user.pw_uid, "gid": user.pw_gid, "groups": sorted(more)}


def walked(path: Path) -> list[Path]:
    """The folders that have to be searched on the way to a file or folder, links followed; itself not included."""
    names, at, found, links = list(path.absolute().parts[1:]), Path("/"), [Path("/")], 0
    while names:
        name, *names = names
        here = at.parent if name == ".." else at / name
        if here.is_symlink() and links < LINKS:
            links += 1
            aim = here.readlink()
            names = [*(aim.parts[1:] if aim.is_absolute() else aim.parts), *names]
            at = Path("/") if aim.is_absolute() else at
            continue
        at = here
        if names:
            found.append(at)
    return found


def _lacks(found: os.stat_result, user: Facts, bits: int) -> bool:
    """Whether mode bits deny a user some of `bits`, given as those of the others. Root has no more rights in the unit."""
    if user["uid"] == found.st_uid:
        return bits & (found.st_mode >> 6) != bits
    if found.st_gid in user["groups"]:
        return bits & (found.st_mode >> 3) != bits
    return bits & found.st_mode != bits


def barred(folder: Path | None, files: list[Path], user: Facts) -> list[Facts]:
    """`{path, real, need, mode, owner}` of folders on the way, a folder and files in it that are closed to the user.

    path: as it is reached; real: without links. Where the user is there already, access lists and the like have the last word.
    """
    asked: dict[str, tuple[Path, int]] = {}
    folders = [(folder, stat.S_IROTH | stat.S_IXOTH)] if folder else []
    for path, bits in [*folders, *((file, stat.S_IROTH) for file in files)]:
        for above in walked(path):
            asked.setdefault(str(above), (above, stat.S_IXOTH))
        asked[os.path.realpath(path)] = (path, bits)
    denied = {}
    for path, bits in asked.values():
        found = path.stat()
        if _lacks(found, user, bits):
            denied[path] = (found, bits)
    if denied and user["uid"] and os.geteuid() == 0:
        denied = _proven(denied, user)
    return [
        {
            "path": str(path),
            "real": os.path.realpath(path),
            "need": WORDS[bits],
            "mode": f"{stat.S_IMODE(found.st_mode):04o}",
            "owner": _owner(found),
        }
        for path, (found, bits) in denied.items()
    ]


Denied = dict[Path, "tuple[os.stat_result, int]"]


def _proven(denied: Denied, user: Facts) -> Denied:
    """Those that a process of the user is denied in fact."""

    def tried() -> list[str]:
        os.setgroups(user["groups"])
        os.setgid(user["gid"])
        os.setuid(user["uid"])
        return [str(path) for path, (_, bits) in denied.items() if not os.access(path, bits)]

    try:
        still = in_child(tried, PROOF_SECONDS)
    except (ChildError, RuntimeError):
        return denied
    return {path: told for path, told in denied.items() if str(path) in still}


def _owner(found: os.stat_result) -> str:
    try:
        return pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        return str(found.st_uid)


def gather_files(paths: list[str], user: Facts) -> Facts:
    """`{path: {exists, barred}}` of single files; a folder is none, and one that even root cannot look for is left out."""
    found = {}
    for path in map(Path, paths):
        try:
            there = path.is_file()
            found[str(path)] = {"exists": there, "barred": barred(None, [path], user) if there else []}
        except OSError:
            continue
    return found
