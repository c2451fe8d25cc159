# SPDX-License-Identifier: Apache-2.0
"""Rules about GPUs that are in the machine and do not answer, or are not joined to their neighbours yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    WARN,
    Case,
    Hit,
    Map,
    inside,
    label,
    on_gpus,
    on_kernel,
    on_metal,
    rule,
    wanted_gpus,
    whole,
)

DEBUG_GUIDE = "https://docs.nvidia.com/deploy/gpu-debug-guidelines/index.html"
FELL_OFF = 79  # Xid: the GPU has fallen off the bus


def several(gpus: list[Map]) -> str:
    """How messages name GPUs that share a fault: `GPU 0, 1 (NVIDIA H200)`."""
    names = ", ".join(dict.fromkeys(str(gpu["name"] or gpu["uuid"]) for gpu in gpus))
    return f"GPU {', '.join(str(gpu['index']) for gpu in gpus)} ({names})"


def on_each(case: Case, gpus: list[Map], command: str) -> str:
    """A command of nvidia-smi for each of these GPUs: `{}` is where its `-i UUID` stands, which is not needed for all of them."""
    if len(gpus) == len(case.gpus):
        return f"`{command.replace(' {}', '')}`"
    if len(gpus) == 1:
        return f"`{command.replace('{}', '-i ' + gpus[0]['uuid'])}`"
    return f"`for gpu in {' '.join(gpu['uuid'] for gpu in gpus)}; do {command.replace('{}', '-i $gpu')}; done`"


def bus(address: Any) -> tuple[int, ...]:
    """`PCI:0000:65:00`, `00000000:65:00.0` as (domain, bus, device)."""
    parts = re.findall(r"[0-9a-fA-F]+", str(address).upper().removeprefix("PCI:").split(".")[0])
    return tuple(int(part, 16) for part in parts)


def logged(address: Any) -> str:
    """A PCI address as the kernel's log has it: `0000:65:00`."""
    domain, number, device = bus(address)
    return f"{domain:04x}:{number:02x}:{device:02x}"


def fell_off(case: Case) -> list[str]:
    """PCI addresses that the driver's log of this boot says have fallen off the bus."""
    events = case.facts.get("gpu", {}).get("xids") or []
    return list(dict.fromkeys(str(event["pci"]) for event in events if event["xid"] == FELL_OFF))


def _word(case: Case) -> str | None:
    """The driver's word on a GPU that it knows of and cannot reach, while others answer."""
    error = str((case.facts.get("gpu", {}).get("nvml") or {}).get("error") or "")
    found = re.match(r"device \d+: .*(lost|reset|restart|unknown error)", error, re.IGNORECASE)
    return error if on_gpus(case) and found else None


def missing(case: Case) -> list[str]:
    """PCI addresses of GPUs that the driver should list beside others, and does not.

    A container was perhaps given only some, so there nothing is missing. No fault either: a card that another driver has (vfio
    gives it to a VM), and one that none has while it is of another kind than those that answer, as an old one for a monitor.
    """
    if not on_gpus(case) or inside(case) == "container":
        return []
    gpu, fallen = case.facts["gpu"], fell_off(case)
    cards = gpu.get("cards")
    if cards is None:  # an older recording
        cards = [{"pci": pci, "device": None, "driver": "nvidia"} for pci in gpu.get("on_bus") or []]
    listed = {bus(one["pci"]) for one in case.gpus}
    kinds = {card["device"] for card in cards if bus(card["pci"]) in listed}
    found = {}
    for card in cards:
        ours = card["driver"] == "nvidia"
        broken = card["driver"] is None and (card["device"] in kinds or bus(card["pci"]) in map(bus, fallen))
        if bus(card["pci"]) not in listed and (ours or broken):
            found[bus(card["pci"])] = card["pci"]
    seen = listed | {bus(card["pci"]) for card in cards}
    found |= {bus(pci): pci for pci in fallen if bus(pci) not in seen}
    return [found[at] for at in sorted(found)]


def lost(case: Case) -> bool:
    """Whether a GPU of this machine is away while others answer."""
    return bool(missing(case) or _word(case))


def meant(case: Case, asked: Any) -> Map | None:
    """The GPU that an index meant while all were there; None for the lost one, and for one that never was."""
    places = {bus(pci): None for pci in missing(case)} | {bus(gpu["pci"]): gpu for gpu in case.gpus}
    order = [places[at] for at in sorted(places)]
    return order[asked] if 0 <= asked < len(order) else None


def explained(case: Case, asked: Any) -> bool:
    """Whether it is the lost GPU that an inventory's GPU is not found for."""
    if isinstance(asked, str):
        return lost(case)
    return bool(len(case.gpus) <= asked < len(case.gpus) + len(missing(case)))


def _shifted(case: Case) -> Iterator[tuple[str, list[str] | None, bool]]:
    """Instances that a lost GPU concerns: (name, UUIDs to write instead, or None if it was on that GPU; has it others)."""
    for at, instance in enumerate(case.instances):
        asked = instance.get("gpus")
        named = [one for one in asked if whole(one) or isinstance(one, str)] if isinstance(asked, list) else []
        if not missing(case):  # only NVML's word, so nobody knows which index it had
            then = [case.gpu(one) for one in named]
            concerned = any(whole(one) for one in named)
        else:
            then = [meant(case, one) if whole(one) else case.gpu(one) for one in named]
            concerned = any(whole(one) and meant(case, one) != case.gpu(one) for one in named)
        if concerned or None in then:
            uuids = None if None in then else [gpu["uuid"] for gpu in then if gpu]
            yield label(instance, at), uuids, len(named) > 1


def _observed(case: Case) -> str:
    gone = missing(case)
    named = f"{', '.join(gone)} {'do' if len(gone) > 1 else 'does'} not" if gone else "not all"
    xid = f"Xid {FELL_OFF} (it fell off the bus)" if set(map(bus, gone)) & set(map(bus, fell_off(case))) else None
    told = "; ".join(word for word in (_word(case), xid) if word)
    return f"{len(case.gpus)} answer, {named}" + (f": {told}" if told else "")


def _back(case: Case) -> str:
    steps = "switch the machine off and on; if it stays away, seat the card anew and look at its power cables"
    if "reset" in str(_word(case)):
        which = "".join(f" -i {pci}" for pci in missing(case)[:1])
        steps = f"`nvidia-smi{which} --gpu-reset` with nothing running there; if that fails, {steps}"
    return f"`dmesg | grep -iE 'xid|fallen|nvrm'` says when it went. {on_metal(case, steps[0].upper() + steps[1:])}."


@rule(
    "gpu-lost",
    BLOCK,
    "Indices count the GPUs that answer, so without one of them they mean other cards than the inventory does.",
    source=DEBUG_GUIDE,
)
def gpu_lost(case: Case) -> Iterator[Hit]:
    """No GPU is away that an instance names, or whose absence moves the indices that instances name."""
    found = list(_shifted(case)) if lost(case) else []
    if not found:
        return
    known = missing(case)
    write = [f"{name} gpus: [{', '.join(uuids)}]" for name, uuids, _ in found if uuids and known]
    out = [f"{name} out" + (", or give it fewer GPUs" if many else "") for name, uuids, many in found if uuids is None]
    steps = [f"write for {'; for '.join(write)}"] if write else []
    steps += [f"take {'; '.join(out)}"] if out and known else []
    if not known:
        steps = ["name each instance's GPUs by UUID (`nvidia-smi -L` lists those that answer)"]
    instead = f" To serve without it, in {case.where}: {', and '.join(steps)}." if steps else ""
    yield Hit("the host's GPUs", _observed(case), "all of them", f"{_back(case)}{instead}")


@rule(
    "gpu-lost-elsewhere",
    WARN,
    "No instance names it, and the indices of those that are named have not moved; another restart may show more of it.",
    source=DEBUG_GUIDE,
)
def gpu_lost_elsewhere(case: Case) -> Iterator[Hit]:
    """No other GPU of the machine is away."""
    if lost(case) and wanted_gpus(case) and not list(_shifted(case)):
        yield Hit("the host's GPUs", _observed(case), "all of them", _back(case))


@rule(
    "gpu-fabric",
    BLOCK,
    "GPUs on an NVSwitch board compute only once the fabric manager has joined them; until then CUDA says that the system is "
    "not yet initialized (802).",
    source="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
)
def gpu_fabric(case: Case) -> Iterator[Hit]:
    """Every wanted GPU with a fabric is joined to it. In a VM it depends on the machine outside, so nothing is said there."""
    waiting = [gpu for gpu in wanted_gpus(case) if gpu.get("fabric") in ("not started", "in progress")]
    if waiting and inside(case) != "vm":
        driver = case.facts["gpu"].get("driver")
        package = f"'nvidia-fabricmanager={driver}-*'" if driver else "nvidia-fabricmanager"
        package += " nvlsm" if case.profile == "sm100" else ""  # boards from Blackwell on have a subnet manager too
        fix = (
            "`systemctl enable --now nvidia-fabricmanager && systemctl status nvidia-fabricmanager`. If there is no such "
            f"unit, install it in the driver's version, from NVIDIA's repository: `apt-get install -y {package}`"
        )
        yield Hit(
            several(waiting),
            f"registration with the NVSwitch fabric is {waiting[0]['fabric']}",
            "completed (`nvidia-smi -q | grep -A1 Fabric`)",
            f"{on_kernel(case, fix)}.",
        )
