# SPDX-License-Identifier: Apache-2.0
"""Profiles as data: every file is sound, every defect is named."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROLE = Path(__file__).resolve().parents[2] / "roles/kernel_backends"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


profiles = _load(ROLE / "lookup_plugins/kernel_backends_profile.py")


@pytest.mark.parametrize("name", ["cpu", "sm90", "sm100", "sm120"])
def test_every_profile_is_sound(name: str) -> None:
    profile = profiles.load(name)
    assert profile["name"] == name
    assert set(profile) == {"name", "args", "env", "files", "stub_libcuda", "stub_symbols", "row", "backends"}
    assert profile["args"]["page-size"] == 1
    assert all(isinstance(value, str) for value in profile["env"].values())
    assert profile["stub_libcuda"] == bool(profile["stub_symbols"]) == (name == "cpu")


def test_known_profiles_are_the_contracts() -> None:
    assert profiles.known() == ["cpu", "sm100", "sm120", "sm90"]


def test_gpu_profiles_carry_nothing_of_the_cpus() -> None:
    for name in ("sm90", "sm100", "sm120"):
        profile = profiles.load(name)
        assert profile["files"] == {}
        assert not {"SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET", "PYTHONPATH", "LD_LIBRARY_PATH"} & set(profile["env"])
        assert "disable-cuda-graph" not in profile["args"]


def test_cpu_profile_publishes_every_file_of_its_package() -> None:
    folder = ROLE / "files/cpu"
    files = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert profiles.load("cpu")["files"] == files
    assert "sglang_fleet_cpu = sglang_fleet_cpu:register" in files["sglang_fleet_cpu-1.0.dist-info/entry_points.txt"]


def test_lookup_gives_one_profile_per_term() -> None:
    lookup = profiles.LookupModule()
    assert [profile["name"] for profile in lookup.run(["sm90", "cpu"])] == ["sm90", "cpu"]


def test_lookup_names_the_known_profiles() -> None:
    from ansible.errors import AnsibleError

    with pytest.raises(AnsibleError, match=r"kernel_backends: unknown profile 'sm80'; known: cpu, sm100, sm120, sm90"):
        profiles.LookupModule().run(["sm80"])


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    """Load the cpu profile after a change of its data."""
    shutil.copytree(ROLE / "files", tmp_path / "files", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "files/profiles/cpu.yml"

    def load(change: Any) -> dict[str, Any]:
        data = yaml.safe_load(path.read_text())
        change(data)
        path.write_text(yaml.safe_dump(data))
        return dict(profiles.load("cpu", tmp_path / "files"))

    return load


def test_unchanged_copy_loads(changed: Any) -> None:
    assert changed(lambda data: None) == profiles.load("cpu")


DEFECTS: dict[str, tuple[Any, str]] = {
    "auto": (lambda d: d["args"][0].update(value="auto"), r"args: device: is auto; a profile names its choice"),
    "backend": (lambda d: d["args"][0].update(flag="moe-runner-backend"), r"moe-runner-backend belong to matrix\.yml"),
    "no source": (lambda d: d["args"][0].pop("source"), r"args: device: needs exactly flag, value, why, source, date"),
    "bad source": (lambda d: d["args"][0].update(source="somewhere"), r"args: device: needs a source"),
    "bad date": (lambda d: d["env"][0].update(date="today"), r"env: SGLANG_USE_CPU_ENGINE: needs a date"),
    "twice": (lambda d: d["args"].append(dict(d["args"][0])), r"args: device: appears twice"),
    "dashes": (lambda d: d["args"][0].update(flag="--device"), r"args: --device: is no valid flag"),
    "unquoted": (lambda d: d["env"][0].update(value=1), r"env: SGLANG_USE_CPU_ENGINE: must be a string"),
    "placeholder": (
        lambda d: d["env"][0].update(value="{home}/x"),
        r"env: SGLANG_USE_CPU_ENGINE: knows only \{release\}",
    ),
    "escape": (lambda d: d["files"][0].update(path="../../etc/x"), r"path must stay inside the profile folder"),
    "no file": (lambda d: d["files"][0].update({"from": "cpu/none.py"}), r"there is no .*cpu/none\.py"),
    "other name": (lambda d: d.update(name="sm90"), r"says it is 'sm90'"),
    "unknown key": (lambda d: d.update(extra=1), r"has unknown keys \['extra'\]"),
    "symbols": (lambda d: d["stub_libcuda"].update(symbols=["system"]), r"symbols must be cu\* names"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(changed: Any, defect: str) -> None:
    change, message = DEFECTS[defect]
    with pytest.raises(profiles.ProfileError, match=f"^profiles/cpu\\.yml: .*{message}"):
        changed(change)
