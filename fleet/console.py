# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a door works: phases with seconds, a live line for long steps, programs run with a full log."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO, cast

CLEAR = "\r\033[K"


class Progress:
    """Phases and what happens in them. On a terminal the running step is one live line; elsewhere it is repeated now and then.

    `seconds` holds the wall seconds of every finished phase, failed ones included. `started` is a time.time() of the past
    where the work began before this process.
    """

    def __init__(self, out: TextIO, *, started: float | None = None, every: float = 30.0) -> None:
        self.out, self.every = out, every
        self.started = time.time() if started is None else started
        self.seconds: dict[str, float] = {}
        self._terminal = out.isatty()
        self._live = False
        self._told = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        print(f"{CLEAR if self._live else ''}{text}", file=self.out, flush=True)
        self._live, self._told = False, time.monotonic()

    def still(self, text: str, since: float) -> None:
        """The step that runs since `since` (time.monotonic); called often, written when it helps."""
        waited = time.monotonic() - since
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"{CLEAR}{f'  {waited:6.1f} s  {text} ...'[:width]}", end="", file=self.out, flush=True)
            self._live = True
        elif time.monotonic() - self._told >= self.every:
            self.say(f"  {waited:6.1f} s  {text} ... (still running)")

    def done(self, name: str, seconds: float) -> None:
        """Closes a phase that was measured elsewhere."""
        self.seconds[name] = round(seconds, 2)
        self.say(f"[{time.time() - self.started:6.1f} s] {name}: {seconds:.1f} s")

    @contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        """Announces a phase and measures it, however it ends."""
        self.say(f"[{time.time() - self.started:6.1f} s] {name}: {what}")
        began = time.monotonic()
        try:
            yield
        finally:
            self.done(name, time.monotonic() - began)


def _terminal_tells_us() -> bool:
    """Whether this process group is in front of its terminal, so that Ctrl-C reaches all of it."""
    try:
        with open("/dev/tty", encoding="utf-8") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def run_logged(
    argv: Sequence[str],
    log: Path,
    on_line: Callable[[str], None],
    on_wait: Callable[[], None],
    env: Mapping[str, str] | None = None,
) -> int:
    """Runs a program without stdin; every line of its output goes to `log` (appended) and to `on_line`.

    `on_wait` is called about once a second while nothing comes. Returns the exit status, 128 + n after signal n. Whatever ends
    this early waits for the program's own end: at Ctrl-C the terminal has told it too, otherwise (and the second time) it gets
    SIGTERM.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        ) as child,
        selectors.DefaultSelector() as ready,
    ):
        file.write(f"$ {' '.join(argv)}\n")
        pipe, rest = cast(IO[bytes], child.stdout).fileno(), b""
        ready.register(pipe, selectors.EVENT_READ)
        try:
            while True:
                if not ready.select(timeout=1.0):
                    on_wait()
                    continue
                data = os.read(pipe, 65536)
                *lines, rest = (rest + data).split(b"\n") if data else ([rest, b""] if rest else [b""])
                for raw in lines:
                    line = raw.decode(errors="replace").rstrip("\r")
                    file.write(line + "\n")
                    on_line(line)
                file.flush()
                if not data:
                    break
        except BaseException as reason:
            if not (isinstance(reason, KeyboardInterrupt) and _terminal_tells_us()):
                child.terminate()
            try:
                child.communicate()  # a full pipe would keep it from ending
            except BaseException:
                child.terminate()
                child.communicate()
                raise
            raise
        code = child.wait()
    return code if code >= 0 else 128 - code


def last_lines(log: Path, count: int) -> list[str]:
    """The end of a log, for the person who would open it next."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
