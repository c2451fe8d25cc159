# SPDX-License-Identifier: Apache-2.0
"""Swap, switch and roll back the deployment of one host; what the state is and how it changes stands in gpu_units_state."""

from __future__ import annotations

import os
from pathlib import Path

from ansible.module_utils import gpu_units_files as files
from ansible.module_utils.gpu_units_ended import masked
from ansible.module_utils.gpu_units_host import HostError
from ansible.module_utils.gpu_units_instances import Data
from ansible.module_utils.gpu_units_render import (
    HOME,
    KEYS,
    changed_instances,
    common_files,
    files_of,
    switched,
)
from ansible.module_utils.gpu_units_start import own_cache, start, start_units
from ansible.module_utils.gpu_units_state import Host, folders, load, name_of, recover, save, transition, units_of
from ansible.module_utils.gpu_units_stop import guarded


def _uuids(instances: list[Data]) -> set[str]:
    return {uuid for instance in instances for uuid in instance["gpus"]}


def _stale(host: Host, current: Data | None, wanted: Data, keys: dict[str, str]) -> tuple[list[Data], list[str]]:
    """(instances of `current` to stop, what differs): wanted against current.json, and against what lies on the disk."""
    names: set[str] = {instance["name"] for instance in changed_instances(current, wanted)}
    what: list[str] = []
    own = {path: i["name"] for d in (current, wanted) if d for i in d["instances"] for path in files_of(i["name"])}
    everyone = {instance["name"] for instance in (current or wanted)["instances"]}
    for path, text in wanted["files"].items():
        if host.differs(path, text):
            what.append(path)
            names |= {own[path]} if path in own else everyone
    what += [path for path in (current or {"files": {}})["files"] if path not in wanted["files"]]
    for name, key in keys.items():
        if host.differs(f"{KEYS}/{name}", key):
            what.append(f"{KEYS}/{name}")
            names.add(name)
    link = host.at(f"{HOME}/current")
    if not link.is_symlink() or str(link.readlink()) != f"releases/{wanted['release']}":
        what.append(f"{HOME}/current")
        names |= everyone
    states = host.systemd.show(units_of(wanted))
    what += [f"{unit} (enable)" for unit, state in states.items() if state.get("UnitFileState") != "enabled"]
    return [instance for instance in (current or wanted)["instances"] if instance["name"] in names], what


def _diff(host: Host, current: Data | None, wanted: Data | None, keys: dict[str, str] | None = None) -> list[Data]:
    """Differences for --diff, from what lies on the disk; a key shows only that it differs."""
    found = []
    old_lines = [f"release {current['release']}", *units_of(current)] if current else []
    new_lines = [f"release {wanted['release']}", *units_of(wanted)] if wanted else []
    pairs: list[tuple[str, str, str]] = [("deployment", "\n".join(old_lines) + "\n", "\n".join(new_lines) + "\n")]
    wanted_files = wanted["files"] if wanted else {}
    for path in sorted({*(current["files"] if current else {}), *wanted_files}):
        pairs.append((f"/{path}", files.text_of(host.at(path)) or "", wanted_files.get(path, "")))
    for name, key in (keys or {}).items():
        if files.text_of(host.at(f"{KEYS}/{name}")) != key:
            pairs.append((f"/{KEYS}/{name}", "(hidden)\n", "(hidden, differs)\n"))
    for header, before, after in pairs:
        if before != after:
            found.append({"before_header": header, "after_header": header, "before": before, "after": after})
    return found


def _ready_release(host: Host, deployment: Data) -> None:
    """The release is complete and its cache belongs to the engine's user."""
    folder = host.at(f"{HOME}/releases/{deployment['release']}")
    if not deployment["release"] or not (folder / "manifest.json").is_file():
        release = deployment["release"]
        raise HostError(
            f"release {release} is not complete here ({folder}/manifest.json is missing); build it again: `rm -rf {folder}` on "
            f"this host, then `{host.site}`"
        )
    cache = folder / "cache"
    if not cache.is_dir():
        cache.mkdir(mode=0o750)
    if os.statvfs(cache).f_flag & (os.ST_NOEXEC | os.ST_RDONLY):
        raise HostError(
            f"{cache} is mounted noexec or read-only, so kernels that engines compile there can't be written and loaded; "
            f"mount it with rw,exec: mount -o remount,rw,exec $(findmnt -no TARGET -T {cache})"
        )
    own_cache(host, deployment)


def _startable(host: Host, deployment: Data) -> None:
    """Nobody has forbidden the units to start."""
    for unit, state in host.systemd.show(units_of(deployment)).items():
        if (word := masked(state)) is not None:
            raise HostError(
                f"{unit} is masked, so it can't be started; `systemctl unmask{word} {unit}` on this host, or take the instance "
                f"out of the inventory, then `{host.site}`"
            )


def _readable(host: Host, deployment: Data) -> None:
    for instance in deployment["instances"]:
        for key in ("model_path", "draft_model_path"):
            path = instance[key]
            if (
                path
                and (key == "model_path" or instance["mode"] != "baseline")
                and not host.can_read(f"{path}/config.json")
            ):
                raise HostError(
                    f"instance {instance['name']}: the engine's user can't read {path}/config.json ({key}); "
                    "put the model there and let others read it: chmod -R a+rX"
                )


def swap(host: Host, wanted: Data, keys: dict[str, str], check: bool = False) -> Data:
    """Make `wanted` the live deployment; what it does not change keeps running. Nothing of it is started here.

    `keys` is {instance: API key}. Result: {changed, what, stopped, cgroups, gpus, diff, notes}.
    """
    keys = {name: key.strip() + "\n" for name, key in keys.items()}
    if empty := sorted(name for name, key in keys.items() if not key.strip()):
        raise HostError(f"the API key of {', '.join(empty)} is empty; write one into its api_key_file")
    if load(host, "swap") and check:
        host.notes.append("an earlier change was cut short; the next run mends it first")
    elif not check:
        recover(host)
    current = load(host, "current")
    stale, what = _stale(host, current, wanted, keys)
    _startable(host, wanted)
    same = current is not None and current["id"] == wanted["id"]
    result: Data = {"changed": bool(what) or not same, "what": what, "diff": _diff(host, current, wanted, keys)}
    if same and current and current.get("switched") and "switched" not in wanted and not check:
        save(host, "current", {**current, "switched": False})  # the inventory says the same now
    if check or not result["changed"]:
        return {**result, "stopped": [], "notes": host.notes}
    _ready_release(host, wanted)
    _readable(host, wanted)
    known = {instance["name"] for instance in (current or wanted)["instances"]}
    new = [instance for instance in wanted["instances"] if instance["name"] not in known]
    previous, older = load(host, "previous"), load(host, "older")

    def change() -> None:
        folders(host)
        for name, key in keys.items():
            if host.differs(f"{KEYS}/{name}", key):
                host.put(f"{KEYS}/{name}", key)
        if same:
            transition(host, wanted, previous, older)
        else:
            # What serves now is the way back if `wanted` fails; a temporary switch that is over pushes no older one out.
            kept = [d for d in (previous, older) if d and d["id"] != wanted["id"] and not d.get("switched")]
            transition(host, wanted, current, kept[0] if kept else None)

    units = [instance[kind] for instance in stale + new for kind in ("unit", "baseline_unit")]
    moved = [i for i in wanted["instances"] if i["name"] in {s["name"] for s in stale + new}]
    result |= guarded(host, units, _uuids(stale + moved), change)
    _forget_keys(host)
    return {**result, "notes": host.notes}


def switch(host: Host, rendered: Data, name: str, check: bool = False) -> Data:
    """One instance of the live deployment as `rendered` has it; everything else stays. Nothing is started here.

    Result as of swap, and `deployment`. The release is the live one, whatever `rendered` names.
    """
    if not check:
        recover(host)
    current = load(host, "current")
    if current is None or name not in {instance["name"] for instance in current["instances"]}:
        known = ", ".join(instance["name"] for instance in (current or {"instances": []})["instances"])
        raise HostError(f"instance {name} is not deployed here ({known or 'nothing is'}); run site.yml first")
    if current["profile"] != rendered["profile"] or common_files(current) != common_files(rendered):
        raise HostError(
            "what is live was deployed by another version of this toolkit, with other settings of the units or another "
            "profile, and one instance alone can't be changed; run site.yml first"
        )
    wanted = switched(current, rendered, name)
    previous = load(host, "previous")
    for kept in (current, previous):
        if kept and kept["id"] == wanted["id"]:
            wanted = {key: value for key, value in kept.items() if key != "activated_at"}
    return {**swap(host, wanted, {}, check), "deployment": wanted}


def _forget_keys(host: Host) -> None:
    """Remove keys that no kept deployment names any more."""
    kept = {
        Path(instance["api_key_file"]).name
        for name in ("current", "previous", "older")
        for instance in (load(host, name) or {"instances": []})["instances"]
        if instance["api_key_file"]
    }
    for path in host.at(KEYS).iterdir():
        if path.name not in kept:
            files.remove(path)


def rollback(host: Host, discard: str | None = None, check: bool = False, to_nothing: bool = False) -> Data:
    """Back to the previous deployment, and start it.

    Without `discard` current and previous change places, so a second call goes forward again; a temporary switch before the
    present deployment is passed over. With the id of a deployment that
    failed, that one is put aside as failed.json and can't come back; is another one live, only what should run is started.
    Where nothing was before, an operator's own rollback needs `to_nothing`: it takes down all that serves.
    Result: {changed, rolled_back, deployment (or None), failed, started, diff, notes}.
    """
    if not check:
        recover(host)
    current, previous, older = (load(host, name) for name in ("current", "previous", "older"))
    if discard is not None and (current is None or current["id"] != discard):
        host.notes.append(
            f"{discard or 'the failed deployment'} is not live, so nothing is swapped; {name_of(current)} stays"
        )
        done = start(host, check) if current else {"changed": False, "started": []}
        state = {"rolled_back": False, "deployment": current, "diff": [], "notes": host.notes}
        return {**state, "changed": done["changed"], "started": done["started"]}
    if current is None and previous is None:
        raise HostError(
            "nothing is deployed here and nothing was before, so there is nothing to go back to; run site.yml"
        )
    if discard is None and previous is None and not to_nothing:
        raise HostError(
            f"nothing was deployed before {name_of(current)}, so there is nothing to go back to and nothing was changed. "
            f"To stop {', '.join(units_of(current))} and leave this host without a deployment: "
            f"`{host.site} --tags rollback -e rollback_to_nothing=true`"
        )
    if discard is None and previous and previous.get("switched") and older:
        previous, older = older, previous  # a switch was temporary: the way back leads past it
    result: Data = {
        "changed": True,
        "rolled_back": True,
        "deployment": previous,
        "diff": _diff(host, current, previous),
    }
    if previous is None:
        host.notes.append(
            f"nothing was deployed before {name_of(current)}; its units are stopped and no deployment is live"
        )
    if previous is not None:
        _startable(host, previous)
    if check:
        return {**result, "started": units_of(previous), "notes": host.notes}
    if previous is not None:
        _ready_release(host, previous)
    stale = changed_instances(current, previous)
    known = {instance["name"] for instance in (current or {"instances": []})["instances"]}
    new = [instance for instance in (previous or {"instances": []})["instances"] if instance["name"] not in known]

    def change() -> None:
        if discard is None:
            transition(host, previous, current, older)
        else:
            transition(host, previous, older, None, failed=current)

    units = [instance[kind] for instance in stale + new for kind in ("unit", "baseline_unit")]
    result |= guarded(host, units, _uuids(stale + new), change)
    started, failures = start_units(host, units_of(previous))
    if failures:
        raise HostError(f"rolled back to {name_of(previous)}, but it does not run:\n" + "\n".join(failures))
    return {**result, "started": started, "notes": host.notes}
