# SPDX-License-Identifier: Apache-2.0
"""A host that dies at any step of a change has one whole deployment after the next run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_units_files as files
from ansible.module_utils import gpu_units_state as state

from tests.unit.units_kit import Lab, no_disk, wanted

__all__ = ["no_disk"]  # a fixture


class CutError(BaseException):
    """The host dies here: nothing may catch it, as nothing catches a power loss."""


def count_steps(change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, cut_at: int | None) -> int:
    """Run a change whose n-th write, removal, link or word to systemd is the last thing the host does."""
    steps = 0
    originals = {name: getattr(files, name) for name in ("write", "remove", "link")}

    def step(name: str) -> Callable[..., Any]:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == cut_at:
                raise CutError
            return originals[name](*args, **kwargs)

        return stepped

    with monkeypatch.context() as patch:
        for name in originals:
            patch.setattr(files, name, step(name))
        try:
            change()
        except CutError:
            return steps
    return steps


def crash_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Lab], None], change: Callable[[Lab], Any]
) -> list[Lab]:
    """One host for each step of a change, cut at that step."""
    whole = Lab(tmp_path / "whole")
    prepare(whole)
    total = count_steps(lambda: change(whole), monkeypatch, None)
    assert total > 8
    cut = []
    for at in range(1, total + 1):
        lab = Lab(tmp_path / f"cut{at}")
        prepare(lab)
        assert count_steps(lambda lab=lab: change(lab), monkeypatch, at) == at
        cut.append(lab)
    return cut


def test_crash_at_any_step_of_a_swap(tmp_path, monkeypatch):
    """After the next run's recovery a host has the old deployment or the new one in every part; both are seen."""
    one, two, three = wanted("r1", "a", "b"), wanted("r2", "a", "b"), wanted("r3", "a", "c", unit="v2", budget=7)

    def prepare(lab: Lab) -> None:
        lab.go(one)
        lab.go(two)

    seen = set()
    for lab in crash_everywhere(tmp_path, monkeypatch, prepare, lambda lab: lab.swap(three)):
        state.recover(lab.host())
        if lab.live() == two["id"]:
            lab.agrees(two, previous=one)
        else:
            lab.agrees(three, previous=two)
        seen.add(lab.live())
        lab.swap(three)
        lab.start()
        lab.agrees(three, previous=two)
        lab.rollback()
        lab.agrees(two, previous=three)
    assert seen == {two["id"], three["id"]}


def test_crash_at_any_step_of_the_first_swap(tmp_path, monkeypatch):
    one = wanted("r1", "a", "b")
    for lab in crash_everywhere(tmp_path, monkeypatch, Lab.files, lambda lab: lab.swap(one)):
        state.recover(lab.host())
        lab.agrees(one if lab.live() else None, previous=None)
        lab.swap(one)
        lab.agrees(one, previous=None)


def test_crash_at_any_step_of_a_rollback(tmp_path, monkeypatch):
    one, two = wanted("r1", "a"), wanted("r2", "a", "b", unit="v2")

    def prepare(lab: Lab) -> None:
        lab.go(one)
        lab.go(two)

    for lab in crash_everywhere(tmp_path, monkeypatch, prepare, lambda lab: lab.rollback()):
        state.recover(lab.host())
        if lab.live() == two["id"]:
            lab.agrees(two, previous=one)
        else:
            lab.agrees(one, previous=two)


def test_nothing_may_start_while_a_change_is_open(tmp_path, monkeypatch, repo):
    """The unit template refuses to start as long as the note of an unfinished change lies there."""
    template = (repo / "roles/gpu_units/templates/sglang@.service.j2").read_text()
    assert f"AssertPathExists=!/{state.STATE}/deployments/swap.json\n" in template
    lab = Lab(tmp_path)
    lab.go(wanted("r1"))
    note = lab.root / state.STATE / "deployments/swap.json"
    seen = []
    real = state.enact
    monkeypatch.setattr(state, "enact", lambda *a: (seen.append(note.exists()), real(*a)))
    lab.swap(wanted("r2"))
    assert seen == [True]
    assert not note.exists()
