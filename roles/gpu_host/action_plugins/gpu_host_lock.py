# SPDX-License-Identifier: Apache-2.0
"""The controller's half of the run lock: says who asks, and proves that the run which left a lock behind is gone."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


def started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, which tells it from a later one of the same number; None if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets and may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def controller() -> str:
    """This machine and this boot of it; a process number means nothing beyond either."""
    parts = [platform.node()]
    for name in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        path = Path(name)
        parts.append(path.read_text(encoding="utf-8").strip() if path.exists() else "")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def gone(holder: dict[str, Any], here: str) -> bool:
    """Whether the holder is a run of this controller whose process has ended."""
    if holder.get("controller") != here or not str(holder.get("pid")).isdigit():
        return False
    return started(int(holder["pid"])) != holder.get("started")


def refusal(host: str, holder: dict[str, Any], ours: bool) -> str:
    """The one message for a host that another run holds."""
    who = f"{holder['user']} on {holder['machine']} (process {holder['pid']})"
    wait = "Wait for it to end" if ours else "Ask there whether it still works, and wait for it"
    return (
        f"{host}: another run holds this host: {who}, since {holder['since']}. Expected: one run at a time. Nothing was changed. "
        f"{wait}; if it is surely dead, free the host with: ssh {host} sudo systemctl stop sglang-fleet-run.service"
    )


class ActionModule(ActionBase):
    """Calls the module once, and once more when a dead run of this controller holds the lock."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Result of the module, or one clear error that names the holder."""
        task_vars = task_vars or {}
        super().run(tmp, task_vars)
        host = str(task_vars.get("inventory_hostname", "the host"))
        here, pid = controller(), os.getppid()
        me = {
            "controller": here,
            "user": getpass.getuser(),
            "machine": platform.node() or "controller",
            "pid": pid,
            "started": started(pid) or "",
        }
        arguments = {**self._task.args, "holder": me}
        result = self._execute_module(module_name="gpu_host_lock", module_args=arguments, task_vars=task_vars)
        holder = result.get("held_by")
        if not result.get("failed") and holder and not result.get("mine") and gone(holder, here):
            arguments["take_over"] = holder["invocation"]
            result = self._execute_module(module_name="gpu_host_lock", module_args=arguments, task_vars=task_vars)
            holder = result.get("held_by")
        if not result.get("failed") and holder and not result.get("mine"):
            raise AnsibleActionFail(refusal(host, holder, ours=holder.get("controller") == here))
        return dict(result)
