# SPDX-License-Identifier: Apache-2.0
"""Work that may hang for good: real child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible.module_utils.gpu_host_gather_child import ChildError, in_child

MODULE = Path(__file__).parents[2] / "roles/gpu_host/module_utils/gpu_host_gather_child.py"


def test_a_result_of_any_size_comes_back() -> None:
    assert in_child(lambda: {"pid": os.getpid()}, 10)["pid"] != os.getpid()
    assert len(in_child(lambda: "x" * 300_000, 10)) == 300_000


def test_a_hang_is_told_and_the_child_is_gone(tmp_path: Path) -> None:
    def hang() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()

    with pytest.raises(ChildError, match="no answer within 1 s"):
        in_child(hang, 1)
    child = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            return  # reaped
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child is still there")


def test_a_death_is_told() -> None:
    with pytest.raises(ChildError, match="died"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), 10)


def test_a_fault_of_the_work_itself_is_no_fact() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: 1 // 0, 10)


def test_a_child_that_cannot_end_holds_nobody_who_reads_the_parents_output() -> None:
    # Nobody ends this child; it ends by itself after the time in which its reader has to be done.
    script = (
        "import importlib.util as u, os, signal, sys; s = u.spec_from_file_location('c', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); os.kill = lambda *a: None\n"
        "try: m.in_child(lambda: (signal.alarm(12), signal.pause()), 0.2)\n"
        "except m.ChildError as e: print(e)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script, str(MODULE)], capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("no answer"), done.stderr
    assert time.monotonic() - began < 10
