# SPDX-License-Identifier: Apache-2.0
"""bin/preflight: what it takes from the inventory and the host, what a person reads, exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import gpu_host_judge

from fleet import declared, preflight, remote
from tests.unit.judge_kit import good

HERE = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}
CPU = {
    "fleet_engine": "sglang-0.5.11",
    "gpu_host_profile": "cpu",
    "gpu_units_defaults": {"mode": "baseline", "model_path": "/srv/none"},
    "gpu_units_instances": [{"name": "cpu0", "gpus": [], "port": 39999, "address": "127.0.0.1"}],
}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes an inventory of hosts with these variables and goes where it lies; the options to name it."""
    monkeypatch.chdir(tmp_path)

    def write(**named: dict[str, Any]) -> list[str]:
        (tmp_path / "fleet.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": named}}))
        return ["-i", "fleet.yml"]

    return write


def facts(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Every host answers with the facts of the good one."""
    told = preflight.MARK + json.dumps({**good()[1], **changed})
    monkeypatch.setattr(remote, "run_python", lambda target, text, limit, least: f"motd\n{told}\n")


GOOD = {
    **HERE,
    "fleet_engine": "sglang-0.5.11",
    "gpu_units_defaults": good()[0]["defaults"],
    "gpu_units_instances": good()[0]["instances"],
}


def test_facts_are_gathered_by_a_program_that_needs_nothing_on_the_host(hosts: Any, capsys: Any) -> None:
    assert preflight.main([*hosts(me={**HERE, **CPU}), "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    ids = [finding["id"] for finding in verdict["findings"]]
    assert "model-missing" in ids and "host.reachable" not in ids
    assert verdict["profile"] == "cpu"
    (missing,) = [finding for finding in verdict["findings"] if finding["id"] == "model-missing"]
    assert "/srv/none" in missing["observed"]
    assert "host_vars/me.yml" in missing["fix"]


def test_every_source_comes_after_those_it_imports() -> None:
    names = list(preflight.sources("gpu_host_gather"))
    assert names[-1] == "gpu_host_gather" and names.index("gpu_host_gather_base") < names.index("gpu_host_nvml")
    assert not [name for name in names if "rules" in name or "judge" in name]


def test_a_good_host_is_told_in_few_lines_with_the_next_step(
    hosts: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts(monkeypatch)
    assert preflight.main([*hosts(ct200=GOOD)]) == 0
    told, count = capsys.readouterr().out.splitlines(), len(gpu_host_judge.RULES)
    assert told == [
        f"ct200: preflight ok, profile sm120, 8 instances, {count} of {count} checks hold.",
        "GPUs: 8x RTX PRO 6000 Blackwell Server Edition",
        "Next: ansible-playbook site.yml -l ct200 -i fleet.yml",
    ]


def test_information_is_counted_and_shown_on_demand(hosts: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts(monkeypatch, kernel={**good()[1]["kernel"], "cgroup": 1})
    words = hosts(ct200=GOOD)
    assert preflight.main(words) == 0
    assert "1 more, only good to know: -v shows them." in capsys.readouterr().out
    assert preflight.main([*words, "-v"]) == 0
    assert "info [cgroup-old]" in capsys.readouterr().out


def test_a_host_that_does_not_answer_is_a_finding_beside_those_of_its_inventory(hosts: Any, capsys: Any) -> None:
    gone = {
        **CPU,
        "ansible_host": "127.0.0.1",
        "ansible_port": 1,
        "gpu_units_instances": [{"name": "cpu0", "gpus": [], "port": 80}],
    }
    words = hosts(gone=gone)
    assert preflight.main(words) == 1
    told = capsys.readouterr().out
    assert "gone: preflight found 2 problems" in told
    assert (
        "block [host.reachable] facts of 127.0.0.1: 127.0.0.1 refuses connections to port 1; expected sshd on port 1"
        in told
    )
    assert "fix: On its console as root: `systemctl enable --now ssh`" in told
    assert "host_vars/gone.yml as ansible_port: PORT" in told
    assert "block [port-bad]" in told
    assert "After the repair: bin/preflight -l gone -i fleet.yml" in told
    assert "Traceback" not in told


def test_a_fault_of_the_program_is_not_called_the_hosts(
    hosts: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "DOOR", "def main(payload):\n    raise KeyError('gpu')\n")
    assert preflight.main([*hosts(me={**HERE, **CPU})]) == 1
    told = capsys.readouterr().out
    assert "KeyError: 'gpu'" in told and "a fault of this program" in told


def test_many_hosts_are_a_table(hosts: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts(monkeypatch, shm=None)
    bad = {**GOOD, "fleet_engine": "sglang-9"}
    assert preflight.main([*hosts(ct200=GOOD, ct201=bad)]) == 1
    head, first, second, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["host", "verdict", "profile", "GPUs", "blocks", "warns", "first", "problem"]
    assert first.split()[:3] == ["ct200", "ok", "sm120"] and "0       1      shm-low: /dev/shm: missing" in first
    assert (
        second.split()[:2] == ["ct201", "BLOCKED"]
        and "1       1      engine-unknown: fleet_engine: 'sglang-9'" in second
    )
    assert last == "All of a host, with why and fix: bin/preflight -l HOST -i fleet.yml"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gpu_host_min_systemd": "new"}, "gpu_host_min_systemd"),
        ({"gpu_host_facts_file": "none.json"}, "none.json"),
    ],
)
def test_an_inventory_that_cannot_be_meant_is_misuse(hosts: Any, capsys: Any, keys: dict[str, Any], words: str) -> None:
    assert preflight.main([*hosts(ct200={**GOOD, **keys})]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "ct200" in told.err and words in told.err


def test_an_unknown_host_is_misuse(hosts: Any, capsys: Any) -> None:
    assert preflight.main([*hosts(ct200=GOOD), "-l", "ct999"]) == 2
    assert "no host matches 'ct999'" in capsys.readouterr().err


def test_recorded_facts_stand_in_and_are_told(
    hosts: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, repo: Path
) -> None:
    facts(monkeypatch)
    file = str(repo / "tests/unit/data/gpu_host/h200.json")
    one = {**GOOD, "gpu_host_facts_file": file, "gpu_units_instances": [{"name": "gpu0", "gpus": [0], "port": 30000}]}
    assert preflight.main([*hosts(ct200=one)]) == 0
    told = capsys.readouterr().out
    assert "profile sm90" in told and "GPUs: 1x H200" in told and "warn [facts-stand-in]" in told


def test_what_cannot_be_waived_is_what_the_docs_say(repo: Path) -> None:
    text = (repo / "docs/checks.md").read_text().partition("What judges the inventory cannot")[2]
    assert set(re.findall(r"`([a-z0-9-]+)`", text.partition("Every finding")[0])) == set(gpu_host_judge.NEVER_WAIVED)


@pytest.mark.parametrize("rule", gpu_host_judge.NEVER_WAIVED)
def test_what_judges_the_inventory_against_the_host_cannot_be_waived(rule: str) -> None:
    assert [one.severity for one in gpu_host_judge.RULES if one.id == rule and one.needs_host] == ["block"]
    wanted, facts = good()
    wanted |= {"waivers": {rule: "we know better"}}
    wanted["instances"][0]["gpus"] = [99]
    verdict = gpu_host_judge.judge("ct200", wanted, facts)
    told = {finding["id"]: finding["severity"] for finding in verdict["findings"]}
    assert not verdict["ok"] and told["gpu-unknown"] == told["waiver-unknown"] == "block"


def test_the_door_and_the_play_ask_the_same(repo: Path) -> None:
    """Every key that the role's task hands to the module is handed to the judge by the door."""
    (task,) = yaml.safe_load((repo / "roles/gpu_host/tasks/main.yml").read_text())
    asked, _ = preflight.wanted("ct200", {"inventory_dir": str(repo / "inventory")})
    # By the module, and by its action plugin.
    added = {"root", "key_files", "ssh", *declared.known(None, None, None, {})}
    assert set(asked) - added == set(task["gpu_host_preflight"]["wanted"])
    assert asked["where"] == "inventory/host_vars/ct200.yml"
