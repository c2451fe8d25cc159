# SPDX-License-Identifier: Apache-2.0
"""The run lock's words and the proof that a holder is gone; the lock itself is tested on lab hosts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from ansible.module_utils.gpu_host_lockfile import TITLE, describe, parse, same_run

PLUGIN = Path(__file__).parents[2] / "roles/gpu_host/action_plugins/gpu_host_lock.py"
ME = {"controller": "abc", "user": "ann", "machine": "desk", "pid": 12, "started": "345"}


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_host_lock_action", PLUGIN)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_is_read_again() -> None:
    line = describe(ME, "2026-11-29T19:00:00Z")
    assert line.startswith(TITLE)
    assert parse(line) == {**ME, "pid": "12", "since": "2026-11-29T19:00:00Z"}
    assert same_run(parse(line), ME)


def test_another_process_boot_or_controller_is_another_run() -> None:
    holder = parse(describe(ME, "now"))
    for change in ({"pid": 13}, {"started": "346"}, {"controller": "abd"}):
        assert not same_run(holder, {**ME, **change})


def test_a_value_with_spaces_cannot_forge_a_field() -> None:
    holder = parse(describe({**ME, "user": "ann pid=99"}, "now"))
    assert holder["pid"] == "12"
    assert holder["user"] == "annpid=99"


def test_a_foreign_description_equals_nobody() -> None:
    assert not same_run(parse("/usr/bin/sleep infinity"), ME)


def test_a_live_process_is_not_gone_and_an_ended_one_is(plugin: ModuleType) -> None:
    here = plugin.controller()
    mine = {"controller": here, "pid": str(os.getpid()), "started": plugin.started(os.getpid())}
    assert not plugin.gone(mine, here)
    assert plugin.gone({**mine, "started": "1"}, here), "the number was given to another process"
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = plugin.started(child.pid) or "0"
    child.wait()
    assert plugin.gone({"controller": here, "pid": str(child.pid), "started": started}, here)


def test_nothing_is_known_of_processes_of_another_controller(plugin: ModuleType) -> None:
    assert not plugin.gone({"controller": "elsewhere", "pid": "1", "started": "0"}, plugin.controller())
    assert not plugin.gone(
        {"controller": plugin.controller(), "pid": "unknown", "started": "unknown"}, plugin.controller()
    )


def test_the_refusal_names_host_holder_and_next_step(plugin: ModuleType) -> None:
    text = plugin.refusal("ct200", {**ME, "since": "2026-11-29T19:00:00Z"}, ours=True)
    for word in (
        "ct200",
        "ann on desk",
        "process 12",
        "since 2026-11-29T19:00:00Z",
        "systemctl stop sglang-fleet-run.service",
    ):
        assert word in text
