# SPDX-License-Identifier: Apache-2.0
"""Phases, live lines and programs with a log."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.console import Progress, last_lines, run_logged
from fleet.importer import ROOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def nothing() -> None:
    pass


def test_lines_arrive_as_they_are_written_and_the_log_has_all(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "logs" / "run.log"
    code = "import sys; print('one'); print('two', file=sys.stderr); print('last', end='')"
    assert run_logged(python(code), log, lines.append, nothing) == 0
    assert lines == ["one", "two", "last"]
    assert log.read_text().splitlines()[1:] == lines
    assert last_lines(log, 2) == ["two", "last"]


def test_a_line_in_two_writes_and_bad_bytes_stay_one_line(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import os, time; os.write(1, b'a\\xff'); time.sleep(0.2); os.write(1, b'b\\r\\nc\\n')"
    assert run_logged(python(code), tmp_path / "log", lines.append, nothing) == 0
    assert lines == ["a\ufffdb", "c"]


def test_exit_status_is_the_programs_own(tmp_path: Path) -> None:
    assert run_logged(python("raise SystemExit(3)"), tmp_path / "log", lambda _: None, nothing) == 3
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run_logged(python(kill), tmp_path / "log", lambda _: None, nothing) == 128 + signal.SIGTERM


def test_program_gets_no_stdin(tmp_path: Path) -> None:
    lines: list[str] = []
    run_logged(python("import sys; print(repr(sys.stdin.read()))"), tmp_path / "log", lines.append, nothing)
    assert lines == ["''"]


def test_waiting_is_reported_while_nothing_comes(tmp_path: Path) -> None:
    waits: list[float] = []
    code = "import time; time.sleep(1.5); print('done')"
    run_logged(python(code), tmp_path / "log", lambda _: None, lambda: waits.append(time.monotonic()))
    assert waits


def test_program_is_told_to_end_and_waited_for_when_its_reader_fails(tmp_path: Path) -> None:
    code = f"""
import pathlib, signal, sys, time
def bye(*_):
    print("x" * 300000)  # more than a pipe holds
    pathlib.Path({str(tmp_path / "ended")!r}).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
print("up")
time.sleep(60)
"""

    def fail(_: str) -> None:
        raise RuntimeError("reader")

    with pytest.raises(RuntimeError, match="reader"):
        run_logged(python(code), tmp_path / "log", fail, nothing)
    assert (tmp_path / "ended").exists()


def test_an_interrupt_without_a_terminal_reaches_the_program(tmp_path: Path) -> None:
    """As in `bin/quickstart &` and a kill -INT of its pid alone: nobody else tells what runs below it."""
    door = f"""
import pathlib, sys
from fleet.console import run_logged
program = [sys.executable, "-uc", "import time; print('up'); time.sleep(60)"]
run_logged(program, pathlib.Path({str(tmp_path / "log")!r}), print, lambda: None)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", door], env=env, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
        assert process.stdout.read() == "", "what ran below it has ended: nobody holds the pipe"


def test_phase_is_measured_even_if_it_fails() -> None:
    out = io.StringIO()
    progress = Progress(out)
    with pytest.raises(ValueError, match="no"), progress.phase("build", "a release"):
        raise ValueError("no")
    assert set(progress.seconds) == {"build"}
    assert "build: a release" in out.getvalue()


def test_live_line_is_wiped_on_a_terminal_and_rare_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        progress = Progress(out, every=60)
        progress.still("slow step", time.monotonic() - 5)
        progress.say("next")
    assert terminal.getvalue().startswith("\r\033[K") and terminal.getvalue().endswith("\r\033[Knext\n")
    assert pipe.getvalue() == "next\n"


def test_long_silence_is_broken_without_a_terminal() -> None:
    out = io.StringIO()
    Progress(out, every=0).still("slow step", time.monotonic() - 30)
    assert "30.0 s  slow step" in out.getvalue()
