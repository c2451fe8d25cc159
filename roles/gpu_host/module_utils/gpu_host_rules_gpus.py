# SPDX-License-Identifier: Apache-2.0
"""Rules about which GPUs there are, which are wanted, and who is on them."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    CAPABILITIES,
    PROFILES,
    WARN,
    Case,
    Hit,
    Map,
    called,
    inside,
    label,
    on_gpus,
    on_kernel,
    on_metal,
    ours,
    rule,
    version,
    wanted_gpus,
)
from ansible.module_utils.gpu_host_rules_driver import from_nvidia, lost, no_driver_cause


@rule(
    "gpu-none",
    BLOCK,
    "The CPU profile is slow and for trials, so it has to be asked for and is never a fall-back.",
    source="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
)
def gpu_none(case: Case) -> Iterator[Hit]:
    """A host without GPUs is refused unless the inventory says cpu."""
    if case.wanted.get("profile") == "cpu" or case.gpus or no_driver_cause(case):
        return
    gpu = case.facts.get("gpu", {})
    if gpu.get("error"):
        observed = f"the driver fails: {gpu['error']}"
        fix = "Repair the driver until `nvidia-smi` works: `dmesg | grep -i nvrm` says why it does not."
    elif gpu.get("nvidia_smi"):
        observed = "the driver lists no GPU"
        fix = "See whether the cards are given to this host (`lspci -d 10de:`) and driven (`dmesg | grep -i nvrm`)."
    else:
        cards = gpu.get("on_bus") or []
        observed = "no nvidia-smi, so no NVIDIA driver" + (f", for {len(cards)} cards on the bus" if cards else "")
        fix = f"Install the driver: {from_nvidia(case, 'nvidia-open')}, then `systemctl reboot`."
        if inside(case) == "container":
            fix = "Start the container with its GPUs (`--gpus all`, or nvidia.runtime: true for LXC), so that `nvidia-smi` works."
    yield Hit(
        "the host",
        observed,
        "at least one NVIDIA GPU",
        f"{fix} If it is to serve on its CPU, write in {case.where}: gpu_host_profile: cpu",
    )


@rule(
    "gpu-capability",
    BLOCK,
    "Backends are known for these compute capabilities only.",
    source="https://developer.nvidia.com/cuda-gpus",
)
def gpu_capability(case: Case) -> Iterator[Hit]:
    """Every wanted GPU has a capability that a profile serves."""
    for gpu in wanted_gpus(case):
        if gpu["compute_cap"] not in CAPABILITIES:
            known = ", ".join(sorted(CAPABILITIES, key=version))
            yield Hit(
                f"GPU {gpu['index']} ({gpu['name']})",
                f"compute capability {gpu['compute_cap']}",
                f"one of {known}",
                f"Leave GPU {gpu['index']} out of gpus in {case.where}.",
            )


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
    for at, instance in enumerate(case.instances):
        asked = instance.get("gpus")
        for one in asked if isinstance(asked, list) else []:
            if case.gpu(one) is None and isinstance(one, (int, str)) and not isinstance(one, bool):
                have = ", ".join(f"{gpu['index']} ({gpu['uuid']})" for gpu in case.gpus)
                yield Hit(label(instance, at), f"GPU {one!r}", f"one of {have}", f"Correct gpus of it in {case.where}.")


@rule(
    "gpu-lost",
    BLOCK,
    "One GPU does not answer. Indices count those that do, so they may mean other cards than the inventory does, and CUDA may "
    "not start on any of them.",
    source="https://docs.nvidia.com/deploy/gpu-debug-guidelines/index.html",
)
def gpu_lost(case: Case) -> Iterator[Hit]:
    """Every GPU that the driver knows answers it."""
    told = lost(case)
    if told:
        fix = (
            "`systemctl reboot`; if it stays away, switch the machine off and on and look at the card's seat and power"
        )
        yield Hit("the host's GPUs", f"{len(case.gpus)} answer, but {told}", "all of them", f"{on_metal(case, fix)}.")


@rule(
    "gpu-busy",
    BLOCK,
    "The engine sizes its KV cache by the memory it finds; beside another process it fails or starves it.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def gpu_busy(case: Case) -> Iterator[Hit]:
    """No process outside of our units is on a wanted GPU."""
    for gpu, process in _strangers(case):
        if process.get("orphan"):
            continue
        pid, unit = process.get("pid"), process.get("unit")
        who = f"process {pid} ({process.get('name')})" if pid else "a process of another container"
        told = f"{who}{f' of {unit}' if unit else ''}{_owner(process)} holds {process['memory_mib']} MiB"
        end = "Find it on the machine that runs this container (`nvidia-smi`) and end it"
        if pid:
            end = f"End it on the host (`{f'systemctl stop {unit}' if unit else f'kill {pid}'}`)"
        yield Hit(
            f"GPU {gpu['index']} ({gpu['uuid']})",
            told,
            "no other process on it",
            f"{end}, or leave GPU {gpu['index']} out of gpus in {case.where}.",
        )


@rule(
    "gpu-orphan",
    BLOCK,
    "An engine's workers can outlive the process that started them and keep the GPU's memory until they are killed.",
    source="https://github.com/sgl-project/sglang/issues/23627",
)
def gpu_orphan(case: Case) -> Iterator[Hit]:
    """No process whose parent is gone is on a wanted GPU."""
    for gpu, process in _strangers(case):
        if process.get("orphan"):
            pid = process["pid"]
            held = f"holds {process['memory_mib']} MiB, and what started it is gone"
            yield Hit(
                f"GPU {gpu['index']} ({gpu['uuid']})",
                f"process {pid} ({process['name']}){_owner(process)} {held}",
                "no process that was left behind",
                f"See what it was (`ps -o user,lstart,args -p {pid}`), then `kill {pid}`; if it is still there after some "
                f"seconds, `kill -KILL {pid}`.",
            )


def _strangers(case: Case) -> Iterator[tuple[Map, Map]]:
    """(GPU, process) of wanted GPUs and what is on them without being ours."""
    wanted = {gpu["uuid"]: gpu for gpu in wanted_gpus(case)}
    for process in case.facts.get("gpu", {}).get("processes", []):
        gpu = wanted.get(process["gpu_uuid"])
        if gpu and not ours(process):
            yield gpu, process


def _owner(process: Map) -> str:
    return f" of user {process['user']}" if process.get("user") else ""


@rule(
    "gpu-memory-held",
    WARN,
    "Memory that no visible process holds belongs to another container, or to a process that died badly.",
    source="https://github.com/sgl-project/sglang/issues/23627",
)
def gpu_memory_held(case: Case) -> Iterator[Hit]:
    """A wanted GPU without a process has its memory free."""
    holders = {process["gpu_uuid"] for process in case.facts.get("gpu", {}).get("processes", [])}
    for gpu in wanted_gpus(case):
        used = gpu.get("memory_used_mib") or 0
        if gpu["uuid"] not in holders and used > 1024:
            look = "`nvidia-smi` and `fuser -v /dev/nvidia*` name it"
            where = "On the machine that runs this container" if inside(case) == "container" else "On the host"
            yield Hit(
                f"GPU {gpu['index']} ({gpu['uuid']})",
                f"{used} MiB used and no process seen",
                "less than 1024 MiB used",
                f"{where}, look for the holder ({look}) and end it; if there is none: "
                f"`nvidia-smi -i {gpu['uuid']} --gpu-reset`.",
            )


@rule(
    "gpu-mig",
    BLOCK,
    "A GPU in MIG mode is used in slices; an instance is bound to whole GPUs and would get one slice, or nothing.",
    source="https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
)
def gpu_mig(case: Case) -> Iterator[Hit]:
    """MIG is off on wanted GPUs."""
    for gpu in wanted_gpus(case):
        if gpu.get("mig"):
            fix = f"`nvidia-smi -i {gpu['uuid']} -mig 0`, with nothing running on it; it may want `systemctl reboot` afterwards"
            yield Hit(
                called(gpu),
                "MIG mode is on",
                "MIG mode off",
                f"{on_kernel(case, fix)}; or leave it out of gpus in {case.where}.",
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
    for gpu in wanted_gpus(case):
        if gpu.get("compute_mode") == mode:
            fix = on_kernel(case, f"`nvidia-smi -i {gpu['uuid']} -c DEFAULT`")
            yield Hit(called(gpu), f"compute mode {mode}", "compute mode default", f"{fix}.")
