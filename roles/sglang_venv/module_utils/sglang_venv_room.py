# SPDX-License-Identifier: Apache-2.0
"""Whether the disk has room for a build. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils import sglang_venv_adopt as adopting
from ansible.module_utils.sglang_venv_adopt import Adoption
from ansible.module_utils.sglang_venv_base import BuildError, Options
from ansible.module_utils.sglang_venv_release import build_path


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def warm_mark(plan: Mapping[str, Any], options: Options) -> Path:
    """A file in the cache that says that it has served this lock before."""
    return options.uv_cache / f".fleet-{plan['lock'][:16]}-{plan['python']}"


def check_room(plan: Mapping[str, Any], options: Options, adoption: Adoption | None = None) -> None:
    """BuildError if the disk is too full for this build: bytes and inodes, of the releases' and of the cache's file system.

    A cache that has served this lock before, on the same file system and by links, needs next to nothing. What is taken over
    is copied, and no cache is used.
    """
    size, files = int(plan["unpacked"]["bytes"]), int(plan["unpacked"]["files"])
    if adoption:
        size, files = adoption.bytes + adopting.MARGIN, adoption.files
    releases, cache = _existing(options.root / "releases"), _existing(options.uv_cache)
    linked = options.link_mode == "symlink" or (
        options.link_mode in ("hardlink", "clone") and releases.stat().st_dev == cache.stat().st_dev
    )
    warm = warm_mark(plan, options).exists()
    small = 200 * 2**20
    needs: dict[int, list[Any]] = {}
    places = [(cache, 0 if warm else size), (releases, small if linked else size)]
    for path, amount in [(releases, size)] if adoption else places:
        entry = needs.setdefault(path.stat().st_dev, [path, 0])
        entry[1] += amount
    for path, amount in needs.values():
        state = os.statvfs(path)
        free = state.f_bavail * state.f_frsize
        if free < amount:
            raise BuildError(
                f"disk full: the release needs {amount} bytes ({amount / 2**30:.1f} GiB) below {path}, {free} bytes are free. "
                f"Free some space there, mount a larger file system there, or move sglang_venv_uv_cache to one"
            )
        if state.f_files and state.f_favail < files:
            raise BuildError(f"no inodes left: the release needs {files} below {path}, {state.f_favail} are free")


def room_message(plan: Mapping[str, Any], options: Options, words: str) -> str:
    """What a disk that became full during the build is told as; `words` are the tool's own."""
    return (
        f"disk full while building {build_path(options.root, plan['id'])} (cache {options.uv_cache}): the release needs about "
        f"{plan['unpacked']['bytes']} bytes ({plan['unpacked']['bytes'] / 2**30:.1f} GiB). The build was removed; free some "
        f"space and run again. Reported: {words}"
    )
