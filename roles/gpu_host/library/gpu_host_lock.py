#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Hold or release the run lock of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_host_lock
short_description: Keep two controller runs apart on one host
description:
  - The lock is a transient systemd unit, so that it is taken atomically, is seen by C(systemctl), ends by itself after
    O(max_hours), and is gone after a crash of the host.
  - A lock that the same controller left behind is taken over; the action plugin of this name proves on the controller that
    its process is gone.
  - Taking and giving back count as no change, since nothing of it stays.
options:
  state:
    description: Whether this run holds the lock.
    type: str
    choices: [held, released]
    required: true
  holder:
    description: Who asks. Filled in by the action plugin.
    type: dict
    options:
      controller: {type: str, required: true, description: Identity of the controller and its boot.}
      user: {type: str, required: true, description: Person who runs the play.}
      machine: {type: str, required: true, description: Host name of the controller.}
      pid: {type: int, required: true, description: Process of the play on the controller.}
      started: {type: str, required: true, description: Start time of that process in clock ticks.}
  take_over:
    description: Invocation of the lock that may be replaced, since its process is gone. Filled in by the action plugin.
    type: str
  max_hours:
    description: Hours after which a lock ends by itself.
    type: int
    default: 6
attributes:
  check_mode: {support: full, description: Takes and gives back nothing.}
  diff_mode: {support: none}
author: sglang-fleet
"""

EXAMPLES = r"""
- name: Take the run lock
  gpu_host_lock:
    state: held

- name: Give the run lock back
  gpu_host_lock:
    state: released
"""

RETURN = r"""
held_by: {description: Holder of the lock after the task., type: dict, returned: when somebody holds it}
taken_over: {description: Whether a lock that a dead run left was replaced., type: bool, returned: always}
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_host_lockfile import UNIT, describe, parse, same_run


def current(module: AnsibleModule) -> dict[str, Any] | None:
    """The holder of the lock with its invocation, None when nobody holds it."""
    _, out, _ = module.run_command(
        ["systemctl", "show", UNIT, "--property=ActiveState,Description,InvocationID"], check_rc=True
    )
    values = dict(row.split("=", 1) for row in out.splitlines() if "=" in row)
    if values.get("ActiveState") not in ("active", "activating", "deactivating"):
        return None
    return {**parse(values.get("Description", "")), "invocation": values.get("InvocationID", "")}


def release(module: AnsibleModule) -> None:
    """End the unit, which this run or one that was proven dead holds."""
    module.run_command(["systemctl", "stop", UNIT], check_rc=True)


def take(module: AnsibleModule, me: dict[str, Any]) -> dict[str, Any]:
    """Start the unit; the loser of a race gets the winner as holder."""
    argv = [
        "systemd-run",
        f"--unit={UNIT}",
        "--collect",
        "--quiet",
        "--service-type=exec",
        f"--property=RuntimeMaxSec={module.params['max_hours']}h",
        f"--description={describe(me, time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()))}",
        "sleep",
        "infinity",
    ]
    status, out, err = module.run_command(argv)
    holder = current(module)
    if holder is None or (status != 0 and same_run(holder, me)):
        module.fail_json(
            msg=f"The run lock could not be taken: {(err or out).strip()}. Next: look at `systemctl status {UNIT}` on the host."
        )
    return holder or {}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "required": True},
            "holder": {
                "type": "dict",
                "options": {
                    "controller": {"type": "str", "required": True},
                    "user": {"type": "str", "required": True},
                    "machine": {"type": "str", "required": True},
                    "pid": {"type": "int", "required": True},
                    "started": {"type": "str", "required": True},
                },
            },
            "take_over": {"type": "str"},
            "max_hours": {"type": "int", "default": 6},
        },
        supports_check_mode=True,
    )
    me = module.params["holder"]
    if me is None:
        module.fail_json(msg="gpu_host_lock was called without its action plugin, which says who asks")
    if module.check_mode:
        module.exit_json(changed=False, taken_over=False)
    holder = current(module)
    if module.params["state"] == "released":
        if holder and same_run(holder, me):
            release(module)
        module.exit_json(changed=False, taken_over=False)
    taken_over = False
    if holder and not same_run(holder, me) and holder["invocation"] == module.params["take_over"]:
        release(module)
        holder, taken_over = None, True
    if holder is None:
        holder = take(module, me)
    module.exit_json(changed=False, taken_over=taken_over, held_by=holder, mine=same_run(holder, me))


if __name__ == "__main__":
    main()
