# SPDX-License-Identifier: Apache-2.0
"""Recordings that stand in for a host's facts: a file that is none gives one error that names it, never a traceback."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet import preflight, recording
from tests.unit.judge_kit import good

DATA = Path(__file__).parent / "data/gpu_host"
H200 = json.loads((DATA / "h200.json").read_text())


def without(*keys: str | int) -> dict[str, Any]:
    facts = copy.deepcopy(H200)
    at: Any = facts
    for key in keys[:-1]:
        at = at[key]
    del at[keys[-1]]
    return dict(facts)


BAD = {
    "list": ("[]", "it is a list, not a map"),
    "broken": ('{"gpu": {},\n x}', "bad.json:2 is no JSON"),
    "empty": ("", "bad.json:1 is no JSON"),
    "other": ('{"a": 1}', "recorded is missing"),
    "no gpus": (json.dumps(without("gpu", "gpus")), "gpu.gpus is missing"),
    "gpus": (json.dumps({**H200, "gpu": {**H200["gpu"], "gpus": None}}), "gpu.gpus is null"),
    "gpu": (json.dumps({**H200, "gpu": {**H200["gpu"], "gpus": ["x"]}}), "gpu.gpus[0] is 'x', not a map"),
    "no uuid": (json.dumps(without("gpu", "gpus", 0, "uuid")), "gpu.gpus[0].uuid is missing"),
    "index": (json.dumps({**H200, "gpu": {**H200["gpu"], "gpus": [{**H200["gpu"]["gpus"][0], "index": "0"}]}}), "index is '0'"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_a_file_that_is_none_is_misuse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, words = BAD[name]
    Path("bad.json").write_text(text)
    told = run("bad.json", capsys)
    assert words in told
    assert "ct200: gpu_host_facts_file bad.json" in told
    assert "gpu_host_gather.py --record WORDS" in told


def run(file: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What bin/preflight says of a file that is none: one line, exit code 2."""
    one = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "ansible_become": False,
        "gpu_host_facts_file": file,
        "fleet_engine": "sglang-0.5.11",
        "gpu_units_defaults": good()[0]["defaults"],
        "gpu_units_instances": [{"name": "gpu0", "gpus": [0], "port": 30000}],
    }
    Path("hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"ct200": one}}}))
    assert preflight.main(["-i", "hosts.yml"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


def test_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "gpu_host_facts_file none.json cannot be read: No such file or directory" in run("none.json", capsys)


def test_what_no_rule_knows_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deep in the facts a rule is the first to see it."""
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text(json.dumps({**H200, "limits": 7}))
    told = run("bad.json", capsys)
    assert "has not the form of a recording, or the check is at fault" in told
    assert ": the check " in told and "AttributeError" in told


RECORDINGS = [path for path in sorted(DATA.glob("*.json")) if "gpu" in json.loads(path.read_text())]


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda path: path.stem)
def test_the_bundled_ones_are_recordings(file: Path) -> None:
    assert recording.read(str(file))["recorded"]
    assert recording.read("") == {}
