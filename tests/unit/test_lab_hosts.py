# SPDX-License-Identifier: Apache-2.0
"""Files and words of one host, and the inventory of a lab."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
import yaml

from fleet.lab.cgroups import Layout
from fleet.lab.hosts import Host, Record, bind_word, guest_path, manager_conf, parse_bind, put
from fleet.lab.labs import Lab, Wish
from fleet.lab.settings import Settings, lab_names
from fleet.lab.shell import LabError


def test_links_of_a_host_never_lead_out_of_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/lib").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "lib").symlink_to("usr/lib")
    (root / "abs").symlink_to("/usr/lib")
    (root / "up").symlink_to("../../../../etc")
    assert guest_path(root, Path("/lib/x")) == root / "usr/lib/x"
    assert guest_path(root, Path("/abs/x")) == root / "usr/lib/x"
    assert guest_path(root, Path("/up/x")) == root / "etc/x"
    assert guest_path(root, Path("/../../x")) == root / "x"
    (root / "round").symlink_to("round")
    with pytest.raises(LabError, match="too many links"):
        guest_path(root, Path("/round/x"))


def test_put_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "etc").mkdir(parents=True)
    outside.write_text("machine's own")
    (root / "etc/resolv.conf").symlink_to(outside)
    put(root, "/etc/resolv.conf", "host's")
    assert outside.read_text() == "machine's own"
    assert (root / "etc/resolv.conf").read_text() == "host's"
    put(root, "/etc/a/b/secret", b"x", 0o600)
    assert (root / "etc/a/b/secret").stat().st_mode & 0o777 == 0o600
    assert (root / "etc/a").stat().st_mode & 0o777 == 0o755


def test_manager_environment_keeps_special_characters() -> None:
    assert manager_conf({"A": 'x "y" \\ 100%'}) == '[Manager]\nDefaultEnvironment="A=x \\"y\\" \\\\ 100%%"\n'


def test_binds(tmp_path: Path) -> None:
    assert parse_bind(f"{tmp_path}:/srv/x") == f"--bind={tmp_path}:/srv/x"
    assert parse_bind(f"{tmp_path}:/srv/x:ro") == f"--bind-ro={tmp_path}:/srv/x"
    assert bind_word(Path("/a:b"), "/c", True) == "--bind-ro=/a\\:b:/c"
    for bad in ("/only", f"{tmp_path}:relative", f"{tmp_path}:/x:rx", f"{tmp_path}/absent:/x"):
        with pytest.raises(LabError, match="--bind"):
            parse_bind(bad)


def test_only_what_was_asked_for_can_differ() -> None:
    record = Record(1, "bookworm", "/base", memory=1 << 30, binds=["--bind=/a:/b"])
    assert Wish().differs(record) == []
    assert Wish(suite="bookworm", memory=1 << 30, binds=("--bind=/a:/b",)).differs(record) == []
    assert len(Wish(suite="trixie", memory=2 << 30, disk=1, binds=("--bind=/c:/d",)).differs(record)) == 4


def test_inventory_is_yaml_that_checks_host_keys(tmp_path: Path) -> None:
    where = Settings(
        tmp_path, tmp_path / "state", tmp_path / "cache", tmp_path / "run", tmp_path / "uv", (0, 0), tmp_path
    )
    names, net = lab_names("lab"), ipaddress.IPv4Network("10.213.7.0/24")
    lab = Lab(where, names, print)
    made = [Host(where, names, net, Layout(True, (), tmp_path, None, ()), i) for i in (1, 2)]
    parsed = yaml.safe_load(lab.inventory_text(made))
    assert parsed["lab"]["hosts"] == {
        "lab-h1": {"ansible_host": "10.213.7.11"},
        "lab-h2": {"ansible_host": "10.213.7.12"},
    }
    variables = parsed["lab"]["vars"]
    assert variables["ansible_user"] == "root"
    assert variables["ansible_python_interpreter"] == "/usr/bin/python3"
    assert variables["ansible_ssh_private_key_file"] == str(lab.key)
    words = variables["ansible_ssh_common_args"].split()
    assert "StrictHostKeyChecking=yes" in words
    assert f"UserKnownHostsFile={lab.known_hosts}" in words
    assert f"ControlPath={lab.control}/%C" in words


def test_control_sockets_fit_a_socket_name() -> None:
    where = Settings(Path("/"), Path("/s"), Path("/c"), Path("/run/sglang-fleet-lab"), Path("/u"), (0, 0), Path("/"))
    control = Lab(where, lab_names("a" * 30), print).control
    # 40 for the hash, 17 for what ssh appends while it makes the socket
    assert len(str(control)) + 1 + 40 + 17 < 108
