#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Gather the facts of a host, judge them against the inventory, write the verdict down."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_host_preflight
short_description: Judge a host before anything is changed on it
description:
  - Gathers GPU, driver, kernel, toolchain, room, port and model facts, and judges them and the inventory by named rules.
  - Fails with every blocking finding at once. Changes nothing but its own report, which is a log of this run and not
    counted as a change.
options:
  host:
    description: Name of the host in messages.
    type: str
    required: true
  wanted:
    description:
      - The inventory's side, with the keys V(engine), V(engines), V(profile), V(defaults), V(instances), V(min_driver),
        V(min_systemd), V(min_disk_gib), V(min_shm_gib), V(pythons), V(allow_any_address) and V(waivers); V(where) is the file
        that messages name, V(reach) how ssh reaches the host, empty for this machine, V(user) and V(groups) are the engines'.
      - The action plugin adds V(flags), what the engine knows of the flags that instances name, V(unread), variables that nothing
        reads, V(paths), folders of the host, V(key_files), API keys of the controller, V(ssh), options of ssh and scp to the
        host, V(twice), names that stand twice in a map of the inventory, and V(unread_files), files of variables that nobody
        reads.
      - Its values are judged by the rules, so that a wrong one is named together with everything else that is wrong.
    type: dict
    required: true
  root:
    description: Folder that holds the releases; its file system has to have room.
    type: path
    required: true
  verdict_file:
    description: File for the verdict as JSON. Not written in check mode.
    type: path
    required: true
  facts_file:
    description: A recording on the control machine. The action plugin reads it and hands it over as O(stand_in).
    type: str
  stand_in:
    description:
      - Facts recorded on a real machine by C(gpu_host_gather.py --record). Every fact that the recording holds takes the place
        of this host's own. For tests; the verdict says so.
    type: dict
  pynvml:
    description: NVIDIA's pynvml, packed. Filled in by the action plugin.
    type: str
  enforce:
    description: Whether a blocking finding fails the task. Going back to an older deployment is never held up by findings.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description: Judges as always and leaves the report unwritten.
  diff_mode:
    support: none
    description: It changes nothing that a difference could show.
author: sglang-fleet
"""

EXAMPLES = r"""
- name: Judge the host
  gpu_host_preflight:
    host: "{{ inventory_hostname }}"
    root: /opt/sglang-fleet
    verdict_file: /var/lib/sglang-fleet/verdicts/preflight.json
    wanted:
      engine: sglang-0.5.11
      engines: [sglang-0.5.11]
      profile: auto
      instances: [{name: gpu0, gpus: [0], port: 30000, mode: ddtree, model_path: /srv/models/target}]
      pythons: ["3.12", "3.11"]
      min_driver: "580"
"""

RETURN = r"""
profile: {description: Device profile of the host., type: str, returned: always}
python: {description: Interpreter for the release as C(version) and C(path); null if none fits., type: dict, returned: always}
platform: {description: "Operating system and architecture, as in C(linux-x86_64).", type: str, returned: always}
gpus: {description: GPUs of the host in PCI order., type: list, elements: dict, returned: always}
topology: {description: "NUMA nodes, links between GPUs, IOMMU, bridges, kind of machine.", type: dict, returned: always}
verdict: {description: The verdict with all findings., type: dict, returned: always}
report: {description: The verdict as lines for people., type: list, elements: str, returned: success}
problems: {description: "What holds the host back, as text for people.", type: str, returned: failure}
"""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host_gather import gather
from ansible.module_utils.gpu_host_judge import CheckFailed, instances_of, judge, lines, rows
from ansible.module_utils.gpu_host_rules_files import model_paths
from ansible.module_utils.gpu_host_rules_given import file_paths


def texts(values: Iterable[Any]) -> list[str]:
    """The texts among values, each once."""
    return sorted({value for value in values if isinstance(value, str)})


def facts_for(wanted: dict[str, Any], root: str, stand_in: dict[str, Any] | None, pynvml: str | None) -> dict[str, Any]:
    """Facts of this host for what the inventory asks; what a recording holds replaces the host's own."""
    instances = instances_of(wanted)
    facts = gather(
        root,
        [str(version) for version in wanted.get("pythons") or []],
        model_paths(instances),
        texts(one.get("address") for one in instances),
        pynvml,
        str(wanted.get("user") or "sglang"),
        texts(wanted["groups"]) if isinstance(wanted.get("groups"), list) else [],
        file_paths(instances),
    )
    return {**facts, **(stand_in or {})}


def topology(facts: dict[str, Any]) -> dict[str, Any]:
    """What places instances and lets their GPUs exchange data; null where an older recording does not tell."""
    kernel = facts.get("kernel") or {}
    return {
        "numa": facts.get("numa") or [],
        "p2p": facts["gpu"].get("p2p") or [],
        "iommu": (kernel.get("iommu") or {}).get("mode"),
        "acs": kernel.get("acs"),
        "virt": kernel.get("virt"),
    }


def write(path: Path, text: str) -> None:
    """Put a whole file in place or leave the old one."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".preflight-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "wanted": {"type": "dict", "required": True},
            "root": {"type": "path", "required": True},
            "verdict_file": {"type": "path", "required": True},
            "facts_file": {"type": "str"},
            "stand_in": {"type": "dict"},
            # Long, so it is kept out of the host's log.
            "pynvml": {"type": "str", "no_log": True},
            "enforce": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    wanted = module.params["wanted"]
    stand_in = module.params["stand_in"]
    facts = facts_for(wanted, module.params["root"], stand_in, module.params["pynvml"])
    try:
        verdict = judge(module.params["host"], {**wanted, "root": module.params["root"]}, facts)
    except CheckFailed as error:
        if not stand_in:
            raise
        module.fail_json(
            msg=f"{module.params['host']}: gpu_host_facts_file has not the form of a recording, or the check is at fault (report "
            f"it then): {error}"
        )
    python = next((one for one in facts["pythons"] if one["venv"]), None)
    result = {
        "changed": False,
        "profile": verdict["profile"],
        "python": {"version": python["version"], "path": python["path"]} if python else None,
        "platform": f"linux-{facts['platform']['arch']}",
        "gpus": facts["gpu"]["gpus"],
        "topology": topology(facts),
        "verdict": verdict,
        "report": lines(verdict),
    }
    if not module.check_mode:
        try:
            write(
                Path(module.params["verdict_file"]),
                json.dumps({**verdict, "facts": facts}, indent=2, sort_keys=True) + "\n",
            )
        except OSError as error:
            # A full disk must not hide the findings that would explain it.
            module.warn(
                f"{module.params['host']}: the verdict could not be written to {module.params['verdict_file']}: {error}"
            )
    if not verdict["ok"] and module.params["enforce"]:
        # Ansible prints a failure's message twice, and the rest of its result once.
        head, *problems = result["report"]
        module.fail_json(msg=head, problems="\n".join(problems))
    for finding in verdict["findings"]:
        if finding["severity"] != "info":
            module.warn(f"{module.params['host']}: " + "\n".join(rows(finding)))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
