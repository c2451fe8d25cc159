# SPDX-License-Identifier: Apache-2.0
"""What a benchmark needs around it before anything starts: a folder of its own, and a Python that has the engine."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fleet.bench.arms import Misuse
from fleet.bench.servers import environment

PROBE_LIMIT = 120  # seconds; a cold file system is slow
PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


def take(folder: Path) -> int:
    """Make a folder for reports and hold it for this process; returns the descriptor that holds it. Raises Misuse."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Misuse(f"--out {folder}: {error.strerror}; name a folder that can be written") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise Misuse(f"--out {folder} belongs to a benchmark that still runs; name another folder") from None
    return held


def engine(python: str, env: Mapping[str, str]) -> None:
    """Raises Misuse if a Python can't be run or has no engine, which every arm would tell on its own otherwise."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE],
            env=environment(python, env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Misuse(f"--python {python} can't be run: {error}") from error
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it has no sglang"]
        raise Misuse(f"{python}: {why[0]}; name the engine's Python with --python, or measure on a host with -l")
