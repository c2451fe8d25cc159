# SPDX-License-Identifier: Apache-2.0
"""GPU facts from NVML's answers, replayed by a stand-in that has the real pynvml's constants and errors."""

from __future__ import annotations

import base64
import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any

import pynvml
import pytest
from ansible.module_utils import gpu_host_nvml as nvml

from tests.unit.nvml_stand_in import V2, NvmlStandIn, device

GIB = 1 << 30
LOST = {"!": pynvml.NVML_ERROR_GPU_IS_LOST}


def facts_of(*devices: dict[str, Any], pairs: list[dict[str, Any]] | None = None, **system: Any) -> dict[str, Any]:
    stand_in = NvmlStandIn({"system": system, "devices": list(devices), "pairs": pairs or []})
    facts = nvml.gather_nvml(stand_in)
    assert stand_in.open == 0, "NVML was left open"
    return facts


def gpu_of(**answers: Any) -> dict[str, Any]:
    gpu: dict[str, Any] = facts_of(device("00000000:06:00.0", "GPU-a", **answers))["gpus"][0]
    return gpu


def test_gpus_come_in_pci_order_with_their_own_index() -> None:
    order = ("00010000:01:00.0", "00000000:C1:00.0", "00000000:06:00.0")
    devices = [device(pci, f"GPU-{pci}") for pci in order]
    pairs = [{"a": a, "b": b, "ancestor": 50, "p2p": [a, b, 5, 5]} for a in range(3) for b in range(a + 1, 3)]
    facts = facts_of(*devices, pairs=pairs)
    assert [(gpu["index"], gpu["pci"]) for gpu in facts["gpus"]] == [
        (0, "00000000:06:00.0"),
        (1, "00000000:c1:00.0"),
        (2, "00010000:01:00.0"),
    ]
    # Pairs are told in that order too: NVML's devices 1 and 2 are the GPUs 0 and 1.
    assert [(one["a"], one["b"], one["read"], one["write"]) for one in facts["p2p"]] == [
        (0, 1, "chipset not supported", "gpu not supported"),
        (0, 2, "ok", "gpu not supported"),
        (1, 2, "ok", "chipset not supported"),
    ]


def test_a_gpu_that_supports_nothing_has_unknown_values_and_no_made_up_ones() -> None:
    assert gpu_of() == {
        "index": 0,
        "pci": "00000000:06:00.0",
        "uuid": "GPU-a",
        "name": None,
        "compute_cap": None,
        "memory_total_mib": None,
        "memory_used_mib": None,
        "ecc": {"mode": None, "uncorrected": None, "corrected": None},
        "remapped": None,
        "throttle": [],
        "pcie": dict.fromkeys(("gen", "width", "gen_max", "width_max", "gen_device_max", "width_device_max")),
        "mig": False,
        "persistence": None,
        "bar1_total_mib": None,
        "compute_mode": None,
        "idle": None,
        "recovery": None,
        "fabric": None,
    }


def test_memory_counts_what_is_used_by_processes_not_what_the_driver_reserves() -> None:
    answers = {
        V2: {"total": 141 * GIB, "used": 0, "reserved": GIB},
        "nvmlDeviceGetMemoryInfo": {"total": 141 * GIB, "used": GIB},
    }
    assert gpu_of(**answers)["memory_used_mib"] == 0
    del answers[V2]
    assert gpu_of(**answers)["memory_used_mib"] == 1024


def test_versions() -> None:
    facts = facts_of(
        nvmlSystemGetNVMLVersion="13.580.159.04",
        nvmlSystemGetDriverVersion="580.159.04",
        nvmlSystemGetCudaDriverVersion_v2=13000,
    )
    assert (facts["nvml"], facts["driver"], facts["cuda_driver"]) == (
        {"version": "13.580.159.04", "error": None},
        "580.159.04",
        "13.0",
    )
    assert facts_of(nvmlSystemGetCudaDriverVersion_v2=12080)["cuda_driver"] == "12.8"


def test_ecc_and_remapped_rows() -> None:
    gpu = gpu_of(
        **{
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors 0 0": 3,  # corrected, volatile
            "nvmlDeviceGetTotalEccErrors 1 0": 2,  # uncorrected, volatile
            "nvmlDeviceGetTotalEccErrors 1 1": 99,  # uncorrected in the card's whole life
            "nvmlDeviceGetRemappedRows": [0, 1, 1, 0],
        }
    )
    assert gpu["ecc"] == {"mode": True, "uncorrected": 2, "corrected": 3}
    assert gpu["remapped"] == {"pending": True, "failed": False}


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting, []),
        (pynvml.nvmlClocksEventReasonSwPowerCap, ["sw_power_cap"]),
        (
            pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
            ["hw_thermal", "hw_slowdown"],
        ),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, ["hw_power_brake"]),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, ["sw_thermal"]),
    ],
)
def test_throttling(reasons: int, words: list[str]) -> None:
    assert gpu_of(nvmlDeviceGetCurrentClocksEventReasons=reasons)["throttle"] == words


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (pynvml.NVML_GPU_RECOVERY_ACTION_NONE, "none"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, "reset"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT, "reboot"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, "drain p2p"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET, "drain and reset"),
        (99, None),
    ],
)
def test_what_the_driver_wants_done(action: int, word: str | None) -> None:
    call = f"nvmlDeviceGetFieldValues [{pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION}]"
    assert gpu_of(**{call: [{"nvmlReturn": 0, "value": {"uiVal": action}}]})["recovery"] == word
    refused = {"nvmlReturn": pynvml.NVML_ERROR_NOT_SUPPORTED, "value": {"uiVal": action}}
    assert gpu_of(**{call: [refused]})["recovery"] is None


@pytest.mark.parametrize(
    ("state", "word"), [(0, None), (1, "not started"), (2, "in progress"), (3, "completed"), (LOST, None)]
)
def test_how_far_the_fabric_is(state: Any, word: str | None) -> None:
    assert gpu_of(fabric=state)["fabric"] == word


def test_mig_is_off_where_it_is_not_supported_and_unknown_where_it_cannot_be_asked() -> None:
    assert gpu_of(nvmlDeviceGetMigMode=[1, 1])["mig"] is True
    assert gpu_of(nvmlDeviceGetMigMode=[0, 1])["mig"] is False
    assert gpu_of(nvmlDeviceGetMigMode=LOST)["mig"] is None


@pytest.mark.parametrize(("mode", "word"), [(0, "default"), (1, "exclusive"), (2, "prohibited"), (3, "exclusive")])
def test_compute_mode(mode: int, word: str) -> None:
    assert gpu_of(nvmlDeviceGetComputeMode=mode)["compute_mode"] == word


def test_pcie_link_now_and_at_most() -> None:
    pcie = gpu_of(
        nvmlDeviceGetCurrPcieLinkGeneration=1,
        nvmlDeviceGetCurrPcieLinkWidth=8,
        nvmlDeviceGetMaxPcieLinkGeneration=4,
        nvmlDeviceGetMaxPcieLinkWidth=16,
        nvmlDeviceGetGpuMaxPcieLinkGeneration=5,
    )["pcie"]
    assert (pcie["gen"], pcie["width"], pcie["gen_max"], pcie["width_max"], pcie["gen_device_max"]) == (1, 8, 4, 16, 5)


def test_processes_and_idleness() -> None:
    holder = {"pid": 428, "usedGpuMemory": 1634 << 20}
    hidden = {"pid": 0, "usedGpuMemory": None}
    facts = facts_of(
        device("00000000:06:00.0", "GPU-a", nvmlDeviceGetComputeRunningProcesses=[holder, hidden]),
        device(
            "00000000:07:00.0",
            "GPU-b",
            nvmlDeviceGetComputeRunningProcesses=[],
            nvmlDeviceGetGraphicsRunningProcesses=[],
        ),
        device(
            "00000000:08:00.0",
            "GPU-c",
            nvmlDeviceGetComputeRunningProcesses=[],
            nvmlDeviceGetGraphicsRunningProcesses=[holder],
        ),
        pairs=[{"a": a, "b": b, "ancestor": LOST, "p2p": [LOST] * 4} for a, b in ((0, 1), (0, 2), (1, 2))],
    )
    assert facts["processes"] == [
        {"gpu_uuid": "GPU-a", "pid": 428, "memory_mib": 1634},
        {"gpu_uuid": "GPU-a", "pid": None, "memory_mib": None},
    ]
    assert facts["graphics"] == [{"gpu_uuid": "GPU-c", "pid": 428, "memory_mib": 1634}]
    assert [gpu["idle"] for gpu in facts["gpus"]] == [None, True, False]
    assert {(one["link"], one["read"]) for one in facts["p2p"]} == {(None, "unknown")}


@pytest.mark.parametrize(
    ("ancestor", "p2p", "link", "read"),
    [
        (pynvml.NVML_TOPOLOGY_SYSTEM, [0, 0, 0, 0], "nvlink", "ok"),
        (pynvml.NVML_TOPOLOGY_SYSTEM, [2, 2, 5, 5], "sys", "gpu not supported"),
        (pynvml.NVML_TOPOLOGY_NODE, [3, 3, 5, 5], "node", "topology not supported"),
        (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, [4, 4, 5, 5], "phb", "disabled by registry key"),
        (pynvml.NVML_TOPOLOGY_MULTIPLE, [0, 0, 5, 5], "pxb", "ok"),
        (pynvml.NVML_TOPOLOGY_SINGLE, [0, 0, 5, 5], "pix", "ok"),
        (pynvml.NVML_TOPOLOGY_INTERNAL, [6, 6, 6, 6], "pix", "unknown"),
    ],
)
def test_how_two_gpus_reach_each_other(ancestor: int, p2p: list[int], link: str, read: str) -> None:
    facts = facts_of(
        device("00000000:06:00.0", "GPU-a"),
        device("00000000:07:00.0", "GPU-b"),
        pairs=[{"a": 0, "b": 1, "ancestor": ancestor, "p2p": p2p}],
    )
    assert [(one["link"], one["read"]) for one in facts["p2p"]] == [(link, read)]


def test_a_driver_that_does_not_answer_is_a_fact() -> None:
    facts = facts_of(nvmlInit={"!": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    assert "mismatch" in facts["nvml"]["error"]
    assert (facts["gpus"], facts["processes"], facts["p2p"]) == ([], [], [])


def test_a_gpu_that_fell_off_the_bus_does_not_hide_its_neighbour() -> None:
    facts = facts_of({"handle": LOST}, device("00000000:07:00.0", "GPU-b"))
    assert [gpu["uuid"] for gpu in facts["gpus"]] == ["GPU-b"]
    assert facts["nvml"]["error"].startswith("device 0: ")


def test_a_host_without_the_library_is_told_in_the_loaders_words(tmp_path: Path) -> None:
    assert "none.so" in (nvml.missing_library((str(tmp_path / "none.so"),)) or "")
    assert nvml.missing_library((str(tmp_path / "none.so"), "libc.so.6")) is None


def test_the_packed_pynvml_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")  # a bare host has none, and it looks itself up there
    path = Path(__file__).parents[2] / "roles/gpu_host/action_plugins/gpu_host_preflight.py"
    spec = importlib.util.spec_from_file_location("preflight_plugin", path)
    assert spec and spec.loader
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    packed = plugin.source()
    assert zlib.decompress(base64.b85decode(packed)) == Path(pynvml.__file__).read_bytes()
    loaded = nvml.load(packed)
    assert loaded is not pynvml
    with pytest.raises(loaded.NVMLError):
        loaded.nvmlInit() if not Path("/dev/nvidiactl").exists() else loaded.nvmlDeviceGetHandleByIndex(10**6)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert nvml.load(None) is pynvml
