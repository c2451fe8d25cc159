# SPDX-License-Identifier: Apache-2.0
"""Units start, all at the same time, each with systemd's own result; one that fails says why."""

from __future__ import annotations

import os
import subprocess
import time

from ansible.module_utils import gpu_units_ended as ended
from ansible.module_utils.gpu_units_host import HostError
from ansible.module_utils.gpu_units_instances import Data
from ansible.module_utils.gpu_units_render import HOME
from ansible.module_utils.gpu_units_state import Host, load, recover, units_of

LOOK_BACK = 200  # lines in which the first error is looked for


def _failure(host: Host, unit: str, state: dict[str, str], complaint: str) -> str:
    """Everything a person needs to know about a start that failed."""
    lines = host.systemd.journal(state.get("InvocationID", ""), max(LOOK_BACK, host.journal_lines))
    died = int(state.get("ExecMainExitTimestampMonotonic") or 0) / 1e6
    how = ended.ending(state)
    words = [f"result {state.get('Result', 'unknown')}", *([how] if how else [])]
    words += [f"{time.monotonic() - died:.1f} s after its process ended"] if died else []
    # It is stopped for good after this, whatever it is in now.
    cause = ended.why(unit, {**state, "ActiveState": "failed"}, lines, host.site, host.site, host.root)
    parts = {"first error": ended.first_error(lines), "found": cause.observed, "fix": cause.fix}
    return "\n".join(
        [
            f"{unit} did not start ({', '.join(words)}): {complaint or 'no word from systemd'}",
            *(f"{name}: {text}" for name, text in parts.items() if text),
            "last lines of its journal:",
            *(f"  {line}" for line in lines[-host.journal_lines :] or ["(none)"]),
        ]
    )


def own_cache(host: Host, deployment: Data) -> None:
    """Everything in the cache of a release belongs to the engine's user, whoever ran something in it by hand."""
    cache = host.at(f"{HOME}/releases/{deployment['release']}/cache")
    if host.uid is None or not cache.is_dir():
        return
    gid, given = host.gid or 0, 0
    if (cache.stat().st_uid, cache.stat().st_gid) != (host.uid, gid):
        os.chown(cache, host.uid, gid)
    # By descriptors and never through a link: the folder's owner may change it meanwhile.
    for _, folders, names, handle in os.fwalk(cache):
        for name in (*names, *folders):
            try:
                if os.stat(name, dir_fd=handle, follow_symlinks=False).st_uid != host.uid:
                    os.chown(name, host.uid, gid, dir_fd=handle, follow_symlinks=False)
                    given += 1
            except FileNotFoundError:  # another instance of the release is at work
                continue
    if given:
        host.notes.append(f"{cache}: {given} files did not belong to the engine's user and were given to it")


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
    if current and any(state.get("ActiveState") != "active" for state in host.systemd.show(units).values()):
        own_cache(host, current)
    started, failures = start_units(host, units)
    if failures:
        raise HostError("\n".join(failures))
    return {
        "changed": bool(started),
        "started": started,
        "seconds": round(time.monotonic() - begin, 1),
        "notes": host.notes,
    }
