# SPDX-License-Identifier: Apache-2.0
"""Room: mounts in the kernel's words, and a real file system."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_room as gather


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    facts = gather.gather_room(str(tmp_path / "a/b"))
    assert facts["disk"]["path"] == str(tmp_path)
    assert 0 < facts["disk"]["free"] <= facts["disk"]["total"]
    assert facts["current"] is None
    (tmp_path / "current").symlink_to("releases/abc")
    assert gather.gather_room(str(tmp_path))["current"] is None
    (tmp_path / "releases/abc").mkdir(parents=True)
    assert gather.gather_room(str(tmp_path))["current"] == "abc"


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
31 22 0:26 / /tmp rw,nosuid,noexec shared:9 master:2 - tmpfs tmpfs rw,size=1g
32 22 8:2 / /srv rw,relatime - xfs /dev/sdb1 ro
33 32 0:40 / /srv/mo\040dels rw - nfs4 store:/m rw,vers=4.2
34 22 8:3 / /opt rw - ext4 /dev/sdc1 rw
35 34 0:50 / /opt ro - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "has"),
    [
        ("/", "ext4", "rw"),
        ("/tmpfoo", "ext4", "errors=remount-ro"),
        ("/tmp", "tmpfs", "noexec"),
        ("/tmp/deep/er", "tmpfs", "noexec"),
        ("/srv/x", "xfs", "ro"),  # the file system below is read-only
        ("/srv/mo dels/a", "nfs4", "vers=4.2"),
        ("/opt/a", "overlay", "ro"),  # the upper of two mounts on one point
    ],
)
def test_the_mount_that_holds_a_path(path: str, kind: str, has: str) -> None:
    mount = gather.mount_of(path, gather.parse_mountinfo(MOUNTS))
    assert mount
    assert mount["type"] == kind
    assert has in mount["options"]


def test_mounts_of_this_machine(tmp_path: Path) -> None:
    facts = gather.gather_mounts([str(tmp_path / "not/there/yet")])
    assert set(facts) == {str(tmp_path / "not/there/yet"), "/tmp", "/dev/shm", *gather.PLACES}
    assert facts["/dev/shm"]["type"] == "tmpfs"
