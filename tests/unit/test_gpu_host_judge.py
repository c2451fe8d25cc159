# SPDX-License-Identifier: Apache-2.0
"""Every preflight rule: it holds on a good host, fails alone on the one thing that it is about, and says what to do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_host_rules_system as rules_system
from ansible.module_utils.gpu_host_judge import WAIVABLE, judge, lines, profile_of
from ansible.module_utils.gpu_host_rules import BLOCK, RULES

GIB = 1 << 30
DATA = Path(__file__).parent / "data/gpu_host"
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
}
DRAFTER = {**TARGET, "architectures": ["DFlashDraftModel"], "num_layers": 2, "block_size": 16, "num_target_layers": 4}


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
        **other,
    }


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
    }
    facts = {
        "gpu": {
            "nvidia_smi": "/usr/bin/nvidia-smi",
            "error": None,
            "driver": "580.95.05",
            "cuda_driver": "13.0",
            "gpus": [gpu(n) for n in range(8)],
            "processes": [],
        },
        "nvcc": {"path": "/usr/local/cuda/bin/nvcc", "version": "13.0"},
        "compiler": {"path": "/usr/bin/cc", "version": "cc 13"},
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
        "systemd": {"version": 255, "running": True},
        "disk": {"path": "/opt", "free": 200 * GIB, "total": 900 * GIB},
        "current": None,
        "shm": {"free": 60 * GIB, "total": 60 * GIB},
        "ports": [{"address": "0.0.0.0", "port": 22, "pid": 1, "process": "sshd", "unit": "ssh.service"}],
        "bind": {"127.0.0.1": None},
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
GDN = target(hybrid=True, model_type="qwen3_next")
HYBRID = target(hybrid=True, model_type="nemotron_h")
NO_RADIX = {"disable-radix-cache": True}
UNSAFE = {"speculative-ddtree-allow-hybrid-unsafe": True}

# rule, what is done to the good host, words that the message has to hold
BROKEN: list[tuple[str, Change, list[str]]] = [
    ("engine-unknown", inventory(engine="sglang-9"), ["sglang-9", "sglang-0.5.11"]),
    ("engine-unknown", inventory(engine=None), ["nothing"]),
    ("profile-unknown", both(inventory(profile="sm999")), ["sm999", "auto, sm90"]),
    ("defaults-malformed", inventory(defaults={"modus": "x", **good()[0]["defaults"]}), ["modus"]),
    ("instances-malformed", inventory(instances=[]), ["no instance", "{name: gpu0, gpus: [0], port: 30000}"]),
    ("instances-malformed", inventory(instances=None), ["no instance"]),
    ("instances-malformed", inventory(instances="gpu0"), ["str"]),
    ("instances-malformed", lambda wanted, _: wanted["instances"].append("gpu8"), ["entry 9", "'gpu8'"]),
    ("instance-key-unknown", first(prot=30000), ["gpu0", "'prot'"]),
    ("instance-name", first(name="GPU 0"), ["'GPU 0'"]),
    ("instance-name", first(name=None), ["nothing"]),
    ("instance-name", first(name="../etc"), ["'../etc'"]),
    ("instance-name", first(name="gpu0\n"), ["gpu0"]),
    ("instance-name-twice", first(name="gpu1"), ["gpu1", "2 instances"]),
    ("mode-unknown", first(mode="dtree"), ["gpu0", "'dtree'", "baseline, dflash, ddtree-shadow, ddtree"]),
    ("port-bad", first(port=80), ["80", "1024"]),
    ("port-bad", first(port="30000"), ["'30000'"]),
    ("port-bad", first(port=60000), ["60000", "55535"]),
    ("port-bad", first(port=None), ["nothing", "port: 30000"]),
    ("port-twice", first(port=30001), ["gpu0", "gpu1", "30001"]),
    ("gpus-bad", first(gpus=[]), ["gpu0", "[0]"]),
    ("gpus-bad", first(gpus="0"), ["'0'"]),
    ("gpus-bad", first(gpus=[True]), ["True"]),
    ("gpus-bad", both(CPU, first(gpus=[0])), ["[0]", "cpu"]),
    ("gpu-twice", first(gpus=[1]), ["gpu0", "gpu1", "GPU 1"]),
    ("gpu-twice", first(gpus=[0, 0]), ["gpu0", "2 times"]),
    ("gpu-twice", first(gpus=[gpu(3)["uuid"]]), ["gpu0", "gpu3", gpu(3)["uuid"]]),
    ("address-bad", first(address="1.2.3"), ["'1.2.3'"]),
    ("address-bad", first(address=17), ["17"]),
    ("address-bad", first(address="a b"), ["'a b'"]),
    ("address-open", first(address="0.0.0.0"), ["0.0.0.0", "gpu_host_allow_any_address"]),
    ("address-open", first(address="::"), ["::"]),
    ("budget-bad", first(budget=0), ["gpu0", "budget 0", "1 or more"]),
    ("budget-bad", first(budget="15"), ["'15'"]),
    ("topk-bad", first(topk=0), ["topk 0"]),
    ("spine-bad", first(spine=16), ["16", "15"]),
    ("spine-bad", first(spine=-1), ["-1"]),
    ("page-size", first(args={"page_size": 16}), ["page-size 16", "ddtree"]),
    ("page-size", first(args={"--page-size": "64"}, mode="ddtree-shadow"), ["64"]),
    ("backend-auto", first(args={"attention_backend": "auto"}), ["attention-backend"]),
    ("args-malformed", first(args=["--x"]), ["args is"]),
    ("args-malformed", first(args={"chat template": "x"}), ["chat template"]),
    ("args-malformed", first(args={"chat-template": {"a": 1}}), ["chat-template"]),
    ("args-malformed", first(env={"A-B": "x"}), ["A-B"]),
    ("args-malformed", first(env={"AB": "x\ny"}), ["AB"]),
    ("args-owned", first(args={"port": 1}), ["port under args"]),
    ("args-owned", first(args={"speculative_algorithm": "EAGLE"}), ["speculative-algorithm", "mode"]),
    ("args-owned", first(env={"CUDA_VISIBLE_DEVICES": "1"}), ["CUDA_VISIBLE_DEVICES", "gpus"]),
    ("secret-in-args", first(args={"api_key": "hush"}), ["api-key"]),
    ("secret-in-env", first(env={"HF_TOKEN": "hush"}), ["HF_TOKEN"]),
    ("model-path-bad", first(model_path="org/model"), ["model_path", "absolute"]),
    ("model-path-bad", first(draft_model_path=None), ["draft_model_path nothing"]),
    ("path-hidden", first(model_path="/home/ann/target"), ["/home/ann/target", "/srv/models"]),
    ("path-hidden", first(draft_model_path="/tmp/drafter"), ["/tmp/drafter"]),
    ("parallel-size", first(args={"tp_size": 2}), ["tp-size 2", "1 GPUs"]),
    ("parallel-size", first(args={"tensor-parallel-size": "two"}), ["two"]),
    ("waiver-unknown", inventory(waivers={"port-twice": "no"}), ["port-twice"]),
    ("waiver-unknown", inventory(waivers={"nvcc-old": ""}), ["nvcc-old without a reason"]),
    ("gpu-none", on_gpu(nvidia_smi=None, gpus=[]), ["host_vars/ct200.yml", "gpu_host_profile: cpu", "no nvidia-smi"]),
    ("gpu-none", on_gpu(gpus=[], error="couldn't communicate"), ["couldn't communicate"]),
    ("gpu-none", on_gpu(gpus=[]), ["lists no GPU"]),
    ("gpu-capability", on_gpu(gpus=[gpu(n, compute_cap="8.6") for n in range(8)]), ["8.6", "12.0"]),
    (
        "gpu-mixed",
        on_gpu(gpus=[gpu(n) for n in range(7)] + [gpu(7, compute_cap="9.0", name="NVIDIA H200")]),
        ["sm90", "sm120", "7 (NVIDIA H200)"],
    ),
    ("profile-mismatch", inventory(profile="sm90"), ["sm90", "sm120"]),
    ("gpu-unknown", first(gpus=[8]), ["GPU 8", UUID0]),
    ("gpu-unknown", first(gpus=["GPU-x"]), ["GPU-x"]),
    ("driver-old", on_gpu(driver="575.57.08"), ["575.57.08", "580"]),
    ("driver-old", on_gpu(cuda_driver="12.9"), ["12.9", "13.0"]),
    ("gpu-busy", on_gpu(processes=[BUSY]), ["GPU 0", "78", "train", "kill 78"]),
    ("gpu-busy", on_gpu(processes=[{**BUSY, "unit": "train.service"}]), ["systemctl stop train.service"]),
    ("gpu-memory-held", on_gpu(gpus=[gpu(0, memory_used_mib=5000)] + [gpu(n) for n in range(1, 8)]), ["5000 MiB"]),
    ("nvcc-missing", host(nvcc=None), ["nvcc"]),
    ("nvcc-old", host(nvcc={"path": "/usr/bin/nvcc", "version": "12.4"}), ["12.4", "/usr/bin/nvcc", "12.9"]),
    ("arch-unsupported", host(platform={**good()[1]["platform"], "arch": "riscv64"}), ["riscv64"]),
    ("glibc-old", host(platform={**good()[1]["platform"], "glibc": "2.33"}), ["2.33", "2.34"]),
    ("glibc-old", host(platform={**good()[1]["platform"], "glibc": None}), ["not glibc"]),
    ("systemd", host(systemd={"version": 247, "running": True}), ["247", "249"]),
    ("systemd", host(systemd={"version": 255, "running": False}), ["does not run"]),
    ("python-missing", host(pythons=[]), ["not found", "3.12 or 3.11"]),
    ("compiler-missing", both(host(compiler=None), NO_APT), ["gcc"]),
    ("python-headers-missing", both(NO_HEADERS, NO_APT), ["python3.12-dev"]),
    ("python-headers-missing", host(pythons=[{**PYTHON, "headers": False, "system": False}]), ["/usr/bin/python3.12"]),
    ("disk-low", host(disk={"path": "/opt", "free": 3 * GIB, "total": 9 * GIB}), ["/opt", "3.0 GiB", "12 GiB"]),
    ("disk-low-for-upgrade", host(current="abc", disk={"path": "/opt", "free": GIB, "total": GIB}), ["1.0 GiB"]),
    ("shm-low", host(shm={"free": 1, "total": GIB // 16}), ["0.06 GiB", "remount"]),
    ("shm-low", host(shm=None), ["missing"]),
    ("port-busy", host(ports=[LISTENER]), ["gpu0", "30000", "process 77 (python)", "other.service"]),
    ("port-busy", host(ports=[{**LISTENER, "address": "0.0.0.0", "pid": None, "unit": None}]), ["not visible"]),
    ("address-foreign", both(first(address="192.0.2.9"), host(bind={"192.0.2.9": "Cannot assign"})), ["192.0.2.9"]),
    ("model-missing", target(exists=False), ["/srv/target", "no such folder"]),
    ("model-missing", target(missing=["config.json"]), ["config.json"]),
    ("model-missing", target(missing=["model-00002-of-00002.safetensors"]), ["model-00002-of-00002"]),
    ("model-missing", target(error="config.json: broken"), ["broken"]),
    ("drafter-missing", drafter(exists=False), ["/srv/drafter", "draft_model_path"]),
    ("drafter-kind", drafter(architectures=["Qwen3ForCausalLM"]), ["Qwen3ForCausalLM", "DFlashDraftModel"]),
    ("drafter-foreign", drafter(vocab_size=7), ["vocabulary 7", "1024"]),
    ("drafter-foreign", drafter(num_target_layers=36), ["36", "4"]),
    ("hybrid-radix", GDN, ["mode ddtree", "disable-radix-cache", "extra_buffer"]),
    ("hybrid-tree", HYBRID, ["nemotron_h", "mode: dflash", "speculative-ddtree-allow-hybrid-unsafe"]),
    ("hybrid-unsafe", both(HYBRID, inventory(defaults={**good()[0]["defaults"], "args": UNSAFE})), ["research"]),
    ("facts-stand-in", host(recorded={"machine": "an H200", "date": "2026-11-29"}), ["an H200"]),
    ("cpu-profile", CPU, ["cpu"]),
]
# Findings that come along with another one and are told apart from it.
WITH = {
    "gpus-bad": {"cpu-profile", "gpu-twice"},
    "gpu-twice": set(),
    "profile-unknown": set(),
    "instances-malformed": set(),
}


def findings(change: Change) -> list[dict[str, Any]]:
    wanted, facts = copy.deepcopy(good())
    change(wanted, facts)
    return judge("ct200", wanted, facts)["findings"]


def test_a_good_host_passes_every_rule() -> None:
    wanted, facts = good()
    verdict = judge("ct200", wanted, facts)
    assert verdict["findings"] == []
    assert verdict["ok"]
    assert verdict["profile"] == "sm120"
    assert sorted(verdict["passed"]) == sorted(known.id for known in RULES)


@pytest.mark.parametrize(("rule", "change", "words"), BROKEN, ids=[f"{n}-{row[0]}" for n, row in enumerate(BROKEN)])
def test_one_fault_gives_one_finding(rule: str, change: Change, words: list[str]) -> None:
    found = findings(change)
    mine = [finding for finding in found if finding["id"] == rule]
    assert mine, found
    assert {finding["id"] for finding in found} <= {rule} | WITH.get(rule, set())
    told = " ".join(str(value) for value in mine[0].values())
    for word in words:
        assert word in told
    assert all(mine[0][key].strip() for key in ("thing", "observed", "expected", "why", "fix"))
    assert "hush" not in json.dumps(found)


def test_every_rule_has_its_case() -> None:
    assert {row[0] for row in BROKEN} == {known.id for known in RULES}


def test_all_faults_are_told_at_once_and_blocks_come_first() -> None:
    wanted, facts = good()
    both(first(mode="x", port=30001), on_gpu(driver="535.1"), host(shm=None))(wanted, facts)
    verdict = judge("ct200", wanted, facts)
    assert not verdict["ok"]
    assert {finding["id"] for finding in verdict["findings"]} == {
        "mode-unknown",
        "port-twice",
        "driver-old",
        "shm-low",
    }
    severities = [finding["severity"] for finding in verdict["findings"]]
    assert severities == sorted(severities, key=["block", "warn", "info"].index)
    report = lines(verdict)
    assert report[0].startswith("ct200: preflight found 3 problems")
    assert report[0].endswith("Nothing was changed.")


def test_the_inventory_is_judged_without_a_host() -> None:
    wanted, _ = good()
    assert judge("ct200", wanted)["ok"]
    first(budget=0)(wanted, {})
    assert [finding["id"] for finding in judge("ct200", wanted)["findings"]] == ["budget-bad"]


def test_a_waiver_lets_a_host_finding_pass_and_is_shown() -> None:
    wanted, facts = good()
    both(host(nvcc={"path": "/n", "version": "11.0"}), inventory(waivers={"nvcc-old": "no JIT here"}))(wanted, facts)
    verdict = judge("ct200", wanted, facts)
    assert verdict["ok"]
    assert verdict["findings"][0]["severity"] == "warn"
    assert "    waived: no JIT here" in lines(verdict)
    inventory_rules = {known.id for known in RULES if not known.needs_host and known.severity == BLOCK}
    assert inventory_rules.isdisjoint(WAIVABLE)


def test_our_own_unit_may_hold_its_gpu_and_port() -> None:
    wanted, facts = good()
    unit = "sglang@gpu0.service"
    both(host(ports=[{**LISTENER, "unit": unit}]), on_gpu(processes=[{**BUSY, "unit": unit}]))(wanted, facts)
    assert judge("ct200", wanted, facts)["findings"] == []


def test_the_same_port_on_another_address_is_free() -> None:
    wanted, facts = good()
    host(ports=[{**LISTENER, "address": "192.0.2.200"}])(wanted, facts)
    assert judge("ct200", wanted, facts)["ok"]


@pytest.mark.parametrize("mode", ["dflash", "ddtree-shadow", "ddtree"])
@pytest.mark.parametrize("args", [NO_RADIX, {"mamba-scheduler-strategy": "extra_buffer"}])
def test_gated_delta_nets_draft_in_every_mode(mode: str, args: dict[str, Any]) -> None:
    assert findings(both(GDN, lambda wanted, _: wanted["defaults"].update(mode=mode, args=args))) == []


@pytest.mark.parametrize("mode", ["dflash", "ddtree-shadow"])
def test_the_radix_cache_of_a_hybrid_target_is_asked_for_in_every_drafting_mode(mode: str) -> None:
    found = findings(both(GDN, lambda wanted, _: wanted["defaults"].update(mode=mode)))
    assert {finding["id"] for finding in found} == {"hybrid-radix"}


@pytest.mark.parametrize("mode", ["baseline", "dflash"])
def test_modes_without_a_tree_take_any_page_size_and_hybrid_targets(mode: str) -> None:
    assert findings(both(lambda wanted, _: wanted["defaults"].update(mode=mode, args={"page-size": 16}), HYBRID)) == []


def test_what_the_build_installs_is_no_finding() -> None:
    assert findings(both(host(compiler=None), NO_HEADERS)) == []


def test_parallel_sizes_that_fit() -> None:
    wanted, facts = good()
    wanted["instances"] = [
        {"name": "all", "gpus": list(range(8)), "port": 30000, "args": {"tp": 8, "tp-size": 4, "pp-size": 2}}
    ]
    assert judge("ct200", wanted, facts)["ok"]
    wanted["instances"][0]["args"] = {"tp-size": 8, "dp-size": 2, "enable-dp-attention": True}
    assert judge("ct200", wanted, facts)["ok"]


def test_baseline_needs_no_drafter() -> None:
    wanted, facts = good()
    wanted["defaults"] = {"mode": "baseline", "model_path": "/srv/target"}
    assert judge("ct200", wanted, facts)["ok"]


def test_a_gpu_that_no_instance_uses_is_no_concern() -> None:
    wanted, facts = good()
    wanted["instances"].pop()
    facts["gpu"]["gpus"][7].update(compute_cap="8.6")
    assert judge("ct200", wanted, facts)["ok"]


def test_args_and_env_of_an_instance_join_the_defaults() -> None:
    change = both(
        lambda wanted, _: wanted["defaults"].update(args={"page-size": 16}),
        first(args={"context-length": 4096}),
    )
    assert "instance gpu0" in {finding["thing"] for finding in findings(change)}


@pytest.mark.parametrize(
    ("capability", "profile"),
    [("9.0", "sm90"), ("10.0", "sm100"), ("10.3", "sm100"), ("12.0", "sm120"), ("12.1", "sm120"), ("8.9", None)],
)
def test_profile_from_compute_capability(capability: str, profile: str | None) -> None:
    wanted, facts = good()
    facts["gpu"]["gpus"] = [gpu(n, compute_cap=capability) for n in range(8)]
    assert profile_of(wanted, facts) == profile


@pytest.mark.parametrize(("recording", "expected"), [("h200", []), ("h200-busy", ["gpu-busy"])])
def test_facts_recorded_on_a_real_h200(recording: str, expected: list[str]) -> None:
    wanted, facts = good()
    facts.update(json.loads((DATA / f"{recording}.json").read_text()))
    wanted["instances"] = [{"name": "gpu0", "gpus": [0], "port": 30000}]
    verdict = judge("ct200", wanted, facts)
    assert verdict["profile"] == "sm90"
    assert [finding["id"] for finding in verdict["findings"]] == [*expected, "facts-stand-in"]


def test_junk_in_the_inventory_never_crashes_the_judge() -> None:
    junk = [None, True, 0, -1, 3.5, "", "x", [], [None], [[]], {}, {"x": None}]
    for value in junk:
        for key in ("engine", "profile", "defaults", "instances"):
            wanted, facts = good()
            wanted[key] = value
            judge("ct200", wanted, facts)
        for key in (
            "name",
            "gpus",
            "port",
            "mode",
            "model_path",
            "draft_model_path",
            "address",
            "budget",
            "args",
            "env",
        ):
            wanted, facts = good()
            wanted["instances"][0][key] = value
            verdict = judge("ct200", wanted, facts)
            assert judge("ct200", wanted)["ok"] or not verdict["ok"]


def test_glibc_is_what_the_locks_need(repo: Path) -> None:
    """files.json of every engine names the newest glibc that one of its wheels asks for."""
    needed = [json.loads(path.read_text())["glibc"] for path in repo.glob("engines/*/files.json")]
    assert max(needed, key=lambda text: [int(part) for part in text.split(".")]) == rules_system.MIN_GLIBC
