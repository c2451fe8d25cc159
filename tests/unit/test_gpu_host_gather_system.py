# SPDX-License-Identifier: Apache-2.0
"""The system around the kernel: limits, memory nodes, the clock, Secure Boot."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_system as gather

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         8388608              unlimited            bytes
Max open files            1024                 524288               files
"""


def test_limits_are_those_that_root_can_raise_to() -> None:
    assert gather.parse_limit(LIMITS, "Max open files") == 524288
    assert gather.parse_limit(LIMITS, "Max locked memory") == -1
    assert gather.parse_limit(LIMITS, "Max processes") is None
    assert gather.parse_limit(None, "Max open files") is None


def test_limits_of_a_real_process() -> None:
    text = Path("/proc/self/limits").read_text()
    assert gather.parse_limit(text, "Max open files") == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_limits_of_this_machine() -> None:
    facts = gather.gather_limits()
    assert 0 < facts["memory_available"] <= facts["memory_total"]
    assert facts["overcommit"] in (0, 1, 2)
    assert facts["pids_max"] <= int(Path("/proc/sys/kernel/pid_max").read_text())


def test_memory_nodes_of_this_machine() -> None:
    nodes = gather.gather_numa()
    assert [one["node"] for one in nodes] == sorted(one["node"] for one in nodes)
    assert all(0 < one["memory_free"] <= one["memory_total"] for one in nodes)


def test_version_of_systemd() -> None:
    assert gather.parse_systemd("systemd 252 (252.39-1~deb12u1)\n+PAM\n") == 252
    assert gather.parse_systemd("") is None


def test_units_of_the_journal() -> None:
    service = "Id=systemd-journald.service\nLoadState={}\nActiveState={}\n"
    socket = "Id=systemd-journald.socket\nLoadState=loaded\nActiveState={}\n"
    both = f"{service}\n{socket}".format
    assert gather.parse_journal(both("loaded", "active", "active")) == {"masked": [], "active": True}
    # The next message starts it again.
    assert gather.parse_journal(both("loaded", "inactive", "active"))["active"] is True
    assert gather.parse_journal(both("loaded", "inactive", "inactive"))["active"] is False
    masked = {"masked": ["systemd-journald.service"], "active": False}
    assert gather.parse_journal(both("masked", "inactive", "failed")) == masked
    syslog = "\nId=systemd-journald-dev-log.socket\nLoadState=masked\nActiveState=active\n"
    # Its own masking counts, and that it listens takes no message of a unit.
    assert gather.parse_journal(both("loaded", "inactive", "inactive") + syslog) == {
        "masked": ["systemd-journald-dev-log.socket"],
        "active": False,
    }


def test_the_last_storage_of_the_journal_holds() -> None:
    files = "# /etc/systemd/journald.conf\n[Journal]\n#Storage=auto\n"
    assert gather.parse_storage(files) is None
    files += "# /run/systemd/journald.conf.d/a.conf\n[Journal]\n Storage = None\n"
    assert gather.parse_storage(files) == {"value": "none", "file": "/run/systemd/journald.conf.d/a.conf"}
    files += "# /etc/systemd/journald.conf.d/b.conf\n[Journal]\nStorage=volatile\n"
    assert gather.parse_storage(files) == {"value": "volatile", "file": "/etc/systemd/journald.conf.d/b.conf"}


@pytest.mark.parametrize(("user", "shown", "kept"), [(0, "a message", True), (0, "", False), (1000, "", None)])
def test_a_journal_that_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, user: int, shown: str, kept: bool | None
) -> None:
    states = "Id=systemd-journald.service\nLoadState=loaded\nActiveState=active\n"
    monkeypatch.setattr(gather, "run", lambda argv: (0, states if argv[0] == "systemctl" else shown, ""))
    monkeypatch.setattr(gather.os, "geteuid", lambda: user)
    assert gather.gather_journal() == {"masked": [], "active": True, "kept": kept, "storage": None}


def test_process_1_of_this_machine() -> None:
    facts = gather.gather_systemd()
    assert facts["pid1"] == Path("/proc/1/comm").read_text().strip()
    assert (facts["journal"] is not None) == facts["running"]


def test_who_keeps_the_clock() -> None:
    assert gather.clock_service({"sshd", "chronyd"}) == "chrony"
    assert gather.clock_service({"systemd-timesyn"}) == "systemd-timesyncd"
    assert gather.clock_service({"sshd"}) is None


def test_a_clock_before_the_systems_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / "os-release"
    built.write_text("")
    older = tmp_path / "status"
    older.write_text("")
    os.utime(older, (500_000_000, 500_000_000))
    monkeypatch.setattr(gather, "BUILD_FILES", (str(older), str(built), str(tmp_path / "none")))
    os.utime(built, (1_000_000_000, 1_000_000_000))
    assert gather.gather_clock()["before_build"] is False
    os.utime(built, (9_000_000_000, 9_000_000_000))
    assert gather.gather_clock()["before_build"] is True
    monkeypatch.setattr(gather, "BUILD_FILES", ())
    assert gather.gather_clock()["before_build"] is None


def test_the_kernel_says_whether_its_clock_is_kept() -> None:
    assert gather.kernel_synchronized() in (True, False)


@pytest.mark.parametrize(
    ("variable", "on"), [(b"\x06\0\0\0\x01", True), (b"\x06\0\0\0\0", False), (b"", None), (None, None)]
)
def test_secure_boot(variable: bytes | None, on: bool | None) -> None:
    assert gather.parse_secure_boot(variable) is on
