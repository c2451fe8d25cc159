# SPDX-License-Identifier: Apache-2.0
"""Rules about the health of wanted GPUs: rows of memory, throttling, the PCIe link. What the driver reports: _xids."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    INFO,
    WARN,
    Case,
    Hit,
    Map,
    called,
    inside,
    on_metal,
    rule,
    wanted_gpus,
)
from ansible.module_utils.gpu_host_rules_bus import logged
from ansible.module_utils.gpu_host_rules_xids import MEMORY_GUIDE, reset, reset_asked

THROTTLES = {
    "sw_thermal": "too hot, slowed down by the driver",
    "hw_thermal": "too hot, slowed down by the hardware",
    "hw_power_brake": "slowed down by the power supply's signal (power brake)",
    "hw_slowdown": "slowed down by the hardware (heat or power)",
}


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
    "A bad row of its memory is replaced at the next reset; until then programs run on, and new ones may start.",
    source=MEMORY_GUIDE,
)
def gpu_remap_pending(case: Case) -> Iterator[Hit]:
    """No row remapping waits for a reset."""
    for gpu in wanted_gpus(case):
        remapped = gpu.get("remapped") or {}
        alone = not reset_asked(case, gpu)
        if remapped.get("pending") and not remapped.get("failed") and alone:
            yield Hit(called(gpu), "the replacement of a memory row waits for a reset", "none", reset(case, gpu))


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
            power = "hw_power_brake" in reasons and not any("thermal" in reason for reason in reasons)
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
                on_metal(case, f"Seat the card and its riser anew; {_links(gpu)} shows the lanes."),
            )


@rule(
    "gpu-pcie-speed",
    INFO,
    "The link is slower than slot and card allow though a process is there; a card at rest slows its link down to save power.",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
)
def gpu_pcie_speed(case: Case) -> Iterator[Hit]:
    """A GPU with a computing process has its link at full speed; that it computes at this moment is not known."""
    computing = {process["gpu_uuid"] for process in case.facts["gpu"].get("processes") or []} if case.gpus else set()
    for gpu in wanted_gpus(case):
        link = gpu.get("pcie") or {}
        busy = gpu.get("idle") is False and gpu["uuid"] in computing
        if busy and link.get("gen") and link.get("gen_max") and link["gen"] < link["gen_max"]:
            look = _links(gpu)
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
                f"generation {link.get(f'gen_{kind}') or '?'} x{link.get(f'width_{kind}') or '?'}"
                for kind in ("max", "device_max")
            )
            yield Hit(
                called(gpu),
                f"PCIe {have} in this slot",
                f"{could}, as the card could",
                on_metal(
                    case,
                    f"Move it to a better slot if there is one ({_links(gpu)}); otherwise nothing.",
                ),
            )


def _links(gpu: Map) -> str:
    """The command that shows a link's speed and width, now and at most; without pciutils, without root."""
    return f"`grep . /sys/bus/pci/devices/{logged(gpu['pci'])}.0/*_link_*`"


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
