# SPDX-License-Identifier: Apache-2.0
"""Facts of one host, read only: GPUs, driver, kernel, toolchain, room, ports, models.

Standard library only, and pynvml for the GPUs. It also runs alone on a machine without Ansible; this is how a real machine
is recorded for tests (pynvml.py is one file of the package nvidia-ml-py):

    PYTHONPATH=FOLDER_OF_PYNVML python3 gpu_host_gather.py --record "8x H200, Ubuntu 24.04" > facts.json

Shapes are those of the functions in gpu_host_gather_*.py; sizes are bytes unless the name ends in _mib, versions are strings.
A fact that cannot be read is None or an empty list, never a guess; the judge decides what that means.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    # Alone, without Ansible: the files beside this one under the name that Ansible gives them.
    beside = types.ModuleType("ansible.module_utils")
    beside.__path__ = [str(Path(__file__).resolve().parent)]
    sys.modules.update({"ansible": types.ModuleType("ansible"), "ansible.module_utils": beside})

from ansible.module_utils.gpu_host_gather_access import engine_user, gather_files
from ansible.module_utils.gpu_host_gather_base import Facts, which
from ansible.module_utils.gpu_host_gather_child import ChildError, in_child
from ansible.module_utils.gpu_host_gather_deployed import gather_deployed
from ansible.module_utils.gpu_host_gather_kernel import gather_kernel, gather_xids
from ansible.module_utils.gpu_host_gather_models import gather_model
from ansible.module_utils.gpu_host_gather_pci import gather_placement, nvidia_devices
from ansible.module_utils.gpu_host_gather_processes import bindable, describe_process, gather_ports
from ansible.module_utils.gpu_host_gather_room import gather_mounts, gather_room
from ansible.module_utils.gpu_host_gather_system import (
    gather_clock,
    gather_limits,
    gather_numa,
    gather_platform,
    gather_secure_boot,
    gather_systemd,
)
from ansible.module_utils.gpu_host_gather_tools import (
    gather_compilers,
    gather_libraries,
    gather_nvcc,
    gather_pythons,
)
from ansible.module_utils.gpu_host_nvml import gather_nvml, load, missing_library, nothing

# What a recording holds: the machine, not the system on it, whose place another host takes in a test.
RECORDED = ("gpu", "nvcc", "kernel", "numa", "limits", "clock", "libraries", "secure_boot")

# Drivers without persistence start every GPU for this: some seconds each.
NVML_SECONDS = 90.0


def gather_gpu(pynvml: str | None = None) -> Facts:
    """`{nvidia_smi, error, nvml, driver, cuda_driver, gpus, p2p, processes, graphics, xids, on_bus, cards}`.

    pynvml: its source as `gpu_host_nvml.load` takes it, None for the one that this Python has.
    error: why a driver that is installed gives no GPU. on_bus: PCI addresses of NVIDIA GPUs, with or without a driver;
    cards: the same with what drives each, as `nvidia_devices` has it.
    """
    smi = which("nvidia-smi", ("/usr/local/nvidia/bin",))  # containers get it there
    missing = missing_library()
    if missing:
        facts = nothing(missing)
    else:
        try:
            facts = in_child(lambda: gather_nvml(load(pynvml)), NVML_SECONDS)
        except ChildError as error:
            facts = nothing(f"NVML: {error}")
    facts["nvidia_smi"] = smi
    # Without library and tools there is no driver, which is no error of it.
    facts["error"] = facts["nvml"]["error"] if smi or not missing else None
    for gpu in facts["gpus"]:
        placement = gather_placement(gpu["pci"])
        gpu["pcie"]["width_device_max"] = placement.pop("width_device_max")
        gpu.update(placement)
    for key in ("processes", "graphics"):
        facts[key] = [{**process, **describe_process(process["pid"])} for process in facts[key]]
    facts["xids"] = gather_xids()
    facts["cards"] = nvidia_devices()
    facts["on_bus"] = [card["pci"] for card in facts["cards"]]
    return facts


def gather(
    root: str,
    pythons: list[str],
    models: list[str],
    addresses: list[str],
    pynvml: str | None = None,
    user: str = "sglang",
    groups: list[str] | None = None,
    files: list[str] | None = None,
) -> Facts:
    """Every fact that `gpu_host_judge.judge` takes; pynvml as `gather_gpu` takes it, user and groups run the engines.

    files: single files that flags of instances name.
    """
    gpu = gather_gpu(pynvml)
    engine = engine_user(user, groups or [])
    return {
        "gpu": gpu,
        "nvcc": gather_nvcc(),
        "compilers": gather_compilers(),
        "pythons": gather_pythons(pythons),
        "platform": gather_platform(),
        "systemd": gather_systemd(),
        "kernel": gather_kernel([one["pci"] for one in gpu["gpus"]] or gpu["on_bus"]),
        "numa": gather_numa(),
        "limits": gather_limits(),
        "clock": gather_clock(),
        "libraries": gather_libraries(),
        "secure_boot": gather_secure_boot(),
        **gather_room(root),
        "deployed": gather_deployed(root),
        "mounts": gather_mounts([root, *models]),
        "ports": gather_ports(),
        "bind": bindable(addresses),
        "user": engine,
        "models": {path: gather_model(path, engine) for path in models},
        "files": gather_files(files or [], engine),
    }


def record(machine: str) -> Facts:
    """A recording of this machine: what of its facts depends on no inventory."""
    facts = gather("/", [], [], [])
    recorded = {
        "machine": machine,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),  # noqa: UP017 - older Pythons record too
        "source": "gpu_host_gather.py on the machine itself",
        "kind": "real",
    }
    return {"recorded": recorded, **{key: facts[key] for key in RECORDED}}


def main() -> int:
    """Record this machine's facts for the tests."""
    parser = argparse.ArgumentParser(description="Record the facts of this machine as JSON")
    parser.add_argument("--record", required=True, metavar="WORDS", help="what the machine is, in a few words")
    json.dump(record(parser.parse_args().record), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
