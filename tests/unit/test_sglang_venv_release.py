# SPDX-License-Identifier: Apache-2.0
"""The id of a release and its plan."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from ansible.module_utils import sglang_venv_release as releases
from ansible.module_utils.sglang_venv_lock import LockError

from fleet import engine as engines
from fleet import lock
from tests import venv

A, B, C = "a" * 64, "b" * 64, "c" * 64
LOCK = f"alpha==1.0 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\n"
BASE: dict[str, Any] = {
    "lock": LOCK,
    "series": "",
    "engine": "sglang-0",
    "python": "3.11",
    "machine": "x86_64",
    "profile": {"name": "sm90", "files": {}, "args": {}, "env": {}},
}


def test_an_id_is_short_hex_and_stable() -> None:
    first = releases.release_id(**BASE)
    assert re.fullmatch(r"[0-9a-f]{12,16}", first)
    assert releases.release_id(**copy.deepcopy(BASE)) == first


@pytest.mark.parametrize(
    "change",
    [
        {"lock": LOCK.replace("1.0", "1.1")},
        {"lock": LOCK.replace(A, C)},
        {"series": "f" * 64},
        {"engine": "sglang-1"},
        {"python": "3.12"},
        {"machine": "aarch64"},
        {"profile": {"name": "sm100", "files": {}}},
        {"profile": {"name": "sm90", "files": {"a.py": "x"}}},
        {"profile": {"name": "sm90", "files": {"a.py": "y"}}},
        {"profile": {"name": "sm90", "files": {"b.py": "x"}}},
        {"profile": {"name": "sm90", "files": {}, "stub_libcuda": True}},
        {"profile": {"name": "sm90", "files": {}, "stub_libcuda": True, "stub_symbols": ["cuInit"]}},
    ],
)
def test_every_input_changes_the_id(change: dict[str, Any]) -> None:
    others = [BASE, {**BASE, "profile": {"name": "sm90", "files": {}, "stub_libcuda": True}}]
    changed = releases.release_id(**{**BASE, **change})
    assert changed not in {releases.release_id(**o) for o in others if {**BASE, **change} != o}


@pytest.mark.parametrize(
    "change",
    [
        {"lock": "# written on another day\n" + LOCK},
        {"profile": {"name": "sm90", "args": {"a": 1}, "env": {"B": "c"}}},
        {"profile": {"name": "sm90", "files": {}, "stub_symbols": ["cuInit"]}},
    ],
)
def test_what_a_release_does_not_hold_leaves_the_id(change: dict[str, Any]) -> None:
    assert releases.release_id(**{**BASE, **change}) == releases.release_id(**BASE)


@pytest.fixture
def inputs() -> dict[str, Any]:
    """Everything make_plan wants for a small engine."""
    return {
        "engine": {
            "engine": "sglang-0",
            "version": "0",
            "lock": {"python": ["3.11", "3.12"], "machines": ["x86_64", "aarch64"]},
            "unpacked": {"bytes": 1000, "files": 10},
            "audit": {"cuda_major": 13, "exceptions": [{"file": "x", "package": "y", "major": 12, "reason": "z"}]},
        },
        "overrides": {},
        "lock": LOCK,
        "files": {
            "glibc": "2.34",
            "files": [
                {
                    "package": "alpha==1.0",
                    "name": "alpha-1.0-py3-none-any.whl",
                    "size": 5,
                    "sha256": A,
                    "for": ["3.11/x86_64/28", "3.12/aarch64/28"],
                },
                {
                    "package": "alpha==1.0",
                    "name": "alpha-1.0-cp311-abi3-manylinux_2_34_x86_64.whl",
                    "size": 6,
                    "sha256": B,
                    "for": ["3.11/x86_64/34"],
                },
            ],
        },
        "uv": f"uv==0.1 \\\n    --hash=sha256:{C}\n",
        "python": "3.11",
        "machine": "x86_64",
        "profile": {"name": "cpu", "files": {"a": "b"}, "stub_libcuda": True, "stub_symbols": ["cuB", "cuA"]},
        "series": "s",
    }


def test_a_plan_holds_what_a_host_needs(inputs: dict[str, Any]) -> None:
    plan = releases.make_plan(**inputs)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["packages"] == {"alpha": "1.0"}
    assert [(row["name"], row["glibc"]) for row in plan["files"]] == [
        ("alpha-1.0-py3-none-any.whl", 28),
        ("alpha-1.0-cp311-abi3-manylinux_2_34_x86_64.whl", 34),
    ]
    assert plan["uv"] == {"version": "0.1", "hashes": [C]}
    assert plan["audit"]["exceptions"] == [{"file": "x", "package": "y", "major": 12}]
    assert releases.requirements(plan["files"]) == f"alpha==1.0 --hash=sha256:{A} --hash=sha256:{B}\n"


def test_a_host_takes_the_newest_wheel_its_c_library_allows(inputs: dict[str, Any]) -> None:
    plan = releases.make_plan(**inputs)
    assert releases.pick_files(plan["files"], 31)["alpha==1.0"]["size"] == 5
    assert releases.pick_files(plan["files"], 36)["alpha==1.0"]["size"] == 6


def test_an_unsupported_python_is_told_with_the_next_step(inputs: dict[str, Any]) -> None:
    with pytest.raises(LockError, match=r"locked for Python 3.11 or 3.12 .* has Python 3.13 .* install python3.12"):
        releases.make_plan(**{**inputs, "python": "3.13"})


def test_a_wrong_hash_in_the_lock_names_package_and_file(inputs: dict[str, Any]) -> None:
    with pytest.raises(
        LockError, match=r"wrong hash in the lock of sglang-0: alpha==1.0, file alpha-1.0-py3-none-any.whl"
    ):
        releases.make_plan(**{**inputs, "lock": LOCK.replace(A, C)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lock": "alpha>=1.0\n"}, "not in order: line 1"),
        ({"lock": LOCK.replace("1.0", "2.0")}, "no alpha==1.0"),
        ({"files": {"glibc": "2.34", "files": []}}, "no file for alpha==1.0"),
        ({"uv": f"pip==1 \\\n --hash=sha256:{C}\n"}, "must hold uv==VERSION"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(inputs: dict[str, Any], change: dict[str, Any], said: str) -> None:
    with pytest.raises(LockError, match=said):
        releases.make_plan(**{**inputs, **change})


@pytest.mark.parametrize("device", ["cpu", "sm90"])
def test_the_default_engine_has_a_plan_for_every_host(device: str) -> None:
    engine = engines.load(lock.DEFAULT)
    read = venv.action_plugin().read_engine(engine.folder, venv.ROOT / "requirements" / "uv.txt")
    seen = set()
    for python in engine.pythons:
        for machine in engine.machines:
            plan = releases.make_plan(**read, python=python, machine=machine, profile=venv.profile(device))
            picked = releases.pick_files(plan["files"], 36)
            assert {row.split("==")[0] for row in picked} == set(plan["packages"])
            seen.add(plan["id"])
    assert len(seen) == 4


def test_changes_between_releases_are_told_by_package() -> None:
    before, after = {"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}
    assert releases.compare(before, after) == ["b 1 -> 2", "c 1 -> absent", "d absent -> 1"]
