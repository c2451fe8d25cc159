# SPDX-License-Identifier: Apache-2.0
"""What every gatherer of facts uses: programs, small files, lists of CPUs. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def run(argv: list[str], timeout: float = 20.0) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command; 127 when it is not there, 124 when it hangs."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        return 127, "", str(error)
    except PermissionError as error:
        return 126, "", str(error)
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]} gave no answer within {timeout:.0f} s"
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def which(name: str, extra: tuple[str, ...] = ()) -> str | None:
    """Path of a program: sudo and cron shorten PATH, so the usual folders are always looked at."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", *extra]
    return shutil.which(name, path=os.pathsep.join(folders))


def read(path: str | Path) -> str | None:
    """A small file's text without the white space around it; None when it is not there or not ours to read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def whole(text: str | None) -> int | None:
    """A decimal number; None for anything else, such as `max` or `unlimited`."""
    return int(text) if text is not None and text.strip().lstrip("-").isdigit() else None


def table(text: str | None) -> dict[str, int]:
    """/proc/meminfo and the like: `Name:  123 kB` as name and bytes (plain counts stay counts)."""
    found = {}
    for line in (text or "").splitlines():
        name, _, rest = line.partition(":")
        cells = rest.split()
        if cells and cells[0].isdigit():
            found[name.split()[-1]] = int(cells[0]) * (1024 if cells[1:] == ["kB"] else 1)
    return found
