# SPDX-License-Identifier: Apache-2.0
"""Units start, all at the same time, each with systemd's own result; one that fails says why."""

from __future__ import annotations

import subprocess
import time

from ansible.module_utils.gpu_units_host import HostError, first_error
from ansible.module_utils.gpu_units_render import Data
from ansible.module_utils.gpu_units_state import Host, load, recover, units_of

LOOK_BACK = 200  # lines in which the first error is looked for


def _failure(host: Host, unit: str, state: dict[str, str], complaint: str) -> str:
    """Everything a person needs to know about a start that failed."""
    lines = host.systemd.journal(state.get("InvocationID", ""), max(LOOK_BACK, host.journal_lines))
    ended = int(state.get("ExecMainExitTimestampMonotonic") or 0) / 1e6
    ago = f", {time.monotonic() - ended:.1f} s after its process ended" if ended else ""
    head = (
        f"{unit} did not start (result {state.get('Result', 'unknown')}, main process code {state.get('ExecMainCode')} "
        f"status {state.get('ExecMainStatus')}{ago}): {complaint or 'no word from systemd'}"
    )
    first = [f"first error: {error}"] if (error := first_error(lines)) else []
    return "\n".join(
        [
            head,
            *first,
            "last lines of its journal:",
            *(f"  {line}" for line in lines[-host.journal_lines :] or ["(none)"]),
        ]
    )


def start_units(host: Host, units: list[str]) -> tuple[list[str], list[str]]:
    """(started, failures as texts); all units start at the same time. A unit that fails is left stopped, not in a loop."""
    states = host.systemd.show(units)
    jobs = {unit: host.systemd.begin_start(unit) for unit in units if states[unit].get("ActiveState") != "active"}
    # systemd bounds the start itself; the margin is for its own stop of what is left.
    end = time.monotonic() + host.start_timeout_s + host.stop_timeout_s + 60
    failures = []
    for unit, job in jobs.items():
        try:
            complaint = job.communicate(timeout=max(1.0, end - time.monotonic()))[1].strip()
        except subprocess.TimeoutExpired:
            job.kill()
            job.communicate()
            complaint = "systemd gave no result in time"
        state = host.systemd.show([unit])[unit]
        if job.returncode or state.get("ActiveState") != "active":
            failures.append(_failure(host, unit, state, complaint.splitlines()[0] if complaint else ""))
            host.systemd.stop([unit], host.stop_timeout_s * 2 + 30)
    return list(jobs), failures


def start(host: Host, check: bool = False, expected: list[str] | None = None) -> Data:
    """Start every unit of the live deployment that does not run; returns when each gave a token.

    `expected` are the units that a predicted swap would leave, for check mode. Result: {changed, started, seconds, notes}.
    """
    if not check:
        recover(host)
    current = load(host, "current")
    units = expected if check and expected is not None else units_of(current)
    if current is None and not check:
        raise HostError("nothing is deployed on this host; run site.yml, which swaps a deployment in first")
    if check:
        states = host.systemd.show(units)
        idle = [unit for unit in units if states[unit].get("ActiveState") != "active"]
        return {"changed": bool(idle), "started": idle, "seconds": 0.0, "notes": host.notes}
    begin = time.monotonic()
    started, failures = start_units(host, units)
    if failures:
        raise HostError("\n".join(failures))
    return {
        "changed": bool(started),
        "started": started,
        "seconds": round(time.monotonic() - begin, 1),
        "notes": host.notes,
    }
