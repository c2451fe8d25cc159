#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: the smoke of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: smoke_probe
short_description: Prove that the engines of a host run the path they were deployed for
description:
  - Sends short greedy requests to every instance of the current deployment, reads the journal of exactly this
    invocation of its unit, and compares the output with the recorded baseline.
  - Changes nothing on the host but its own verdict, /var/lib/sglang-fleet/verdicts/smoke.json. In check mode not even that.
  - A check that fails does not fail the module; see RV(ok) and RV(failures).
options:
  hooks:
    description: Patterns by mode, the content of files/hooks.yml.
    type: dict
    required: true
  prompts:
    description: Prompts with id and text; the first O(requests) are used.
    type: list
    elements: dict
    required: true
  host:
    description: Name of the host in the verdict.
    type: str
    required: true
  site:
    description: The command that deploys this host, for messages; by default that with the inventory of ansible.cfg.
    type: str
  mode:
    description: Probe only instances in this mode.
    type: str
  instance:
    description: Probe only the instance of this name.
    type: str
  requests:
    description: Prompts sent, O(concurrency) at a time.
    type: int
    default: 16
  alone:
    description: Prompts that are sent once more, one by one.
    type: int
    default: 4
  tokens:
    description: Tokens asked of every request.
    type: int
    default: 24
  concurrency:
    description: Requests in flight at once.
    type: int
    default: 8
  min_accepted:
    description: Drafts that have to be accepted over all requests in a speculating mode.
    type: int
    default: 1
  near_tie_gaps:
    description: Bound of a near tie in nats by number type; float32 is always compared token for token.
    type: dict
    default: {}
  request_timeout:
    description: Seconds that one request may take.
    type: float
    default: 120
  hook_timeout:
    description: Seconds to wait after the last request for the lines that must be in the journal.
    type: float
    default: 10
  journal_lines:
    description: Last lines of the journal that are shown when a unit is not active.
    type: int
    default: 20
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: sglang-fleet
"""

EXAMPLES = r"""
- name: Prove all instances
  smoke_probe:
    host: "{{ inventory_hostname }}"
    hooks: "{{ smoke_hooks }}"
    prompts: "{{ smoke_prompts }}"
  register: smoke_verdict
"""

RETURN = r"""
verb:
  description: Always V(smoke).
  type: str
  returned: when probed
host:
  description: Name of the host.
  type: str
  returned: when probed
release:
  description: Id of the release that should run.
  type: str
  returned: when probed
ok:
  description: Whether every check holds.
  type: bool
  returned: always
checks:
  description: Every check with id, instance, ok, observed, expected, why and fix.
  type: list
  elements: dict
  returned: when probed
instances:
  description: Per instance its mode, requests, tokens, tokens per step, near ties and the hook lines found.
  type: list
  elements: dict
  returned: when probed
started:
  description: UTC time of the start.
  type: str
  returned: when probed
seconds:
  description: Duration.
  type: float
  returned: when probed
failures:
  description: One readable line per failed check.
  type: list
  elements: str
  returned: always
predicted:
  description: In check mode on a host without a deployment, what a real run would do.
  type: str
  returned: check mode, nothing deployed
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils import smoke_host as sh
from ansible.module_utils import smoke_judge as judge
from ansible.module_utils import smoke_run as run

ARGUMENTS = {
    "hooks": {"type": "dict", "required": True},
    "prompts": {"type": "list", "elements": "dict", "required": True},
    "host": {"type": "str", "required": True},
    "site": {"type": "str"},
    "mode": {"type": "str"},
    "instance": {"type": "str"},
    "requests": {"type": "int", "default": 16},
    "alone": {"type": "int", "default": 4},
    "tokens": {"type": "int", "default": 24},
    "concurrency": {"type": "int", "default": 8},
    "min_accepted": {"type": "int", "default": 1},
    "near_tie_gaps": {"type": "dict", "default": {}},
    "request_timeout": {"type": "float", "default": 120},
    "hook_timeout": {"type": "float", "default": 10},
    "journal_lines": {"type": "int", "default": 20},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    host = sh.Host()
    try:
        sh.require_root()
        if module.check_mode and host.deployment() is None:
            said = f"would probe the instances with {params['requests']} requests each, once there is a deployment"
            module.exit_json(changed=False, ok=True, predicted=said, failures=[])
        verdict = run.probe(host, params["hooks"], params["prompts"], {**params, "write": not module.check_mode})
    except (sh.SmokeError, ValueError) as error:
        module.fail_json(msg=f"{params['host']}: {error}".replace("{site}", run.site_of(params)))
    if module.check_mode:  # what is there now may be what the run would put right
        for line in judge.failures(verdict):
            module.warn(f"before the change: {line}")
    module.exit_json(changed=False, failures=judge.failures(verdict), **verdict)


if __name__ == "__main__":
    main()
