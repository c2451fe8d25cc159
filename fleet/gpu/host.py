# SPDX-License-Identifier: Apache-2.0
"""What lets a GPU machine without systemd, Ansible or a network run the plays against itself. Packed by `bin/gpu-pack --host`.

systemd comes out of a lab host's base, the packages that plays and doors import out of the control environment's lock.
On the machine `tests/gpu/host.sh` boots the one over its root and runs the other inside.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from fleet.engine import ROOT
from fleet.lab import base
from fleet.lab.labs import base_of, this_machine
from fleet.lab.settings import settings as lab_settings
from fleet.lab.shell import LabError

CONTROL = ROOT / "requirements" / "control.txt"
IMPORTED = ("ansible-core", "fabric", "nvidia-ml-py", "pyyaml")
BOOTED = ("systemd",)
# The machine has a C library, and files of systemd that it has stay its own.
LEFT_OUT = re.compile(r"usr/share/(doc|man|locale|bash-completion|zsh|bug|lintian|polkit-1|dbus-1)/|usr/lib/udev/")


# --- packages of the control environment


def closure(python: str) -> list[str]:
    """Canonical names of `IMPORTED` and all they need on a Linux machine with that Python minor, sorted."""
    found: set[str] = set()
    todo = list(IMPORTED)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"python_version": python, "extra": ""}):
                todo.append(need.name)
    return sorted(found)


def subset(text: str, names: list[str]) -> str:
    """The blocks of a hashed requirements file that pin these packages, one per marker. KeyError for one that it lacks."""
    blocks: dict[str, str] = {}
    for match in re.finditer(r"^(?P<name>[\w.-]+)==[^\n]*\\\n(?:    --hash=[^\n]*\n)+", text, re.MULTILINE):
        blocks[match["name"]] = blocks.get(match["name"], "") + match[0]
    return "".join(blocks[name] for name in names)


# --- systemd of a lab host's base


def suite_here() -> base.Suite:
    """Debian 12, whose C library is older than that of every machine this is for; where apt here has none, the machine's own."""
    try:
        base.mirrors(base.SUITES["bookworm"], base.machine_sources(), os.environ.get("FLEET_LAB_MIRROR"))
    except LabError:
        return base.SUITES[base.default_suite(Path("/etc/os-release").read_text())]
    return base.SUITES["bookworm"]


def base_root() -> Path:
    """The root of that suite's lab hosts. Raises LabError where there can be none."""
    settings = lab_settings(os.environ, ROOT)
    return base_of(settings, suite_here(), this_machine(settings), lambda text: print(text, flush=True))


def packages(status: str) -> list[str]:
    """`BOOTED` and what they need, of the text of dpkg's status file; the C library is the machine's own."""
    needs: dict[str, list[str]] = {}
    for block in status.split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", block, re.MULTILINE))
        if "Package" in fields:
            words = ", ".join(fields.get(key, "") for key in ("Depends", "Pre-Depends"))
            needs[fields["Package"]] = [
                part.split("|")[0].split()[0].split(":")[0] for part in words.split(",") if part.strip()
            ]
    found: set[str] = set()
    todo = list(BOOTED)
    while todo:
        name = todo.pop()
        if name in needs and name not in found and name not in ("libc6", "libgcc-s1"):
            found.add(name)
            todo += needs[name]
    return sorted(found)


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """(file or link below the base, its place below a root where /bin, /sbin and /lib are links into /usr)."""
    info = root / "var/lib/dpkg/info"
    for name in packages((root / "var/lib/dpkg/status").read_text()):
        listed = next(path for path in (info / f"{name}.list", *info.glob(f"{name}:*.list")) if path.is_file())
        for line in sorted(listed.read_text().split("\n")):
            path = root / line.lstrip("/")
            place = re.sub(r"^(bin|sbin|lib|lib64)/", r"usr/\1/", line.lstrip("/"))
            if line and (path.is_symlink() or path.is_file()) and not LEFT_OUT.match(place):
                yield path, place


def add_systemd(tar: tarfile.TarFile, root: Path) -> tuple[int, int]:
    """All files of systemd and its libraries; (files, bytes)."""
    count = size = 0
    for path, place in files(root):
        tar.add(path, place, recursive=False)
        count += 1
        size += path.lstat().st_size
    return count, size
