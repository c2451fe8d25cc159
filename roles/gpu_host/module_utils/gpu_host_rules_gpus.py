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
    label,
    on_gpus,
    ours,
    rule,
    version,
    wanted_gpus,
)


@rule(
    "gpu-none",
    BLOCK,
    "The CPU profile is slow and for trials, so it has to be asked for and is never a fall-back.",
    source="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
)
def gpu_none(case: Case) -> Iterator[Hit]:
    """A host without GPUs is refused unless the inventory says cpu."""
    if case.wanted.get("profile") == "cpu" or case.gpus:
        return
    gpu = case.facts.get("gpu", {})
    if gpu.get("error"):
        observed, fix = f"nvidia-smi fails: {gpu['error']}", "Repair the driver until `nvidia-smi` works on the host."
    elif gpu.get("nvidia_smi"):
        observed, fix = (
            "nvidia-smi lists no GPU",
            "Check that the GPUs are seated and given to this host (`lspci -d 10de:`).",
        )
    else:
        observed, fix = "no nvidia-smi, so no NVIDIA driver", "Install the NVIDIA driver 580 or newer."
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
    "gpu-busy",
    BLOCK,
    "The engine sizes its KV cache by the memory it finds; beside another process it fails or starves it.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def gpu_busy(case: Case) -> Iterator[Hit]:
    """No process outside of our units is on a wanted GPU."""
    wanted = {gpu["uuid"]: gpu for gpu in wanted_gpus(case)}
    for process in case.facts.get("gpu", {}).get("processes", []):
        gpu = wanted.get(process["gpu_uuid"])
        if gpu and not ours(process):
            unit = f" of {process['unit']}" if process.get("unit") else ""
            observed = f"process {process['pid']} ({process['name']}){unit} holds {process['memory_mib']} MiB"
            fix = f"systemctl stop {process['unit']}" if process.get("unit") else f"kill {process['pid']}"
            yield Hit(
                f"GPU {gpu['index']} ({gpu['uuid']})",
                observed,
                "no other process on it",
                f"End it on the host (`{fix}`) or leave GPU {gpu['index']} out of gpus in {case.where}.",
            )


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
            yield Hit(
                f"GPU {gpu['index']} ({gpu['uuid']})",
                f"{used} MiB used and no process seen",
                "less than 1024 MiB used",
                "Look for the holder on the outer host (`nvidia-smi`, `fuser -v /dev/nvidia*`).",
            )
