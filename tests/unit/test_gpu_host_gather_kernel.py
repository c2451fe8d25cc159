# SPDX-License-Identifier: Apache-2.0
"""The kernel's words in, facts out: log records, boot parameters, PCI configuration space, kinds of machine."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_kernel as kernel
from ansible.module_utils import gpu_host_gather_pci as pci

# /dev/kmsg's form: priority, number, microseconds since boot, flag; a record's further fields follow on lines of their own.
LOG = """6,225,125901,-;iommu: Default domain type: Translated
4,357,3566815,c;NVRM: Persistence mode is deprecated and will be removed in a future release.
3,401,60500000,-;NVRM: Xid (PCI:0000:C1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
 SUBSYSTEM=pci
 DEVICE=+pci:0000:c1:00.0
3,402,61000000,-;NVRM: Xid (PCI:0000:06:00.0): 31, pid=428, name=python3, Ch 00000009, intr 00000000.
3,403,bad,-;NVRM: Xid (PCI:0001:01:00): 48, pid=1
"""


def test_xids_name_the_gpu_as_nvml_does_and_when() -> None:
    first, second, third = kernel.parse_xids(LOG, 1796085039.0)
    assert (first["pci"], first["xid"], first["when"]) == ("00000000:c1:00.0", 79, "2026-12-01T00:31:39Z")
    assert first["text"].endswith("GPU has fallen off the bus.")
    assert (second["pci"], second["xid"]) == ("00000000:06:00.0", 31)
    assert (third["pci"], third["when"]) == ("00000001:01:00.0", None)
    assert kernel.parse_xids(LOG, None)[0]["when"] is None


def test_only_the_newest_xids_are_kept() -> None:
    many = "".join(f"3,{n},{n},-;NVRM: Xid (PCI:0000:01:00): {n}, pid=1\n" for n in range(1, 200))
    found = kernel.parse_xids(many, 0.0)
    assert (len(found), found[-1]["xid"]) == (kernel.KEPT_XIDS, 199)


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel log is not readable here")
def test_the_whole_kernel_log_of_this_machine_is_read() -> None:
    log = kernel.kernel_log()
    assert log
    # The first and the last record are there: the buffer was read to its end.
    records = [line for line in log.splitlines() if line[:1].isdigit()]
    numbers = [int(line.split(",")[1]) for line in records]
    assert numbers == sorted(numbers)
    assert len(numbers) > 10


@pytest.mark.parametrize(
    ("name", "hypervisor", "marks", "expected"),
    [
        ("none", False, [], ("metal", "none")),
        ("kvm", True, [], ("vm", "kvm")),
        ("microsoft", True, [], ("vm", "microsoft")),
        ("lxc", False, [], ("container", "lxc")),
        ("systemd-nspawn", True, [], ("container", "systemd-nspawn")),
        # Without systemd-detect-virt.
        ("", True, ["docker"], ("container", "docker")),
        ("", True, [], ("vm", None)),
        ("", False, [], (None, None)),
    ],
)
def test_kind_of_machine(
    name: str, hypervisor: bool, marks: list[str], expected: tuple[str | None, str | None]
) -> None:
    assert kernel.virt_of(name, hypervisor, marks) == expected


def test_modes_and_versions() -> None:
    assert kernel.parse_thp("always [madvise] never") == "madvise"
    assert kernel.parse_thp(None) is None
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\nGCC version: 15"
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    assert kernel.parse_module_version(opened) == "580.159.04"
    assert kernel.parse_module_version(closed) == "535.183.01"
    assert kernel.parse_module_version(None) is None
    assert kernel.stamp(1796085039.0) == "2026-12-01T00:30:39Z"


@pytest.mark.parametrize(
    ("mounts", "version"),
    [
        ("32 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate", 2),
        (
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw shared:4 - cgroup cgroup rw,cpu",
            1,
        ),
        # Hybrid: the new tree is there too, but the controllers are in the old ones.
        (
            "32 31 0:29 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw",
            1,
        ),
        ("22 1 8:1 / / rw - ext4 /dev/sda1 rw", None),
    ],
)
def test_cgroup_version(mounts: str, version: int | None) -> None:
    assert kernel.cgroup_version(mounts) == version


def test_kernel_of_this_machine() -> None:
    facts = kernel.gather_kernel([])
    assert facts["release"] == os.uname().release
    assert facts["boot"] is not None
    assert facts["boot"].endswith("Z")
    assert facts["hugepages"]["size"] >= 1 << 20


# --- PCI ------------------------------------------------------------------------------------------


def test_addresses_of_nvml_and_of_sysfs() -> None:
    assert pci.address("00000000:C1:00.0") == "0000:c1:00.0"
    assert pci.address("00010000:01:00.0") == "10000:01:00.0"
    assert pci.long_address("0000:c1:00.0") == "00000000:c1:00.0"
    assert pci.long_address("10000:01:00") == "00010000:01:00.0"


def test_bridges_between_the_root_and_a_device() -> None:
    path = "/sys/devices/pci0000:60/0000:60:01.1/0000:61:00.0/0000:62:04.0/0000:63:00.0"
    assert pci.bridges_above(path) == ["0000:60:01.1", "0000:61:00.0", "0000:62:04.0"]
    assert pci.bridges_above("/sys/devices/pci0000:00/0000:00:06.0") == []


def space(*capabilities: tuple[int, int], control: int = 0) -> bytes:
    """A configuration space with extended capabilities as (id, offset), ACS with a control register."""
    config = bytearray(4096)
    for at, (name, offset) in enumerate(capabilities):
        after = capabilities[at + 1][1] if at + 1 < len(capabilities) else 0
        struct.pack_into("<I", config, offset, name | 1 << 16 | after << 20)
        if name == pci.ACS:
            struct.pack_into("<HH", config, offset + 4, 0x5F, control)
    return bytes(config)


def test_acs_is_found_behind_other_capabilities() -> None:
    assert pci.acs_control(space((0x0001, 0x100), (0x000D, 0x2A0), control=0x1D)) == 0x1D
    assert pci.acs_control(space((0x000D, 0x100), control=0)) == 0
    assert pci.acs_control(space((0x0001, 0x100))) == 0
    assert pci.acs_control(bytes(4096)) == 0
    assert pci.acs_control(bytes(64)) is None, "what a user without rights gets to read"


def test_a_ring_of_capabilities_ends() -> None:
    config = bytearray(space((0x0001, 0x100), (0x0003, 0x148)))
    struct.pack_into("<I", config, 0x148, 0x0003 | 1 << 16 | 0x100 << 20)
    assert pci.acs_control(bytes(config)) == 0


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PCI bus in a folder: one GPU below a switch port, one on the root, and a bridge of another maker."""
    tree = tmp_path / "devices/pci0000:60"
    inner = tree / "0000:60:01.1/0000:61:00.0/0000:62:00.0"
    outer = tree / "0000:60:02.0"
    for folder in (inner, outer):
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        (folder / "local_cpulist").write_text("0-31,64-95\n")
        (folder / "max_link_width").write_text("16\n")
        (folder / "device").write_text("0x2bb5\n")
    (tmp_path / "drivers/nvidia").mkdir(parents=True)
    (inner / "driver").symlink_to(tmp_path / "drivers/nvidia")
    (inner / "numa_node").write_text("1\n")
    (outer / "numa_node").write_text("-1\n")
    for folder, control in ((inner.parent, 0x1D), (inner.parent.parent, 0x11)):
        (folder / "vendor").write_text("0x1022\n")
        (folder / "class").write_text("0x060400\n")
        (folder / "config").write_bytes(space((0x000D, 0x100), control=control))
    links = tmp_path / "bus"
    links.mkdir()
    for folder in (inner, outer, inner.parent, inner.parent.parent):
        (links / folder.name).symlink_to(folder)
    (tmp_path / "groups/7").mkdir(parents=True)
    (tmp_path / "groups/7/type").write_text("DMA-FQ\n")
    (inner / "iommu_group").symlink_to(tmp_path / "groups/7")
    monkeypatch.setattr(pci, "DEVICES", links)
    monkeypatch.setattr(pci, "GROUPS", tmp_path / "groups")
    return tmp_path


GPUS = ["00000000:60:02.0", "00000000:62:00.0"]


def test_gpus_on_the_bus_need_no_driver(bus: Path) -> None:
    kind = {"device": "0x2bb5"}
    assert pci.nvidia_devices() == [
        {"pci": GPUS[0], **kind, "driver": None},
        {"pci": GPUS[1], **kind, "driver": "nvidia"},
    ]


def test_where_a_gpu_sits(bus: Path) -> None:
    assert pci.gather_placement(GPUS[1]) == {"numa_node": 1, "cpus": "0-31,64-95", "width_device_max": 16}
    assert pci.gather_placement(GPUS[0])["numa_node"] is None, "-1 is the kernel's word for unknown"


def test_bridges_that_send_traffic_between_gpus_up(bus: Path) -> None:
    assert pci.gather_acs(GPUS) == ["0000:61:00.0"]
    assert pci.gather_acs(GPUS[:1]) == []
    (bus / "bus/0000:61:00.0/config").write_bytes(bytes(64))
    assert pci.gather_acs(GPUS) is None


def test_iommu_of_the_gpus(bus: Path) -> None:
    assert pci.gather_iommu(GPUS, "")["mode"] == "translated"
    (bus / "groups/7/type").write_text("identity\n")
    facts = pci.gather_iommu(GPUS, "")
    assert (facts["mode"], facts["groups"]) == ("passthrough", 1)


@pytest.mark.parametrize(
    ("types", "groups", "cmdline", "mode"),
    [
        ([], 0, "intel_iommu=on", "off"),  # asked for and not there: no IOMMU, or switched off in the firmware
        (["identity", "DMA"], 9, "", "translated"),
        ([], 9, "quiet iommu=pt", "passthrough"),
        ([], 9, "iommu.passthrough=1", "passthrough"),
        ([], 9, "amd_iommu=pt", None),  # no such parameter
    ],
)
def test_iommu_mode(types: list[str], groups: int, cmdline: str, mode: str | None) -> None:
    assert pci.iommu_mode(types, groups, cmdline)[0] == mode
