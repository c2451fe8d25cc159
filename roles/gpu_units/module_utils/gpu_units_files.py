# SPDX-License-Identifier: Apache-2.0
"""Files and links of a deployment on the disk: whole or not at all, each with the rights that belong to its place."""

from __future__ import annotations

import os
from pathlib import Path

from ansible.module_utils.gpu_units_render import ETC, KEYS, LIBEXEC


def sync(folder: Path) -> None:
    """The names in a folder are on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, text: str, mode: int, gid: int = 0) -> None:
    """The whole file or nothing of it, and on the disk when this returns."""
    # One name for all tries (one change at a time holds the lock), so a crash leaves nothing that the next try does not replace.
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchown(stream.fileno(), os.geteuid(), gid)
            os.fchmod(stream.fileno(), mode)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except Exception:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """No file or link of this name."""
    if path.exists() or path.is_symlink():
        path.unlink()
        sync(path.parent)


def remove_empty(folder: Path) -> None:
    """A folder goes with the last file of it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def link(place: Path, target: str | None) -> None:
    """A link that points to `target`, None for no link."""
    if target is None:
        remove(place)
    elif not place.is_symlink() or str(place.readlink()) != target:
        new = place.with_name(f".{place.name}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(place)
        sync(place.parent)


def text_of(path: Path) -> str | None:
    """None if it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def rights(path: str, group_reads_keys: bool = False) -> tuple[int, bool]:
    """(mode, belongs to the engine's group) of a deployed file. A key is root's: systemd hands it to the unit.

    Deployments from before that read the file themselves, so a key that goes back to one of them is the group's again.
    """
    if path.startswith(KEYS):
        return (0o640, True) if group_reads_keys else (0o600, False)
    if path.startswith(ETC):
        return 0o640, True
    return (0o755 if path.startswith(LIBEXEC) else 0o644), False


def differs(file: Path, text: str, mode: int, gid: int) -> bool:
    """Whether a file is not just this text with these rights."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return True
    return (
        file.is_symlink()
        or text_of(file) != text
        or (status.st_mode & 0o7777) != mode
        or (status.st_uid, status.st_gid) != (os.geteuid(), gid)
    )
