#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: the deployment of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_deployment
short_description: Swap, switch, start and roll back the SGLang instances of a host as one
description:
  - A deployment is a release and the rendered files of all instances of a host.
  - C(swap) stops what changes, proves that its processes are gone and its GPUs are free, replaces files and links, and
    enables the units. What does not change keeps running.
  - C(switch) does the same for one instance of the live deployment, which becomes what its entry of O(instances) says, its mode
    above all; release and other instances stay.
  - C(start) starts every unit that does not run; each start returns when a real token came back.
  - C(rollback) goes back to the previous deployment and starts it.
  - A run that was cut short is mended by the next one; a host has the old or the new deployment, never a mixture.
options:
  action:
    description: What to do.
    type: str
    required: true
    choices: [swap, switch, start, rollback]
  instances:
    description: Instances of the host as in the inventory.
    type: list
    elements: dict
    default: []
  instance:
    description: Name of the instance that C(switch) changes.
    type: str
  defaults:
    description: Keys that hold for every instance that does not name them.
    type: dict
    default: {}
  profile:
    description: "The device's profile: {name, args, env}."
    type: dict
    default: {}
  modes:
    description: "Modes as data: {name: {needs, args}}."
    type: dict
    default: {}
  gpus:
    description: "GPUs of the host in PCI order: {index, uuid}."
    type: list
    elements: dict
    default: []
  release:
    description: Id of the release that the instances run from.
    type: str
  common:
    description: Files that all instances share, as path below / and text.
    type: dict
    default: {}
  device_policy:
    description: >-
      C(closed) shows engines no device but their own GPUs, C(auto) all of the host.
    type: str
    choices: [closed, auto]
    default: closed
  topology:
    description: >-
      NUMA nodes, links between GPUs, IOMMU and bridges of the host, as C(gpu_host_preflight) returns them.
    type: dict
    default: {}
  numa:
    description: >-
      C(auto) binds the unit of an instance to the NUMA node of its GPUs where the host has several and lets it, which a unit that
      does nothing tries first. C(off) binds nothing.
    type: str
    choices: [auto, "off"]
    default: auto
  exchange:
    description: Rows of C(files/nccl.yml).
    type: list
    elements: dict
    default: []
  api_keys:
    description: API key by instance. Appears in no output.
    type: dict
    default: {}
  discard:
    description: C(rollback) only if this deployment is live, and put it aside as failed. Empty when none was swapped in.
    type: str
  expected:
    description: Units that C(start) will find after a swap that check mode only predicted.
    type: list
    elements: str
  site:
    description: The command that deploys this host, for messages.
    type: str
    default: ansible-playbook site.yml
  to_nothing:
    description: C(rollback) of a host on which nothing was deployed before may stop what is live and leave no deployment.
    type: bool
    default: false
  user:
    description: The system user that runs the engines.
    type: str
    default: sglang
  groups:
    description: Further groups of the engines' processes.
    type: list
    elements: str
    default: []
  start_timeout:
    description: Seconds that one engine has until its first token.
    type: int
    default: 900
  stop_timeout:
    description: Seconds that one engine has to finish its requests.
    type: int
    default: 90
  free_timeout:
    description: Seconds that processes and GPU memory have to be gone after a stop.
    type: int
    default: 30
  lock_timeout:
    description: Seconds to wait for another change of this host.
    type: int
    default: 30
  idle_memory:
    description: MiB of GPU memory that count as free.
    type: int
    default: 1024
  journal_lines:
    description: Lines of the journal that a failed start shows.
    type: int
    default: 40
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - The sglang-fleet authors
"""

EXAMPLES = r"""
- name: Swap the deployment
  gpu_deployment:
    action: swap
    instances: "{{ gpu_units_instances }}"
    defaults: "{{ gpu_units_defaults }}"
    profile: "{{ kernel_backends_profile }}"
    modes: "{{ gpu_units_modes }}"
    gpus: "{{ gpu_host_result.gpus }}"
    release: "{{ sglang_venv_release.id }}"
    common: {"etc/systemd/system/sglang@.service": "{{ lookup('ansible.builtin.template', 'sglang@.service.j2') }}"}

- name: Another mode for one instance
  gpu_deployment:
    action: switch
    instance: gpu0
    instances: "{{ gpu_units_instances }}"
    defaults: "{{ gpu_units_defaults }}"
    profile: "{{ kernel_backends_profile }}"
    modes: "{{ gpu_units_modes }}"
    gpus: "{{ gpu_host_result.gpus }}"
    common: "{{ gpu_units_common }}"

- name: Start it
  gpu_deployment:
    action: start

- name: Go back
  gpu_deployment:
    action: rollback
"""

RETURN = r"""
deployment:
  description: The live deployment, without the text of its files. Null when nothing is deployed.
  returned: always
  type: dict
  sample: {"id": "8c1d0f2ab34e", "release": "4f0e9c", "instances": [{"name": "gpu0", "unit": "sglang@gpu0.service"}]}
what:
  description: Paths and units that differed.
  returned: swap and switch
  type: list
  elements: str
stopped:
  description: Units that were stopped.
  returned: swap, switch and rollback
  type: list
  elements: str
started:
  description: Units that were started.
  returned: start and rollback
  type: list
  elements: str
rolled_back:
  description: Whether the live deployment was replaced by the previous one.
  returned: rollback
  type: bool
cgroups:
  description: Proof that the control groups of stopped units are empty.
  returned: swap, switch and rollback, when something changed
  type: str
gpus:
  description: Proof that the GPUs were free, or why none was asked for.
  returned: swap, switch and rollback, when something changed
  type: str
notes:
  description: What a person should know although it is no failure.
  returned: always
  type: list
  elements: str
"""

import grp
import os
import platform
import pwd
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_units_deploy import rollback, swap, switch
from ansible.module_utils.gpu_units_host import Gpus, HostError, Systemd, minors
from ansible.module_utils.gpu_units_probe import usable_nodes
from ansible.module_utils.gpu_units_instances import InvalidError, resolve
from ansible.module_utils.gpu_units_render import exposed, render
from ansible.module_utils.gpu_units_start import start
from ansible.module_utils.gpu_units_state import Host, load, locked
from ansible.module_utils.gpu_units_topology import notes


def host_of(params: dict[str, Any]) -> Host:
    """The host as it is; without the engine's user things can only be predicted."""
    try:
        user = pwd.getpwnam(params["user"])
        uid, gid = user.pw_uid, user.pw_gid
        groups = [
            entry.gr_gid
            for entry in grp.getgrall()
            if params["user"] in entry.gr_mem or entry.gr_name in params["groups"]
        ]
    except KeyError:
        uid, gid, groups = None, None, []

    def can_read(path: str) -> bool:
        if uid is None:
            return Path(path).is_file()
        done = subprocess.run(["/usr/bin/test", "-r", path], user=uid, group=gid, extra_groups=groups, check=False)
        return done.returncode == 0

    return Host(
        systemd=Systemd(),
        gpu_holders=Gpus(params["idle_memory"]).holders,
        can_read=can_read,
        uid=uid,
        gid=gid,
        start_timeout_s=params["start_timeout"],
        stop_timeout_s=params["stop_timeout"],
        free_timeout_s=params["free_timeout"],
        lock_timeout_s=params["lock_timeout"],
        journal_lines=params["journal_lines"],
        site=params["site"],
    )


def public(deployment: dict[str, Any] | None) -> dict[str, Any] | None:
    """A deployment without the text of its files."""
    return deployment and {key: deployment[key] for key in ("id", "release", "profile", "instances")}


def act(params: dict[str, Any], host: Host, check: bool) -> dict[str, Any]:
    """Do one action; returns what the module returns."""
    if params["action"] in ("swap", "switch"):
        same = (
            *("instances", "defaults", "profile", "modes", "release", "common", "start_timeout", "device_policy"),
            *("topology", "exchange"),
        )
        numbers = minors()
        gpus = [{**gpu, "minor": numbers.get(gpu["uuid"])} for gpu in params["gpus"]]
        nodes, told = usable_nodes(params["topology"], gpus) if params["numa"] == "auto" else ({}, [])
        wanted = render(**{key: params[key] for key in same}, gpus=gpus, nodes=nodes)
        asked = resolve(params["instances"], params["defaults"], params["profile"], params["modes"], gpus)
        host.notes += told + notes(asked, gpus, nodes)
        if params["action"] == "switch":
            result = switch(host, wanted, params["instance"], check)
            return {**result, "deployment": public(result["deployment"])}
        host.notes += exposed(wanted)
        return {**swap(host, wanted, params["api_keys"], check), "deployment": public(wanted)}
    if params["action"] == "start":
        return {**start(host, check, params["expected"]), "deployment": public(load(host, "current"))}
    result = rollback(host, params["discard"], check, params["to_nothing"])
    return {**result, "deployment": public(result["deployment"])}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "required": True, "choices": ["swap", "switch", "start", "rollback"]},
            "instances": {"type": "list", "elements": "dict", "default": []},
            "instance": {"type": "str"},
            "defaults": {"type": "dict", "default": {}},
            "profile": {"type": "dict", "default": {}},
            "modes": {"type": "dict", "default": {}},
            "gpus": {"type": "list", "elements": "dict", "default": []},
            "release": {"type": "str"},
            "common": {"type": "dict", "default": {}},
            "device_policy": {"type": "str", "choices": ["closed", "auto"], "default": "closed"},
            "topology": {"type": "dict", "default": {}},
            "numa": {"type": "str", "choices": ["auto", "off"], "default": "auto"},
            "exchange": {"type": "list", "elements": "dict", "default": []},
            "api_keys": {"type": "dict", "default": {}, "no_log": True},
            "discard": {"type": "str"},
            "expected": {"type": "list", "elements": "str"},
            "site": {"type": "str", "default": "ansible-playbook site.yml"},
            "to_nothing": {"type": "bool", "default": False},
            "user": {"type": "str", "default": "sglang"},
            "groups": {"type": "list", "elements": "str", "default": []},
            "start_timeout": {"type": "int", "default": 900},
            "stop_timeout": {"type": "int", "default": 90},
            "free_timeout": {"type": "int", "default": 30},
            "lock_timeout": {"type": "int", "default": 30},
            "idle_memory": {"type": "int", "default": 1024},
            "journal_lines": {"type": "int", "default": 40},
        },
        required_if=[
            ("action", "swap", ["release", "profile", "modes"]),
            ("action", "switch", ["instance", "profile", "modes"]),
        ],
        supports_check_mode=True,
    )
    os.umask(0o022)
    try:
        host = host_of(module.params)
        if host.uid is None and not module.check_mode:
            raise HostError(f"user {module.params['user']} is not there; role sglang_venv makes it, so run site.yml")
        if module.check_mode:
            result = act(module.params, host, check=True)
        else:
            with locked(host):
                result = act(module.params, host, check=False)
    except InvalidError as error:
        module.fail_json(msg=f"{platform.node()}: the instances can't be served.\n- " + "\n- ".join(error.problems))
    except (HostError, OSError, subprocess.SubprocessError) as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    for note in result["notes"]:
        module.warn(note)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
