# SPDX-License-Identifier: Apache-2.0
"""Removes byte code that was cut when it was written: a module with such a file can't be imported, and would never be again.

Python 3.11 and early 3.12 do not see that a full disk took only a part of a file, and keep it under its final name
(https://github.com/python/cpython/issues/126606). Runs as ExecStartPre with -I, so its own modules do not come from there.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER
from pathlib import Path

HEADER = 16  # bytes before the code: magic number, flags, time or hash of the source, its size (PEP 552)
BLOCK = 512  # a disk that is full ends a file at a block; all others need not be read


def suspects(folder: Path) -> Iterator[Path]:
    """Files whose size is that of whole blocks."""
    for path in folder.rglob("*.pyc"):
        try:
            if path.stat().st_size % BLOCK == 0:
                yield path
        except FileNotFoundError:  # another instance of this release is at work, too
            continue


def cut(data: bytes) -> bool:
    """Whether this can't be the byte code of a whole module."""
    if len(data) < HEADER:
        return True
    if data[:4] != MAGIC_NUMBER:
        return False  # of another Python, which leaves it alone as this one does
    try:
        marshal.loads(data[HEADER:])  # noqa: S302 (the engine loads the same a moment later)
    except (EOFError, ValueError, TypeError):
        return True
    return False


def clean(folder: Path) -> list[Path]:
    """Remove what is cut; what was removed."""
    gone = []
    for path in suspects(folder):
        try:
            if cut(path.read_bytes()):
                path.unlink()
                gone.append(path)
        except FileNotFoundError:
            continue
    return gone


def main() -> None:
    """In the release's cache, which is the working folder."""
    folder = Path.cwd() / "pycache"
    try:
        gone = clean(folder)
    except OSError as error:
        sys.exit(f"sglang-fleet: damaged byte code can't be removed ({error}); on the host: rm -rf {folder}")
    for path in gone:
        print(f"sglang-fleet: byte code that a full disk had cut was removed: {path.relative_to(folder)}", flush=True)


if __name__ == "__main__":
    main()
