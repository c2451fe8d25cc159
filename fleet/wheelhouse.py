# SPDX-License-Identifier: Apache-2.0
"""Fills a folder with every wheel of a lock, and uv's, for hosts that can reach no index."""

from __future__ import annotations

import base64
import hashlib
import json
import netrc
import re
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.sglang_venv_lock import LockError

from fleet import engine as engines
from fleet import lock, wheels
from fleet.engine import Engine

SUMS = "SHA256SUMS"
_TRIES = 5
_PAUSE = 2.0  # seconds before the second try, doubled for each further one
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """One file of a wheelhouse."""

    name: str
    size: int
    sha256: str


def wanted_files(engine: Engine, pythons: Iterable[str], machines: Iterable[str]) -> list[Wanted]:
    """The wheels that hosts with these Pythons and machines take, by files.json, sorted by name."""
    pairs = {(python, machine) for python in pythons for machine in machines}
    return [
        Wanted(row["name"], row["size"], row["sha256"])
        for row in json.loads(engine.files.read_text())["files"]
        if any(tuple(tag.split("/")[:2]) in pairs for tag in row["for"])
    ]


def uv_files(machines: Iterable[str]) -> tuple[list[Wanted], dict[str, str]]:
    """uv's wheels for the machines, and their addresses; checked against requirements/uv.txt."""
    text = (engines.ROOT / "requirements" / "uv.txt").read_text()
    allowed = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
    with tempfile.TemporaryDirectory(prefix="fleet-lock-") as name:
        (Path(name) / "uv.in").write_text(f"uv=={lock.pinned_uv()}\n")
        data = lock.export(["--python-version", "3.11", "--no-deps", "uv.in"], Path(name))
    found = {wheel["name"]: wheel for rows in data.values() for wheel in rows}
    chosen: list[Wanted] = []
    for machine in machines:
        for wheel in wheels.needed(found, "3.11", machine):
            if found[wheel]["sha256"] not in allowed:
                raise LockError(f"wrong hash: {wheel} of the index is not the one of requirements/uv.txt")
            chosen.append(Wanted(wheel, found[wheel]["size"], found[wheel]["sha256"]))
    return chosen, {name: wheel["url"] for name, wheel in found.items()}


def sha256(path: Path) -> str:
    """sha256 of a file in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _request(url: str, offset: int) -> urllib.request.Request:
    """A request for the rest of a file; the password of a private index comes from its address or from ~/.netrc."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user, password = parts.username or "", parts.password or ""
    if not user and host:
        try:
            if entry := netrc.netrc().authenticators(parts.hostname or ""):
                user, password = entry[0], entry[2]
        except (OSError, netrc.NetrcParseError):
            pass
    request = urllib.request.Request(parts._replace(netloc=host).geturl())  # noqa: S310  # the scheme is the index's own
    if user:
        secret = base64.b64encode(f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    return request


class Progress:
    """One line that says how far the whole download is; on a terminal rewritten in place, else a line every ten seconds."""

    def __init__(self, total: int, files: int) -> None:
        self.total, self.files = total, files
        self.done = self.finished = self.resumed = 0
        self.start = time.monotonic()
        self.last = 0.0

    def add(self, size: int, name: str, force: bool = False) -> None:
        """Counts bytes of a file and prints if it is time."""
        self.done += size
        now, live = time.monotonic(), sys.stderr.isatty()
        if not force and now - self.last < (0.2 if live else 10.0):
            return
        self.last = now
        rate = (self.done - self.resumed) / max(now - self.start, 1e-3)
        left = (self.total - self.done) / rate if rate > 0 else 0.0
        line = (
            f"{self.finished}/{self.files} files, {self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB, "
            f"{rate / 1e6:.1f} MB/s, {left:.0f} s left  {name}"
        )
        print(f"\r\x1b[K{line[:150]}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)


def fetch(url: str, target: Path, want: Wanted, progress: Progress) -> None:
    """Downloads one file to `target`, whole or not at all. A part of an earlier try is continued.

    LockError if its hash is wrong (the part is removed), OSError if it can't be had after some tries.
    """
    part = target.with_name(f".{target.name}.part")
    error: Exception | None = None
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(min(_PAUSE * 2 ** (attempt - 1), 10.0))  # the server's time to recover: nothing to wait on
        offset = part.stat().st_size if part.exists() else 0
        if offset >= want.size:
            part.unlink()
            offset = 0
        try:
            with urllib.request.urlopen(_request(url, offset), timeout=60) as answer:  # noqa: S310
                resumed = answer.status == 206 if hasattr(answer, "status") else False
                with part.open("ab" if resumed else "wb") as handle:
                    progress.resumed += handle.tell()
                    progress.add(handle.tell(), want.name)
                    while chunk := answer.read(_CHUNK):
                        handle.write(chunk)
                        progress.add(len(chunk), want.name)
                    size = handle.tell()
        except (urllib.error.URLError, TimeoutError, ConnectionError) as problem:
            error = problem
            progress.add(-(part.stat().st_size if part.exists() else 0), want.name)
            if isinstance(problem, urllib.error.HTTPError) and problem.code in (401, 403, 404):
                break
            continue
        if size < want.size:
            error = OSError(f"{want.name}: the connection ended after {size} of {want.size} bytes")
            progress.add(-size, want.name)
            continue
        if (digest := sha256(part)) != want.sha256:
            part.unlink()
            raise LockError(
                f"wrong hash: {want.name} of the index has sha256 {digest}, the lock asks for {want.sha256}"
            )
        part.replace(target)
        return
    raise OSError(f"{want.name} could not be downloaded: {error}; run again, finished files are kept")


def fill(engine: Engine, folder: Path, pythons: Sequence[str], machines: Sequence[str]) -> int:
    """Brings `folder` to hold exactly what hosts need; returns 0. Files with the right hash stay, parts are continued.

    Files that this lock does not name stay too, so that one folder can serve several engines; SHA256SUMS names all of this lock.
    """
    if wrong := lock.faults(engine):
        raise LockError(f"{engine.name}: {wrong[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    uv, urls = uv_files(machines)
    wanted = sorted([*wanted_files(engine, pythons, machines), *uv], key=lambda want: want.name)
    missing, kept = [], 0
    for want in wanted:
        path = folder / want.name
        if path.exists() and path.stat().st_size == want.size and sha256(path) == want.sha256:
            kept += 1
        else:
            path.unlink(missing_ok=True)
            missing.append(want)
    total = sum(want.size for want in missing)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(f"disk full: {folder} needs {total} bytes more, {free} are free")
    print(
        f"{engine.name}: {len(wanted)} files, {kept} there already, {len(missing)} to fetch ({total / 1e9:.2f} GB)",
        file=sys.stderr,
    )
    if missing:
        remote: dict[str, list[dict[str, Any]]] = lock.remote_files(engine, engine.lock.read_text())
        urls |= {wheel["name"]: wheel["url"] for rows in remote.values() for wheel in rows}
    progress = Progress(total, len(missing))
    for want in missing:
        if want.name not in urls:
            raise LockError(
                f"{want.name} is no longer on the index; run bin/lock {engine.name}, or take it from an older wheelhouse"
            )
        fetch(urls[want.name], folder / want.name, want, progress)
        progress.finished += 1
    if missing:
        progress.add(0, "done", force=True)
        print(file=sys.stderr)
    sums = "".join(f"{want.sha256}  {want.name}\n" for want in wanted)
    part = folder / f".{SUMS}.part"
    part.write_text(sums)
    part.replace(folder / SUMS)
    print(f"{folder}: {len(wanted)} files for Python {', '.join(pythons)} on {', '.join(machines)}.")
    print("Next: copy it to the host and set sglang_venv_wheelhouse to its path there.")
    return 0
