# SPDX-License-Identifier: Apache-2.0
"""Starting programs, locks and files that are whole or absent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path


class LabError(Exception):
    """A lab operation that failed; the message names the thing, what was expected and the next step."""


class MisuseError(LabError):
    """A call that can't work as written (exit code 2)."""


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    timeout: float | None = None,
    beat: Callable[[float], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. LabError with its own words when it fails, is absent or outlasts `timeout` seconds.

    A long one calls `beat` with the seconds so far every 15 s.
    """
    words = [str(a) for a in argv]
    try:
        done = _finish(words, stdin, env, timeout, beat)
    except FileNotFoundError:
        raise LabError(f"{words[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(words)} gave no answer within {timeout:g} s") from None
    if check and done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "(nothing printed)")[-2000:]
        raise LabError(f"{' '.join(words)} failed with exit code {done.returncode}: {said}")
    return done


def _finish(
    words: list[str],
    stdin: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    beat: Callable[[float], None] | None,
) -> subprocess.CompletedProcess[str]:
    began = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL if stdin is None else pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=dict(env) if env is not None else None,
    ) as child:
        try:
            while True:
                spent = time.monotonic() - began
                limits = [15.0] * bool(beat) + ([timeout - spent] if timeout else [])
                try:
                    out, err = child.communicate(stdin, timeout=min(limits, default=None))
                    return subprocess.CompletedProcess(words, child.returncode, out, err)
                except subprocess.TimeoutExpired:
                    spent = time.monotonic() - began
                    if timeout and spent >= timeout:
                        raise
                    if beat:
                        beat(spent)
        except BaseException:
            child.kill()
            raise


@contextlib.contextmanager
def locked(path: Path, note: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file; `note` is called once if somebody else holds it. Ends with the process.

    The holder may delete the file: whoever waited for it then locks the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if note:
                    note()
                    note = None
                fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(path.stat(), os.fstat(handle.fileno()))
            except FileNotFoundError:
                same = False
            if same:
                yield
                return


def write(path: Path, text: str, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
    """Write a file by rename, so that a reader sees the old or the new one; the mode holds from the first byte."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "w") as f:
            os.fchmod(f.fileno(), mode)
            if owner:
                os.fchown(f.fileno(), *owner)
            f.write(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def mounts(under: Path) -> list[Path]:
    """Mount points at or under a folder, innermost first; a folder bound onto itself counts too."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # blanks are written as \\040
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), line.split()[4]))
        if point.is_relative_to(under):
            found.append(point)
    return sorted(found, reverse=True)


def until(condition: Callable[[], bool], seconds: float, step: float = 0.02) -> bool:
    """Wait for a condition; False when it does not hold within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step)
    return True
