# SPDX-License-Identifier: Apache-2.0
"""Module ddtree_apply, lookup ddtree_series and the role, on a small engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleLookupError
from ansible.module_utils.testing import patch_module_args
from ansible.plugins.loader import lookup_loader

from tests.unit import series_kit as kit_of
from tests.unit.series_kit import ENGINE, KILLED, Kit, apply_in_child, kill_after, tree_hash

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return kit_of.make(tmp_path)


@pytest.fixture
def run(kit: Kit, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the module as Ansible does, arguments in, JSON out; `warned` is the text of its warnings, wherever they go."""
    import ddtree_apply

    def call(check: bool = False, diff: bool = True, **params: Any) -> dict[str, Any]:
        args = {"release": str(kit.release), "series": kit.load().pack(), "import_timeout": 60, **params}
        args |= {"_ansible_check_mode": check, "_ansible_diff": diff}
        with patch_module_args(args), pytest.raises(SystemExit):
            ddtree_apply.main()
        out, err = capsys.readouterr()
        answer = dict(json.loads(out))
        return answer | {"warned": " ".join((err + json.dumps(answer.get("warnings", ""))).split())}

    return call


def test_documentation_and_arguments_agree(repo: Path) -> None:
    import ddtree_apply

    documented = yaml.safe_load(ddtree_apply.DOCUMENTATION)["options"]
    source = (repo / "roles/ddtree_patches/library/ddtree_apply.py").read_text()
    for name, option in documented.items():
        assert f'"{name}": {{"type": "{option["type"]}"' in source
    specs = yaml.safe_load((repo / "roles/ddtree_patches/meta/argument_specs.yml").read_text())["argument_specs"]
    defaults = yaml.safe_load((repo / "roles/ddtree_patches/defaults/main.yml").read_text())
    assert {name: o["default"] for name, o in specs["main"]["options"].items()} == defaults
    assert all(defaults[name] == o["default"] for name, o in specs["state"]["options"].items())


def test_apply_then_nothing(kit: Kit, run: Run) -> None:
    first = run(import_env={"WHERE": "{release}/x", "NUMBER": 1})
    assert (first["changed"], first["was"], first["state"], first["stamped"]) == (True, "clean", "applied", True)
    assert first["imported"] == list(kit.load().imports)
    assert first["diff"] == {"prepared": kit.load().diff_text()}
    assert "+    'tree'," in first["diff"]["prepared"]
    assert "+from demo.srt.args import FLAGS" in first["diff"]["prepared"]
    assert kit.load().pack() not in json.dumps(first), "the series is not echoed"
    again = run()
    assert (again["changed"], again["was"], again["state"], again["stamped"]) == (False, "applied", "applied", True)
    assert "diff" not in again


def test_the_environment_reaches_the_imports(kit: Kit, run: Run) -> None:
    kit_of.write(
        kit.folder / "overlay",
        {"demo/tree/worker.py": "import os\nassert os.environ['WHERE'] == os.environ['RIGHT']\n"},
    )
    kit_of.series.refresh(ENGINE, kit.site, kit.root)
    right = f"{kit.release}/profile"
    assert "AssertionError" in run(import_env={"WHERE": "{release}/wrong", "RIGHT": right})["msg"]
    assert run(import_env={"WHERE": "{release}/profile", "RIGHT": right})["state"] == "applied"


def test_check_mode_changes_nothing_and_predicts(kit: Kit, run: Run) -> None:
    before = tree_hash(kit.release)
    got = run(check=True)
    assert (got["changed"], got["state"], got["was"]) == (True, "clean", "clean")
    assert got["diff"]["prepared"] == kit.load().diff_text()
    assert tree_hash(kit.release) == before
    assert "diff" not in run(check=True, diff=False)
    run()
    assert run(check=True)["changed"] is False


def test_check_mode_on_a_host_that_has_no_release_yet(kit: Kit, run: Run, tmp_path: Path) -> None:
    got = run(check=True, release=str(tmp_path / "none"))
    assert (got["changed"], got["state"]) == (True, "absent")
    assert got["diff"]["prepared"] == kit.load().diff_text()
    (tmp_path / "begun/venv/bin").mkdir(parents=True)
    assert run(check=True, release=str(tmp_path / "begun"))["state"] == "absent", "a build that has just begun"
    assert run(check=True, release=str(tmp_path / "begun"), published=True)["failed"]
    assert "release is empty" in run(release="")["msg"]
    real = run(release=str(tmp_path / "none"))
    assert real["failed"]
    assert "expected one lib/python3.*/site-packages, found 0" in real["msg"]


def test_check_mode_on_an_interrupted_build(kit: Kit, run: Run) -> None:
    assert apply_in_child(kit.root, ENGINE, kit.site, kill_after(2)).returncode == KILLED
    got = run(check=True)
    assert (got["changed"], got["state"]) == (True, "partial")
    assert "a run makes it anew" in got["warned"]
    for check in (False, True):
        failed = run(check=check, published=True)
        assert failed["failed"]
        assert (
            "is partial towards demo-1.0: patched: demo/a.py, demo/srt/args.py; unpatched: demo/tree/" in failed["msg"]
        )
    assert run()["failed"]


def test_published(kit: Kit, run: Run) -> None:
    assert "never changed" in run(published=True)["msg"]
    run()
    assert run(published=True)["changed"] is False
    kit.stamp.unlink()
    bare = run(published=True)
    assert (bare["changed"], bare["state"], bare["stamped"]) == (False, "applied", False)
    assert "ddtree.json is missing" in bare["warned"]


def test_reported_says_every_state_and_never_fails_for_one(kit: Kit, run: Run, tmp_path: Path) -> None:
    none = run(state="reported", release=str(tmp_path / "none"))
    assert (none["state"], none["changed"]) == ("absent", False)
    assert "found 0" in none["reason"]
    assert run(state="reported")["state"] == "clean"
    assert apply_in_child(kit.root, ENGINE, kit.site, kill_after(1)).returncode == KILLED
    assert run(state="reported")["state"] == "partial"
    (kit.site / "demo/a.py").write_text("x\n")
    before = tree_hash(kit.release)
    got = run(state="reported")
    assert (got["state"], got["changed"]) == ("foreign", False)
    assert "demo/a.py: expected sha256" in got["reason"]
    assert tree_hash(kit.release) == before


def test_lookup(kit: Kit, repo: Path) -> None:
    lookup_loader.add_directory(str(repo / "roles/ddtree_patches/lookup_plugins"))
    lookup = lookup_loader.get("ddtree_series")
    (got,) = lookup.run([ENGINE], root=str(kit.root))
    one = kit.load()
    assert (got["engine"], got["distribution"], got["version"], got["digest"]) == (ENGINE, "demo", "1.0", one.digest)
    assert got["patches"] == ["0001-count.patch", "0002-flag.patch"]
    assert got["files"]["demo/tree/worker.py"] == {"before": None, "after": one.files["demo/tree/worker.py"].after}
    assert kit_of.core.Series.unpack(got["payload"]) == one
    (kit.root / "common/utils.py").write_text("# edited, not refreshed\n")
    with pytest.raises(AnsibleLookupError, match=r"ddtree_series: demo-1\.0: .*bin/series refresh"):
        lookup.run([ENGINE], root=str(kit.root))


PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: ddtree_patches
        tasks_from: "{{ entry | default('main') }}"
    - ansible.builtin.debug:
        msg: "answer={{ ddtree_patches_result | to_json }}"
"""


def test_role_check_run_run_report(kit: Kit, repo: Path, tmp_path: Path) -> None:
    """The whole way through Ansible: lookup, packed argument, module with its utilities, published result."""
    (tmp_path / "play.yml").write_text(PLAY)

    def play(*argv: str, facts: dict[str, Any] | None = None, **more: Any) -> tuple[str, dict[str, Any]]:
        published = {
            "fleet_engine": ENGINE,
            "sglang_venv_release": {"build_path": str(kit.release), "present": False},
            "kernel_backends_profile": {"env": {"A": "{release}"}},
        }
        extra = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ddtree_patches_root": str(kit.root),
            **(published if facts is None else facts),
            **more,
        }
        env = {**os.environ, "ANSIBLE_CONFIG": str(repo / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(repo / "roles")}
        argv = ("ansible-playbook", "-i", "localhost,", str(tmp_path / "play.yml"), "-e", json.dumps(extra), *argv)
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        tasks = yaml.safe_load(done.stdout[done.stdout.index("    msg: ") :].split("\n\n")[0])
        return done.stdout, json.loads(tasks["msg"].removeprefix("answer="))

    gone = {"build_path": str(tmp_path / "none"), "present": False}
    out, got = play("--check", "--diff", sglang_venv_release=gone)
    assert "+    'tree'," in out
    assert (got["state"], got["changed"]) == ("absent", True)
    _, got = play()
    assert (got["state"], got["was"], got["changed"], got["stamped"]) == ("applied", "clean", True, True)
    out, got = play("--check", "--diff", sglang_venv_release={"build_path": str(kit.release), "present": True})
    assert (got["state"], got["changed"]) == ("applied", False)
    assert "changed=0" in out
    # The report needs no result of another role.
    alone = {"ddtree_patches_release": str(kit.release), "ddtree_patches_engine": ENGINE, "entry": "state"}
    _, got = play(facts={}, **alone)
    assert (got["state"], got["stamped"]) == ("applied", True)
