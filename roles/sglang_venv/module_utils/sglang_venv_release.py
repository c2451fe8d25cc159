# SPDX-License-Identifier: Apache-2.0
"""Names and plan of a release: pure functions, the same on the controller, on a host and in tests.

The plan is everything a host has to know to build a release. It is made on the controller out of the engine's folder and
handed over as one JSON file, so that a host needs neither the lock nor a resolver.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.sglang_venv_lock import LockError, Pin, body_digest, canonical, lint, parse, select

__all__ = [
    "BUILD_PREFIX",
    "build_path",
    "compare",
    "make_plan",
    "pick_files",
    "release_id",
    "release_path",
    "requirements",
    "uv_pin",
]

BUILD_PREFIX = ".build-"
ID_LENGTH = 14


def release_id(*, lock: str, series: str, engine: str, python: str, machine: str, profile: Mapping[str, Any]) -> str:
    """The id of a release, 14 hex digits. Equal inputs give an equal id on every machine and day.

    `lock` is the text of the lock (comments don't count), `series` the digest of the patch series ('' = unpatched), `python`
    the minor version ('3.11'), `machine` the platform ('x86_64'), `profile` a mapping of which name, files (path -> text)
    and the stub's wish and symbols count; arguments and environment belong to a deployment, not to a release.
    """
    inputs = {
        "lock": body_digest(lock),
        "series": series,
        "engine": engine,
        "python": python,
        "machine": machine,
        "profile": str(profile["name"]),
        "files": dict(profile.get("files") or {}),
        "stub": sorted(profile.get("stub_symbols") or []) if profile.get("stub_libcuda") else None,
        # What the rows of the matrix decide, without their sources: the smoke of a release goes by the rows in its manifest.
        "backends": [
            [row["id"], row["env"], {name: sorted(topic["allowed"]) for name, topic in row["backends"].items()}]
            for row in profile.get("backends") or []
        ],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:ID_LENGTH]


def release_path(root: Path, identifier: str) -> Path:
    """Where a published release lies."""
    return root / "releases" / identifier


def build_path(root: Path, identifier: str) -> Path:
    """Where a release is built."""
    return root / "releases" / f"{BUILD_PREFIX}{identifier}"


def uv_pin(text: str) -> Pin:
    """The one pin of a requirements file for uv. LockError if it is anything else."""
    pins = parse(text)
    if len(pins) != 1 or pins[0].name != "uv" or not pins[0].hashes:
        raise LockError("the uv requirements must hold uv==VERSION with its sha256 and nothing else")
    return pins[0]


def make_plan(
    *,
    engine: Mapping[str, Any],
    overrides: Mapping[str, Any],
    lock: str,
    files: Mapping[str, Any],
    uv: str,
    python: str,
    machine: str,
    profile: Mapping[str, Any],
    series: str = "",
    imports: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The plan of one release. LockError, in words for the person at the inventory, if the engine's files don't fit together.

    `engine`, `overrides` and `imports` are engine.yml, overrides.yml and imports.yml, `lock` and `uv` are texts of locks, `files`
    is files.json.
    The answer is JSON: id, packages (name -> version), files to install ({package, name, size, sha256, glibc}), bounds.
    """
    name = str(engine["engine"])
    pythons, machines = list(map(str, engine["lock"]["python"])), list(engine["lock"]["machines"])
    if python not in pythons or machine not in machines:
        raise LockError(
            f"{name} is locked for Python {' or '.join(pythons)} on {' or '.join(machines)}; this host has Python {python} "
            f"on {machine}: install python{pythons[-1]}, or set sglang_venv_python to a supported one"
        )
    rows = overrides.get("prereleases") or []
    if faults := lint(lock, pythons, machines, [row["package"] for row in rows]):
        raise LockError(f"the lock of {name} is not in order: {'; '.join(faults[:3])}. Run bin/lock --check {name}")
    pins = {str(pin): pin for pin in select(parse(lock), python, machine)}
    chosen: list[dict[str, Any]] = []
    for row in files["files"]:
        levels = [int(tag.split("/")[2]) for tag in row["for"] if tag.split("/")[:2] == [python, machine]]
        if not levels:
            continue
        if row["package"] not in pins:
            raise LockError(
                f"the lock of {name} has no {row['package']}, files.json names {row['name']}: run bin/lock {name}"
            )
        if row["sha256"] not in pins[row["package"]].hashes:
            raise LockError(
                f"wrong hash in the lock of {name}: {row['package']}, file {row['name']}: its sha256 is {row['sha256']}, "
                f"which lock.txt does not list. Restore lock.txt, or run bin/lock {name}"
            )
        chosen.append({key: row[key] for key in ("package", "name", "size", "sha256")} | {"glibc": levels[0]})
    if missing := sorted(set(pins) - {row["package"] for row in chosen}):
        raise LockError(f"files.json of {name} names no file for {', '.join(missing[:3])}: run bin/lock {name}")
    pin = uv_pin(uv)
    return {
        "id": release_id(lock=lock, series=series, engine=name, python=python, machine=machine, profile=profile),
        "engine": name,
        "version": str(engine["version"]),
        "python": python,
        "machine": machine,
        "series": series,
        "lock": body_digest(lock),
        "glibc": str(files["glibc"]),
        "packages": {p.name: p.version for p in pins.values()},
        "files": chosen,
        "unpacked": dict(engine["unpacked"]),
        "audit": {
            "cuda_major": int(engine["audit"]["cuda_major"]),
            "exceptions": [
                {key: row[key] for key in ("file", "package", "major")}
                for row in engine["audit"].get("exceptions") or []
            ],
        },
        "profile": {
            "name": str(profile["name"]),
            "files": dict(profile.get("files") or {}),
            "stub_libcuda": bool(profile.get("stub_libcuda")),
            "stub_symbols": sorted(profile.get("stub_symbols") or []),
        },
        "imports": dict(imports or {}),
        "load_bearing": list((imports or {}).get("load_bearing") or []),
        "backends": list(profile.get("backends") or []),
        "uv": {"version": pin.version, "hashes": list(pin.hashes)},
    }


def pick_files(files: Iterable[Mapping[str, Any]], glibc: int) -> dict[str, Mapping[str, Any]]:
    """The one file of each package that a host with glibc 2.<glibc> takes: 'name==version' -> row of the plan."""
    best: dict[str, Mapping[str, Any]] = {}
    for row in files:
        known = best.get(row["package"])
        if row["glibc"] <= glibc and (known is None or row["glibc"] > known["glibc"]):
            best[row["package"]] = row
    return best


def requirements(files: Iterable[Mapping[str, Any]]) -> str:
    """A requirements file with one pin per package and the sha256 of the files a plan names."""
    hashes: dict[str, list[str]] = {}
    for row in files:
        hashes.setdefault(row["package"], []).append(row["sha256"])
    return "".join(
        f"{package} {' '.join(f'--hash=sha256:{digest}' for digest in sorted(found))}\n"
        for package, found in sorted(hashes.items())
    )


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What changes between two sets of packages (name -> version), one line each, sorted by name."""
    lines = []
    for name in sorted(set(before) | set(after)):
        old, new = before.get(name), after.get(name)
        if old != new:
            lines.append(f"{name} {old or 'absent'} -> {new or 'absent'}")
    return lines


def installed(site: Path) -> dict[str, str]:
    """The distributions of a site-packages folder by their own metadata: canonical name -> version."""
    found: dict[str, str] = {}
    for metadata in site.glob("*.dist-info/METADATA"):
        name = version = ""
        with metadata.open(encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if line.startswith("Name:"):
                    name = line.partition(":")[2].strip()
                elif line.startswith("Version:"):
                    version = line.partition(":")[2].strip()
                if not line.strip() or (name and version):
                    break
        found[canonical(name)] = version
    return found
