# SPDX-License-Identifier: Apache-2.0
"""What a release lacks of the packages that it was made of, by their own lists of files (RECORD). Standard library only."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path


def missing(release: Path) -> list[str]:
    """One text per package that lacks files, e.g. `orjson 3.11 lacks 4 of 9 files, orjson/__init__.py first`."""
    found = []
    known = set()
    for info in sorted(release.glob("venv/lib/python3*/site-packages/*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        known.add(_normal(name))
        try:
            rows = list(csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()))
        except FileNotFoundError:
            found.append(f"{name} {version} lacks its RECORD")
            continue
        # Programs lie elsewhere and byte code is never kept.
        files = [row[0] for row in rows if row and not row[0].startswith(("/", "..")) and not row[0].endswith(".pyc")]
        if gone := [file for file in files if not (info.parent / file).exists()]:
            found.append(f"{name} {version} lacks {len(gone)} of {len(files)} files, {gone[0]} first")
    try:
        packages = dict(json.loads((release / "manifest.json").read_text(encoding="utf-8"))["packages"])
    except (OSError, ValueError, KeyError, TypeError):
        return [*found, "its manifest.json can't be read"]
    return [f"{name} {version} is gone" for name, version in packages.items() if _normal(name) not in known] + found


def _normal(name: str) -> str:
    """Names of packages are the same whatever their case and separators (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
