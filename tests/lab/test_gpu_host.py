# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/host.sh on this machine: systemd over its root, gone without a trace."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.gpu import host
from fleet.importer import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "host.sh"


def call(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    # /dev/null: what boots must not hold this test's own streams.
    return subprocess.run(
        [SCRIPT, *words], check=check, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("gpu-host")
    with tarfile.open(folder / "systemd.tar", "w") as tar:
        count, _ = host.add_systemd(tar, host.base_root())
    assert count > 300
    home = folder / "home"
    said = call("up", home, folder / "systemd.tar").stdout
    assert "runs over this machine's root" in said
    yield home
    call("down", home)
    assert str(home) not in Path("/proc/self/mounts").read_text()
    assert not any(home.iterdir())


def test_units_run_in_version_2_groups_with_a_device_policy(up: Path) -> None:
    unit = ["systemd-run", "--wait", "--pipe", "-q", "-p", "DevicePolicy=closed", "-p", "PrivateTmp=yes"]
    done = call("run", up, *unit, "sh", "-c", "cat /proc/self/cgroup; head -c 1 /dev/kmsg || echo refused")
    assert "0::/system.slice/run-" in done.stdout
    assert "refused" in done.stdout


def test_what_is_written_inside_stays_inside(up: Path) -> None:
    call("run", up, "sh", "-c", "echo x >/opt/fleet-host-was-here")
    assert call("run", up, "cat", "/opt/fleet-host-was-here").stdout == "x\n"
    assert not Path("/opt/fleet-host-was-here").exists()


def test_exit_codes_and_misuse(up: Path) -> None:
    assert call("run", up, "sh", "-c", "exit 7", check=False).returncode == 7
    again = call("up", up, up.parent / "systemd.tar", check=False)
    assert again.returncode == 2 and "is up already" in again.stderr
    assert call("run", up.parent / "nowhere", "true", check=False).returncode == 2
