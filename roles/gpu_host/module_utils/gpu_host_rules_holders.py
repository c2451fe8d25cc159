# SPDX-License-Identifier: Apache-2.0
"""Rules about who is on wanted GPUs, or holds their memory."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_owners import owner
from ansible.module_utils.gpu_host_rules import BLOCK, WARN, Case, Hit, Map, inside, on_kernel, ours, rule, wanted_gpus

HELD_MIB = 1024  # more than a driver, a console or a login screen takes


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
        who, of = "a process of another container", ""
        end = "Find it on the machine that runs this container (`nvidia-smi`) and end it"
        if process.get("pid"):
            found = owner(process)
            who, of = f"process {process['pid']}{_name(process)}", f" of {found.name}" if found.name else ""
            end = f"End it on the host ({found.end})"
        told = f"{who}{of}{_user(process)} {_holds(process)}"
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
            held = f"{_holds(process)}, and what started it is gone"
            yield Hit(
                f"GPU {gpu['index']} ({gpu['uuid']})",
                f"process {pid}{_name(process)}{_user(process)} {held}",
                "no process that was left behind",
                f"See what it was (`ps -o user,lstart,args -p {pid}`), then `kill {pid}`; if it is still there after some "
                f"seconds, `kill -KILL {pid}`.",
            )


def _drawn(case: Case) -> Iterator[Map]:
    """Wanted GPUs of which a desktop or another program that draws holds much, while nothing computes there."""
    drawers = {process["gpu_uuid"] for process in case.facts.get("gpu", {}).get("graphics") or []}
    computing = {process["gpu_uuid"] for process in case.facts.get("gpu", {}).get("processes") or []}
    for gpu in wanted_gpus(case):
        if gpu["uuid"] in drawers - computing and (gpu.get("memory_used_mib") or 0) > HELD_MIB:
            yield gpu


@rule(
    "gpu-desktop",
    WARN,
    "What a desktop holds of the GPU's memory is missing for KV, and it grows and shrinks while the engine runs.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def gpu_desktop(case: Case) -> Iterator[Hit]:
    """No desktop holds much of a wanted GPU's memory."""
    for gpu in _drawn(case):
        found = [one for one in case.facts["gpu"]["graphics"] if one["gpu_uuid"] == gpu["uuid"]]
        named = ", ".join(dict.fromkeys(f"{one['name'] or 'a hidden process'} ({one['pid'] or '-'})" for one in found))
        fix = "`systemctl isolate multi-user.target && systemctl set-default multi-user.target`, which ends the desktop"
        yield Hit(
            f"GPU {gpu['index']} ({gpu['uuid']})",
            f"{gpu['memory_used_mib']} MiB used, and what draws on it is {named}",
            f"at most {HELD_MIB} MiB",
            f"If nobody needs the desktop: {on_kernel(case, fix)}; or leave GPU {gpu['index']} out of gpus in {case.where}.",
        )


def _strangers(case: Case) -> Iterator[tuple[Map, Map]]:
    """(GPU, process) of wanted GPUs and what is on them without being ours."""
    wanted = {gpu["uuid"]: gpu for gpu in wanted_gpus(case)}
    for process in case.facts.get("gpu", {}).get("processes", []):
        gpu = wanted.get(process["gpu_uuid"])
        if gpu and not ours(process):
            yield gpu, process


def _name(process: Map) -> str:
    return f" ({process['name']})" if process.get("name") else ""


def _holds(process: Map) -> str:
    return f"holds {process['memory_mib']} MiB" if process.get("memory_mib") is not None else "is on it"


def _user(process: Map) -> str:
    return f" of user {process['user']}" if process.get("user") else ""


@rule(
    "gpu-memory-held",
    WARN,
    "Memory that no visible process holds belongs to another container, or to a process that died badly.",
    source="https://github.com/sgl-project/sglang/issues/23627",
)
def gpu_memory_held(case: Case) -> Iterator[Hit]:
    """A wanted GPU without a process has its memory free."""
    facts = case.facts.get("gpu", {})
    holders = {process["gpu_uuid"] for process in facts.get("processes", [])} | {gpu["uuid"] for gpu in _drawn(case)}
    for gpu in wanted_gpus(case):
        used = gpu.get("memory_used_mib") or 0
        if gpu["uuid"] not in holders and used > HELD_MIB:
            look = "`nvidia-smi`, or by process number `grep -l /dev/nvidia /proc/[0-9]*/maps`"
            where = "On the machine that runs this container" if inside(case) == "container" else "On the host"
            yield Hit(
                f"GPU {gpu['index']} ({gpu['uuid']})",
                f"{used} MiB used and no process seen",
                f"at most {HELD_MIB} MiB used",
                f"{where}, look for the holder ({look}) and end it; if there is none: "
                f"`nvidia-smi -i {gpu['uuid']} --gpu-reset`.",
            )
