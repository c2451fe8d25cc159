# SPDX-License-Identifier: Apache-2.0
"""Names and folders of the lab, and what its command line refuses."""

from __future__ import annotations

import os
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from fleet.lab import cli
from fleet.lab.settings import (
    MAX_HOSTS,
    address,
    host_index,
    lab_names,
    settings,
    size,
    wanted_hosts,
)
from fleet.lab.shell import LabError, MisuseError, locked, mounts, run, until, write


def test_kernel_names_fit() -> None:
    names = lab_names("a" * 30)
    assert len(names.bridge) <= 15
    assert len(names.veth(MAX_HOSTS)) <= 15
    assert len(names.host(MAX_HOSTS)) <= 64
    assert names.table.isidentifier()
    macs = {names.mac(i) for i in range(MAX_HOSTS + 1)}
    assert len(macs) == MAX_HOSTS + 1
    assert all(len(m) == 17 and m.startswith("02:") for m in macs)


def test_labs_do_not_share_names() -> None:
    one, other = lab_names("lab"), lab_names("lab2")
    assert one.bridge != other.bridge
    assert one.table != other.table
    assert not other.netns(1).startswith(one.netns_prefix)


@pytest.mark.parametrize("bad", ["", "Lab", "1st", "end-", "a_b", "a/b", "..", "a" * 31, "lab h1", "l\n"])
def test_lab_names_that_are_refused(bad: str) -> None:
    with pytest.raises(MisuseError, match="lab name"):
        lab_names(bad)


def test_host_words() -> None:
    names = lab_names("lab")
    assert host_index(names, "h3") == host_index(names, "lab-h3") == 3
    for bad in ("3", "h0", "h201", "h03", "other-h3", "lab-3", "h1 "):
        with pytest.raises(MisuseError, match="--lab"):
            host_index(names, bad)


def test_wanted_hosts() -> None:
    names = lab_names("lab")
    assert wanted_hosts(names, []) == [1]
    assert wanted_hosts(names, ["3"]) == [1, 2, 3]
    assert wanted_hosts(names, ["h5", "lab-h2", "h5"]) == [5, 2]
    for bad in (["0"], ["201"]):
        with pytest.raises(MisuseError, match="1 to 200"):
            wanted_hosts(names, bad)
    with pytest.raises(MisuseError):
        wanted_hosts(names, ["2", "h3"])


def test_sizes() -> None:
    assert [size(w) for w in ("6G", "512M", "64k", "1GiB", "2T", "4096")] == [
        6 << 30,
        512 << 20,
        64 << 10,
        1 << 30,
        2 << 40,
        4096,
    ]
    for bad in ("", "G", "1.5G", "-1G", "6 G", "0", "6X"):
        with pytest.raises(MisuseError, match="whole number"):
            size(bad)


def test_addresses_stay_inside_the_subnet() -> None:
    net = IPv4Network("10.213.4.0/24")
    assert address(net, 1) == "10.213.4.11"
    assert address(net, MAX_HOSTS) == "10.213.4.210"


def test_folders(tmp_path: Path) -> None:
    found = settings({"HOME": "/home/x"}, tmp_path)
    assert found.state == Path("/var/lib/sglang-fleet-lab")
    assert found.cache == Path("/home/x/.cache/sglang-fleet/lab")
    assert found.uv_cache == Path("/home/x/.cache/sglang-fleet/uv")
    env = {"HOME": "/home/x", "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c", "UV_CACHE_DIR": "/u"}
    found = settings(env, tmp_path)
    assert (found.state, found.cache, found.uv_cache) == (
        Path("/s/sglang-fleet-lab"),
        Path("/c/sglang-fleet/lab"),
        Path("/u"),
    )
    for bad in ("/a b", "/a:b", "/a,b", "relative"):
        with pytest.raises(MisuseError, match="XDG_STATE_HOME"):
            settings({**env, "XDG_STATE_HOME": bad}, tmp_path)


def test_under_sudo_the_caches_are_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("fleet.lab.settings._owner", lambda _path: 65534)
    env = {
        "HOME": "/home/x",
        "SUDO_UID": "65534",
        "SUDO_GID": "65534",
        "UV_CACHE_DIR": "/home/x/uv",
        "XDG_CACHE_HOME": "/home/x/c",
    }
    found = settings(env, tmp_path)
    assert found.owner == (65534, 65534)
    assert not found.uv_cache.is_relative_to("/home/x")
    assert not found.cache.is_relative_to("/home/x")
    monkeypatch.setattr("fleet.lab.settings._owner", lambda _path: 0)
    assert settings(env, tmp_path).uv_cache == Path("/home/x/uv")


@pytest.mark.parametrize("verb", ["up", "down", "crash", "start", "stop", "partition", "heal", "cut", "uncut"])
def test_verbs_that_change_need_root(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main([verb, "h1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "sudo" in said


def test_list_needs_no_root_and_no_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_lab_option_after_the_host_is_not_the_command() -> None:
    args = cli.parser().parse_args(["ssh", "--lab", "x", "h1", "ls", "--all", "-l"])
    assert (args.lab, args.host, args.command) == ("x", "h1", ["ls", "--all", "-l"])


def test_write_is_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "old", 0o600)
    write(path, "new", 0o600)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_deleted_lock_is_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        path.unlink()
        waited = []
        with locked(path, lambda: waited.append(1)):  # a new file: nobody holds it
            assert path.exists()
        assert not waited


def test_run_says_what_failed(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="exit code 3: went wrong"):
        run(["sh", "-c", "echo went wrong >&2; exit 3"])
    with pytest.raises(LabError, match="is not installed"):
        run([tmp_path / "nothing"])
    with pytest.raises(LabError, match=r"within 0\.1 s"):
        run(["sleep", "30"], timeout=0.1)
    assert run(["cat"], stdin="text").stdout == "text"
    assert not until(lambda: False, 0.01)


def test_mounts_are_named_innermost_first() -> None:
    every = mounts(Path("/"))
    assert every[-1] == Path("/")
    assert Path("/proc") in every
    assert mounts(Path("/proc/1/nothing")) == []
