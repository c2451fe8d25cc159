# SPDX-License-Identifier: Apache-2.0
"""bin/preflight and models: from files on a host to the command that mends them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import gpu_host_rules_files as rules_files
from ansible.module_utils.gpu_host_rules import Case
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from fleet import preflight

HERE = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}


def test_a_pair_that_was_copied_in_part_is_told_with_the_copy_that_mends_it(
    repo: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target", "draft"):
        shutil.copytree(repo / "models/nano" / name, tmp_path / name)
    weights = tmp_path / "target/model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    (tmp_path / "target/tokenizer.json").unlink()
    (tmp_path / "draft/config.json").chmod(0o600)
    host = {
        **HERE,
        "fleet_engine": "sglang-0.5.11",
        "gpu_host_profile": "cpu",
        "gpu_units_user": "nobody-of-this-name",
        "gpu_units_defaults": {
            "mode": "ddtree",
            "model_path": str(tmp_path / "target"),
            "draft_model_path": str(tmp_path / "draft"),
        },
        "gpu_units_instances": [{"name": "cpu0", "gpus": [], "port": 39999}],
    }
    (tmp_path / "fleet.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"me": host}}}))
    monkeypatch.setattr("ansible.module_utils.gpu_host_rules_files.HIDDEN", ())  # it lies in /tmp
    assert preflight.main(["-i", str(tmp_path / "fleet.yml"), "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    found = {finding["id"]: finding for finding in verdict["findings"]}
    broken = found["weights-broken"]
    assert f"model.safetensors has {size - 1} bytes" in broken["observed"] and broken["expected"] == f"{size} bytes"
    command = f"`mkdir -p {tmp_path}/target && cp -rL FOLDER/model.safetensors {tmp_path}/target/`"
    assert command in broken["fix"]
    assert "FOLDER/tokenizer*" in found["tokenizer-missing"]["fix"]
    closed = found["model-unreadable"]
    assert f"chmod a+r {tmp_path}/draft/config.json`" in closed["fix"]
    assert "user nobody-of-this-name, who will be one of the others" in closed["observed"]


def test_commands_to_a_host_carry_its_options_of_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_SSH_ARGS", "-o ControlMaster=auto")
    way = {"ansible_ssh_common_args": "-F none -o UserKnownHostsFile=known", "ansible_port": 2222}
    way["ansible_ssh_private_key_file"] = "/keys/one"
    asked, _ = preflight.wanted("ct200", {**way, "ansible_user": "root", "inventory_dir": str(tmp_path)})
    options = "-F none -o UserKnownHostsFile=known -o Port=2222 -i /keys/one"
    assert asked["ssh"] == options
    whole, part = (rules_files.copy(Case("ct200", asked), "/srv/m", names) for names in (None, ["config.json"]))
    assert whole == f"ssh {options} root@ct200 mkdir -p /srv/m && scp {options} -r FOLDER/* root@ct200:/srv/m/"
    assert part == f"scp {options} FOLDER/config.json root@ct200:/srv/m/"
    plain, _ = preflight.wanted("ct200", {"inventory_dir": str(tmp_path)})
    assert plain["ssh"] == ""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "ct200"),
        ({"ansible_host": "192.0.2.200"}, "192.0.2.200"),
        ({"ansible_host": "192.0.2.200", "ansible_user": "root"}, "root@192.0.2.200"),
        ({"ansible_user": "ann", "ansible_connection": "ssh"}, "ann@ct200"),
        ({"ansible_connection": "local", "ansible_user": "root"}, ""),
    ],
)
def test_copies_go_where_ansible_goes(repo: Path, variables: dict[str, Any], told: str) -> None:
    (task,) = yaml.safe_load((repo / "roles/gpu_host/tasks/main.yml").read_text())
    text = trust_as_template(task["gpu_host_preflight"]["wanted"]["reach"])
    played = Templar(loader=DataLoader(), variables={**variables, "inventory_hostname": "ct200"}).template(text)
    assert preflight.reach("ct200", variables) == played == told
