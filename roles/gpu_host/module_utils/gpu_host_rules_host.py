# SPDX-License-Identifier: Apache-2.0
"""Rules that look at the host: GPUs, driver, toolchain, room, ports and models against what the inventory wants."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    CAPABILITIES,
    INFO,
    PROFILES,
    TREE_MODES,
    UNIT_PREFIX,
    WARN,
    Case,
    Hit,
    Map,
    args_of,
    label,
    rule,
)

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - named, not written to
HYBRID_FLAG = "speculative-ddtree-allow-hybrid-unsafe"
# Gated delta nets: hybrid targets whose states the engine forks at every node of a tree.
FORKING_MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = ("x86_64", "aarch64")
MIN_GLIBC = "2.34"  # the newest that a wheel of the lock asks for: engines/*/files.json
MIN_CUDA_DRIVER = "13.0"  # torch of the lock is built for CUDA 13.0
MIN_NVCC = {"sm120": "12.9", "sm100": "12.9", "sm90": "12.4"}


def version(text: Any) -> tuple[int, ...]:
    """`580.95.05` as (580, 95, 5); words count as nothing."""
    return tuple(int(part) for part in re.findall(r"\d+", str(text)))


def _on_gpus(case: Case) -> bool:
    """Whether GPU rules apply: not on the cpu profile, and only where GPUs were found."""
    return case.wanted.get("profile") != "cpu" and bool(case.gpus)


def _ours(process: Map) -> bool:
    return str(process.get("unit") or "").startswith(UNIT_PREFIX)


# --- GPUs and driver ----------------------------------------------------------------------------


@rule(
    "gpu-none",
    BLOCK,
    "The CPU profile is slow and for trials, so it has to be asked for and is never a fall-back.",
    needs_host=True,
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


@rule("gpu-capability", BLOCK, "Backends are known for these compute capabilities only.", needs_host=True)
def gpu_capability(case: Case) -> Iterator[Hit]:
    """Every wanted GPU has a capability that a profile serves."""
    for gpu in _wanted_gpus(case):
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
    needs_host=True,
)
def gpu_mixed(case: Case) -> Iterator[Hit]:
    """All GPUs that instances use belong to one profile."""
    kinds: dict[str, list[str]] = {}
    for gpu in _wanted_gpus(case):
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
    needs_host=True,
)
def profile_mismatch(case: Case) -> Iterator[Hit]:
    """A profile given by name is the one that the GPUs have."""
    asked = case.wanted.get("profile")
    if asked in PROFILES and asked != "cpu":
        found = {CAPABILITIES[gpu["compute_cap"]] for gpu in _wanted_gpus(case) if gpu["compute_cap"] in CAPABILITIES}
        if found and found != {asked}:
            yield Hit(
                "gpu_host_profile",
                asked,
                " or ".join(sorted(found)) + ", as the GPUs say",
                f"Set gpu_host_profile: auto in {case.where}.",
            )


@rule("gpu-unknown", BLOCK, "An instance is bound to exactly the GPUs that the inventory names.", needs_host=True)
def gpu_unknown(case: Case) -> Iterator[Hit]:
    """Every index and UUID exists on the host."""
    if not _on_gpus(case):
        return
    for at, instance in enumerate(case.instances):
        asked = instance.get("gpus")
        for one in asked if isinstance(asked, list) else []:
            if case.gpu(one) is None and isinstance(one, (int, str)) and not isinstance(one, bool):
                have = ", ".join(f"{gpu['index']} ({gpu['uuid']})" for gpu in case.gpus)
                yield Hit(label(instance, at), f"GPU {one!r}", f"one of {have}", f"Correct gpus of it in {case.where}.")


@rule(
    "driver-old", BLOCK, "The engine's torch is built for CUDA 13.0, which needs driver 580 or newer.", needs_host=True
)
def driver_old(case: Case) -> Iterator[Hit]:
    """The driver is new enough for the lock's CUDA."""
    if not _on_gpus(case):
        return
    gpu, least = case.facts["gpu"], str(case.wanted.get("min_driver"))
    fix = f"Install NVIDIA driver {least} or newer and reboot; in a container it has to equal the outer host's."
    if version(gpu.get("driver")) < version(least):
        yield Hit("the NVIDIA driver", str(gpu.get("driver")), f"{least} or newer", fix)
    elif gpu.get("cuda_driver") and version(gpu["cuda_driver"]) < version(MIN_CUDA_DRIVER):
        yield Hit("the driver's CUDA", gpu["cuda_driver"], f"{MIN_CUDA_DRIVER} or newer", fix)


@rule(
    "gpu-busy",
    BLOCK,
    "The engine sizes its KV cache by the memory it finds; beside another process it fails or starves it.",
    needs_host=True,
)
def gpu_busy(case: Case) -> Iterator[Hit]:
    """No process outside of our units is on a wanted GPU."""
    wanted = {gpu["uuid"]: gpu for gpu in _wanted_gpus(case)}
    for process in case.facts.get("gpu", {}).get("processes", []):
        gpu = wanted.get(process["gpu_uuid"])
        if gpu and not _ours(process):
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
    needs_host=True,
)
def gpu_memory_held(case: Case) -> Iterator[Hit]:
    """A wanted GPU without a process has its memory free."""
    holders = {process["gpu_uuid"] for process in case.facts.get("gpu", {}).get("processes", [])}
    for gpu in _wanted_gpus(case):
        used = gpu.get("memory_used_mib") or 0
        if gpu["uuid"] not in holders and used > 1024:
            yield Hit(
                f"GPU {gpu['index']} ({gpu['uuid']})",
                f"{used} MiB used and no process seen",
                "less than 1024 MiB used",
                "Look for the holder on the outer host (`nvidia-smi`, `fuser -v /dev/nvidia*`).",
            )


@rule(
    "nvcc-missing",
    BLOCK,
    "Kernels that no wheel carries are compiled at the first start, and deep_gemm refuses to be imported without a CUDA folder.",
    needs_host=True,
)
def nvcc_missing(case: Case) -> Iterator[Hit]:
    """A GPU host has nvcc."""
    if _on_gpus(case) and not case.facts.get("nvcc"):
        yield Hit(
            "nvcc",
            "not found on PATH or in /usr/local/cuda/bin",
            "nvcc of CUDA 13.0",
            "Install the CUDA 13.0 compiler (package cuda-nvcc-13-0 of NVIDIA's repository).",
        )


@rule(
    "nvcc-old",
    BLOCK,
    "This nvcc cannot build for the GPU, so just-in-time compilation fails, or falls back without a word.",
    needs_host=True,
)
def nvcc_old(case: Case) -> Iterator[Hit]:
    """The nvcc that is found can build for the profile."""
    nvcc = case.facts.get("nvcc")
    least = MIN_NVCC.get(case.profile or "")
    if _on_gpus(case) and nvcc and least and version(nvcc.get("version")) < version(least):
        yield Hit(
            "nvcc",
            f"{nvcc.get('version')} at {nvcc['path']}",
            f"{least} or newer for {case.profile}",
            "Install the CUDA 13.0 compiler (package cuda-nvcc-13-0) and remove the old one from PATH.",
        )


def _wanted_gpus(case: Case) -> list[Map]:
    """The GPUs that instances name, each once; none on the cpu profile."""
    if not _on_gpus(case):
        return []
    found: dict[str, Map] = {}
    for instance in case.instances:
        asked = instance.get("gpus")
        for one in asked if isinstance(asked, list) else []:
            gpu = case.gpu(one)
            if gpu:
                found[gpu["uuid"]] = gpu
    return sorted(found.values(), key=lambda gpu: int(gpu["index"]))


# --- the system ---------------------------------------------------------------------------------


@rule("arch-unsupported", BLOCK, "The lock holds files for these architectures only.", needs_host=True)
def arch_unsupported(case: Case) -> Iterator[Hit]:
    """x86_64 or aarch64."""
    arch = case.facts["platform"]["arch"]
    if arch not in ARCHITECTURES:
        yield Hit("the host", arch, " or ".join(ARCHITECTURES), "Use a host of a supported architecture.")


@rule(
    "glibc-old",
    BLOCK,
    f"The wheels are built against glibc {MIN_GLIBC}; an older one, or another C library, cannot load them.",
    needs_host=True,
)
def glibc_old(case: Case) -> Iterator[Hit]:
    """New enough for every wheel of the lock."""
    glibc = case.facts["platform"]["glibc"]
    if version(glibc) < version(MIN_GLIBC):
        yield Hit(
            "the C library",
            f"glibc {glibc}" if glibc else "not glibc",
            f"glibc {MIN_GLIBC} or newer",
            "Use Debian 12, Ubuntu 22.04 or newer.",
        )


@rule(
    "systemd",
    BLOCK,
    "Instances are systemd units, and their start is judged by features of this version.",
    needs_host=True,
)
def systemd(case: Case) -> Iterator[Hit]:
    """systemd runs the host and is new enough."""
    found, least = case.facts["systemd"], int(case.wanted.get("min_systemd") or 0)
    if not found["running"]:
        yield Hit(
            "systemd",
            "does not run this host",
            f"systemd {least} or newer as process 1",
            "Use a host, VM or system container that boots systemd.",
        )
    elif (found["version"] or 0) < least:
        yield Hit(
            "systemd",
            f"version {found['version']}",
            f"{least} or newer",
            "Upgrade the distribution: Debian 12, Ubuntu 24.04 or newer.",
        )


@rule(
    "python-missing",
    BLOCK,
    "The lock is made for these Python versions, and none is ever fetched behind your back.",
    needs_host=True,
)
def python_missing(case: Case) -> Iterator[Hit]:
    """One wanted interpreter with the venv module."""
    wanted = case.wanted.get("pythons") or []
    if not any(python["venv"] for python in case.facts["pythons"]):
        observed = "without the venv module" if case.facts["pythons"] else "not found"
        yield Hit(
            "Python",
            observed,
            " or ".join(wanted) + " with its venv module",
            f"apt-get install python{wanted[0]} python{wanted[0]}-venv, or the like for {' or '.join(wanted[1:]) or 'it'}.",
        )


@rule(
    "compiler-missing",
    BLOCK,
    "Triton compiles its launcher with the host's C compiler at the first start.",
    needs_host=True,
)
def compiler_missing(case: Case) -> Iterator[Hit]:
    """A C compiler on a GPU host; where apt is, the build installs one."""
    if _on_gpus(case) and not case.facts.get("compiler") and not case.facts["platform"]["apt"]:
        yield Hit("the C compiler", "no cc, gcc or clang", "a C compiler", "Install gcc and the C library's headers.")


@rule(
    "python-headers-missing",
    BLOCK,
    "Triton's launcher includes Python.h when it is compiled at the first start.",
    needs_host=True,
)
def python_headers_missing(case: Case) -> Iterator[Hit]:
    """Python.h of the chosen interpreter on a GPU host; the build installs python3-dev, which serves the system's own only."""
    python = next((one for one in case.facts["pythons"] if one["venv"]), None)
    installed = case.facts["platform"]["apt"] and bool(python and python["system"])
    if _on_gpus(case) and python and not python["headers"] and not installed:
        yield Hit(
            "Python.h",
            f"not installed for {python['path']}",
            f"the headers of Python {python['version']}",
            f"Install python{python['version']}-dev, or the like for this interpreter.",
        )


@rule("disk-low", BLOCK, "A release holds about 9 GB, and a new one is built beside the live one.", needs_host=True)
def disk_low(case: Case) -> Iterator[Hit]:
    """Room for the first release."""
    if not case.facts.get("current"):
        yield from _disk(case)


@rule(
    "disk-low-for-upgrade",
    WARN,
    "A release holds about 9 GB; a change of engine, series or profile builds a new one beside the live one.",
    needs_host=True,
)
def disk_low_for_upgrade(case: Case) -> Iterator[Hit]:
    """Room for the next release on a host that already serves one."""
    if case.facts.get("current"):
        yield from _disk(case)


def _disk(case: Case) -> Iterator[Hit]:
    disk, least = case.facts["disk"], float(case.wanted.get("min_disk_gib") or 0)
    if disk["free"] < least * GIB:
        yield Hit(
            f"the file system of {disk['path']}",
            f"{disk['free'] / GIB:.1f} GiB free",
            f"{least:g} GiB free",
            "Free or add room there (`du -xh --max-depth=2 / | sort -h | tail`).",
        )


@rule(
    "shm-low",
    WARN,
    "Engine processes hand tensors to each other through /dev/shm; when it is full they crash with a bus error.",
    needs_host=True,
)
def shm_low(case: Case) -> Iterator[Hit]:
    """Room in /dev/shm."""
    shm, least = case.facts.get("shm"), float(case.wanted.get("min_shm_gib") or 0)
    if shm is None:
        yield Hit(SHM, "missing", "a tmpfs", "mount -t tmpfs tmpfs /dev/shm")
    elif shm["total"] < least * GIB:
        yield Hit(
            SHM,
            f"{shm['total'] / GIB:.2f} GiB in all",
            f"{least:g} GiB",
            f"mount -o remount,size={least:g}G /dev/shm, and the same in /etc/fstab.",
        )


@rule("port-busy", BLOCK, "The engine could not bind the port and would die at its start.", needs_host=True)
def port_busy(case: Case) -> Iterator[Hit]:
    """No process outside of our units listens on an instance's port."""
    for at, instance in enumerate(case.instances):
        for listener in case.facts["ports"]:
            if (
                listener["port"] == instance.get("port")
                and not _ours(listener)
                and _meets(listener["address"], instance.get("address"))
            ):
                who = (
                    f"process {listener['pid']} ({listener['process']})"
                    if listener["pid"]
                    else "a process that is not visible"
                )
                unit = f" of {listener['unit']}" if listener.get("unit") else ""
                yield Hit(
                    label(instance, at),
                    f"port {listener['port']} is held by {who}{unit} on {listener['address']}",
                    "a free port",
                    f"End that process or set another port for it in {case.where}.",
                )
                break


def _meets(listening: str, asked: Any) -> bool:
    """Whether two binds of one port collide: the same address, or either of them is every address."""
    every = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    names = {"localhost": "127.0.0.1"}
    return listening == names.get(str(asked), asked) or listening in every or asked in every


@rule("address-foreign", BLOCK, "A server can bind only addresses that the host has.", needs_host=True)
def address_foreign(case: Case) -> Iterator[Hit]:
    """Every address of an instance can be bound."""
    for at, instance in enumerate(case.instances):
        reason = case.facts["bind"].get(str(instance.get("address")))
        if reason:
            yield Hit(
                label(instance, at),
                f"address {instance['address']}: {reason}",
                "an address of this host",
                f"Set address for it in {case.where}; `ip -brief address` on the host lists them.",
            )


# --- models -------------------------------------------------------------------------------------


@rule("model-missing", BLOCK, "The engine would fail at its start; nothing is fetched by it.", needs_host=True)
def model_missing(case: Case) -> Iterator[Hit]:
    """The target's folder is whole."""
    for at, instance in enumerate(case.instances):
        yield from _folder(case, at, instance, "model_path")


@rule("drafter-missing", BLOCK, "Every mode but baseline drafts with this model.", needs_host=True)
def drafter_missing(case: Case) -> Iterator[Hit]:
    """The drafter's folder is whole, in every mode that drafts."""
    for at, instance in enumerate(case.instances):
        if instance.get("mode") != "baseline":
            yield from _folder(case, at, instance, "draft_model_path")


def _folder(case: Case, at: int, instance: Map, key: str) -> Iterator[Hit]:
    path = instance.get(key)
    model = case.model(path)
    if model is None:
        return
    fix = f"Copy the model to {path} on the host, or correct {key} in {case.where}."
    if not model["exists"]:
        yield Hit(label(instance, at), f"{key} {path}: no such folder", "a folder with config.json and weights", fix)
    elif model["error"]:
        yield Hit(label(instance, at), f"{key} {path}: {model['error']}", "a config.json that can be read", fix)
    elif model["missing"]:
        yield Hit(
            label(instance, at),
            f"{key} {path}: no {', '.join(model['missing'][:3])}",
            "a folder with config.json and weights",
            fix,
        )


@rule(
    "drafter-kind",
    BLOCK,
    "DFLASH and DDTREE draft with a block drafter; another model cannot answer them.",
    needs_host=True,
)
def drafter_kind(case: Case) -> Iterator[Hit]:
    """The drafter is a DFlashDraftModel."""
    for at, instance, draft, _ in _pairs(case):
        if "DFlashDraftModel" not in draft["architectures"]:
            found = ", ".join(draft["architectures"]) or "no architecture"
            yield Hit(
                label(instance, at),
                f"draft_model_path {instance['draft_model_path']} is {found}",
                "DFlashDraftModel",
                f"Set draft_model_path in {case.where} to a DFlash drafter of this target.",
            )


@rule(
    "drafter-foreign",
    BLOCK,
    "A drafter reads the target's hidden states and shares its vocabulary: it fits the target that it was trained for.",
    needs_host=True,
)
def drafter_foreign(case: Case) -> Iterator[Hit]:
    """Vocabulary, width and layers of drafter and target agree, as far as both say them."""
    for at, instance, draft, target in _pairs(case):
        for words, mine, theirs in (
            ("vocabulary", draft["vocab_size"], target["vocab_size"]),
            ("hidden size", draft["hidden_size"], target["hidden_size"]),
            ("target layers", draft["num_target_layers"], target["num_layers"]),
        ):
            if mine is not None and theirs is not None and mine != theirs:
                yield Hit(
                    label(instance, at),
                    f"{words} {mine} in the drafter",
                    f"{theirs}, as the target has",
                    f"Set draft_model_path in {case.where} to the drafter of this target.",
                )


@rule(
    "hybrid-tree",
    BLOCK,
    "A hybrid model keeps a recurrent state per sequence. The engine can fork that of gated delta nets at every node of a "
    "tree; with other kinds branches would leak into each other and change the output.",
    needs_host=True,
)
def hybrid_tree(case: Case) -> Iterator[Hit]:
    """No hybrid target in a tree mode whose states cannot fork, without the unsafe flag."""
    for at, instance, target in _hybrids(case, ("ddtree",)):
        if target["model_type"] not in FORKING_MODEL_TYPES and not args_of(instance).get(HYBRID_FLAG):
            yield Hit(
                label(instance, at),
                f"mode {instance['mode']} with the hybrid target {instance['model_path']} ({target['model_type']})",
                "a dense target, or one with gated delta nets (Qwen3-Next, Qwen3.5), in a tree mode",
                f"Set mode: dflash for it in {case.where}; for research only: args: {{{HYBRID_FLAG}: true}}.",
            )


@rule(
    "hybrid-radix",
    BLOCK,
    "With speculation, the radix cache of a hybrid model needs a buffer for the state at the end of a shared prefix; the engine "
    "does not start without it.",
    needs_host=True,
)
def hybrid_radix(case: Case) -> Iterator[Hit]:
    """A drafting mode on gated delta nets says what becomes of the radix cache."""
    for at, instance, target in _hybrids(case, ("dflash", *TREE_MODES)):
        args = args_of(instance)
        buffered = args.get("mamba-scheduler-strategy") == "extra_buffer"
        if target["model_type"] in FORKING_MODEL_TYPES and not buffered and not args.get("disable-radix-cache"):
            yield Hit(
                label(instance, at),
                f"mode {instance['mode']} with the hybrid target {instance['model_path']} and the radix cache as it is",
                "disable-radix-cache, or mamba-scheduler-strategy extra_buffer (GPU only)",
                f"Add to it in {case.where}: args: {{disable-radix-cache: true}}, "
                "or on a GPU args: {mamba-scheduler-strategy: extra_buffer}.",
            )


@rule(
    "hybrid-unsafe",
    WARN,
    "With the unsafe flag the output may differ from baseline: for research, not for service.",
    needs_host=True,
)
def hybrid_unsafe(case: Case) -> Iterator[Hit]:
    """The unsafe flag is in use."""
    for at, instance, target in _hybrids(case, TREE_MODES):
        if args_of(instance).get(HYBRID_FLAG):
            yield Hit(
                label(instance, at),
                f"{HYBRID_FLAG} on {target['model_type']}",
                "a tree mode without that flag",
                f"Remove the flag in {case.where}, or set mode: dflash, before it serves people.",
            )


def _hybrids(case: Case, modes: Collection[str]) -> Iterator[tuple[int, Map, Map]]:
    for at, instance in enumerate(case.instances):
        target = case.model(instance.get("model_path"))
        if instance.get("mode") in modes and target and target.get("hybrid"):
            yield at, instance, target


def _pairs(case: Case) -> Iterator[tuple[int, Map, Map, Map]]:
    """Instances that draft and whose two configurations could be read: (position, instance, drafter, target)."""
    for at, instance in enumerate(case.instances):
        draft, target = case.model(instance.get("draft_model_path")), case.model(instance.get("model_path"))
        if (
            instance.get("mode") != "baseline"
            and draft
            and target
            and "architectures" in draft
            and "architectures" in target
        ):
            yield at, instance, draft, target


# --- what the person should know ----------------------------------------------------------------


@rule(
    "facts-stand-in",
    WARN,
    "The GPU facts come from a file, so they say nothing about this host: for tests only.",
    needs_host=True,
)
def facts_stand_in(case: Case) -> Iterator[Hit]:
    """Facts of another machine stand in for this one's."""
    recorded = case.facts.get("recorded")
    if recorded:
        yield Hit(
            "the GPU facts",
            f"recorded on {recorded['machine']}, {recorded['date']}",
            "this host's own",
            f"Remove gpu_host_facts_file from {case.where}.",
        )


@rule(
    "cpu-profile",
    INFO,
    "Asked for in the inventory. It runs the real engine for trials and tests, not for service.",
    needs_host=True,
)
def cpu_profile(case: Case) -> Iterator[Hit]:
    """The cpu profile is in use."""
    if case.wanted.get("profile") == "cpu":
        yield Hit(
            "gpu_host_profile",
            "cpu",
            "a GPU profile for service",
            f"Remove gpu_host_profile from {case.where} on a GPU host.",
        )
