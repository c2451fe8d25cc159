# SPDX-License-Identifier: Apache-2.0
"""GPU facts from NVML, the driver's own library, through NVIDIA's `pynvml` (package nvidia-ml-py).

Every function takes the pynvml module, so a test can replay recorded answers. What the driver does not know or does not
support is None; only a library or driver that does not work at all is an error, and that is a fact too.
Meaning of values: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/ (2026-11).
"""

from __future__ import annotations

import base64
import ctypes
import sys
import types
import zlib
from typing import Any

Facts = dict[str, Any]

# Clock event reasons that slow a GPU down against its owner's will; idle and application clocks are no trouble.
THROTTLES = (
    ("nvmlClocksEventReasonSwThermalSlowdown", "sw_thermal"),
    ("nvmlClocksEventReasonHwThermalSlowdown", "hw_thermal"),
    ("nvmlClocksEventReasonHwPowerBrakeSlowdown", "hw_power_brake"),
    ("nvmlClocksEventReasonHwSlowdown", "hw_slowdown"),
    ("nvmlClocksEventReasonSwPowerCap", "sw_power_cap"),
)
# The words of `nvidia-smi topo`; two GPUs of one board meet on one switch.
LINKS = (
    ("NVML_TOPOLOGY_INTERNAL", "pix"),
    ("NVML_TOPOLOGY_SINGLE", "pix"),
    ("NVML_TOPOLOGY_MULTIPLE", "pxb"),
    ("NVML_TOPOLOGY_HOSTBRIDGE", "phb"),
    ("NVML_TOPOLOGY_NODE", "node"),
    ("NVML_TOPOLOGY_SYSTEM", "sys"),
)
P2P_STATUS = (
    ("NVML_P2P_STATUS_OK", "ok"),
    ("NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED", "chipset not supported"),
    ("NVML_P2P_STATUS_GPU_NOT_SUPPORTED", "gpu not supported"),
    ("NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED", "topology not supported"),
    ("NVML_P2P_STATUS_DISABLED_BY_REGKEY", "disabled by registry key"),
    ("NVML_P2P_STATUS_NOT_SUPPORTED", "not supported"),
)
# pynvml 13 defines READ as (0,) by a stray comma, so these are written as NVML's header has them.
P2P_CAPS = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
COMPUTE_MODES = (
    ("NVML_COMPUTEMODE_DEFAULT", "default"),
    ("NVML_COMPUTEMODE_PROHIBITED", "prohibited"),
    ("NVML_COMPUTEMODE_EXCLUSIVE_PROCESS", "exclusive"),
    ("NVML_COMPUTEMODE_EXCLUSIVE_THREAD", "exclusive"),
)
# What the driver says has to be done before the GPU is of use again:
# https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html (2026-12).
RECOVERY = (
    ("NVML_GPU_RECOVERY_ACTION_NONE", "none"),
    ("NVML_GPU_RECOVERY_ACTION_GPU_RESET", "reset"),
    ("NVML_GPU_RECOVERY_ACTION_NODE_REBOOT", "reboot"),
    ("NVML_GPU_RECOVERY_ACTION_DRAIN_P2P", "drain p2p"),
    ("NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET", "drain and reset"),
    ("NVML_GPU_RECOVERY_ACTION_BUS_RESET", "reboot"),
    ("NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT", "reboot"),
)
# State of the NVSwitch fabric that a GPU of an HGX board is joined to by the fabric manager: nvmlGpuFabricState_t.
FABRIC = (
    ("NVML_GPU_FABRIC_STATE_NOT_STARTED", "not started"),
    ("NVML_GPU_FABRIC_STATE_IN_PROGRESS", "in progress"),
    ("NVML_GPU_FABRIC_STATE_COMPLETED", "completed"),
)
MIB = 1 << 20
# Containers of NVIDIA's runtime and WSL have it in a folder that the loader may not look at.
LIBRARY = "libnvidia-ml.so.1"
LIBRARY_PLACES = (LIBRARY, f"/usr/local/nvidia/lib64/{LIBRARY}", f"/usr/lib/wsl/lib/{LIBRARY}")


def missing_library(places: tuple[str, ...] = LIBRARY_PLACES) -> str | None:
    """None once the driver's library is loaded, as pynvml then gets it by name wherever it was; else the loader's word."""
    reason = None
    for place in places:
        try:
            ctypes.CDLL(place)
        except OSError as error:
            reason = reason or str(error)
        else:
            return None
    return reason


def load(packed: str | None) -> Any:
    """pynvml from its source, zlib in base85, or the one that this Python has."""
    if packed is None:
        import pynvml

        return pynvml
    module = sys.modules["pynvml"] = types.ModuleType("pynvml")  # it looks itself up there for its error classes
    source = zlib.decompress(base64.b85decode(packed))
    exec(compile(source, "pynvml.py", "exec"), module.__dict__)  # noqa: S102 - the control environment's hash-locked file
    return module


class Nvml:
    """NVML's calls with a missing value as None, where pynvml raises."""

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of one call; None where this driver has no such call, or the GPU no such value."""
        try:
            return getattr(self.pynvml, name)(*arguments)
        except self.pynvml.NVMLError:
            return None

    def supports(self, name: str, *arguments: Any) -> bool | None:
        """Whether the GPU has what a call asks for; None when that cannot be told."""
        try:
            getattr(self.pynvml, name)(*arguments)
        except self.pynvml.NVMLError as error:
            return False if error.value == self.pynvml.NVML_ERROR_NOT_SUPPORTED else None
        return True

    def word(self, names: tuple[tuple[str, str], ...], value: Any) -> str | None:
        """The word for one of pynvml's constants."""
        return next((word for name, word in names if getattr(self.pynvml, name) == value), None)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _mib(value: int | None) -> int | None:
    return None if value is None else value // MIB


def nothing(error: str | None) -> Facts:
    """The facts before NVML said anything, and the reason if it never will."""
    return {
        "nvml": {"version": None, "error": error},
        "driver": None,
        "cuda_driver": None,
        "gpus": [],
        "p2p": [],
        "processes": [],
        "graphics": [],
    }


def gather_nvml(pynvml: Any) -> Facts:
    """`{nvml: {version, error}, driver, cuda_driver, gpus, p2p, processes, graphics}`; error says why there is nothing.

    GPUs are in PCI order, which is the index that an inventory means. processes compute, graphics draw, as a desktop does:
    `[{gpu_uuid, pid, memory_mib}]`.
    """
    facts = nothing(None)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        facts["nvml"]["error"] = str(error)
        return facts
    try:
        nvml = Nvml(pynvml)
        facts["nvml"]["version"] = nvml.ask("nvmlSystemGetNVMLVersion")
        facts["driver"] = nvml.ask("nvmlSystemGetDriverVersion")
        cuda = nvml.ask("nvmlSystemGetCudaDriverVersion_v2")
        facts["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
        found = []
        for at in range(nvml.ask("nvmlDeviceGetCount") or 0):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(at)
                found.append((handle, describe(nvml, handle)))
            except pynvml.NVMLError as error:
                # A GPU that fell off the bus must not hide its healthy neighbours.
                facts["nvml"]["error"] = f"device {at}: {error}"
        # Addresses have one width and case, so the order of texts is that of numbers.
        found.sort(key=lambda one: str(one[1]["pci"]))
        facts["gpus"] = [{"index": index, **gpu} for index, (_, gpu) in enumerate(found)]
        handles = [handle for handle, _ in found]
        facts["p2p"] = [pair(nvml, handles, a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
        for key, kind in (("processes", "Compute"), ("graphics", "Graphics")):
            facts[key] = [one for (handle, gpu) in found for one in processes(nvml, handle, gpu["uuid"], kind)]
    finally:
        pynvml.nvmlShutdown()
    return facts


def describe(nvml: Nvml, handle: Any) -> Facts:
    """One GPU. A GPU without address and UUID is none: NVMLError."""
    pynvml = nvml.pynvml
    pci = pynvml.nvmlDeviceGetPciInfo(handle).busId
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2) or nvml.ask(
        "nvmlDeviceGetMemoryInfo", handle
    )
    bar1 = nvml.ask("nvmlDeviceGetBAR1MemoryInfo", handle)
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    holders = [nvml.ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics")]
    return {
        "pci": (pci.decode("ascii") if isinstance(pci, bytes) else pci).lower(),
        "uuid": pynvml.nvmlDeviceGetUUID(handle),
        "name": nvml.ask("nvmlDeviceGetName", handle),
        "compute_cap": "{}.{}".format(*capability) if capability else None,
        "memory_total_mib": _mib(memory.total) if memory else None,
        "memory_used_mib": _mib(memory.used) if memory else None,
        "ecc": ecc(nvml, handle),
        "remapped": remapped(nvml, handle),
        "throttle": throttle(nvml, handle),
        "pcie": pcie(nvml, handle),
        "mig": bool(mig[0]) if mig else (False if nvml.supports("nvmlDeviceGetMigMode", handle) is False else None),
        "persistence": _flag(nvml.ask("nvmlDeviceGetPersistenceMode", handle)),
        "bar1_total_mib": _mib(bar1.bar1Total) if bar1 else None,
        "compute_mode": nvml.word(COMPUTE_MODES, nvml.ask("nvmlDeviceGetComputeMode", handle)),
        "idle": None if None in holders else not any(holders),
        "recovery": recovery(nvml, handle),
        "fabric": fabric(nvml, handle),
    }


def ecc(nvml: Nvml, handle: Any) -> Facts:
    """`{mode, uncorrected, corrected}`, counted since the driver was loaded; all None on a GPU without ECC."""
    mode = nvml.ask("nvmlDeviceGetEccMode", handle)
    volatile = nvml.pynvml.NVML_VOLATILE_ECC
    return {
        "mode": bool(mode[0]) if mode else None,
        "uncorrected": nvml.ask(
            "nvmlDeviceGetTotalEccErrors", handle, nvml.pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
        ),
        "corrected": nvml.ask(
            "nvmlDeviceGetTotalEccErrors", handle, nvml.pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile
        ),
    }


def remapped(nvml: Nvml, handle: Any) -> Facts | None:
    """`{pending, failed}` of memory rows: pending ones need a reset of the GPU, a failed remap needs a new GPU."""
    rows = nvml.ask("nvmlDeviceGetRemappedRows", handle)
    return {"pending": bool(rows[2]), "failed": bool(rows[3])} if rows else None


def recovery(nvml: Nvml, handle: Any) -> str | None:
    """What the driver wants done now; None where it does not tell (drivers before 570, GPUs without it)."""
    field = nvml.pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    answers = nvml.ask("nvmlDeviceGetFieldValues", handle, [field])
    if not answers or answers[0].nvmlReturn != nvml.pynvml.NVML_SUCCESS:
        return None
    return nvml.word(RECOVERY, answers[0].value.uiVal)


def fabric(nvml: Nvml, handle: Any) -> str | None:
    """How far the GPU's registration with its NVSwitch fabric is; None for a GPU on no such board."""
    info = nvml.pynvml.c_nvmlGpuFabricInfo_t()
    if nvml.ask("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
        return None
    return nvml.word(FABRIC, info.state)


def throttle(nvml: Nvml, handle: Any) -> list[str]:
    """What slows the clocks down right now."""
    reasons = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
    return [word for name, word in THROTTLES if reasons & getattr(nvml.pynvml, name)]


def pcie(nvml: Nvml, handle: Any) -> Facts:
    """Link now, what slot and card allow, what the card alone allows. An idle GPU lowers `gen` to save power."""
    return {
        "gen": nvml.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        "width": nvml.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        "gen_max": nvml.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "width_max": nvml.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        "gen_device_max": nvml.ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        "width_device_max": None,  # NVML has no call for it; the PCI facts fill it in
    }


def pair(nvml: Nvml, handles: list[Any], a: int, b: int) -> Facts:
    """How two GPUs reach each other: `ok` or NVML's reason, and the link between them."""
    status = {
        name: nvml.word(P2P_STATUS, nvml.ask("nvmlDeviceGetP2PStatus", handles[a], handles[b], cap)) or "unknown"
        for name, cap in P2P_CAPS.items()
    }
    common = nvml.word(LINKS, nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b]))
    return {"a": a, "b": b, "link": "nvlink" if status["nvlink"] == "ok" else common, **status}


def processes(nvml: Nvml, handle: Any, uuid: str, kind: str) -> list[Facts]:
    """Processes of a kind on one GPU; pid is None for one of another container, which is not ours to see."""
    return [
        {
            "gpu_uuid": uuid,
            "pid": one.pid or None,
            "memory_mib": _mib(one.usedGpuMemory),
        }
        for one in nvml.ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) or []
    ]
