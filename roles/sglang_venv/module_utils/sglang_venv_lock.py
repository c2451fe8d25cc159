# SPDX-License-Identifier: Apache-2.0
"""The lock of an engine as data: parsing, markers, lint. Standard library only, so that hosts, controller and tests share it.

A lock is a requirements file in which bin/lock has written every line: `name==version`, at most one marker out of a small
closed set, and the sha256 of every file of that version. Anything else in it is a fault, and `lint` says which.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["LockError", "Pin", "applies", "body_digest", "canonical", "lint", "parse", "select", "write_marker"]

_PIN = re.compile(r"(?P<name>[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)==(?P<version>[^\s;\\*]+)(?: ; (?P<marker>[^\\]+?))?$")
_TERM = re.compile(r"(?P<key>python_version|platform_machine) == '(?P<value>[^']+)'$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})$")
_PRERELEASE = re.compile(r"(?:a|b|c|rc|alpha|beta|pre|preview|dev)\d*", re.IGNORECASE)


class LockError(ValueError):
    """A lock that can't be used; the message names the line or the package and says what was expected."""


@dataclass(frozen=True)
class Pin:
    """One distribution: canonical name, exact version, marker ('' = everywhere), sha256 of its files in hex."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def canonical(name: str) -> str:
    """The name of a distribution as the lock writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_prerelease(version: str) -> bool:
    """True for a, b, rc and dev versions; post releases and local versions are none."""
    return bool(_PRERELEASE.search(version.split("+", maxsplit=1)[0].replace("post", "")))


def parse(text: str) -> list[Pin]:
    """The pins of a lock in file order. LockError names the first line that is not `name==version[ ; marker]` with hashes."""
    pins: list[Pin] = []
    number = 0
    lines = text.splitlines()
    while number < len(lines):
        first = number
        line = lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        parts = [line.removesuffix("\\").strip()]
        while line.endswith("\\") and number < len(lines):
            line = lines[number].strip()
            number += 1
            parts.append(line.removesuffix("\\").strip())
        head, *rest = parts
        if not (match := _PIN.match(head)):
            raise LockError(f"line {first + 1}: expected name==version and nothing else, found {head!r}")
        hashes = []
        for offset, part in enumerate(rest, first + 2):
            if not (found := _HASH.match(part)):
                raise LockError(f"line {offset}: expected --hash=sha256: and 64 hex digits for {head}, found {part!r}")
            hashes.append(found[1])
        pins.append(Pin(match["name"], match["version"], match["marker"] or "", tuple(hashes)))
    return pins


def applies(marker: str, python: str, machine: str) -> bool:
    """Whether a marker holds for a Python minor ('3.11') and a machine ('x86_64'). LockError on any other marker language."""
    if not marker:
        return True
    facts = {"python_version": python, "platform_machine": machine}
    held = []
    for clause in marker.split(" or "):
        terms = [_TERM.match(term) for term in clause.split(" and ")]
        if not all(terms):
            raise LockError(f"marker {marker!r} is not one that bin/lock writes")
        held.append(all(facts[t["key"]] == t["value"] for t in terms if t))
    return any(held)


def write_marker(wanted: Iterable[tuple[str, str]], pythons: Sequence[str], machines: Sequence[str]) -> str:
    """The shortest marker that holds exactly for the (python, machine) pairs wanted, out of all pythons x machines."""
    pairs = set(wanted)
    by_machines: dict[tuple[str, ...], list[str]] = {}
    for python in pythons:
        if found := tuple(m for m in machines if (python, m) in pairs):
            by_machines.setdefault(found, []).append(python)
    clauses = []
    for found, those in by_machines.items():
        python_terms = [""] if len(those) == len(pythons) else [f"python_version == '{p}'" for p in those]
        machine_terms = [""] if len(found) == len(machines) else [f"platform_machine == '{m}'" for m in found]
        clauses += [" and ".join(filter(None, (p, m))) for p in python_terms for m in machine_terms]
    return " or ".join(clauses)


def select(pins: Iterable[Pin], python: str, machine: str) -> list[Pin]:
    """The pins that hold for a Python minor and a machine."""
    return [pin for pin in pins if applies(pin.marker, python, machine)]


def body_digest(text: str) -> str:
    """sha256 of what counts in a lock: its lines without comments and blank lines."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def lint(text: str, pythons: Sequence[str], machines: Sequence[str], prereleases: Iterable[str] = ()) -> list[str]:
    """Every fault of a lock, in plain words; an empty list is a clean lock.

    `prereleases` names the packages whose pre-releases are allowed. A lock that does not parse gives that one fault.
    """
    try:
        pins = parse(text)
        for pin in pins:
            applies(pin.marker, pythons[0], machines[0])
    except LockError as error:
        return [str(error)]
    allowed = {canonical(name) for name in prereleases}
    faults = [] if pins else ["no package at all"]
    for pin in pins:
        if not pin.hashes:
            faults.append(f"{pin}: no sha256")
        if len(set(pin.hashes)) < len(pin.hashes):
            faults.append(f"{pin}: a sha256 is listed twice")
        if is_prerelease(pin.version) and pin.name not in allowed:
            faults.append(f"{pin}: a pre-release, and overrides.yml does not allow one for {pin.name}")
    for python in pythons:
        for machine in machines:
            seen: dict[str, Pin] = {}
            for pin in select(pins, python, machine):
                if pin.name in seen:
                    faults.append(f"{pin}: also locked as {seen[pin.name].version} for Python {python} on {machine}")
                seen[pin.name] = pin
    if [p.name for p in pins] != sorted(p.name for p in pins):
        faults.append("the packages are not in alphabetical order")
    return faults
