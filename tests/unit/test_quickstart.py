# SPDX-License-Identifier: Apache-2.0
"""The quickstart reads a real play's output, and stops at the first phase that fails."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from fleet import quickstart
from fleet.console import Progress, run_logged
from fleet.playview import PLAY_ENV, PlayView

PLAY = """---
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - name: Looks
      ansible.builtin.command: "true"
      changed_when: false
    - name: Is left out
      ansible.builtin.command: "true"
      when: false
    - name: Writes
      ansible.builtin.copy: {{content: x, dest: "{0}/file", mode: "0644"}}
    - name: Breaks
      ansible.builtin.fail: {{msg: on purpose}}
      when: {1}
"""


def play(tmp_path: Path, fail: bool) -> tuple[int, PlayView, str]:
    book, out = tmp_path / "play.yml", io.StringIO()
    book.write_text(PLAY.format(tmp_path, str(fail).lower()))
    view = PlayView(Progress(out))
    env = {**os.environ, **PLAY_ENV}
    argv = ["ansible-playbook", "-i", "localhost,", str(book)]
    return run_logged(argv, tmp_path / "log", view.line, view.wait, env), view, out.getvalue()


def test_play_view_counts_what_ran_and_shows_what_changed(tmp_path: Path) -> None:
    code, view, shown = play(tmp_path, fail=False)
    assert (code, view.tasks, view.changed) == (0, 2, 1)
    assert "changed  Writes" in shown
    assert "Is left out" not in shown
    assert set(view.roles) == {"site"}


def test_play_view_marks_the_task_that_failed(tmp_path: Path) -> None:
    code, view, shown = play(tmp_path, fail=True)
    assert code == 2
    assert view.tasks == 3
    assert "FAILED   Breaks" in shown


def test_seconds_go_to_the_role_of_the_task() -> None:
    view = PlayView(Progress(io.StringIO()))
    for line in (
        "TASK [one : A] ****",
        "ok: [h]",
        "TASK [one : B] ***",
        "changed: [h]",
        "RUNNING HANDLER [two : C] **",
        "ok: [h]",
    ):
        view.line(line)
    view.line("PLAY RECAP *****")
    assert set(view.roles) == {"one", "two"}
    assert (view.tasks, view.changed) == (3, 1)


VERDICT: dict[str, Any] = {
    "ok": False,
    "host": "quickstart-h1",
    "release": "0123abcd",
    "seconds": 1.0,
    "instances": [],
    "checks": [
        {
            "id": "verify-ran",
            "instance": "i0",
            "ok": True,
            "observed": "line 7",
            "expected": "a line",
            "why": "",
            "fix": "",
        },
        {
            "id": "lossless",
            "instance": "i0",
            "ok": False,
            "observed": "3 differ",
            "expected": "equal",
            "why": "W",
            "fix": "F",
        },
    ],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Phases that only record that they ran."""
    ran: list[str] = []
    monkeypatch.setattr(quickstart, "lacking", list)
    monkeypatch.setattr(quickstart.Quickstart, "up", lambda _: ran.append("lab"))
    monkeypatch.setattr(quickstart.Quickstart, "play", lambda _: ran.append("play"))
    monkeypatch.setattr(quickstart.Quickstart, "smoke", lambda _: ran.append("smoke") or {**VERDICT, "ok": True})
    return ran


def test_ok_only_if_the_verdict_is(
    machine: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quickstart.main([]) == 0
    assert machine == ["lab", "play", "smoke"]
    monkeypatch.setattr(quickstart.Quickstart, "smoke", lambda _: VERDICT)
    assert quickstart.main([]) == 1
    out = capsys.readouterr().out
    assert "NOT OK" in out and "expected: equal" in out and "fix:      F" in out


def test_a_failed_phase_ends_it(
    machine: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: quickstart.Quickstart) -> None:
        raise quickstart.PhaseError("play: it broke")

    monkeypatch.setattr(quickstart.Quickstart, "play", broken)
    assert quickstart.main(["--json"]) == 1
    captured = capsys.readouterr()
    assert machine == ["lab"]
    assert '"error": "play: it broke"' in captured.out
    assert "play: it broke" in captured.err


def test_a_machine_that_cannot_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "lacking", lambda: ["1.0 GiB of memory are free; expected 4"])
    assert quickstart.main([]) == 2
    assert "1.0 GiB of memory are free" in capsys.readouterr().err


def test_lacking_names_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(quickstart, "NEED_DISK", 1 << 60)
    assert any(str(tmp_path) in sentence for sentence in quickstart.lacking())
