# SPDX-License-Identifier: Apache-2.0
"""Processes and ports: the kernel's words in, and what only real processes and real sockets can show."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_processes as gather


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/system-sglang.slice/sglang@gpu0.service\n", "sglang@gpu0.service"),
        ("5:cpu:/\n1:name=systemd:/system.slice/ssh.service\n0::/\n", "ssh.service"),
        ("0::/user.slice/user-0.slice/session-1.scope\n", None),
        ("0::/\n", None),
    ],
)
def test_unit_of_a_process(text: str, unit: str | None) -> None:
    assert gather.unit_from_cgroup(text) == unit


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/user.slice/user-0.slice/session-1.scope\n", "/user.slice/user-0.slice/session-1.scope"),
        ("5:cpu:/\n1:name=systemd:/system.slice/ssh.service\n0::/\n", "/system.slice/ssh.service"),
        ("5:cpu:/long/path/of/one/controller\n", None),
    ],
)
def test_control_group_of_a_process(text: str, path: str | None) -> None:
    assert gather.path_from_cgroup(text) == path


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_real_listener_is_found_with_its_process(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:  # many containers have no IPv6; the other family is shown all the same
            pytest.skip(f"this machine has no {address}")
        server.listen()
        port = server.getsockname()[1]
        found = [entry for entry in gather.gather_ports() if entry["port"] == port]
    assert [(entry["address"], entry["pid"]) for entry in found] == [(address, os.getpid())]
    assert found[0]["process"]


def test_a_process_that_ends_while_it_is_looked_at_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [os.getpid()]
    real = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == Path(f"/proc/{ended[0]}/fd"):
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return real(folder)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(Path, "iterdir", iterdir)
        port = server.getsockname()[1]
        (found,) = [entry for entry in gather.gather_ports() if entry["port"] == port]
    assert found["pid"] is None


def test_addresses_that_can_be_bound() -> None:
    answer = gather.bindable(["127.0.0.1", "192.0.2.1"])
    assert answer["127.0.0.1"] is None
    assert answer["192.0.2.1"]


def test_parent_of_a_process_whose_name_looks_like_more_fields() -> None:
    assert gather.parent_from_stat("428 (a) S 1 (b) R 77 428 428 0 -1") == 77


@pytest.mark.parametrize(
    ("parent", "first", "main_pid", "orphan"),
    [
        (77, "systemd", None, False),  # whoever started it is there
        (1, "systemd", 428, False),  # the main process of a unit
        (1, "systemd", 400, True),  # left behind in a unit whose main process is another
        (1, "systemd", None, True),  # left behind by a session
        (1, "init", None, True),
        (1, "bash", None, None),  # a container whose first process starts everything
        (None, "systemd", None, None),
    ],
)
def test_orphans(parent: int | None, first: str, main_pid: int | None, orphan: bool | None) -> None:
    assert gather.is_orphan(parent, first, 428, main_pid) is orphan


def test_a_process_of_this_machine() -> None:
    facts = gather.describe_process(os.getpid())
    assert facts["user"] == getpass.getuser()
    assert facts["name"]
    assert facts["orphan"] is False


def test_a_process_that_is_gone_or_hidden() -> None:
    nothing = {"name": None, "unit": None, "cgroup": None, "user": None, "orphan": None}
    assert gather.describe_process(None) == nothing
    assert gather.describe_process(2**22 + 1) == nothing
