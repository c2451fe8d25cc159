# SPDX-License-Identifier: Apache-2.0
"""Where instances run and how their GPUs exchange data, from recorded hosts; what of it lands in units and environments."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible.module_utils import gpu_units_probe as probe
from ansible.module_utils import gpu_units_render as r
from ansible.module_utils import gpu_units_topology as t
from ansible.module_utils.gpu_host_judge import judge

from tests.unit import judge_kit

DATA = Path(__file__).parent / "data/gpu_host"
OFF = {"NCCL_P2P_DISABLE": "1"}
SM120 = {"name": "sm120", "args": {"attention-backend": "triton"}, "env": {}}


@pytest.fixture(scope="module")
def preflight(repo: Path) -> ModuleType:
    """The module itself: what it returns is what instances are placed by."""
    spec = importlib.util.spec_from_file_location(
        "preflight_module", repo / "roles/gpu_host/library/gpu_host_preflight.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(repo: Path) -> list[dict[str, Any]]:
    return yaml.safe_load((repo / "roles/gpu_units/files/nccl.yml").read_text())


@pytest.fixture(scope="module")
def modes(repo: Path) -> dict[str, Any]:
    return yaml.safe_load((repo / "roles/gpu_units/files/modes.yml").read_text())


def recorded(preflight: ModuleType, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(GPUs, topology) of a recorded host, as the preflight returns them."""
    facts = json.loads((DATA / f"{name}.json").read_text())
    return facts["gpu"]["gpus"], preflight.topology(facts)


def instance(gpus: list[dict[str, Any]], *indices: int, **args: Any) -> dict[str, Any]:
    return {"name": "one", "uuids": [gpus[index]["uuid"] for index in indices], "args": args}


def deploy(
    modes: dict[str, Any], gpus: list[dict[str, Any]], *instances: dict[str, Any], **more: Any
) -> dict[str, Any]:
    defaults = {"mode": "dflash", "model_path": "/srv/models/t", "draft_model_path": "/srv/models/d"}
    fixed = {"profile": SM120, "modes": modes, "gpus": gpus, "release": "abc", "common": {}, "start_timeout": 900}
    return r.render(instances=list(instances), defaults=defaults, **{**fixed, **more})


# --- NUMA ----------------------------------------------------------------------------------------------------------


def test_an_instance_stays_on_the_node_of_its_gpus(preflight: ModuleType) -> None:
    gpus, topology = recorded(preflight, "rtxpro6000-8x")
    nodes = t.nodes_of(topology)
    assert nodes == {0: "0-47,96-143", 1: "48-95,144-191"}
    wanted = ["CPUAffinity=48-95,144-191", "NUMAPolicy=preferred", "NUMAMask=1"]
    assert t.placement(instance(gpus, 4, 5), gpus, nodes) == (wanted, "")
    gpus, topology = recorded(preflight, "b200-8x")
    assert t.placement(instance(gpus, 7), gpus, t.nodes_of(topology))[0][0] == "CPUAffinity=84-111"


def test_instances_of_a_node_share_it_whoever_comes_or_goes(preflight: ModuleType, modes: dict[str, Any]) -> None:
    gpus, topology = recorded(preflight, "rtxpro6000-8x")
    one, two = ({"name": f"g{n}", "gpus": [n], "port": 30000 + n} for n in (0, 1))
    alone, both = (deploy(modes, gpus, *some, nodes=t.nodes_of(topology)) for some in ((one,), (one, two)))
    assert "CPUAffinity=0-47,96-143\n" in alone["files"][r.dropin_of("g0")]
    assert r.changed_instances(alone, both) == []
    assert both["files"][r.dropin_of("g1")].count("CPUAffinity=0-47,96-143") == 1
    assert "NUMAMask=0\n" in both["files"][r.dropin_of("g1.baseline")]


@pytest.mark.parametrize("name", ["rtx5090-2x", "mixed", "h200"])
def test_one_node_is_no_choice(preflight: ModuleType, name: str) -> None:
    gpus, topology = recorded(preflight, name)
    assert t.nodes_of(topology) == {}
    assert t.placement(instance(gpus, 0), gpus, t.nodes_of(topology)) == ([], "")


def test_nodes_without_cpus_are_memory_of_devices() -> None:
    assert t.nodes_of({"numa": [{"node": 0, "cpus": "0-71"}, {"node": 1, "cpus": ""}, {"node": 2, "cpus": ""}]}) == {}


def test_unit_and_engine_never_both_bind(preflight: ModuleType) -> None:
    gpus, topology = recorded(preflight, "rtxpro6000-8x")
    lines, note = t.placement(instance(gpus, 4, 5, **{"numa-node": [1, 1]}), gpus, t.nodes_of(topology))
    assert lines == []
    assert "args has numa-node" in note


def test_gpus_of_several_nodes_are_left_to_the_engine_and_the_flag_is_told(preflight: ModuleType) -> None:
    gpus, topology = recorded(preflight, "rtxpro6000-8x")
    lines, note = t.placement(instance(gpus, 5, 0), gpus, t.nodes_of(topology))
    assert lines == []
    assert "NUMA nodes 0, 1" in note
    assert "args: {numa-node: [1, 0]}" in note  # in the order of the ranks


def test_a_gpu_of_an_unknown_node_is_bound_to_nothing(preflight: ModuleType) -> None:
    gpus, topology = recorded(preflight, "rtxpro6000-8x")
    gpus = [{**gpus[0], "numa_node": None}, gpus[1]]
    assert t.placement(instance(gpus, 0, 1), gpus, t.nodes_of(topology)) == ([], "")


def test_only_nodes_that_the_host_accepts_are_used(preflight: ModuleType) -> None:
    gpus, topology = recorded(preflight, "rtxpro6000-8x")
    asked: list[int] = []

    def ask(node: int, cpus: str) -> str:
        asked.append(node)
        return "its NUMA policy is not allowed" if node else ""

    nodes, told = probe.usable_nodes(topology, gpus, ask)
    assert asked == [0, 1]
    assert nodes == {0: "0-47,96-143"}
    assert len(told) == 1
    assert "node 1: its NUMA policy is not allowed" in told[0]
    assert t.placement(instance(gpus, 4), gpus, nodes) == ([], "")
    assert probe.usable_nodes(topology, gpus[:4], ask) == ({0: "0-47,96-143"}, [])


SYSTEMD_RUN = """#!/bin/sh
echo "$@" >{log}
{answer}
"""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("printf 'Name:\\tcat\\nCpus_allowed_list:\\t0-3\\n'", ""),
        ("printf 'Cpus_allowed_list:\\t0-11\\n'", "asked for CPUs 0-3,8, a unit got 0-11"),
        ("exit 242", "its NUMA policy is not allowed"),
        ("exit 215", "its CPUs are not there for it"),
        ("echo 'Unknown assignment: NUMAMask=1' >&2; exit 1", "Unknown assignment"),
    ],
)
def test_the_host_is_asked_with_the_very_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, reason: str
) -> None:
    log = tmp_path / "log"
    tool = tmp_path / "systemd-run"
    tool.write_text(SYSTEMD_RUN.format(log=log, answer=answer))
    tool.chmod(0o755)
    monkeypatch.setattr(probe.shutil, "which", lambda _: str(tool))
    found = probe.refusal(1, "0-3,8")
    assert (reason in found) if reason else found == ""
    for line in t.directives(1, "0-3,8"):
        assert f"--property {line}" in log.read_text()


# --- exchange between GPUs -----------------------------------------------------------------------------------------


def chosen(preflight: ModuleType, rows: list[dict[str, Any]], name: str, *indices: int, **other: Any) -> dict[str, Any]:
    gpus, topology = recorded(preflight, name)
    row = t.exchange(instance(gpus, *indices), gpus, {**topology, **other}, rows)
    assert row
    return row


@pytest.mark.parametrize(
    ("host", "indices", "other", "row", "off"),
    [
        ("b200-8x", range(8), {}, "nvlink", False),
        ("b200-8x", (0, 1), {"iommu": "translated", "acs": ["x"]}, "nvlink", False),
        ("rtxpro6000-8x", (0, 1), {}, "pcie", False),
        ("rtxpro6000-8x", (0, 1), {"iommu": "off"}, "pcie", False),
        ("rtxpro6000-8x", (0, 1), {"iommu": "translated"}, "sm120-redirected", True),
        ("rtxpro6000-8x", (0, 1), {"acs": ["0000:15:01.0"]}, "sm120-redirected", True),
        ("rtxpro6000-8x", (0, 1), {"iommu": None}, "sm120-unknown", True),
        ("rtxpro6000-8x", (0, 1), {"virt": "vm"}, "sm120-unknown", True),
        ("rtxpro6000-8x", (0, 1), {"p2p": []}, "sm120-partial", True),
        ("rtx5090-2x", (0, 1), {}, "p2p-none", True),
        ("mixed", (0, 1), {}, "p2p-none", True),
        ("b200-8x", (0, 1), {"p2p": []}, "engine", False),
    ],
)
def test_the_row_of_a_recorded_host(
    preflight: ModuleType, rows: Any, host: str, indices: Any, other: Any, row: str, off: bool
) -> None:
    found = chosen(preflight, rows, host, *indices, **other)
    assert found["id"] == row
    assert found["env"] == (OFF if off else {})
    assert found["args"] == ({"disable-custom-all-reduce": True} if off else {})


def test_a_pair_that_does_not_reach_each_other_is_enough(preflight: ModuleType, rows: Any) -> None:
    p2p = [dict(pair) for pair in recorded(preflight, "rtxpro6000-8x")[1]["p2p"]]
    p2p[1] |= {"read": "not supported", "write": "not supported"}  # GPUs 0 and 2
    assert chosen(preflight, rows, "rtxpro6000-8x", 0, 1, 2, p2p=p2p)["id"] == "sm120-partial"
    assert chosen(preflight, rows, "rtxpro6000-8x", 0, 1, p2p=p2p)["id"] == "pcie"


def test_cards_that_hang_exchange_directly_only_where_all_is_known_to_be_well(rows: Any) -> None:
    gpus = [{"index": n, "uuid": f"GPU-{n}", "compute_cap": "12.0"} for n in (0, 1)]
    direct = []
    words = ("ok", "not supported", "unknown")
    for iommu, acs, virt, word in product(
        ("off", "passthrough", "translated", None), ([], ["x"], None), ("metal", "vm", "container"), words
    ):
        pair = {"a": 0, "b": 1, "link": "phb", "read": word, "write": word}
        topology = {"p2p": [pair], "iommu": iommu, "acs": acs, "virt": virt}
        row = t.exchange({"name": "x", "uuids": ["GPU-0", "GPU-1"], "args": {}}, gpus, topology, rows)
        assert row
        if not row["env"]:
            direct.append((iommu, acs, virt, word))
    assert direct == [(i, [], v, "ok") for i in ("off", "passthrough") for v in ("metal", "container")]


def test_one_gpu_exchanges_nothing(preflight: ModuleType, rows: Any) -> None:
    gpus, topology = recorded(preflight, "rtx5090-2x")
    assert t.exchange(instance(gpus, 1), gpus, topology, rows) is None


def test_every_row_is_taken_by_some_host_and_says_why(preflight: ModuleType, rows: Any) -> None:
    assert [row["id"] for row in rows] == [
        *("nvlink", "p2p-none", "sm120-redirected", "sm120-unknown", "sm120-partial", "pcie", "engine")
    ]
    for row in rows:
        assert set(row) == {"id", "when", "env", "args", "why", "source", "date"}
        assert row["source"].startswith("https://")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert all(isinstance(value, str) for value in row["env"].values())


def settings(
    modes: dict[str, Any], preflight: ModuleType, rows: Any, **own: Any
) -> tuple[dict[str, str], dict[str, Any]]:
    """(environment, flags) of an instance on both cards of the host that has no access between them."""
    gpus, topology = recorded(preflight, "rtx5090-2x")
    one = {"name": "pair", "gpus": [0, 1], "port": 30000, **own}
    files = deploy(modes, gpus, one, topology=topology, exchange=rows)["files"]
    env = dict(re.findall(r'^(\w+)="(.*)"$', files[f"{r.ETC}/pair.env"], re.MULTILINE))
    flags = yaml.safe_load(files[f"{r.ETC}/pair.yaml"])
    assert yaml.safe_load(files[f"{r.ETC}/pair.baseline.yaml"])["tp-size"] == 2
    return env, flags


def test_what_is_chosen_is_in_environment_and_flags_by_name(modes: Any, preflight: ModuleType, rows: Any) -> None:
    env, flags = settings(modes, preflight, rows)
    assert env["NCCL_P2P_DISABLE"] == "1"
    assert env["FLEET_NCCL"] == "p2p-none"
    assert flags["disable-custom-all-reduce"] is True
    assert flags["attention-backend"] == "triton"


def test_the_inventorys_own_wins(modes: Any, preflight: ModuleType, rows: Any) -> None:
    own = {"env": {"NCCL_P2P_DISABLE": 0, "NCCL_DEBUG": "INFO"}, "args": {"disable_custom_all_reduce": None}}
    env, flags = settings(modes, preflight, rows, **own)
    assert (env["NCCL_P2P_DISABLE"], env["NCCL_DEBUG"]) == ("0", "INFO")
    assert "disable-custom-all-reduce" not in flags


# --- order of GPUs -------------------------------------------------------------------------------------------------


def test_gpus_of_mixed_kinds_are_counted_by_their_bus_and_bound_by_uuid(modes: Any, preflight: ModuleType) -> None:
    """CUDA alone would count the fastest first, and an index would mean another card than the driver's."""
    gpus, _ = recorded(preflight, "mixed")
    assert [gpu["index"] for gpu in sorted(gpus, key=lambda gpu: gpu["pci"])] == [0, 1]
    files = deploy(modes, gpus[::-1], {"name": "second", "gpus": [1], "port": 30000})["files"]
    text = files[f"{r.ETC}/second.env"]
    assert 'CUDA_DEVICE_ORDER="PCI_BUS_ID"\n' in text
    assert f'CUDA_VISIBLE_DEVICES="{gpus[1]["uuid"]}"\n' in text


# --- preflight and units say the same --------------------------------------------------------------------------------

ASKING: tuple[dict[str, Any], ...] = (
    {"env": {"NCCL_P2P_DISABLE": 0}},
    {"args": {"disable-custom-all-reduce": False}},
    {"args": {"disable_custom_all_reduce": None}},
)


@pytest.mark.parametrize("own", [{}, *ASKING], ids=str)
@pytest.mark.parametrize("iommu", ["off", "passthrough", "translated"])
@pytest.mark.parametrize("acs", [[], ["0000:60:01.1"]], ids=["no bridge", "bridge"])
def test_preflight_refuses_what_units_would_switch_off(
    rows: Any, iommu: str, acs: list[str], own: dict[str, Any]
) -> None:
    wanted, facts = judge_kit.good()
    wanted["instances"] = [{"name": "pair", "gpus": [0, 1], "port": 30000, **own}]
    facts["kernel"] |= {"iommu": {"mode": iommu, "groups": 9, "source": "test"}, "acs": acs}
    found = {finding["id"] for finding in judge("ct200", wanted, facts)["findings"]}
    gpus = facts["gpu"]["gpus"]
    topology = {"p2p": facts["gpu"]["p2p"], "iommu": iommu, "acs": acs, "virt": "metal"}
    row = t.exchange(instance(gpus, 0, 1), gpus, topology, rows)
    assert row
    hangs = iommu == "translated" or bool(acs)
    assert (row["env"] == OFF) is hangs
    assert ("p2p-deadlock" in found) is (hangs and bool(own))
