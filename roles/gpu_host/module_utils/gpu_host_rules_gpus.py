# SPDX-License-Identifier: Apache-2.0
"""Rules about which GPUs there are, which are wanted, and in what mode they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    CAPABILITIES,
    PROFILES,
    WARN,
    Case,
    Hit,
    Map,
    inside,
    kernel,
    label,
    on_gpus,
    on_kernel,
    on_metal,
    rule,
    shown,
    version,
    wanted_gpus,
    whole,
)
from ansible.module_utils.gpu_host_rules_bus import explained, fell_off, logged, on_each, several
from ansible.module_utils.gpu_host_rules_driver import DRIVER, from_nvidia, headers, no_driver_cause
from ansible.module_utils.gpu_host_rules_named import names_gpu


@rule(
    "gpu-none",
    BLOCK,
    "Nothing is served without a GPU. The CPU profile is slow and for trials: it has to be asked for and is never a fall-back.",
    source="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
)
def gpu_none(case: Case) -> Iterator[Hit]:
    """A host without GPUs is refused unless the inventory says cpu."""
    if case.wanted.get("profile") == "cpu" or case.gpus or no_driver_cause(case):
        return
    gpu, container = case.facts.get("gpu", {}), inside(case) == "container"
    cards, fallen = gpu.get("on_bus") or [], fell_off(case)
    if fallen and not container:
        observed = f"no GPU answers: Xid 79, fallen off the bus, at {', '.join(map(logged, fallen))}"
        fix = on_metal(
            case, "Switch the machine off and on; if it stays away, seat the card anew and look at its power cables."
        )
        fix += " `dmesg | grep -i xid` says when it went."
    elif container:
        observed = f"the driver fails: {gpu['error']}" if gpu.get("error") else "this container has no GPU"
        fix = "Start the container with its GPUs (docker: `--gpus all`, LXC: nvidia.runtime: true), so that `nvidia-smi` works."
    elif gpu.get("error"):
        observed = f"the driver fails: {gpu['error']}"
        fix = "`dmesg | grep -i nvrm` says why. If `nvidia-smi` hangs, `systemctl reboot`; it has to work."
        if kernel(case) and not (kernel(case).get("modules") or {}).get("nvidia"):
            observed += "; the kernel module nvidia is not loaded"
            fix = (
                "Load it: `modprobe nvidia && nvidia-smi`. If there is none for this kernel (`dkms status`), build it: "
                f"`apt-get update && apt-get install -y {headers(case)} && dkms autoinstall && systemctl reboot`."
            )
    elif gpu.get("nvidia_smi"):
        observed = "the driver lists no GPU"
        fix = "See whether the cards are given to this host (`lspci -d 10de:`) and driven (`dmesg | grep -i nvrm`)."
    else:
        observed = "no nvidia-smi, so no NVIDIA driver" + (f", for {len(cards)} cards on the bus" if cards else "")
        fix = f"Install the driver: {from_nvidia(case, DRIVER)}, then `systemctl reboot`."
        if "on_bus" in gpu and not cards:
            observed = "no NVIDIA card on the PCI bus (`lspci -d 10de:`)"
            fix = "If it should have one, look at its seat and its power cables."
            if inside(case) == "vm":
                fix = "If it should have one, pass it through on the machine that runs this VM."
    yield Hit(
        "the host",
        observed,
        "at least one NVIDIA GPU",
        f"{fix} If it is to serve on its CPU, {_cpu(case)}",
    )


@rule(
    "gpu-capability",
    BLOCK,
    "Backends are known for these compute capabilities only.",
    source="https://developer.nvidia.com/cuda-gpus",
)
def gpu_capability(case: Case) -> Iterator[Hit]:
    """Every wanted GPU has a capability that a profile serves."""
    kinds: dict[str | None, list[Map]] = {}
    for gpu in wanted_gpus(case):
        if gpu["compute_cap"] not in CAPABILITIES:
            kinds.setdefault(gpu["compute_cap"], []).append(gpu)
    for capability, gpus in kinds.items():
        known = ", ".join(sorted(CAPABILITIES, key=version))
        if capability is None:
            look = "`nvidia-smi --query-gpu=index,name,compute_cap --format=csv`"
            fix = f"{look} says it where the driver works; otherwise {on_kernel(case, '`systemctl reboot`')}."
            yield Hit(several(gpus), "a compute capability that its driver does not tell", f"one of {known}", fix)
            continue
        indices = ", ".join(str(gpu["index"]) for gpu in gpus)
        fix = f"Take GPU {indices} out of gpus in {case.where}; an instance that has no other goes with it."
        if all(gpu["compute_cap"] not in CAPABILITIES for gpu in case.gpus):
            fix = f"No card of this host is served: take the host out of the inventory, or, for trials on its CPU, {_cpu(case)}."
        yield Hit(several(gpus), f"compute capability {capability}", f"one of {known}", fix)


def _cpu(case: Case) -> str:
    named = any(instance.get("gpus") for instance in case.instances)
    return f"write in {case.where}: gpu_host_profile: cpu" + (", and gpus: [] for every instance" if named else "")


@rule(
    "gpu-mixed",
    BLOCK,
    "One release serves one profile; kernels of one kind of GPU do not run on the other.",
    source="https://developer.nvidia.com/cuda-gpus",
)
def gpu_mixed(case: Case) -> Iterator[Hit]:
    """All GPUs that instances use belong to one profile."""
    kinds: dict[str, list[str]] = {}
    for gpu in wanted_gpus(case):
        profile = CAPABILITIES.get(gpu["compute_cap"])
        if profile:
            kinds.setdefault(profile, []).append(f"{gpu['index']} ({gpu['name']})")
    if len(kinds) > 1:
        observed = "; ".join(f"{profile}: GPU {', '.join(gpus)}" for profile, gpus in sorted(kinds.items()))
        yield Hit(
            "the host's GPUs",
            observed,
            "GPUs of one profile",
            f"Keep the GPUs of one profile in gpu_units_instances of {case.where}.",
        )


@rule(
    "profile-mismatch",
    BLOCK,
    "The inventory names one kind of GPU and the host has another: one of them is wrong.",
    source="docs/architecture.md",
)
def profile_mismatch(case: Case) -> Iterator[Hit]:
    """A profile given by name is the one that the GPUs have."""
    asked = case.wanted.get("profile")
    if asked in PROFILES and asked != "cpu":
        found = {CAPABILITIES[gpu["compute_cap"]] for gpu in wanted_gpus(case) if gpu["compute_cap"] in CAPABILITIES}
        if found and found != {asked}:
            yield Hit(
                "gpu_host_profile",
                asked,
                " or ".join(sorted(found)) + ", as the GPUs say",
                f"Set gpu_host_profile: auto in {case.where}.",
            )


@rule(
    "gpu-unknown",
    BLOCK,
    "An instance is bound to exactly the GPUs that the inventory names.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def gpu_unknown(case: Case) -> Iterator[Hit]:
    """Every index and UUID exists on the host."""
    if not on_gpus(case):
        return
    others = [card for card in case.facts["gpu"].get("cards") or [] if card["driver"] not in ("nvidia", None)]
    given = "".join(f"; the card at {card['pci']} is driven by {card['driver']}" for card in others)
    named = {one for asked in _lists(case) for one in asked}
    many = {one for one in named if whole(one)}
    # Every GPU here is named, and one more: a card that left the bus too looks like this, and then indices moved.
    short = set(range(len(case.gpus))) < many and not others and inside(case) != "container"
    have = ", ".join(f"{gpu['index']} ({gpu['uuid']})" for gpu in case.gpus) + given
    for at, (instance, asked) in enumerate(zip(case.instances, _lists(case), strict=True)):
        for one in asked:
            if case.gpu(one) is not None or explained(case, one):
                continue
            observed, fix = f"GPU {shown(one)}", f"Correct gpus of it in {case.where}."
            if short and whole(one):
                observed += f"; the inventory names {len(many)} GPUs by index and the host has {len(case.gpus)}, also on its bus"
                back = on_metal(case, "Switch the machine off and on; if it stays away, seat the card anew.")
                fix = (
                    f"If it never had more: take GPU {one} out of gpus in {case.where}. If it had, a card has left the bus and "
                    f"indices may mean other cards than before. {back} To serve without it, name the GPUs by UUID "
                    f"(`nvidia-smi -L`) in gpus of {case.where}."
                )
            yield Hit(label(instance, at), observed, f"one of {have}", fix)


def _lists(case: Case) -> list[list[Any]]:
    """What each instance names, in a form that means a GPU; another form has its own rule."""
    asked = (instance.get("gpus") for instance in case.instances)
    return [[one for one in gpus if names_gpu(one)] if isinstance(gpus, list) else [] for gpus in asked]


@rule(
    "gpu-mig",
    BLOCK,
    "A GPU in MIG mode is used in slices; an instance is bound to whole GPUs and would get one slice, or nothing.",
    source="https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
)
def gpu_mig(case: Case) -> Iterator[Hit]:
    """MIG is off on wanted GPUs."""
    sliced = [gpu for gpu in wanted_gpus(case) if gpu.get("mig")]
    if sliced:
        # Slices go before the mode does; where there are none these two say so and do nothing.
        off = on_each(case, sliced, "nvidia-smi mig -dci {}; nvidia-smi mig -dgi {}; nvidia-smi {} -mig 0")
        fix = f"{off}, with nothing running there; it may want `systemctl reboot` afterwards"
        it = "it" if len(sliced) == 1 else "them"
        yield Hit(
            several(sliced),
            "MIG mode is on",
            "MIG mode off",
            f"{on_kernel(case, fix)}; or leave {it} out of gpus in {case.where}.",
        )


@rule(
    "gpu-compute-prohibited",
    BLOCK,
    "In this compute mode no program may use the GPU for computing.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def gpu_compute_prohibited(case: Case) -> Iterator[Hit]:
    """Wanted GPUs take compute work."""
    yield from _compute_mode(case, "prohibited")


@rule(
    "gpu-compute-exclusive",
    WARN,
    "One process at a time may use the GPU: a second process of an engine, or the next one while the last goes down, is refused.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def gpu_compute_exclusive(case: Case) -> Iterator[Hit]:
    """Wanted GPUs take more than one process."""
    yield from _compute_mode(case, "exclusive")


def _compute_mode(case: Case, mode: str) -> Iterator[Hit]:
    gpus = [gpu for gpu in wanted_gpus(case) if gpu.get("compute_mode") == mode]
    if gpus:
        fix = on_kernel(case, on_each(case, gpus, "nvidia-smi {} -c DEFAULT"))
        yield Hit(several(gpus), f"compute mode {mode}", "compute mode default", f"{fix}.")
