# SPDX-License-Identifier: Apache-2.0
"""The PCI side of GPUs, from sysfs: their NUMA node, CPUs and IOMMU, and what stands between them and the root."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts, read, whole

DEVICES = Path("/sys/bus/pci/devices")
GROUPS = Path("/sys/kernel/iommu_groups")
NVIDIA = "0x10de"
DISPLAY = ("0x0300", "0x0302")  # VGA and 3D controllers
ACS = 0x000D  # PCIe extended capability: Access Control Services
REQUEST_REDIRECT = 0x04  # bit of its control register: traffic between siblings goes up to the root and its IOMMU


def address(pci: str) -> str:
    """sysfs' name of an NVML address: `00000000:C1:00.0` is `0000:c1:00.0` there."""
    domain, _, rest = pci.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def long_address(name: str) -> str:
    """NVML's address of a device, as gpus[].pci has it, for sysfs' or the kernel log's name of it."""
    domain, _, rest = name.lower().partition(":")
    return f"{int(domain, 16):08x}:{rest}" + ("" if "." in rest else ".0")


def nvidia_devices() -> list[Facts]:
    """`[{pci, device, driver}]` of the NVIDIA GPUs on the PCI bus, in its order, whether or not a driver sees them.

    pci as gpus[].pci has it; device: the number of the kind of card; driver: the kernel module that is bound to it, or None.
    """
    found = []
    for device in sorted(DEVICES.glob("*")):
        if read(device / "vendor") == NVIDIA and (read(device / "class") or "").startswith(DISPLAY):
            bound = device / "driver"
            driver = bound.resolve().name if bound.exists() else None
            found.append({"pci": long_address(device.name), "device": read(device / "device"), "driver": driver})
    return found


def gather_placement(pci: str) -> Facts:
    """`{numa_node, cpus, width_device_max}` of one GPU; the node is None where the firmware names none."""
    device = DEVICES / address(pci)
    node = whole(read(device / "numa_node"))
    return {
        "numa_node": node if node is not None and node >= 0 else None,
        "cpus": read(device / "local_cpulist") or None,
        "width_device_max": whole(read(device / "max_link_width")),
    }


def bridges_above(path: str) -> list[str]:
    """Addresses of the bridges in a device's real sysfs path, root first, without the device itself."""
    return re.findall(r"/([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?=/)", path)


def acs_control(config: bytes) -> int | None:
    """ACS control register of a bridge's configuration space; 0 without ACS, None where only root may read it."""
    if len(config) < 0x104:
        return None
    at, seen = 0x100, set()
    while at >= 0x100 and at not in seen and at + 8 <= len(config):
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACS:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
    return 0


def gather_acs(gpus: list[str]) -> list[str] | None:
    """Bridges above the GPUs that redirect requests between siblings, so that P2P goes through the root; None if unreadable."""
    found = []
    for name in sorted({name for pci in gpus for name in bridges_above(os.path.realpath(DEVICES / address(pci)))}):
        try:
            control = acs_control((DEVICES / name / "config").read_bytes())
        except OSError:
            control = None
        if control is None:
            return None
        if control & REQUEST_REDIRECT:
            found.append(name)
    return found


def iommu_mode(types: list[str], groups: int, cmdline: str) -> tuple[str | None, str]:
    """(mode, where it was read) from the types of the GPUs' IOMMU groups, the number of groups and the boot parameters."""
    if groups == 0:
        return "off", "no group in /sys/kernel/iommu_groups"
    kinds = {"passthrough" if kind == "identity" else "translated" for kind in types}
    if kinds:
        # One translated GPU is enough to spoil P2P.
        return ("translated" if "translated" in kinds else "passthrough"), "type of the GPUs' IOMMU groups"
    if re.search(r"\biommu(\.passthrough=1|=pt)\b", cmdline):
        return "passthrough", "/proc/cmdline"
    return None, "no GPU in an IOMMU group"


def gather_iommu(gpus: list[str], cmdline: str) -> Facts:
    """`{mode, groups, source}`: off, passthrough or translated, as it is for the GPUs."""
    groups = len(list(GROUPS.glob("*")))
    types = [read(DEVICES / address(pci) / "iommu_group/type") for pci in gpus]
    mode, source = iommu_mode([kind for kind in types if kind], groups, cmdline)
    return {"mode": mode, "groups": groups, "source": source}
