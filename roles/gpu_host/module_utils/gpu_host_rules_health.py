# SPDX-License-Identifier: Apache-2.0
"""Rules about the health of wanted GPUs: memory errors, Xids, throttling, the PCIe link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    INFO,
    WARN,
    Case,
    Hit,
    Map,
    called,
    inside,
    on_kernel,
    on_metal,
    rule,
    wanted_gpus,
)

MEMORY_GUIDE = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html"
XID_CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
# Xids after which the catalogue wants the GPU or the machine reset, or the hardware looked at. 2026-11.
FATAL_XIDS = {
    48: "memory error that could not be corrected",
    62: "halt of its power controller",
    64: "bad memory row that could not be replaced",
    74: "NVLink error",
    79: "it fell off the bus",
    95: "memory error that was not contained",
    119: "no answer of its system processor (GSP)",
    120: "error of its system processor (GSP)",
    140: "memory error without recovery",
    143: "failed initialization",
}
THROTTLES = {
    "sw_thermal": "too hot, slowed down by the driver",
    "hw_thermal": "too hot, slowed down by the hardware",
    "hw_power_brake": "slowed down by the power supply's signal (power brake)",
    "hw_slowdown": "slowed down by the hardware (heat or power)",
}


def _reset(case: Case, gpu: Map) -> str:
    return on_kernel(
        case, f"Stop what runs on it, then `nvidia-smi -i {gpu['uuid']} --gpu-reset`, or `systemctl reboot`."
    )


@rule(
    "gpu-remap-failed",
    BLOCK,
    "A row of its memory is bad and no spare row is left: errors will come again, and the maker replaces such a card.",
    source=MEMORY_GUIDE,
)
def gpu_remap_failed(case: Case) -> Iterator[Hit]:
    """No failed row remapping."""
    for gpu in wanted_gpus(case):
        if (gpu.get("remapped") or {}).get("failed"):
            yield Hit(
                called(gpu),
                "a bad memory row could not be replaced",
                "none",
                f"Leave GPU {gpu['index']} out of gpus in {case.where} and have the card replaced "
                f"(`nvidia-smi -i {gpu['uuid']} -q -d ROW_REMAPPER` shows it).",
            )


@rule(
    "gpu-remap-pending",
    WARN,
    "A bad row of its memory is replaced at the next reset; until then the row is in use.",
    source=MEMORY_GUIDE,
)
def gpu_remap_pending(case: Case) -> Iterator[Hit]:
    """No row remapping waits for a reset."""
    for gpu in wanted_gpus(case):
        remapped = gpu.get("remapped") or {}
        if remapped.get("pending") and not remapped.get("failed"):
            yield Hit(called(gpu), "the replacement of a memory row waits for a reset", "none", _reset(case, gpu))


@rule(
    "gpu-ecc-uncorrected",
    WARN,
    "Memory gave wrong data that could not be corrected since the driver was loaded; what ran there died or was wrong.",
    source=MEMORY_GUIDE,
)
def gpu_ecc_uncorrected(case: Case) -> Iterator[Hit]:
    """No uncorrected memory errors."""
    for gpu in wanted_gpus(case):
        count = (gpu.get("ecc") or {}).get("uncorrected") or 0
        if count:
            yield Hit(
                called(gpu),
                f"{count} uncorrected memory error{'s' if count > 1 else ''}",
                "0 since the driver was loaded",
                f"{_reset(case, gpu)} If they come back, have the card replaced.",
            )


def bus(address: Any) -> tuple[int, ...]:
    """`PCI:0000:65:00`, `00000000:65:00.0` as (domain, bus, device)."""
    parts = re.findall(r"[0-9a-fA-F]+", str(address).upper().removeprefix("PCI:").split(".")[0])
    return tuple(int(part, 16) for part in parts)


def logged(address: Any) -> str:
    """A PCI address as the kernel's log has it: `0000:65:00`."""
    domain, number, device = bus(address)
    return f"{domain:04x}:{number:02x}:{device:02x}"


def _xids(case: Case, fatal: bool) -> Iterator[tuple[str, Map | None, list[int]]]:
    """(PCI address, its GPU if the host still lists it, numbers) of wanted and of lost GPUs."""
    wanted = {bus(gpu["pci"]): gpu for gpu in wanted_gpus(case)}
    listed = {bus(gpu["pci"]) for gpu in case.gpus}
    seen: dict[str, list[int]] = {}
    for event in case.facts.get("gpu", {}).get("xids") or []:
        at, number = bus(event["pci"]), event["xid"]
        if (number in FATAL_XIDS) == fatal and (at in wanted or at not in listed) and wanted:
            seen.setdefault(str(event["pci"]), []).append(number)
    for pci, numbers in seen.items():
        yield pci, wanted.get(bus(pci)), numbers


@rule(
    "gpu-xid",
    WARN,
    "The driver reported an error of the GPU since the last boot after which it has to be reset, or looked at, to be trusted.",
    source=XID_CATALOGUE,
)
def gpu_xid(case: Case) -> Iterator[Hit]:
    """No Xid of this boot that speaks of the hardware."""
    for pci, gpu, numbers in _xids(case, fatal=True):
        told = ", ".join(f"Xid {number} ({FATAL_XIDS[number]})" for number in dict.fromkeys(numbers))
        look = f"Read `journalctl -k -b | grep 'Xid.*{logged(pci)}'`"
        if gpu:
            yield Hit(called(gpu), told, "no such Xid since the last boot", f"{look}. {_reset(case, gpu)}")
        else:
            fix = on_metal(
                case, f"{look}, then switch the machine off and on; if it stays away, look at its seat and power."
            )
            yield Hit(f"the GPU at {pci}, which is not listed any more", told, "the GPU", fix)


@rule(
    "gpu-xid-program",
    INFO,
    "The driver reported an error since the last boot that programs usually bring about; it explains a crash of that time.",
    source=XID_CATALOGUE,
)
def gpu_xid_program(case: Case) -> Iterator[Hit]:
    """No other Xid of this boot."""
    for pci, gpu, numbers in _xids(case, fatal=False):
        if gpu:
            counts = ", ".join(f"Xid {number} ({numbers.count(number)} times)" for number in sorted(set(numbers)))
            grep = f"`journalctl -k -b | grep 'Xid.*{logged(pci)}'`"
            yield Hit(called(gpu), counts, "none", f"Look each up in the catalogue; {grep} shows when and by whom.")


@rule(
    "gpu-throttled",
    WARN,
    "The GPU runs below its clocks right now, so the engine is slower than it was measured, or times out.",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
)
def gpu_throttled(case: Case) -> Iterator[Hit]:
    """No GPU is slowed down by heat or power."""
    for gpu in wanted_gpus(case):
        reasons = [reason for reason in gpu.get("throttle") or [] if reason in THROTTLES]
        if reasons:
            power = all(reason == "hw_power_brake" for reason in reasons)
            part = (
                "the power supplies and the card's power cables"
                if power
                else "fans, airflow and the room's temperature"
            )
            watch = f"`nvidia-smi -i {gpu['uuid']} -q -d PERFORMANCE,TEMPERATURE,POWER`"
            yield Hit(
                called(gpu),
                "; ".join(THROTTLES[reason] for reason in reasons),
                "no throttling",
                on_metal(case, f"Check {part}; {watch} shows when it ends."),
            )


@rule(
    "gpu-pcie-width",
    WARN,
    "The link runs on fewer lanes than slot and card offer, which comes from a badly seated card, a riser or a damaged contact.",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
)
def gpu_pcie_width(case: Case) -> Iterator[Hit]:
    """All lanes that slot and card have in common are in use."""
    for gpu in wanted_gpus(case):
        link = gpu.get("pcie") or {}
        if link.get("width") and link.get("width_max") and link["width"] < link["width_max"]:
            yield Hit(
                called(gpu),
                f"PCIe x{link['width']}",
                f"x{link['width_max']}, as slot and card allow",
                on_metal(case, f"Seat the card and its riser anew; `{_lspci(gpu)} | grep LnkSta:` shows the lanes."),
            )


@rule(
    "gpu-pcie-speed",
    INFO,
    "The link is slower than slot and card allow though a process is there; a card at rest slows its link down to save power.",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
)
def gpu_pcie_speed(case: Case) -> Iterator[Hit]:
    """A GPU with a process has its link at full speed; that it computes at this moment is not known."""
    for gpu in wanted_gpus(case):
        link = gpu.get("pcie") or {}
        if gpu.get("idle") is False and link.get("gen") and link.get("gen_max") and link["gen"] < link["gen_max"]:
            look = f"`{_lspci(gpu)} | grep LnkSta:`"
            yield Hit(
                called(gpu),
                f"PCIe generation {link['gen']} with a process on it",
                f"generation {link['gen_max']}, as slot and card allow",
                on_metal(
                    case,
                    f"Look again under load ({look}); if it stays, seat the card anew or update the firmware.",
                ),
            )


@rule(
    "gpu-pcie-slot",
    INFO,
    "The slot gives less than the card could use: weights load more slowly, and so do exchanges between GPUs without NVLink.",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
)
def gpu_pcie_slot(case: Case) -> Iterator[Hit]:
    """The slot is as good as the card."""
    for gpu in wanted_gpus(case):
        link = gpu.get("pcie") or {}
        pairs = [(link.get(f"{key}_max"), link.get(f"{key}_device_max")) for key in ("gen", "width")]
        if any(slot and card and slot < card for slot, card in pairs):
            have, could = (
                f"generation {link.get(f'gen_{kind}')} x{link.get(f'width_{kind}')}" for kind in ("max", "device_max")
            )
            yield Hit(
                called(gpu),
                f"PCIe {have} in this slot",
                f"{could}, as the card could",
                on_metal(
                    case,
                    f"Move it to a better slot if there is one (`{_lspci(gpu)} | grep LnkCap:`); otherwise nothing.",
                ),
            )


def _lspci(gpu: Map) -> str:
    return f"lspci -vv -s {gpu['pci'].split(':', 1)[-1]}"


@rule(
    "gpu-persistence",
    INFO,
    "Without persistence the driver forgets a GPU whenever nothing uses it: starts take longer, counts of errors are lost.",
    source="https://docs.nvidia.com/deploy/driver-persistence/index.html",
)
def gpu_persistence(case: Case) -> Iterator[Hit]:
    """Persistence is on."""
    off = [str(gpu["index"]) for gpu in wanted_gpus(case) if gpu.get("persistence") is False]
    if off:
        fix = "`systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1` until the next boot"
        if inside(case) == "container":
            fix = f"On the machine that runs this container: {fix}"
        yield Hit(f"GPU {', '.join(off)}", "persistence is off", "persistence on", f"{fix}.")
