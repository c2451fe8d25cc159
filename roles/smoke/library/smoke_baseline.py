#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: record what the engine says without speculation."""

from __future__ import annotations

DOCUMENTATION = r"""
module: smoke_baseline
short_description: Record the baseline output of the current deployment
description:
  - Output of a speculating instance is compared with what the same release says without speculation. This module
    makes that recording, once per set of inputs (release, model files, dtype, arguments, prompts), and keeps it in
    /var/lib/sglang-fleet/baselines.
  - To record, it stops the unit of one instance, starts the baseline unit in its place, asks every prompt, stops it,
    proves that no process is left, and starts the instance's unit again if that was active before.
  - A second run with the same inputs finds the recording and changes nothing.
options:
  hooks:
    description: Patterns by mode, the content of files/hooks.yml.
    type: dict
    required: true
  prompts:
    description: Prompts with id and text.
    type: list
    elements: dict
    required: true
  release:
    description: The release that has just been deployed; any other one in the current deployment is an error.
    type: str
  site:
    description: The command that deploys this host, for messages; by default that with the inventory of ansible.cfg.
    type: str
  tokens:
    description: Tokens recorded of every prompt.
    type: int
    default: 24
  requests:
    description: How many of the prompts are recorded.
    type: int
    default: 16
  start_timeout:
    description: Seconds that a unit may take to start; its own limit usually comes first.
    type: float
    default: 1800
  request_timeout:
    description: Seconds that one request may take.
    type: float
    default: 120
  journal_lines:
    description: Last lines of the journal shown when a unit does not start.
    type: int
    default: 20
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: sglang-fleet
"""

EXAMPLES = r"""
- name: Record the baseline
  smoke_baseline:
    hooks: "{{ smoke_hooks }}"
    prompts: "{{ smoke_prompts }}"
"""

RETURN = r"""
recorded:
  description: Recordings made, or to be made in check mode, with key, instance, unit and path.
  type: list
  elements: dict
  returned: always
present:
  description: Keys of the recordings that were there already.
  type: list
  elements: str
  returned: always
"""

from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils import smoke_host as sh
from ansible.module_utils import smoke_recording as recordings

ARGUMENTS = {
    "hooks": {"type": "dict", "required": True},
    "prompts": {"type": "list", "elements": "dict", "required": True},
    "release": {"type": "str"},
    "site": {"type": "str"},
    "tokens": {"type": "int", "default": 24},
    "requests": {"type": "int", "default": 16},
    "start_timeout": {"type": "float", "default": 1800},
    "request_timeout": {"type": "float", "default": 120},
    "journal_lines": {"type": "int", "default": 20},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    host, prompts = sh.Host(), params["prompts"][: params["requests"]]
    try:
        sh.require_root()
        deployment = host.deployment()
        wanted, current = params["release"], (deployment or {}).get("release")
        if deployment is None or (wanted and wanted != current):
            if not module.check_mode:
                raise sh.SmokeError(
                    f"{host.state}/deployments/current.json has release {current}, expected {wanted or 'any'}; "
                    f"run `{{site}} --tags activate`"
                )
            after = "baseline of the new deployment\n"
            module.exit_json(changed=True, recorded=[], present=[], diff={"before": "", "after": after})
        todo, present = recordings.plan(host, deployment, params["hooks"], prompts, params["tokens"])
        rows = [
            {
                "key": k,
                "instance": e["instance"]["name"],
                "unit": e["instance"]["baseline_unit"],
                "path": str(recordings.path_of(host, k)),
            }
            for k, e in todo.items()
        ]
        made = {}
        if todo and not module.check_mode:
            # Each takes the place of its own instance, so they disturb one another as little as the instances do.
            with ThreadPoolExecutor(max_workers=len(todo)) as pool:
                jobs = {k: pool.submit(recordings.record_unit, host, k, e, prompts, params) for k, e in todo.items()}
            made = {k: job.result() for k, job in jobs.items()}
    except (sh.SmokeError, ValueError) as error:
        module.fail_json(msg=str(error).replace("{site}", params["site"] or "ansible-playbook site.yml"))
    for row in rows:
        done = made.get(row["key"])
        if done:
            row.update(start_seconds=done["start_seconds"], seconds=done["seconds"])
    before = "".join(f"{recordings.path_of(host, k)}\n" for k in present)
    after = before + "".join(f"{r['path']} ({len(prompts)} prompts, recorded by {r['unit']})\n" for r in rows)
    diff = {"before_header": "recordings", "after_header": "recordings", "before": before, "after": after}
    module.exit_json(changed=bool(rows), recorded=rows, present=present, diff=diff)


if __name__ == "__main__":
    main()
