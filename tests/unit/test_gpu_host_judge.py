# SPDX-License-Identifier: Apache-2.0
"""Every preflight rule: it holds on a good host, fails alone on the one thing that it is about, and says what to do."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import gpu_host_rules_python as rules_python
from ansible.module_utils import gpu_host_rules_room as rules_room
from ansible.module_utils import gpu_host_rules_system as rules_system
from ansible.module_utils.gpu_host_judge import WAIVABLE, judge, lines, profile_of
from ansible.module_utils.gpu_host_rules import BLOCK, RULES, Rule, boot_with

from fleet import declared
from fleet.preflight import table_of
from tests.unit.judge_cases import (
    BROKEN,
    GONE,
    NAMED,
    NEWER,
    NVCC,
    OTHER,
    P2P_OFF,
    TRANSLATED,
    WITH,
)
from tests.unit.judge_cases_control import QUIET_CONTROL
from tests.unit.judge_cases_deployed import QUIET_DEPLOYED
from tests.unit.judge_cases_host import IN_LXC, MISMATCH, QUIET_HOST, UNSIGNED, xid
from tests.unit.judge_cases_models import QUIET_MODELS
from tests.unit.judge_cases_sizes import SIZES_RIGHT
from tests.unit.judge_kit import (
    BUSY,
    CPU,
    GDN,
    GIB,
    HYBRID,
    LISTENER,
    NO_HEADERS,
    NO_RADIX,
    Change,
    both,
    compilers,
    findings,
    first,
    good,
    gpu,
    host,
    inventory,
    kernel,
    libraries,
    limits,
    links,
    on_first,
    on_gpu,
    pair,
    target,
)

DATA = Path(__file__).parent / "data/gpu_host"


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


@pytest.mark.parametrize("known", RULES, ids=[known.id for known in RULES])
def test_every_rule_says_why_and_who_says_so(repo: Path, known: Rule) -> None:
    assert known.why.endswith(".")
    public = re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+/\S*", known.source)
    assert public or (repo / known.source).is_file(), known.source


COMMAND = re.compile(r"`[a-z][^`]*`")
EDIT = re.compile(r"(host_vars/ct200\.yml|gpu_units_defaults|under args)")


@pytest.mark.parametrize(
    ("rule", "change"), [row[:2] for row in BROKEN], ids=[f"{n}-{r[0]}" for n, r in enumerate(BROKEN)]
)
def test_every_fix_has_a_command_or_names_the_file_to_edit(rule: str, change: Change) -> None:
    for finding in findings(change):
        assert COMMAND.search(finding["fix"]) or EDIT.search(finding["fix"]), (finding["id"], finding["fix"])


# What code leaves in a text that was not finished: names of classes, values without a word, fields that were not filled.
UNFINISHED = re.compile(
    r"<class|<[\w.]+ object|_Ansible|\bNoneType\b|\bNone\b|\bTrue\b|\bFalse\b|\b(Posix)?Path\(|dict_|"
    r"\w*(Error|Exception)\(|\{\}|\{[a-z_]+(\.[a-z_]+|\[[^\]]*\])*(![rs])?\}"
)


@pytest.mark.parametrize(
    ("rule", "change"), [row[:2] for row in BROKEN], ids=[f"{n}-{r[0]}" for n, r in enumerate(BROKEN)]
)
def test_no_text_holds_what_only_code_says(rule: str, change: Change) -> None:
    for finding in findings(change):
        for key in ("thing", "observed", "expected", "fix", "why"):
            assert not UNFINISHED.search(finding[key]), (finding["id"], key, finding[key])


@pytest.mark.parametrize(
    "text", ["a <class 'int'>", "GPU None", "args: {}", "at {path}", "{gpu['uuid']}", "{x!r}", "ValueError('x')"]
)
def test_what_only_code_says_is_seen(text: str) -> None:
    assert UNFINISHED.search(text)


DEFAULT: dict[str, dict[str, Any]] = {
    "mode-unknown": {"mode": "dtree"},
    "budget-bad": {"budget": 0},
    "flag-unknown": {"args": {"contxt-length": 8192}},
    "address-bad": {"address": "127.0.0.1:30000"},
    "gpus-bad": {"gpus": []},
}


@pytest.mark.parametrize("rule", DEFAULT)
def test_one_wrong_default_is_one_finding(rule: str) -> None:
    def change(wanted: dict[str, Any], facts: dict[str, Any]) -> None:
        wanted["defaults"].update(DEFAULT[rule])
        for one in wanted["instances"] if "gpus" in DEFAULT[rule] else []:
            del one["gpus"]
        facts["bind"]["127.0.0.1:30000"] = "Name or service not known"

    (found,) = findings(change)
    assert (found["id"], found["thing"]) == (rule, "instance gpu0 and 7 more")
    assert found["also"] == [f"instance gpu{n}" for n in range(1, 8)]
    wanted, facts = good()
    change(wanted, facts)
    wanted["flags"] = declared.flags(wanted["engine"], wanted["instances"], wanted["defaults"])
    verdict = judge("ct200", wanted, facts)
    told, row = lines(verdict), table_of([{**verdict, "gpus": []}], [])[-2].split()
    assert len(told) == 4
    assert "found 1 problem," in told[0]
    assert row[1:6] == ["BLOCKED", "sm120", "-", "1", "0"]


def test_the_fix_of_a_shared_fault_is_for_all_of_them() -> None:
    (same,) = findings(both(first(mode="dtree"), lambda wanted, _: wanted["instances"][3].update(mode="dtree")))
    assert same["fix"].endswith("The same for gpu3.")
    (each,) = findings(both(first(gpus=[]), lambda wanted, _: wanted["instances"][3].update(gpus=[])))
    at = "for it in host_vars/ct200.yml (beside the inventory in use)."
    assert each["fix"] == f"gpu0: Write gpus: [0] {at} gpu3: Write gpus: [3] {at}"


def test_other_values_and_one_alone_are_not_joined() -> None:
    apart = findings(both(first(mode="dtree"), lambda wanted, _: wanted["instances"][3].update(mode="tree")))
    assert [one["thing"] for one in apart] == ["instance gpu0", "instance gpu3"]
    assert not any("also" in one for one in apart)


def test_a_gpu_that_is_not_there_cannot_be_waived() -> None:
    wanted, facts = good()
    wanted |= {"waivers": {"gpu-unknown": "no"}}
    wanted["instances"][0]["gpus"] = [8]
    verdict = judge("ct200", wanted, facts)
    assert not verdict["ok"]
    assert {"gpu-unknown", "waiver-unknown"} <= {one["id"] for one in verdict["findings"]}


FP8 = inventory(defaults={**good()[0]["defaults"], "args": {"quantization": "fp8"}})
QUIET: dict[str, Change] = {
    **QUIET_CONTROL,
    **QUIET_MODELS,
    **QUIET_HOST,
    **QUIET_DEPLOYED,
    **SIZES_RIGHT,
    "a link that rests at idle": on_first(pcie={**gpu(0)["pcie"], "gen": 1, "width": 16}),
    "an unknown link": on_first(pcie=dict.fromkeys(gpu(0)["pcie"])),
    "a GPU that says nothing of its health": on_first(ecc={}, remapped=None, throttle=[], mig=None, persistence=None),
    "a GPU's error when no instance uses it": both(pair(), on_gpu(xids=[xid(95, gpu(7)["pci"])])),
    "another GPU that this container may not touch": both(
        on_gpu(nvml={"version": "580", "error": "device 3: Insufficient Permissions"}), IN_LXC
    ),
    "an unreadable kernel log": on_gpu(xids=None),
    "IOMMU and one GPU each": TRANSLATED,
    "IOMMU and NVLink": both(pair(), TRANSLATED, links(link="nvlink", nvlink="ok")),
    "IOMMU and P2P kept off": both(pair(args=P2P_OFF["args"], env=P2P_OFF["env"]), TRANSLATED),
    "P2P kept off where there is none": both(pair(**P2P_OFF), links(read="not supported", write="not supported")),
    "bridges that redirect, but no exchange": kernel(acs=["0000:60:01.1"]),
    "all GPUs of two nodes": pair(*range(8)),
    "a small window and one GPU each": on_first(bar1_total_mib=256),
    "limits of process 1 outside of containers": limits(pid1_nofile=1024, pid1_memlock=65536),
    "what the build installs": libraries(libnuma=None, libstdcxx=None),
    "a large model that is quantized at loading": both(target(weights=150 * GIB), FP8),
    "float32 files of twice the size": target(weights=150 * GIB, dtype="float32"),
    "nvcc of another version, the right one named": both(host(nvcc=NVCC | NEWER | {"candidates": [OTHER]}), NAMED),
    "huge pages that are used": kernel(hugepages={"total": 60000, "free": 0, "size": 2 << 20, "thp": "always"}),
    "facts of an older recording": lambda _, facts: [facts.pop(key) for key in NEW_FACTS] and None,
}
NEW_FACTS = ("kernel", "numa", "limits", "clock", "libraries", "secure_boot", "mounts")


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_fault_is_not_found(name: str) -> None:
    # What nobody could look at, and a container, may be told; that is no fault.
    assert {finding["id"] for finding in findings(QUIET[name])} <= {"nvml-missing", "host-guest"}


def test_what_explains_a_missing_gpu_is_told_alone() -> None:
    for change in (MISMATCH, UNSIGNED):
        assert "gpu-none" not in {finding["id"] for finding in findings(change)}


def test_information_is_kept_for_those_who_ask() -> None:
    verdict = judge("ct200", *_with(kernel(cgroup=1), host(shm=None)))
    assert [finding["id"] for finding in verdict["findings"]] == ["shm-low", "cgroup-old"]
    assert "[cgroup-old]" not in "\n".join(lines(verdict))
    assert "info [cgroup-old]" in "\n".join(lines(verdict, info=True))


def test_a_file_and_an_inventory_that_are_known_are_named() -> None:
    wanted, facts = _with(inventory(where="fleet/host_vars/ct200.yml"), first(port=80))
    assert "in fleet/host_vars/ct200.yml" in judge("ct200", wanted, facts)["findings"][0]["fix"]


def _with(*changes: Change) -> tuple[dict[str, Any], dict[str, Any]]:
    wanted, facts = copy.deepcopy(good())
    both(*changes)(wanted, facts)
    return wanted, facts


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
    fetched = {"path": None, "installed": False}
    assert findings(both(compilers(gcc=fetched, cxx=fetched), NO_HEADERS)) == []


def test_compilers_that_nothing_calls_are_no_finding() -> None:
    gone = compilers(gcc=GONE, cxx=GONE)
    env = {"CC": "/opt/gcc/bin/gcc", "CXX": "/opt/gcc/bin/g++"}
    assert findings(both(gone, lambda wanted, _: wanted["defaults"].update(env=env))) == []
    assert "compiler-missing" not in {one["id"] for one in findings(both(CPU, compilers(cxx=GONE)))}
    # The stub is built with a release, and there is one.
    assert "compiler-missing" not in {one["id"] for one in findings(both(CPU, gone, host(current="abc")))}


def test_parallel_sizes_that_fit() -> None:
    wanted, facts = good()
    wanted["defaults"]["mode"] = "baseline"  # drafts take neither pp-size nor data-parallel attention
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
    (found,) = findings(change)
    assert found["thing"] == "instance gpu0 and 7 more"


@pytest.mark.parametrize(
    ("capability", "profile"),
    [("9.0", "sm90"), ("10.0", "sm100"), ("10.3", "sm100"), ("12.0", "sm120"), ("12.1", "sm120"), ("8.9", None)],
)
def test_profile_from_compute_capability(capability: str, profile: str | None) -> None:
    wanted, facts = good()
    facts["gpu"]["gpus"] = [gpu(n, compute_cap=capability) for n in range(8)]
    assert profile_of(wanted, facts) == profile


RECORDINGS = sorted(path.stem for path in DATA.glob("*.json"))


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_recorded_machine_is_not_refused(recording: str) -> None:
    """Real machines, and those built from public output, serve one engine on each GPU of their first kind."""
    wanted, facts = good()
    facts.update(json.loads((DATA / f"{recording}.json").read_text()))
    gpus = facts["gpu"]["gpus"]
    kind = [gpu["index"] for gpu in gpus if gpu["compute_cap"] == gpus[0]["compute_cap"]]
    wanted["instances"] = [{"name": f"gpu{n}", "gpus": [n], "port": 30000 + n} for n in kind]
    verdict = judge("ct200", wanted, facts)
    told = {finding["id"] for finding in verdict["findings"] if finding["severity"] != "info"}
    assert told - WARNED.get(recording, set()) == {"facts-stand-in"}, lines(verdict)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_one_engine_on_all_gpus_of_a_recorded_machine_is_not_refused(recording: str) -> None:
    wanted, facts = good()
    facts.update(json.loads((DATA / f"{recording}.json").read_text()))
    gpus = facts["gpu"]["gpus"]
    kind = [gpu["index"] for gpu in gpus if gpu["compute_cap"] == gpus[0]["compute_cap"]]
    wanted["instances"] = [{"name": "all", "gpus": kind, "port": 30000, "args": {"tp-size": len(kind)}}]
    told = {finding["id"] for finding in judge("ct200", wanted, facts)["findings"] if finding["severity"] != "info"}
    assert told - WARNED.get(recording, set()) == {"facts-stand-in"}


# What is wrong with a recorded machine, or was when it was recorded.
WARNED = {"h200-busy": {"gpu-busy"}}


def test_a_recorded_h200_is_sm90_and_a_busy_one_is_told() -> None:
    for recording, blocks in (("h200", []), ("h200-busy", ["gpu-busy"])):
        wanted, facts = good()
        facts.update(json.loads((DATA / f"{recording}.json").read_text()))
        wanted["instances"] = [{"name": "gpu0", "gpus": [0], "port": 30000}]
        verdict = judge("ct200", wanted, facts)
        assert verdict["profile"] == "sm90"
        assert [finding["id"] for finding in verdict["findings"] if finding["severity"] == BLOCK] == blocks


def test_an_engine_of_ours_that_serves_is_no_stranger_and_any_other_is() -> None:
    """What holds the GPU is known by its unit; the swap stops those of ours that are no longer wanted."""
    for unit, blocks in (("sglang@gpu0.service", []), ("vllm.service", ["gpu-busy"])):
        wanted, facts = good()
        facts.update(json.loads((DATA / "h200-serving.json").read_text()))
        facts["gpu"]["processes"][0]["unit"] = unit
        wanted["instances"] = [{"name": "gpu0", "gpus": [0], "port": 30000}]
        verdict = judge("ct200", wanted, facts)
        assert [finding["id"] for finding in verdict["findings"] if finding["severity"] == BLOCK] == blocks


def blanks(facts: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where facts may be unknown: the values of maps that are no list or map, of lists those of the first entry."""
    entries = facts.items() if isinstance(facts, dict) else enumerate(facts[:1]) if isinstance(facts, list) else ()
    for key, value in entries:
        if isinstance(value, (dict, list)):
            yield from blanks(value, (*at, key))
        elif isinstance(facts, dict) and key not in KNOWN:
            yield (*at, key)


# What is there wherever its map is, by how it is gathered.
KNOWN = {"index", "pci", "uuid", "a", "b", "read", "write", "gpu_uuid", "xid", "free", "total", "path", "fix"}
TOPICS = (
    "gpu",
    "nvcc",
    "kernel",
    "numa",
    "limits",
    "clock",
    "libraries",
    "secure_boot",
    "systemd",
    "shm",
    "mounts",
    "ports",
)


@pytest.mark.parametrize("recording", ["b200-8x", "rtx5090-2x", "h200"])
def test_one_unknown_fact_neither_crashes_the_judge_nor_stands_as_none_in_a_message(recording: str) -> None:
    wanted, own = good()
    own["gpu"].update(processes=[{**BUSY, "user": "ann", "orphan": False}], xids=[xid(119)])
    own["gpu"]["gpus"][0].update(recovery="reset", mig=True, throttle=["hw_thermal"], memory_used_mib=9000)
    for facts in (own, {**good()[1], **json.loads((DATA / f"{recording}.json").read_text())}):
        kind = [gpu["index"] for gpu in facts["gpu"]["gpus"]]
        wanted["instances"] = [{"name": "all", "gpus": kind, "port": 30000, "args": {"tp-size": len(kind)}}]
        for path in blanks({topic: facts[topic] for topic in TOPICS}):
            unknown = copy.deepcopy(facts)
            place = unknown
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = None
            for finding in judge("ct200", wanted, unknown)["findings"]:
                told = " ".join(str(finding[key]) for key in ("thing", "observed", "expected", "fix"))
                assert not re.search(r"\bNone\b", told), (path, told)


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


def test_pythons_and_the_size_of_a_release_are_those_of_the_locks(repo: Path) -> None:
    for path in repo.glob("engines/*/engine.yml"):
        engine = yaml.safe_load(path.read_text())
        assert set(rules_python.LOCK_PYTHONS) == set(engine["lock"]["python"])
        assert rules_room.SIZE.startswith(f"{engine['unpacked']['bytes'] / 1e9:.1f} GB ")
    assert set(rules_python.SOURCES) == set(rules_python.LOCK_PYTHONS)
    assert set(rules_python.SYSTEM_PYTHON.values()) <= set(rules_python.LOCK_PYTHONS)


def test_a_boot_parameter_gets_where_grub_looks(tmp_path: Path) -> None:
    grub = tmp_path / "grub"
    grub.write_text('GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX="a=b"\n')
    edit = boot_with("iommu=pt").strip("`").split(" && ")[0].replace("/etc/default/grub", str(grub))
    subprocess.run(["sh", "-c", edit], check=True)
    assert grub.read_text().splitlines()[1:] == [
        'GRUB_CMDLINE_LINUX_DEFAULT="quiet"',
        'GRUB_CMDLINE_LINUX="iommu=pt a=b"',
    ]


def test_glibc_is_what_the_locks_need(repo: Path) -> None:
    """files.json of every engine names the newest glibc that one of its wheels asks for."""
    needed = [json.loads(path.read_text())["glibc"] for path in repo.glob("engines/*/files.json")]
    assert max(needed, key=lambda text: [int(part) for part in text.split(".")]) == rules_system.MIN_GLIBC
