# SPDX-License-Identifier: Apache-2.0
"""Files of variables that no host reads, and names that stand twice: told with place and command, and no false alarm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.gpu_host_judge import judge

from fleet import preflight, remote, varfiles

HOSTS = "gpu_hosts:\n  hosts:\n    rack8: {ansible_host: 127.0.0.1}\n    rack9: {ansible_host: 127.0.0.1}\n"
SERVES = "gpu_units_instances: [{name: gpu0, gpus: [0], port: 30000}]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"hosts.yml": HOSTS})
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def findings(host: str = "rack8") -> list[dict[str, Any]]:
    """What the preflight tells of the files, from the inventory as Ansible reads it."""
    (one,) = remote.targets(["hosts.yml"], host, "gpu_host_", "gpu_units_", "fleet_", "inventory_dir")
    asked, _ = preflight.wanted(one.name, one.variables, one.written)
    ids = ("file-unread", "key-twice", "instances-malformed")
    return [finding for finding in judge(host, asked)["findings"] if finding["id"] in ids]


@pytest.mark.parametrize("name", ["rack-8.yml", "rack8.yml.txt", "rak8", "Rack8.yaml"])
def test_a_misnamed_file_is_named_where_instances_are_missing_and_its_fix_mends_it(name: str, here: Path) -> None:
    write(here, {f"host_vars/{name}": SERVES, "host_vars/rack9.yml": SERVES})
    (one,) = findings()
    assert one["id"] == "instances-malformed"
    assert f"no instance; host_vars/{name} is there and is not read: " in one["observed"]
    subprocess.run(re.findall(r"`([^`]+)`", one["fix"])[0], shell=True, check=True)
    assert (here / "host_vars/rack8.yml").read_text() == SERVES, (
        "what Ansible reads; in this process it remembers the old name"
    )
    assert findings("rack9") == []


def test_a_file_of_nobody_is_a_warning_for_the_host_that_it_looks_like(here: Path) -> None:
    write(here, {"host_vars/rack8.yml": SERVES, "host_vars/rack-8.yml": "a: 1\n", "host_vars/rack9.yml": SERVES})
    (one,) = findings()
    assert (one["id"], one["severity"], one["thing"]) == ("file-unread", "warn", "host_vars/rack-8.yml")
    assert "no host rack-8 is in this inventory" in one["observed"]
    assert "into host_vars/rack8.yml, then `rm -r host_vars/rack-8.yml`" in one["fix"]
    assert findings("rack9") == []
    write(here, {"group_vars/gpu-hosts.yml": "a: 1\n"})
    (group,) = findings("rack9")
    assert group["fix"] == "`mv group_vars/gpu-hosts.yml group_vars/gpu_hosts.yml`"


@pytest.mark.parametrize(
    ("read", "hidden"),
    [
        ("rack8.yml", "rack8.yaml"),
        ("rack8/main.yml", "rack8.yml"),
        ("rack8", "rack8.yml"),
        ("rack8.yaml", "rack8.json"),
    ],
)
def test_of_two_files_of_a_host_the_one_that_ansible_leaves_out_is_told(read: str, hidden: str, here: Path) -> None:
    write(here, {f"host_vars/{read}": f"{SERVES}which: read\n", f"host_vars/{hidden}": "which: hidden\n"})
    (target,) = remote.targets(["hosts.yml"], "rack8", "which")
    assert target.variables["which"] == "read", "as Ansible itself has it"
    (one,) = findings()
    assert one["thing"] == f"host_vars/{hidden}"
    assert f"not read: host_vars/{read.partition('/')[0]} is read instead" in one["observed"]
    assert f"`rm host_vars/{hidden}`" in one["fix"]


def test_what_is_no_fault_is_not_told(here: Path) -> None:
    others = ("host_vars/.rack.yml", "host_vars/README.md", "host_vars/rack8.yml~", "host_vars/rack8.yml.bak")
    write(here, {**dict.fromkeys(others, "a: 1\n"), "group_vars/lab.yml": "a: 1\n", "group_vars/all/x.yml": "a: 1\n"})
    write(here, {"host_vars/rack8.yml": SERVES, "host_vars/old1.yml": "a: 1\n"})
    write(here, {"staging.yml": "gpu_hosts:\n  hosts:\n    old1:\n"})  # host_vars may serve several inventories
    merged = "a: &x {topk: 1}\nb: {<<: *x, topk: 2}\nd: {<<: *x, <<: *x}\nc: [{a: 1}, {a: 2}]\n"
    write(here, {"group_vars/gpu_hosts.yml": merged})
    assert findings() == []
    assert varfiles.known({"inventory_dir": None}) == {"twice": [], "unread_files": []}


@pytest.mark.parametrize(
    ("file", "text", "at", "before", "name"),
    [
        ("host_vars/rack8.yml", f"gpu_units_defaults:\n  topk: 8\n  topk: 4\n{SERVES}", 3, 2, "topk"),
        ("host_vars/rack8.yml", "gpu_units_instances:\n  - {name: a, port: 30003,\n     port: 30009}\n", 3, 2, "port"),
        ("host_vars/rack8.yml", f"{SERVES}\n{SERVES}", 3, 1, "gpu_units_instances"),
        ("host_vars/rack8/a.yml", f"{SERVES}x: 1\n'x': 2\n", 3, 2, "x"),
        ("group_vars/all.yml", f"{SERVES}a: 1\na: 2\n", 3, 2, "a"),
        ("hosts.yml", f"{HOSTS}    rack8: {{ansible_host: 127.0.0.2}}\n  vars:\n    {SERVES}", 5, 3, "rack8"),
    ],
)
def test_a_name_that_stands_twice_is_told_with_both_places(
    file: str, text: str, at: int, before: int, name: str, here: Path
) -> None:
    write(here, {file: text})
    (one,) = findings()
    assert (one["id"], one["severity"], one["thing"]) == ("key-twice", "block", f"{file}:{at}")
    assert one["observed"] == f"{name} is written a second time, before at {file}:{before}"
    assert f"Remove one of the two `{name}:` in {file}" in one["fix"]


def test_another_hosts_file_is_not_this_hosts_fault(here: Path) -> None:
    write(here, {"host_vars/rack8.yml": SERVES, "host_vars/rack9.yml": f"{SERVES}a: 1\na: 2\n"})
    assert findings() == []
    assert [one["id"] for one in findings("rack9")] == ["key-twice"]


def test_plays_look_at_the_files_as_the_doors_do(repo: Path) -> None:
    """Both ask fleet.declared, with all variables of the host."""
    from fleet import declared

    variables = {"inventory_dir": str(repo / "inventory"), "inventory_hostname": "ct200", "groups": {"all": ["ct200"]}}
    assert {"twice", "unread_files"} <= set(declared.known(None, None, None, variables))
    assert "declared.known(" in (repo / "roles/gpu_host/action_plugins/gpu_host_preflight.py").read_text()
