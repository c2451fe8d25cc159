# SPDX-License-Identifier: Apache-2.0
"""Swap, start and rollback in a folder that stands for a host. systemd is a double that keeps states; files are real."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_units_deploy as d
from ansible.module_utils import gpu_units_render as r
from ansible.module_utils.gpu_units_host import HostError

MODES = {
    "baseline": {"needs": [], "args": {}},
    "ddtree": {"needs": ["draft_model_path", "budget", "topk"], "args": {"budget": "{budget}"}},
}
PROFILE = {"name": "sm90", "args": {}, "env": {}}
GPUS = [{"index": i, "uuid": f"GPU-{i}"} for i in range(4)]


class CutError(BaseException):
    """The host dies here: nothing may catch it, as nothing catches a power loss."""


class Systemd:
    """States by unit. `dies` are units whose start fails; `log` is what was asked for, in order."""

    def __init__(self) -> None:
        self.active: set[str] = set()
        self.enabled: set[str] = set()
        self.dies: set[str] = set()
        self.log: list[str] = []
        self.pids: dict[str, int] = {}

    def reload(self) -> None:
        self.log.append("reload")

    def enable(self, units: list[str]) -> None:
        self.enabled |= set(units)

    def disable(self, units: list[str]) -> None:
        self.enabled -= set(units)

    def show(self, units: list[str]) -> dict[str, dict[str, str]]:
        return {
            unit: {
                "ActiveState": "active" if unit in self.active else "inactive",
                "UnitFileState": "enabled" if unit in self.enabled else "disabled",
                "ControlGroup": f"/system.slice/{unit}" if unit in self.active else "",
                "MainPID": str(self.pids.get(unit, 0)) if unit in self.active else "0",
                "InvocationID": "1" * 32,
                "Result": "exit-code" if unit in self.dies else "success",
                "ExecMainCode": "1",
                "ExecMainStatus": "1",
            }
            for unit in units
        }

    def stop(self, units: list[str], _timeout_s: float) -> None:
        self.log += [f"stop {unit}" for unit in units]
        self.active -= set(units)

    def begin_start(self, unit: str) -> subprocess.Popen[str]:
        self.log.append(f"start {unit}")
        dies = unit in self.dies
        if not dies:
            self.active.add(unit)
        script = "echo Job failed. >&2; exit 1" if dies else ""
        return subprocess.Popen(["/bin/sh", "-c", script], stderr=subprocess.PIPE, text=True)

    def journal(self, _invocation: str, lines: int) -> list[str]:
        return ["Traceback", "RuntimeError: no such kernel"][-lines:]


class Lab:
    """A host in a folder."""

    def __init__(self, root: Path) -> None:
        self.systemd = Systemd()
        self.holders: list[str] = []
        self.left: list[int] = []
        self.unreadable: set[str] = set()
        self.root = root
        for release in ("r1", "r2", "r3"):
            folder = root / "opt/sglang-fleet/releases" / release
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")

    def host(self) -> d.Host:
        return d.Host(
            systemd=self.systemd,
            gpu_holders=lambda uuids: [text for text in self.holders if any(uuid in text for uuid in uuids)],
            can_read=lambda path: path not in self.unreadable,
            uid=os.getuid(),
            gid=os.getgid(),
            root=self.root,
            free_timeout_s=0.1,
            lock_timeout_s=0.3,
            pids_of=lambda group: self.left if group else [],
        )

    def swap(self, wanted: dict[str, Any], keys: dict[str, str] | None = None, check: bool = False) -> dict[str, Any]:
        return d.swap(self.host(), wanted, keys or {}, check)

    def start(self, **more: Any) -> dict[str, Any]:
        return d.start(self.host(), **more)

    def rollback(self, **more: Any) -> dict[str, Any]:
        return d.rollback(self.host(), **more)

    def go(self, wanted: dict[str, Any]) -> None:
        self.swap(wanted)
        self.start()

    def live(self, name: str = "current") -> str | None:
        found = d.load(self.host(), name)
        return found and found["id"]

    def link(self, name: str) -> str | None:
        path = self.root / "opt/sglang-fleet" / name
        return str(path.readlink()) if path.is_symlink() else None

    def files(self) -> dict[str, str]:
        """All files that a deployment may have put there."""
        return {
            str(path.relative_to(self.root)): path.read_text()
            for top in ("etc", "opt/sglang-fleet/libexec")
            for path in sorted((self.root / top).rglob("*"))
            if path.is_file() and "keys" not in path.parts
        }

    def agrees(self, wanted: dict[str, Any] | None, *, previous: dict[str, Any] | None) -> None:
        """Everything on the host belongs to one deployment, and the way back is the right one."""
        assert self.files() == (wanted["files"] if wanted else {})
        assert self.link("current") == (f"releases/{wanted['release']}" if wanted else None)
        assert self.link("previous") == (f"releases/{previous['release']}" if previous else None)
        assert self.systemd.enabled == ({i["unit"] for i in wanted["instances"]} if wanted else set())
        assert self.live() == (wanted["id"] if wanted else None)
        assert self.live("previous") == (previous["id"] if previous else None)
        assert not (self.root / "var/lib/sglang-fleet/deployments/swap.json").exists()


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk proves nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _handle: None)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def wanted(
    release: str, *names: str, unit: str = "v1", more: list[dict[str, Any]] | None = None, **keys: Any
) -> dict[str, Any]:
    instances = [{"name": name, "gpus": [i], "port": 30000 + i, **keys} for i, name in enumerate(names or ("a",))]
    return r.render(
        instances=instances + (more or []),
        defaults={"model_path": "/m", "draft_model_path": "/d"},
        profile=PROFILE,
        modes=MODES,
        gpus=GPUS,
        release=release,
        common={r.UNIT: f"[Unit]\n# {unit}\n", f"{r.LIBEXEC}/sglang_ready.py": "pass\n"},
        start_timeout=900,
    )


def test_first_swap_and_start(lab):
    one = wanted("r1", "a", "b")
    result = lab.swap(one)
    assert result["changed"]
    lab.agrees(one, previous=None)
    assert lab.systemd.active == set()
    started = lab.start()
    assert started["started"] == ["sglang@a.service", "sglang@b.service"]
    again = lab.start()
    assert (again["changed"], again["started"]) == (False, [])


def test_second_run_touches_nothing(lab):
    one = wanted("r1", "a", "b")
    lab.go(one)
    before = {path: path.stat().st_mtime_ns for path in lab.root.rglob("*") if "lock" not in path.name}
    lab.systemd.log.clear()
    result = lab.swap(one)
    assert not result["changed"]
    assert (result["what"], result["diff"], result["stopped"]) == ([], [], [])
    assert lab.start()["changed"] is False
    assert lab.systemd.log == []
    assert before == {path: path.stat().st_mtime_ns for path in lab.root.rglob("*") if "lock" not in path.name}


def test_rights_of_files(lab):
    lab.swap(wanted("r1"), keys={"a": "secret"})
    mode = {
        path: (lab.root / path).stat().st_mode & 0o777
        for path in (f"{r.ETC}/a.yaml", r.UNIT, f"{r.LIBEXEC}/sglang_ready.py")
    }
    assert list(mode.values()) == [0o640, 0o644, 0o755]
    assert (lab.root / r.ETC).stat().st_mode & 0o777 == 0o750


def test_only_the_changed_instance_is_stopped(lab):
    lab.go(wanted("r1", "a", "b"))
    lab.systemd.log.clear()
    lab_b = {"name": "b", "gpus": [1], "port": 30001, "budget": 7}
    changed = wanted("r1", "a", more=[lab_b])
    result = lab.swap(changed)
    assert result["stopped"] == ["sglang@b.service"]
    assert lab.systemd.active == {"sglang@a.service"}
    assert lab.start()["started"] == ["sglang@b.service"]


def test_new_release_stops_all_and_remembers_the_old(lab):
    one, two = wanted("r1", "a", "b"), wanted("r2", "a", "b")
    lab.go(one)
    lab.systemd.active.add("sglang@a.baseline.service")
    result = lab.swap(two)
    assert result["stopped"] == ["sglang@a.service", "sglang@a.baseline.service", "sglang@b.service"]
    assert result["gpus"] == "free: GPU-0, GPU-1"
    lab.agrees(two, previous=one)


def test_removed_instance_goes_with_all_that_it_had(lab):
    lab.go(wanted("r1", "a", "b"))
    lab.swap(wanted("r1", "a"))
    lab.agrees(wanted("r1", "a"), previous=wanted("r1", "a", "b"))
    assert lab.systemd.active == {"sglang@a.service"}


def test_drift_on_the_disk_is_mended_and_keeps_the_way_back(lab):
    one, two = wanted("r1"), wanted("r2")
    lab.go(one)
    lab.go(two)
    file = lab.root / f"{r.ETC}/a.yaml"
    file.write_text("changed by hand\n")
    result = lab.swap(two)
    assert result["what"] == [f"{r.ETC}/a.yaml"]
    assert result["stopped"] == ["sglang@a.service"]
    lab.agrees(two, previous=one)


@pytest.mark.parametrize("how", ["mode", "link", "disabled"])
def test_drift_beside_the_text_is_seen(lab, how):
    one = wanted("r1")
    lab.go(one)
    if how == "mode":
        (lab.root / f"{r.ETC}/a.env").chmod(0o644)
    elif how == "link":
        (lab.root / "opt/sglang-fleet/current").unlink()
    else:
        lab.systemd.enabled.clear()
    assert lab.swap(one)["changed"]
    lab.agrees(one, previous=None)
    assert not lab.swap(one)["changed"]


def test_check_mode_predicts_and_touches_nothing(lab):
    lab.go(wanted("r1"))
    before = {path: path.stat().st_mtime_ns for path in lab.root.rglob("*")}
    lab.systemd.log.clear()
    result = lab.swap(wanted("r2", unit="v2"), check=True)
    assert result["changed"]
    assert {entry["before_header"] for entry in result["diff"]} == {"deployment", f"/{r.UNIT}"}
    assert lab.start(check=True, expected=["sglang@x.service"])["started"] == ["sglang@x.service"]
    assert lab.rollback(check=True)["changed"]
    assert lab.systemd.log == []
    assert before == {path: path.stat().st_mtime_ns for path in lab.root.rglob("*")}


def test_check_mode_on_a_bare_host(tmp_path):
    lab = Lab(tmp_path / "bare")
    host = lab.host()
    host.uid = host.gid = None
    result = d.swap(host, wanted("r1"), {}, check=True)
    assert result["changed"]
    assert [entry["after"] for entry in result["diff"] if entry["after_header"] == "deployment"] == [
        "release r1\nsglang@a.service\n"
    ]
    assert not (tmp_path / "bare/etc").exists()


def test_diff_shows_both_sides(lab):
    lab.go(wanted("r1"))
    result = lab.swap(wanted("r1", budget=7))
    (entry,) = result["diff"]
    assert entry["before_header"] == f"/{r.ETC}/a.yaml"
    assert ("budget: 15\n" in entry["before"], "budget: 7\n" in entry["after"]) == (True, True)


# --- keys -----------------------------------------------------------------------------------------


def keyed(release: str = "r1", **keys: Any) -> dict[str, Any]:
    return wanted(release, api_key_file="somewhere", **keys)


def test_key_is_written_and_shown_nowhere(lab):
    result = lab.swap(keyed(), keys={"a": "s3cret-one"})
    path = lab.root / f"{r.KEYS}/a"
    assert path.read_text() == "s3cret-one\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert "s3cret-one" not in json.dumps(result)
    assert "s3cret-one" not in (lab.root / "var/lib/sglang-fleet/deployments/current.json").read_text()
    assert "s3cret-one" not in json.dumps(lab.files())


def test_another_key_restarts_and_is_shown_as_different_only(lab):
    lab.swap(keyed(), keys={"a": "s3cret-one"})
    lab.start()
    assert not lab.swap(keyed(), keys={"a": "s3cret-one\n"})["changed"]
    result = lab.swap(keyed(), keys={"a": "s3cret-two"})
    assert result["stopped"] == ["sglang@a.service"]
    assert "s3cret" not in json.dumps(result)
    assert (lab.root / f"{r.KEYS}/a").read_text() == "s3cret-two\n"


def test_key_stays_as_long_as_a_way_back_needs_it(lab):
    lab.swap(keyed("r1"), keys={"a": "k"})
    key = lab.root / f"{r.KEYS}/a"
    lab.swap(wanted("r2"))
    assert key.exists()
    lab.swap(wanted("r3"))
    lab.swap(wanted("r2"))
    assert not key.exists()


def test_empty_key_is_refused(lab):
    with pytest.raises(HostError, match="API key of a is empty"):
        lab.swap(keyed(), keys={"a": "\n"})


# --- what stands in the way -------------------------------------------------------------------------


def refused(lab: Lab, new: dict[str, Any], old: dict[str, Any], match: str) -> str:
    """A swap fails with a reason, and the old deployment is untouched and runs."""
    with pytest.raises(HostError, match=match) as caught:
        lab.swap(new)
    lab.agrees(old, previous=None)
    assert lab.systemd.active == {i["unit"] for i in old["instances"]}
    return str(caught.value)


def test_gpu_that_does_not_get_free_names_its_holder(lab):
    one = wanted("r1", "a", "b")
    lab.go(one)
    lab.holders = ["GPU GPU-1: pid 77 (root: python3) uses 900 MiB"]
    text = refused(lab, wanted("r2", "a", "b"), one, "GPUs are not free: GPU GPU-1: pid 77")
    assert "running again: sglang@a.service, sglang@b.service" in text


def test_other_instances_gpus_are_nobodys_business(lab):
    lab.go(wanted("r1", "a", "b"))
    lab.holders = ["GPU GPU-0: pid 77 (root: python3) uses 900 MiB"]
    changed = wanted("r1", "a")
    lab.swap(changed)
    lab.agrees(changed, previous=wanted("r1", "a", "b"))


def test_process_that_survives_a_stop_is_named(lab):
    one = wanted("r1")
    lab.go(one)
    lab.left = [os.getpid()]
    refused(lab, wanted("r2"), one, rf"processes are left: sglang@a.service: pid {os.getpid()} \(")


def test_a_control_group_that_shows_nothing_proves_nothing(lab):
    one = wanted("r1")
    lab.go(one)
    lab.systemd.pids["sglang@a.service"] = 4711
    refused(lab, wanted("r2"), one, "process 4711 is not seen in its control group")


def test_unfinished_release_is_refused_before_anything_stops(lab):
    one = wanted("r1")
    lab.go(one)
    lab.systemd.log.clear()
    refused(lab, wanted("r9"), one, "release r9 is not complete")
    assert lab.systemd.log == []


@pytest.mark.parametrize("path", ["/m/config.json", "/d/config.json"])
def test_model_that_the_engine_may_not_read(lab, path):
    one = wanted("r1")
    lab.go(one)
    lab.unreadable.add(path)
    refused(lab, wanted("r2"), one, f"can't read {path}")


def test_disk_full_in_the_middle_leaves_the_old(lab, monkeypatch):
    one, two = wanted("r1"), wanted("r2", budget=7, unit="v2")
    lab.go(one)
    real = d.write
    state = {"writes": 0}

    def full(path: Path, text: str, mode: int, gid: int = 0) -> None:
        state["writes"] += 1
        if state["writes"] == 3:
            raise OSError(28, "No space left on device", str(path))
        real(path, text, mode, gid)

    monkeypatch.setattr(d, "write", full)
    refused(lab, two, one, "No space left on device")


def test_broken_state_file_is_named(lab):
    lab.go(wanted("r1"))
    (lab.root / "var/lib/sglang-fleet/deployments/current.json").write_text("{")
    with pytest.raises(HostError, match=r"current\.json is no JSON"):
        lab.swap(wanted("r1"))


def test_another_change_holds_the_lock(lab):
    expected = pytest.raises(HostError, match=rf"pid {os.getpid()} .* is changing this host")
    with d.locked(lab.host()), expected, d.locked(lab.host()):
        pytest.fail("the lock was taken twice")
    with (lab.root / "var/lib/sglang-fleet/lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- crash ------------------------------------------------------------------------------------------


def count_steps(change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, cut_at: int | None) -> int:
    """Run a change whose n-th write, removal, link or word to systemd is the last thing the host does."""
    steps = 0
    originals = {name: getattr(d, name) for name in ("write", "_remove", "_link")}

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
            patch.setattr(d, name, step(name))
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
        d.recover(lab.host())
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
        d.recover(lab.host())
        lab.agrees(one if lab.live() else None, previous=None)
        lab.swap(one)
        lab.agrees(one, previous=None)


def test_crash_at_any_step_of_a_rollback(tmp_path, monkeypatch):
    one, two = wanted("r1", "a"), wanted("r2", "a", "b", unit="v2")

    def prepare(lab: Lab) -> None:
        lab.go(one)
        lab.go(two)

    for lab in crash_everywhere(tmp_path, monkeypatch, prepare, lambda lab: lab.rollback()):
        d.recover(lab.host())
        if lab.live() == two["id"]:
            lab.agrees(two, previous=one)
        else:
            lab.agrees(one, previous=two)


def test_nothing_may_start_while_a_change_is_open(tmp_path, monkeypatch, repo):
    """The unit template refuses to start as long as the note of an unfinished change lies there."""
    template = (repo / "roles/gpu_units/templates/sglang@.service.j2").read_text()
    assert f"AssertPathExists=!/{d.STATE}/deployments/swap.json\n" in template
    lab = Lab(tmp_path)
    lab.go(wanted("r1"))
    note = lab.root / d.STATE / "deployments/swap.json"
    seen = []
    real = d._enact
    monkeypatch.setattr(d, "_enact", lambda *a: (seen.append(note.exists()), real(*a)))
    lab.swap(wanted("r2"))
    assert seen == [True]
    assert not note.exists()


# --- start ------------------------------------------------------------------------------------------


def test_failed_start_names_unit_result_and_journal(lab):
    lab.swap(wanted("r1", "a", "b"))
    lab.systemd.dies.add("sglang@b.service")
    with pytest.raises(HostError) as caught:
        lab.start()
    text = str(caught.value)
    assert "sglang@b.service did not start (result exit-code, main process code 1 status 1): Job failed." in text
    assert "  RuntimeError: no such kernel" in text
    assert "sglang@a.service" not in text
    assert lab.systemd.log[-1] == "stop sglang@b.service"


def test_start_without_a_deployment(lab):
    with pytest.raises(HostError, match="nothing is deployed"):
        lab.start()


# --- rollback ---------------------------------------------------------------------------------------


def test_rollback_goes_back_and_forth(lab):
    one, two = wanted("r1", "a"), wanted("r2", "a", "b", unit="v2")
    lab.go(one)
    lab.go(two)
    result = lab.rollback()
    assert (result["rolled_back"], result["started"]) == (True, ["sglang@a.service"])
    assert result["deployment"]["id"] == one["id"]
    lab.agrees(one, previous=two)
    assert lab.systemd.active == {"sglang@a.service"}
    lab.rollback()
    lab.agrees(two, previous=one)
    assert lab.systemd.active == {"sglang@a.service", "sglang@b.service"}


def test_rollback_of_the_first_deployment_leaves_nothing(lab):
    one = wanted("r1")
    lab.go(one)
    result = lab.rollback()
    assert result["deployment"] is None
    assert "nothing was deployed before" in result["notes"][0]
    lab.agrees(None, previous=one)
    assert lab.systemd.active == set()
    lab.rollback()
    lab.agrees(one, previous=None)


def test_rollback_with_nothing_at_all(lab):
    with pytest.raises(HostError, match="nothing to go back to"):
        lab.rollback()


def test_rollback_needs_the_old_release(lab):
    lab.go(wanted("r1"))
    lab.go(wanted("r2"))
    (lab.root / "opt/sglang-fleet/releases/r1/manifest.json").unlink()
    with pytest.raises(HostError, match="release r1 is not complete"):
        lab.rollback()
    lab.agrees(wanted("r2"), previous=wanted("r1"))
    assert lab.systemd.active == {"sglang@a.service"}


def test_failed_deployment_is_put_aside_and_never_comes_back(lab):
    one, two, bad = wanted("r1"), wanted("r2"), wanted("r3")
    lab.go(one)
    lab.go(two)
    lab.swap(bad)
    result = lab.rollback(discard=bad["id"])
    assert result["rolled_back"]
    lab.agrees(two, previous=one)
    assert lab.live("failed") == bad["id"]
    assert lab.systemd.active == {"sglang@a.service"}
    lab.rollback()
    lab.agrees(one, previous=two)


def test_failed_first_deployment_leaves_nothing(lab):
    bad = wanted("r3")
    lab.swap(bad)
    lab.rollback(discard=bad["id"])
    lab.agrees(None, previous=None)
    assert lab.live("failed") == bad["id"]


def test_discarding_what_is_not_live_only_starts_what_is(lab):
    one, two = wanted("r1"), wanted("r2")
    lab.go(one)
    lab.go(two)
    lab.systemd.active.clear()
    for discard in ("", "ffffffffffff"):
        result = lab.rollback(discard=discard)
        assert not result["rolled_back"]
        lab.agrees(two, previous=one)
        assert lab.systemd.active == {"sglang@a.service"}
    assert not result["changed"]


def test_old_engine_that_does_not_come_back_is_said(lab):
    lab.go(wanted("r1"))
    lab.go(wanted("r2"))
    lab.systemd.dies.add("sglang@a.service")
    with pytest.raises(HostError, match=r"rolled back to deployment .* but it does not run"):
        lab.rollback()
    assert lab.live() == wanted("r1")["id"]
