# SPDX-License-Identifier: Apache-2.0
"""A host on which every preflight rule holds, and ways to break it: what the tests of the rules share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ansible.module_utils import kernel_backends_matrix as matrices
from ansible.module_utils.gpu_host_judge import judge

from fleet import backends, declared, envs

GIB = 1 << 30
MATRIX = backends.read()
TARGET = {
    "exists": True,
    "error": None,
    "missing": [],
    "weights": 2 * GIB,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hybrid": False,
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_layers": 4,
    "block_size": None,
    "num_target_layers": None,
    "target_layer_ids": None,
    "mask_token_id": None,
    "instead": None,
    "broken": [],
    "partial": [],
    "git": False,
    "tokenizer": {"found": True, "broken": []},
    "barred": [],
    "leads": ["/srv/target"],
}
DRAFTER = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "num_layers": 2,
    "block_size": 16,
    "num_target_layers": 4,
    "target_layer_ids": [0, 1, 3],
    "mask_token_id": 3,
    "tokenizer": {"found": False, "broken": []},
    "leads": ["/srv/drafter"],
}


def gpu(index: int, **other: Any) -> dict[str, Any]:
    """Built in the shape of the recording in data/gpu_host: the values of an RTX PRO 6000 Blackwell, not recorded."""
    return {
        "index": index,
        "pci": f"00000000:{index + 1:02x}:00.0",
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "compute_cap": "12.0",
        "memory_total_mib": 97887,
        "memory_used_mib": 0,
        "ecc": {"mode": True, "uncorrected": 0, "corrected": 2},
        "remapped": {"pending": False, "failed": False},
        "throttle": ["sw_power_cap"],
        "pcie": {
            "gen": 1,
            "width": 16,
            "gen_max": 5,
            "width_max": 16,
            "gen_device_max": 5,
            "width_device_max": 16,
        },
        "numa_node": index // 4,
        "cpus": "0-31" if index < 4 else "32-63",
        "mig": False,
        "persistence": True,
        "bar1_total_mib": 131072,
        "compute_mode": "default",
        "idle": True,
        "recovery": "none",
        "fabric": None,
        **other,
    }


def card(index: int, **other: Any) -> dict[str, Any]:
    """The same GPU as the PCI bus has it."""
    return {"pci": gpu(index)["pci"], "device": "0x2bb5", "driver": "nvidia", **other}


def p2p(a: int, b: int, **other: Any) -> dict[str, Any]:
    """Two GPUs that reach each other over PCIe, as NVML tells of two cards below one or two sockets."""
    link = "node" if a // 4 == b // 4 else "sys"
    return {
        "a": a,
        "b": b,
        "link": link,
        "read": "ok",
        "write": "ok",
        "nvlink": "not supported",
        "atomics": "ok",
    } | other


def good() -> tuple[dict[str, Any], dict[str, Any]]:
    """(wanted, facts) of a host with eight GPUs on which every rule holds."""
    wanted = {
        "engine": "sglang-0.5.11",
        "engines": ["sglang-0.5.11"],
        "profile": "auto",
        "defaults": {"mode": "ddtree", "model_path": "/srv/target", "draft_model_path": "/srv/drafter"},
        "instances": [{"name": f"gpu{n}", "gpus": [n], "port": 30000 + n} for n in range(8)],
        "pythons": ["3.12", "3.11"],
        "min_driver": "580",
        "min_systemd": 249,
        "min_disk_gib": 12,
        "min_shm_gib": 1,
        "allow_any_address": False,
        "waivers": {},
        "root": "/opt/sglang-fleet",
        "reach": "root@192.0.2.200",
    }
    facts = {
        "gpu": {
            "nvidia_smi": "/usr/bin/nvidia-smi",
            "error": None,
            "nvml": {"version": "580.95.05", "error": None},
            "on_bus": [gpu(n)["pci"] for n in range(8)],
            "cards": [card(n) for n in range(8)],
            "p2p": [p2p(a, b) for a in range(8) for b in range(a + 1, 8)],
            "xids": [],
            "driver": "580.95.05",
            "cuda_driver": "13.0",
            "gpus": [gpu(n) for n in range(8)],
            "processes": [],
            "graphics": [],
        },
        "nvcc": {
            "path": "/usr/local/cuda/bin/nvcc",
            "version": "13.0",
            "candidates": [{"path": "/usr/local/cuda/bin/nvcc", "version": "13.0"}],
            "cuda_home": None,
        },
        "kernel": {
            "release": "6.8",
            "cmdline": "iommu=pt",
            "boot": "2026-11-30T08:00:00Z",
            "iommu": {"mode": "passthrough", "groups": 90, "source": "type of the GPUs' IOMMU groups"},
            "acs": [],
            "hugepages": {"total": 0, "free": 0, "size": 2 << 20, "thp": "madvise"},
            "virt": "metal",
            "virt_name": "none",
            "cgroup": 2,
            "nouveau": False,
            "modules": {"nvidia": "580.95.05"},
        },
        "numa": [{"node": n, "cpus": "", "memory_total": 256 * GIB, "memory_free": 200 * GIB} for n in range(2)],
        "limits": {
            "pid1_nofile": 524288,
            "pid1_memlock": 8 << 20,
            "fs_nr_open": 1073741816,
            "fs_file_max": 9223372036854775807,
            "pids_max": 4194304,
            "map_count": 65530,
            "swap_total": 0,
            "memory_total": 512 * GIB,
            "memory_available": 500 * GIB,
            "overcommit": 0,
        },
        "clock": {"synchronized": True, "source": "chrony", "year": 2026, "before_build": False},
        "libraries": {
            "libcuda.so.1": "/lib/libcuda.so.1",
            "libgcc_s.so.1": "/lib/libgcc_s.so.1",
            "libnuma.so.1": "/lib/libnuma.so.1",
            "libstdc++.so.6": "/lib/libstdc++.so.6",
            "libstdcxx_glibcxx": "3.4.33",
        },
        "secure_boot": False,
        "mounts": {"/opt/sglang-fleet": {"type": "ext4", "options": ["relatime", "rw"]}},
        "compilers": {
            name: {"path": f"/usr/bin/{name}", "error": None, "installed": True} for name in ("gcc", "g++", "c++")
        },
        "pythons": [
            {
                "version": "3.12",
                "full": "3.12.3",
                "path": "/usr/bin/python3.12",
                "venv": True,
                "headers": True,
                "system": True,
            }
        ],
        "platform": {"arch": "x86_64", "glibc": "2.39", "kernel": "6.8", "os": "ubuntu 24.04", "apt": True},
        "systemd": {
            "version": 255,
            "running": True,
            "pid1": "systemd",
            "journal": {"masked": [], "active": True, "kept": True},
        },
        "disk": {"path": "/opt", "free": 200 * GIB, "total": 900 * GIB},
        "current": None,
        "shm": {"free": 60 * GIB, "total": 60 * GIB},
        "ports": [{"address": "0.0.0.0", "port": 22, "pid": 1, "process": "sshd", "unit": "ssh.service"}],
        "bind": {"127.0.0.1": None},
        "user": {"name": "sglang", "uid": None, "gid": None, "groups": []},
        "models": {"/srv/target": dict(TARGET), "/srv/drafter": dict(DRAFTER)},
    }
    return wanted, facts


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def inventory(**keys: Any) -> Change:
    """Set keys of the inventory."""
    return lambda wanted, _: wanted.update(copy.deepcopy(keys))


def first(**keys: Any) -> Change:
    """Set keys of the first instance."""
    return lambda wanted, _: wanted["instances"][0].update(keys)


def host(**keys: Any) -> Change:
    """Set facts."""
    return lambda _, facts: facts.update(keys)


def on_gpu(**keys: Any) -> Change:
    """Set GPU facts."""
    return lambda _, facts: facts["gpu"].update(keys)


def target(**keys: Any) -> Change:
    """Set facts of the target model."""
    return lambda _, facts: facts["models"]["/srv/target"].update(keys)


def drafter(**keys: Any) -> Change:
    """Set facts of the drafter."""
    return lambda _, facts: facts["models"]["/srv/drafter"].update(keys)


def both(*changes: Change) -> Change:
    """Several changes."""

    def change(wanted: dict[str, Any], facts: dict[str, Any]) -> None:
        for one in changes:
            one(wanted, facts)

    return change


def on_first(**keys: Any) -> Change:
    """Set facts of the first GPU."""
    return lambda _, facts: facts["gpu"]["gpus"][0].update(keys)


def kernel(**keys: Any) -> Change:
    """Set facts of the kernel."""
    return lambda _, facts: facts["kernel"].update(keys)


def systemd(**keys: Any) -> Change:
    """Set facts of systemd."""
    return lambda _, facts: facts["systemd"].update(keys)


def lose(*indices: int, **keys: Any) -> Change:
    """GPUs that the driver does not list any more; keys: what of their cards changed."""

    def change(_: dict[str, Any], facts: dict[str, Any]) -> None:
        facts["gpu"]["gpus"] = [one for one in facts["gpu"]["gpus"] if one["index"] not in indices]
        for at, one in enumerate(facts["gpu"]["gpus"]):
            one["index"] = at
        facts["gpu"]["p2p"] = []
        for index in indices:
            facts["gpu"]["cards"][index].update(keys)

    return change


def limits(**keys: Any) -> Change:
    """Set limits."""
    return lambda _, facts: facts["limits"].update(keys)


def clock(**keys: Any) -> Change:
    """Set facts of the clock."""
    return lambda _, facts: facts["clock"].update(keys)


def libraries(**keys: Any) -> Change:
    """Set system libraries, `_` for the dots and dashes of their names."""
    names = {"libcuda": "libcuda.so.1", "libnuma": "libnuma.so.1", "libstdcxx": "libstdc++.so.6"}
    return lambda _, facts: facts["libraries"].update({names[key]: value for key, value in keys.items()})


def root(**keys: Any) -> Change:
    """Set how the folder of releases is mounted."""
    return lambda _, facts: facts["mounts"]["/opt/sglang-fleet"].update(keys)


def pair(*gpus: int, **keys: Any) -> Change:
    """One instance on several GPUs, and nothing else."""
    one = {"name": "pair", "gpus": list(gpus) or [0, 1], "port": 30000, "args": {"tp-size": len(gpus) or 2}, **keys}
    return inventory(instances=[one])


def links(**keys: Any) -> Change:
    """Set how every two GPUs reach each other."""
    return lambda _, facts: [one.update(keys) for one in facts["gpu"]["p2p"]] and None


UUID0 = gpu(0)["uuid"]
LISTENER = {"address": "127.0.0.1", "port": 30000, "pid": 77, "process": "python", "unit": "other.service"}
BUSY = {"gpu_uuid": UUID0, "pid": 78, "name": "train", "memory_mib": 4000, "unit": None}
CPU = both(
    inventory(profile="cpu", instances=[{"name": "cpu0", "gpus": [], "port": 30000}]),
    on_gpu(nvidia_smi=None, gpus=[], driver=None, cuda_driver=None),
)
PYTHON = good()[1]["pythons"][0]
NO_APT = host(platform={**good()[1]["platform"], "apt": False})
NO_HEADERS = host(pythons=[{**PYTHON, "headers": False}])


def compilers(apt: bool = True, **broken: Any) -> Change:
    """What is wrong with gcc or g++, which c++ is a link to; `apt` off for a host of another distribution."""
    found = copy.deepcopy(good()[1]["compilers"])
    for name, keys in broken.items():
        for one in ("gcc",) if name == "gcc" else ("g++", "c++"):
            found[one].update(keys)
    return host(compilers=found) if apt else both(host(compilers=found), NO_APT)


GDN = target(hybrid=True, model_type="qwen3_next")
HYBRID = target(hybrid=True, model_type="nemotron_h")
NO_RADIX = {"disable-radix-cache": True}
UNSAFE = {"speculative-ddtree-allow-hybrid-unsafe": True}


def findings(change: Change) -> list[dict[str, Any]]:
    wanted, facts = copy.deepcopy(good())
    change(wanted, facts)
    instances = wanted["instances"] if isinstance(wanted["instances"], list) else []
    wanted["flags"] = declared.flags(wanted["engine"], wanted["instances"], wanted["defaults"])
    wanted["envs"] = envs.unknown(wanted["engine"], wanted["instances"], wanted["defaults"])
    wanted["matrix"] = dict(matrices.narrowed(MATRIX, str(wanted["engine"]), [*instances, wanted["defaults"]]))
    return judge("ct200", wanted, facts)["findings"]
