# SPDX-License-Identifier: Apache-2.0
"""All facts together: of this machine, alone and under Ansible, and as recordings of others."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_host_preflight as preflight
import pytest
from ansible.module_utils import gpu_host_gather as gather
from ansible.module_utils import gpu_host_gather_base as base
from ansible.module_utils import gpu_host_nvml as nvml
from ansible.module_utils.gpu_host_judge import judge

from tests.unit.nvml_stand_in import NvmlStandIn

ROLE = Path(__file__).parents[2] / "roles/gpu_host"
DATA = Path(__file__).parent / "data/gpu_host"
BUILT = ("b200-8x", "mixed", "rtx5090-2x", "rtxpro6000-8x")


def recording(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def shape(value: Any) -> Any:
    """Keys of a fact, all the way down; lists as what their first entry has."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def test_a_program_that_is_missing_or_hangs_is_told() -> None:
    assert base.run(["/nonexistent/program"])[0] == 127
    assert base.run(["sleep", "60"], timeout=0.1)[0] == 124


def test_small_files_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(" 12\n")
    assert base.read(tmp_path / "f") == "12"
    assert base.read(tmp_path / "none") is None
    assert [base.whole(text) for text in ("12", "-1", "max", "", None)] == [12, -1, None, None, None]
    assert base.table("Node 0 MemTotal:   8 kB\nHugePages_Total:   3\nodd\n") == {
        "MemTotal": 8192,
        "HugePages_Total": 3,
    }


def test_recording_runs_alone_without_ansible() -> None:
    script = ROLE / "module_utils/gpu_host_gather.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--record", "the test machine"],
        capture_output=True,
        text=True,
        check=True,
    )
    recorded = json.loads(done.stdout)
    assert (recorded["recorded"]["machine"], recorded["recorded"]["kind"]) == ("the test machine", "real")
    assert set(recorded) == {"recorded", *gather.RECORDED}


def test_facts_of_this_machine_can_be_judged() -> None:
    facts = gather.gather("/opt/sglang-fleet", ["3.12", "3.11"], ["/nonexistent"], ["127.0.0.1"])
    json.dumps(facts)
    verdict = judge("here", {"profile": "auto", "instances": [{"name": "a"}]}, facts)
    assert not verdict["ok"]


def test_gpu_facts_come_from_nvml_the_bus_and_the_process_table(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = recording("h200-nvml")
    answers["devices"][0]["nvmlDeviceGetComputeRunningProcesses"] = [{"pid": os.getpid(), "usedGpuMemory": 5 << 20}]
    monkeypatch.setattr(gather, "missing_library", lambda: None)
    monkeypatch.setattr(gather, "load", lambda packed: NvmlStandIn(answers))
    monkeypatch.setattr(gather, "gather_placement", lambda pci: {"numa_node": 1, "cpus": "0-3", "width_device_max": 8})
    cards = [{"pci": f"00000000:00:0{n}.0", "device": "0x2335", "driver": "nvidia"} for n in (6, 7)]
    monkeypatch.setattr(gather, "nvidia_devices", lambda: cards)
    facts = gather.gather_gpu()
    assert shape(facts["gpus"]) == shape(recording("h200")["gpu"]["gpus"])
    (gpu,) = facts["gpus"]
    assert (gpu["numa_node"], gpu["cpus"], gpu["pcie"]["width_device_max"], gpu["idle"]) == (1, "0-3", 8, False)
    assert (facts["cards"], facts["on_bus"]) == (cards, ["00000000:00:06.0", "00000000:00:07.0"])
    (process,) = facts["processes"]
    assert (process["gpu_uuid"], process["pid"], process["memory_mib"]) == (gpu["uuid"], os.getpid(), 5)
    assert (process["user"], process["orphan"]) == (getpass.getuser(), False)
    assert set(process) == {"gpu_uuid", "pid", "memory_mib", "name", "unit", "cgroup", "user", "orphan"}


def test_a_driver_that_hangs_is_a_fact_and_no_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "which", lambda name, extra: None)
    monkeypatch.setattr(gather, "missing_library", lambda: "libnvidia-ml.so.1: not there")
    facts = gather.gather_gpu()
    assert (facts["error"], facts["nvml"]["error"]) == (None, "libnvidia-ml.so.1: not there")
    monkeypatch.setattr(gather, "missing_library", lambda: None)
    monkeypatch.setattr(gather, "load", lambda packed: signal.pause())
    monkeypatch.setattr(gather, "NVML_SECONDS", 0.2)
    facts = gather.gather_gpu()
    assert facts["gpus"] == []
    assert facts["error"] == "NVML: no answer within 0.2 s"


# --- recordings of other machines -----------------------------------------------------------------


def test_the_h200s_answers_give_what_its_nvidia_smi_said_in_the_same_minute() -> None:
    facts = nvml.gather_nvml(NvmlStandIn(recording("h200-nvml")))
    # nvidia-smi -q on that machine, 2026-12-01T00:31:05Z.
    assert (facts["driver"], facts["cuda_driver"]) == ("580.159.04", "13.0")
    (gpu,) = facts["gpus"]
    assert (gpu["pci"], gpu["name"], gpu["compute_cap"]) == ("00000000:00:06.0", "NVIDIA H200", "9.0")
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"], gpu["bar1_total_mib"]) == (143771, 0, 262144)
    assert gpu["ecc"] == {"mode": True, "uncorrected": 0, "corrected": 0}
    assert (gpu["throttle"], gpu["mig"], gpu["persistence"], gpu["compute_mode"]) == ([], False, True, "default")
    assert (gpu["pcie"]["gen"], gpu["pcie"]["width"], gpu["pcie"]["gen_max"]) == (5, 16, 5)
    assert gpu["idle"]


@pytest.mark.parametrize("name", BUILT)
def test_a_machine_built_from_public_words_has_the_facts_of_a_real_one(name: str) -> None:
    real, built = recording("h200"), recording(name)
    assert built["recorded"]["kind"] == "built from public nvidia-smi -q"
    for facts in (real, built):
        facts["gpu"].update(p2p=[], processes=[], graphics=[], xids=[])
        for gpu in facts["gpu"]["gpus"]:
            gpu["remapped"] = None  # a map, or nothing on a GPU that can't
    assert shape(built) == shape(real)


@pytest.mark.parametrize("name", BUILT)
def test_each_pair_of_gpus_is_told_once(name: str) -> None:
    gpu = recording(name)["gpu"]
    count = len(gpu["gpus"])
    assert [(one["a"], one["b"]) for one in gpu["p2p"]] == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(set(one) == {"a", "b", "link", "read", "write", "nvlink", "atomics"} for one in gpu["p2p"])
    assert [one["index"] for one in gpu["gpus"]] == list(range(count))
    assert gpu["on_bus"] == [one["pci"] for one in gpu["gpus"]] == [one["pci"] for one in gpu["cards"]]


def test_a_recording_has_the_shape_of_this_machines_facts() -> None:
    here, real = gather.record("here"), recording("h200")
    assert set(here) == set(real)
    assert shape(here["limits"]) == shape(real["limits"])
    assert shape(here["kernel"]) == shape(real["kernel"])
    assert set(here["gpu"]) == set(real["gpu"])
    assert shape(here["numa"]) == shape(real["numa"])
    assert shape(here["clock"]) == shape(real["clock"])
    assert set(here["libraries"]) == set(real["libraries"])


def test_what_a_recording_holds_takes_the_place_of_the_hosts_own_facts() -> None:
    wanted: dict[str, Any] = {"instances": [], "pythons": []}
    own = preflight.facts_for(wanted, "/", None, None)
    assert "recorded" not in own
    new = preflight.facts_for(wanted, "/", recording("b200-8x"), None)
    assert (new["kernel"]["release"], len(new["gpu"]["gpus"])) == ("6.8.0-87-generic", 8)
    assert new["platform"] == own["platform"]
    # Recordings from before 2026-12 hold GPUs and nvcc only.
    old = preflight.facts_for(wanted, "/", recording("h200-busy"), None)
    assert (old["kernel"]["release"], len(old["gpu"]["processes"])) == (own["kernel"]["release"], 1)
