# SPDX-License-Identifier: Apache-2.0
"""Which wheel of a release a Python on a machine takes, by the C library it finds there."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

# Minor versions of glibc 2 that hosts may have; the oldest is what the manylinux tag of current wheels starts at.
GLIBC = range(28, 46)
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@cache
def _ranks(python: str, machine: str, glibc: int) -> dict[Tag, int]:
    major, minor = map(int, python.split("."))
    platforms = []
    for level in range(glibc, 4, -1):
        platforms.append(f"manylinux_2_{level}_{machine}")
        if level in _OLD_NAMES:
            platforms.append(f"{_OLD_NAMES[level]}_{machine}")
    platforms.append(f"linux_{machine}")
    tags = [
        *cpython_tags((major, minor), platforms=platforms),
        *compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def choose(names: Iterable[str], python: str, machine: str, glibc: int) -> str | None:
    """The file name an installer takes for a Python minor, a machine and glibc 2.<glibc>; None if no wheel fits."""
    ranks = _ranks(python, machine, glibc)
    best: tuple[int, str] | None = None
    for name in names:
        fits = [ranks[tag] for tag in parse_wheel_filename(name)[3] if tag in ranks]
        if fits and (best is None or (min(fits), name) < best):
            best = (min(fits), name)
    return best[1] if best else None


def needed(names: Iterable[str], python: str, machine: str) -> dict[str, int]:
    """Every wheel that some glibc takes, with the oldest glibc (2.<n>) that takes it."""
    found: dict[str, int] = {}
    names = list(names)
    for glibc in GLIBC:
        if name := choose(names, python, machine, glibc):
            found.setdefault(name, glibc)
    return found
