# SPDX-License-Identifier: Apache-2.0
"""Swap and switch: what changes, what keeps running, what stands in the way."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_units_deploy as d
from ansible.module_utils import gpu_units_files as files
from ansible.module_utils import gpu_units_render as r
from ansible.module_utils import gpu_units_start as begin
from ansible.module_utils import gpu_units_state as state
from ansible.module_utils.gpu_units_host import HostError

from tests.unit.units_kit import Lab, lab, no_disk, wanted

__all__ = ["lab", "no_disk"]  # fixtures


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
    lab.go(wanted("r3"))
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
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_gid == 0
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
    lab.swap(wanted("r2"))  # goes back to r3, and from there to r1
    assert key.exists()
    lab.swap(wanted("r3", mode="baseline"))
    lab.swap(wanted("r2", mode="baseline"))
    assert not key.exists()


def test_a_key_is_the_groups_again_for_a_deployment_that_reads_it_itself(lab):
    """Deployments from before credentials are stored as they were rendered, and have to work after a rollback."""
    old = keyed("r1")
    old["files"] = {**old["files"], f"{r.ETC}/a.env": f'FLEET_API_KEY_FILE="/{r.KEYS}/a"\n'}
    old["id"] = r.deployment_id(old)
    lab.swap(old, keys={"a": "k"})
    key = lab.root / f"{r.KEYS}/a"
    assert key.stat().st_mode & 0o777 == 0o640
    lab.swap(keyed("r2"), keys={"a": "k"})
    assert key.stat().st_mode & 0o777 == 0o600
    lab.rollback()
    assert (key.stat().st_mode & 0o777, key.stat().st_gid) == (0o640, os.getgid())
    lab.rollback()
    assert (key.stat().st_mode & 0o777, key.stat().st_gid) == (0o600, 0)
    assert key.read_text() == "k\n"


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


def test_process_that_left_its_control_group_is_named(lab):
    one = wanted("r1")
    lab.go(one)
    lab.strayed = [os.getpid()]
    refused(lab, wanted("r2"), one, rf"processes are left: pid {os.getpid()} \(.*kill -9 PID")


def test_a_cache_that_can_not_hold_kernels_is_refused_before_anything_stops(lab, monkeypatch):
    one = wanted("r1")
    lab.go(one)
    lab.systemd.log.clear()
    real = os.statvfs(lab.root)
    noexec = os.statvfs_result([*real[:8], real.f_flag | os.ST_NOEXEC, real.f_namemax])
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    refused(lab, wanted("r2"), one, "r2/cache is mounted noexec or read-only")
    assert lab.systemd.log == []


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


@pytest.mark.parametrize(("word", "option"), [("masked", ""), ("masked-runtime", " --runtime")])
def test_a_masked_unit_is_refused_before_anything_stops(lab, word, option):
    one, two = wanted("r1", "a", "b"), wanted("r2", "a", "b")
    lab.go(one)
    lab.systemd.masked["sglang@b.service"] = word
    for check in (True, False):
        with pytest.raises(HostError, match=f"masked.*`systemctl unmask{option} sglang@b.service`"):
            lab.swap(two, check=check)
    assert lab.live() == one["id"]
    assert lab.systemd.active == {i["unit"] for i in one["instances"]}
    lab.systemd.masked.clear()
    lab.go(two)
    lab.systemd.masked["sglang@a.service"] = word
    with pytest.raises(HostError, match="masked"):
        lab.rollback()
    assert lab.live() == two["id"]


@pytest.mark.skipif(os.getuid() != 0, reason="gives files away, which root alone may")
def test_a_cache_that_root_wrote_into_is_given_back_when_a_unit_starts(lab, tmp_path):
    lab.go(wanted("r1"))
    cache = lab.root / "opt/sglang-fleet/releases/r1/cache"
    (cache / "triton").mkdir()
    for path in (cache / "triton/kernel", tmp_path / "outside"):
        path.write_text("x")
    (cache / "link").symlink_to(tmp_path / "outside")
    host = lab.host()
    host.uid = host.gid = 4711
    begin.start(host)
    assert host.notes == []  # nothing starts, so nothing is looked at
    lab.systemd.active.clear()
    begin.start(host)
    assert {path.lstat().st_uid for path in (cache, *cache.rglob("*"))} == {4711}
    assert (tmp_path / "outside").stat().st_uid == 0
    assert "3 files did not belong to the engine's user" in host.notes[0]


@pytest.mark.parametrize("path", ["/m/config.json", "/d/config.json"])
def test_model_that_the_engine_may_not_read(lab, path):
    one = wanted("r1")
    lab.go(one)
    lab.unreadable.add(path)
    refused(lab, wanted("r2"), one, f"can't read {path}")


def test_disk_full_in_the_middle_leaves_the_old(lab, monkeypatch):
    one, two = wanted("r1"), wanted("r2", budget=7, unit="v2")
    lab.go(one)
    real = files.write
    count = {"writes": 0}

    def full(path: Path, text: str, mode: int, gid: int = 0) -> None:
        count["writes"] += 1
        if count["writes"] == 3:
            raise OSError(28, "No space left on device", str(path))
        real(path, text, mode, gid)

    monkeypatch.setattr(files, "write", full)
    refused(lab, two, one, "No space left on device")


def test_broken_state_file_is_named(lab):
    lab.go(wanted("r1"))
    (lab.root / "var/lib/sglang-fleet/deployments/current.json").write_text("{")
    with pytest.raises(HostError, match=r"current\.json is no JSON"):
        lab.swap(wanted("r1"))


def test_another_change_holds_the_lock(lab):
    expected = pytest.raises(HostError, match=rf"pid {os.getpid()} .* is changing this host")
    with state.locked(lab.host()), expected, state.locked(lab.host()):
        pytest.fail("the lock was taken twice")
    with (lab.root / "var/lib/sglang-fleet/lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- switch -----------------------------------------------------------------------------------------


def test_a_switch_stops_one_instance_and_keeps_the_release(lab):
    one = wanted("r1", "a", "b")
    lab.go(one)
    result = lab.switch(wanted("r2", "a", "b", mode="baseline"), "b")
    assert (result["changed"], result["stopped"]) == (True, ["sglang@b.service"])
    assert [i["mode"] for i in result["deployment"]["instances"]] == ["ddtree", "baseline"]
    lab.agrees({**result["deployment"], "release": "r1"}, previous=one)
    assert lab.systemd.active == {"sglang@a.service"}
    assert lab.switch(wanted("r2", "a", "b", mode="baseline"), "b")["changed"] is False


def modes_of(lab: Lab, name: str) -> list[str] | None:
    found = state.load(lab.host(), name)
    return found and [instance["mode"] for instance in found["instances"]]


@pytest.mark.parametrize("by", ["switch", "swap"])
def test_the_end_of_a_switch_leaves_the_way_back_as_it_was(lab, by):
    """By the door or by the inventory: an older release is not pushed out by going there and back."""
    old, one, other = wanted("r1"), wanted("r2"), wanted("r2", mode="baseline")
    lab.go(old)
    lab.go(one)
    for _ in range(3):
        lab.switch(other, "a")
        assert (modes_of(lab, "current"), lab.live("previous")) == (["baseline"], one["id"])
        lab.switch(one, "a") if by == "switch" else lab.swap(one)
        lab.agrees(one, previous=other)  # it served before, so that is where a failure leads
        assert lab.live("older") == old["id"]
        assert "switched" not in (state.load(lab.host(), "current") or {})
    lab.rollback()
    lab.agrees(old, previous=one)


def test_the_end_of_a_switch_that_fails_leads_back_into_it(lab):
    one = wanted("r1")
    lab.go(one)
    other = lab.switch(wanted("r1", mode="baseline"), "a")["deployment"]
    lab.start()
    back = lab.switch(one, "a")["deployment"]
    assert back["id"] == one["id"]
    lab.rollback(discard=back["id"])
    lab.agrees(other, previous=None)
    assert lab.systemd.active == {"sglang@a.service"}


def test_a_switch_that_fails_is_taken_back(lab):
    one = wanted("r1")
    lab.go(one)
    done = lab.switch(wanted("r1", mode="baseline"), "a")
    lab.rollback(discard=done["deployment"]["id"])
    lab.agrees(one, previous=None)
    assert lab.systemd.active == {"sglang@a.service"}
    assert modes_of(lab, "failed") == ["baseline"]


def test_a_switch_that_the_inventory_takes_over_is_none_any_more(lab):
    old, one, other = wanted("r1"), wanted("r2"), wanted("r2", mode="baseline")
    lab.go(old)
    lab.go(one)
    lab.switch(other, "a")
    assert not lab.swap(other)["changed"]
    lab.swap(one)
    lab.agrees(one, previous=other)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("c", {}, r"instance c is not deployed here \(a\); run site.yml first"),
        ("a", {"unit": "v2"}, "another version of this toolkit"),
    ],
)
def test_what_can_not_be_switched(lab, name, more, words):
    lab.go(wanted("r1"))
    lab.systemd.log.clear()
    with pytest.raises(HostError, match=words):
        lab.switch(wanted("r1", "a", "c", mode="baseline", **more), name)
    assert lab.systemd.log == []
    with pytest.raises(HostError, match=r"not deployed here \(nothing is\)"):
        Lab(lab.root / "bare").switch(wanted("r1"), "a")
