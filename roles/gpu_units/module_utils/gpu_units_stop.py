# SPDX-License-Identifier: Apache-2.0
"""Units stop, and it is proven: nothing of them is left, in their control groups or out of them, and their GPUs are free."""

from __future__ import annotations

from collections.abc import Callable

from ansible.module_utils.gpu_units_host import HostError, describe, until
from ansible.module_utils.gpu_units_instances import Data
from ansible.module_utils.gpu_units_start import start_units
from ansible.module_utils.gpu_units_state import STOPPED, Host, load, recover, units_of


def _visible(host: Host, states: dict[str, dict[str, str]]) -> None:
    """An empty control group proves something only if its processes could be seen before."""
    for unit, state in states.items():
        pid = int(state.get("MainPID") or 0)
        if pid and pid not in host.pids_of(state.get("ControlGroup", "")):
            group = state.get("ControlGroup")
            raise HostError(f"{unit}: its process {pid} is not seen in its control group {group!r}; run as root")


def _stop(host: Host, units: list[str]) -> None:
    host.systemd.stop(units, host.stop_timeout_s * 2 + 30)
    for unit, state in host.systemd.show(units).items():
        if state.get("ActiveState") not in STOPPED:
            raise HostError(f"{unit} is {state.get('ActiveState')} after a stop; see journalctl -u {unit}")


def _prove_free(host: Host, groups: dict[str, str], uuids: set[str]) -> Data:
    """Nothing of the stopped units is left and their GPUs are free, else HostError names the holders."""

    def left() -> list[str]:
        inside = [f"{unit}: {describe(pid)}" for unit, group in groups.items() for pid in host.pids_of(group)]
        return inside + [describe(pid) for pid in host.strays(list(groups))]

    if holders := until(left, host.free_timeout_s):
        raise HostError(f"stopped, but processes are left: {'; '.join(holders)}; end them (kill -9 PID) and run again")
    if not uuids:
        return {"cgroups": "empty", "gpus": "skipped: no GPU belongs to what changes"}
    if holders := until(lambda: host.gpu_holders(uuids), host.free_timeout_s):
        raise HostError(
            f"stopped, but GPUs are not free: {'; '.join(holders)}; end the holders (kill -9 PID) and run again"
        )
    return {"cgroups": "empty", "gpus": f"free: {', '.join(sorted(uuids))}"}


def guarded(host: Host, units: list[str], uuids: set[str], change: Callable[[], None]) -> Data:
    """Stop, prove, change. If that fails, what ran before runs again and nothing has changed."""
    states = host.systemd.show(units)
    running = [unit for unit in units if states[unit].get("ActiveState") not in STOPPED]
    try:
        _visible(host, {unit: states[unit] for unit in running})
        _stop(host, running)
        proof = _prove_free(host, {unit: states[unit].get("ControlGroup", "") for unit in units}, uuids)
        change()
    except Exception as error:
        raise HostError(f"{error}\nNothing was changed; {_undo(host, running)}") from error
    return {"stopped": running, **proof}


def _undo(host: Host, units: list[str]) -> str:
    recover(host)
    live = units_of(load(host, "current"))
    again = [unit for unit in units if unit in live]
    failures = start_units(host, again)[1]
    if failures:
        return "but the old engine did not come back:\n" + "\n".join(failures)
    return f"running again: {', '.join(again)}" if again else "nothing had been running"
