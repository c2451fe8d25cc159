# SPDX-License-Identifier: Apache-2.0
"""The inventory that ships: ct200 is right by the toolkit's own rules, and lab hosts get their variables from either side."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.gpu_host_judge import judge

DOCUMENTATION = [ipaddress.ip_network(net) for net in ("192.0.2.0/24", "2001:db8::/32")]


def read(repo: Path, *sources: str) -> dict[str, Any]:
    """hostvars of an inventory as Ansible sees them."""
    words = [word for source in sources for word in ("-i", source)]
    command = [str(Path(sys.executable).parent / "ansible-inventory"), *words, "--list"]
    done = subprocess.run(
        command, cwd=repo, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    hostvars: dict[str, Any] = json.loads(done.stdout)["_meta"]["hostvars"]
    return hostvars


def wanted(variables: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": variables["fleet_engine"],
        "engines": ["sglang-0.5.11"],
        "profile": variables["gpu_host_profile"],
        "defaults": variables["gpu_units_defaults"],
        "instances": variables["gpu_units_instances"],
    }


def test_ct200_is_eight_gpus_and_passes_the_inventory_rules(repo: Path) -> None:
    hosts = read(repo, "inventory/hosts.yml")
    assert list(hosts) == ["ct200"]
    instances = hosts["ct200"]["gpu_units_instances"]
    assert [instance["gpus"] for instance in instances] == [[n] for n in range(8)]
    verdict = judge("ct200", wanted(hosts["ct200"]))
    assert verdict["ok"], verdict["findings"]


def test_addresses_are_documentation_addresses(repo: Path) -> None:
    address = ipaddress.ip_address(read(repo, "inventory/hosts.yml")["ct200"]["ansible_host"])
    assert any(address in net for net in DOCUMENTATION if net.version == address.version)


def lab(repo: Path) -> Path:
    """An inventory as bin/lab writes it, beside nothing else: a link to the repository's group_vars."""
    folder = repo / "inventory/lab/.unit-test"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts.yml").write_text("lab:\n  hosts:\n    x-h1:\n      ansible_host: 192.0.2.7\n")
    link = folder / "group_vars"
    if not link.is_symlink():
        link.symlink_to("../../group_vars")
    return folder


def test_lab_hosts_get_their_variables_with_and_without_the_default_inventory(repo: Path) -> None:
    folder = lab(repo)
    try:
        own = str(folder / "hosts.yml")
        for sources in ((own,), ("inventory/hosts.yml", own)):
            found = read(repo, *sources)["x-h1"]
            assert found["gpu_host_profile"] == "cpu"
            verdict = judge("x-h1", wanted(found))
            assert verdict["ok"], verdict["findings"]
    finally:
        for name in ("hosts.yml", "group_vars"):
            (folder / name).unlink()
        folder.rmdir()


def test_instance_keys_and_modes_are_those_of_gpu_units(repo: Path) -> None:
    from ansible.module_utils import gpu_units_instances
    from ansible.module_utils.gpu_host_rules import BUILT_IN, KEYS, MODES, TREE_MODES
    from ansible.module_utils.gpu_host_rules_flags import OWNED_FLAGS, SECRET_FLAGS

    assert set(KEYS) == set(gpu_units_instances.KNOWN)
    assert set(gpu_units_instances.OWNED_FLAGS) <= set(OWNED_FLAGS) | set(SECRET_FLAGS)
    modes = yaml.safe_load((repo / "roles/gpu_units/files/modes.yml").read_text())
    assert set(MODES) == set(modes)
    assert {name for name, mode in modes.items() if "budget" in mode["needs"]} == set(TREE_MODES)
    assert all(BUILT_IN[key] == gpu_units_instances.DEFAULTS[key] for key in BUILT_IN)


def test_profiles_are_those_of_kernel_backends(repo: Path) -> None:
    from ansible.module_utils.gpu_host_rules import CAPABILITIES, PROFILES

    files = {path.stem for path in (repo / "roles/kernel_backends/files/profiles").glob("*.yml")}
    assert set(PROFILES) == files
    assert set(CAPABILITIES.values()) <= files


def test_defaults_of_gpu_host_are_those_of_its_argument_specs(repo: Path) -> None:
    role = repo / "roles/gpu_host"
    options = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    assert {name: option.get("default") for name, option in options.items()} == defaults


def test_an_inventory_with_one_of_the_groups_gives_no_warning(repo: Path, tmp_path: Path) -> None:
    for group in ("gpu_hosts", "lab"):
        (tmp_path / "hosts.yml").write_text(f"{group}:\n  hosts:\n    mine:\n")
        command = [
            Path(sys.executable).parent / "ansible-playbook",
            "site.yml",
            "-i",
            tmp_path / "hosts.yml",
            "--list-hosts",
        ]
        done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True)
        assert "hosts (1):\n      mine" in done.stdout
        assert "WARNING" not in done.stdout + done.stderr
