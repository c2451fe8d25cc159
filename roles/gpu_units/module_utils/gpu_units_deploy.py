# SPDX-License-Identifier: Apache-2.0
"""Swap, start and roll back the deployment of one host.

State lies in `<root>/var/lib/sglang-fleet/deployments`: current.json, previous.json, older.json, failed.json (deployments as
gpu_units_render writes them, plus activated_at). A change goes: stop what changes, prove that it is gone, note the intent in
swap.json, write files and links, replace current.json (from here on the new one holds), drop the intent. A run that finds an
intent first makes the host agree with current.json again, so a crash leaves the old or the new deployment, never a mixture;
until then the unit template refuses to start anything.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ansible.module_utils.gpu_units_host import HostError, describe, pids_of, until
from ansible.module_utils.gpu_units_render import ETC, HOME, KEYS, LIBEXEC, UNIT, changed_instances, files_of

Data = dict[str, Any]
STATE = "var/lib/sglang-fleet"
STOPPED = ("inactive", "failed")


class SystemdLike(Protocol):
    """What is asked of systemd here."""

    def reload(self) -> None: ...
    def enable(self, units: list[str]) -> None: ...
    def disable(self, units: list[str]) -> None: ...
    def show(self, units: list[str]) -> dict[str, dict[str, str]]: ...
    def stop(self, units: list[str], timeout_s: float) -> None: ...
    def begin_start(self, unit: str) -> subprocess.Popen[str]: ...
    def journal(self, invocation: str, lines: int) -> list[str]: ...


@dataclass
class Host:
    """One host. `root` is / but in tests; `uid` and `gid` are the engine's user (None: not there yet, so only predict)."""

    systemd: SystemdLike
    gpu_holders: Callable[[set[str]], list[str]]
    can_read: Callable[[str], bool]
    uid: int | None
    gid: int | None
    root: Path = Path("/")
    pids_of: Callable[[str], list[int]] = pids_of
    start_timeout_s: float = 900.0
    stop_timeout_s: float = 90.0
    free_timeout_s: float = 30.0
    lock_timeout_s: float = 30.0
    journal_lines: int = 40
    notes: list[str] = field(default_factory=list)

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    @property
    def deployments(self) -> Path:
        return self.at(f"{STATE}/deployments")


# --- files --------------------------------------------------------------------------------------


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, text: str, mode: int, gid: int = 0) -> None:
    """The whole file or nothing of it, and on the disk when this returns."""
    # One name for all tries (one change at a time holds the lock), so a crash leaves nothing that the next try does not replace.
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchown(stream.fileno(), os.geteuid(), gid)
            os.fchmod(stream.fileno(), mode)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except Exception:
        new.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _remove(path: Path) -> None:
    if path.exists() or path.is_symlink():
        path.unlink()
        _sync(path.parent)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _link(link: Path, target: str | None) -> None:
    if target is None:
        _remove(link)
    elif not link.is_symlink() or str(link.readlink()) != target:
        new = link.with_name(f".{link.name}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(link)
        _sync(link.parent)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _mode(path: str) -> tuple[int, bool]:
    """(mode, belongs to the engine's group) of a deployed file or folder of it."""
    if path.startswith((ETC, KEYS)):
        return 0o640, True
    return (0o755 if path.startswith(LIBEXEC) else 0o644), False


def _folders(host: Host) -> None:
    """Folders that a deployment needs, each with its own rights."""
    gid = host.gid or 0
    for path, mode, group in (
        (HOME, 0o755, 0),
        (LIBEXEC, 0o755, 0),
        (str(Path(ETC).parent), 0o755, 0),
        (ETC, 0o750, gid),
        (KEYS, 0o750, gid),
        (str(Path(UNIT).parent), 0o755, 0),
        (STATE, 0o755, 0),
        (f"{STATE}/deployments", 0o750, gid),
    ):
        folder = host.at(path)
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(mode)
            os.chown(folder, os.geteuid(), group)


def _differs(host: Host, path: str, text: str) -> bool:
    file = host.at(path)
    mode, shared = _mode(path)
    try:
        status = file.lstat()
    except FileNotFoundError:
        return True
    return (
        file.is_symlink()
        or _text(file) != text
        or (status.st_mode & 0o7777) != mode
        or (status.st_uid, status.st_gid) != (os.geteuid(), host.gid if shared else 0)
    )


def load(host: Host, name: str) -> Data | None:
    """A deployment by its role: current, previous, older, failed."""
    path = host.deployments / f"{name}.json"
    text = _text(path)
    try:
        return None if text is None else dict(json.loads(text))
    except ValueError as error:
        raise HostError(
            f"{path} is no JSON ({error}); restore it from a backup, or remove it and run site.yml again"
        ) from error


def _save(host: Host, name: str, data: Data | None) -> None:
    path = host.deployments / f"{name}.json"
    if data is None:
        _remove(path)
    else:
        write(path, json.dumps(data, indent=1, sort_keys=True) + "\n", 0o640, host.gid or 0)


@contextmanager
def locked(host: Host) -> Iterator[None]:
    """One change of a host at a time; the kernel drops the lock of a run that dies."""
    folder = host.at(STATE)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+", encoding="ascii") as stream:
        end = time.monotonic() + host.lock_timeout_s
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    stream.seek(0)
                    holder = stream.read().strip()
                    who = describe(int(holder)) if holder.isdigit() else "another run"
                    raise HostError(
                        f"{who} is changing this host (lock {folder / 'lock'}); wait until it is done"
                    ) from None
                time.sleep(0.1)
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


# --- the change itself ----------------------------------------------------------------------------


def _units(*deployments: Data | None) -> list[str]:
    return sorted({instance["unit"] for d in deployments if d for instance in d["instances"]})


def _enact(host: Host, to: Data | None, previous: Data | None, files: list[str], units: list[str]) -> None:
    """Make files, links and enabled units agree with a deployment; `files` and `units` are all that may be there."""
    wanted = to["files"] if to else {}
    if host.at(UNIT).exists():  # without its template systemd knows no such unit, and none is enabled
        host.systemd.disable([unit for unit in units if unit not in _units(to)])
    if to:
        _folders(host)
    for path, text in wanted.items():
        if _differs(host, path, text):
            mode, shared = _mode(path)
            host.at(path).parent.mkdir(mode=0o755, exist_ok=True)
            write(host.at(path), text, mode, (host.gid or 0) if shared else 0)
    for path in files:
        if path not in wanted:
            _remove(host.at(path))
            if path.endswith(".conf"):
                _remove_empty(host.at(path).parent)
    for link, deployment in (("previous", previous), ("current", to)):
        _link(host.at(f"{HOME}/{link}"), f"releases/{deployment['release']}" if deployment else None)
    host.systemd.reload()
    host.systemd.enable(_units(to))


def transition(
    host: Host, to: Data | None, previous: Data | None, older: Data | None, failed: Data | None = None
) -> None:
    """From the live deployment to another one (None: to nothing). What changes has to be stopped before."""
    now = {name: load(host, name) for name in ("current", "previous", "older")}
    current = now["current"]
    files = sorted({path for d in (current, to) if d for path in d["files"]})
    units = _units(current, to)
    _save(host, "swap", {"to": to and to["id"], "before": now, "files": files, "units": units})
    _enact(host, to, previous, files, units)
    if failed is not None:
        _save(host, "failed", failed)
    _save(host, "older", older)
    _save(host, "previous", previous)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    _save(host, "current", to and {**to, "activated_at": stamp})
    _save(host, "swap", None)


def recover(host: Host) -> bool:
    """Finish or undo a change that a crash cut; true if there was one."""
    intent = load(host, "swap")
    if intent is None:
        return False
    current = load(host, "current")
    if (current and current["id"]) != intent["to"]:
        for name in ("older", "previous"):
            _save(host, name, intent["before"][name])
    _enact(host, current, load(host, "previous"), intent["files"], intent["units"])
    _save(host, "swap", None)
    host.notes.append(f"an earlier change was cut short; the host agrees again with {_name(current)}")
    return True


def _name(deployment: Data | None) -> str:
    return f"deployment {deployment['id']} (release {deployment['release']})" if deployment else "no deployment"


# --- stop and proof -------------------------------------------------------------------------------


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
        return [f"{unit}: {describe(pid)}" for unit, group in groups.items() for pid in host.pids_of(group)]

    if holders := until(left, host.free_timeout_s):
        raise HostError(f"stopped, but processes are left: {'; '.join(holders)}; end them and run again")
    if not uuids:
        return {"cgroups": "empty", "gpus": "skipped: no GPU belongs to what changes"}
    if holders := until(lambda: host.gpu_holders(uuids), host.free_timeout_s):
        raise HostError(f"stopped, but GPUs are not free: {'; '.join(holders)}; end the holders and run again")
    return {"cgroups": "empty", "gpus": f"free: {', '.join(sorted(uuids))}"}


def _guarded(host: Host, units: list[str], uuids: set[str], change: Callable[[], None]) -> Data:
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
    live = _units(load(host, "current"))
    again = [unit for unit in units if unit in live]
    failures = _start(host, again)[1]
    if failures:
        return "but the old engine did not come back:\n" + "\n".join(failures)
    return f"running again: {', '.join(again)}" if again else "nothing had been running"


# --- swap -------------------------------------------------------------------------------------------


def _uuids(instances: list[Data]) -> set[str]:
    return {uuid for instance in instances for uuid in instance["gpus"]}


def _stale(host: Host, current: Data | None, wanted: Data, keys: dict[str, str]) -> tuple[list[Data], list[str]]:
    """(instances of `current` to stop, what differs): wanted against current.json, and against what lies on the disk."""
    names: set[str] = {instance["name"] for instance in changed_instances(current, wanted)}
    what: list[str] = []
    own = {path: i["name"] for d in (current, wanted) if d for i in d["instances"] for path in files_of(i["name"])}
    everyone = {instance["name"] for instance in (current or wanted)["instances"]}
    for path, text in wanted["files"].items():
        if _differs(host, path, text):
            what.append(path)
            names |= {own[path]} if path in own else everyone
    what += [path for path in (current or {"files": {}})["files"] if path not in wanted["files"]]
    for name, key in keys.items():
        if _differs(host, f"{KEYS}/{name}", key):
            what.append(f"{KEYS}/{name}")
            names.add(name)
    link = host.at(f"{HOME}/current")
    if not link.is_symlink() or str(link.readlink()) != f"releases/{wanted['release']}":
        what.append(f"{HOME}/current")
        names |= everyone
    states = host.systemd.show(_units(wanted))
    what += [f"{unit} (enable)" for unit, state in states.items() if state.get("UnitFileState") != "enabled"]
    return [instance for instance in (current or wanted)["instances"] if instance["name"] in names], what


def _diff(host: Host, current: Data | None, wanted: Data | None, keys: dict[str, str] | None = None) -> list[Data]:
    """Differences for --diff, from what lies on the disk; a key shows only that it differs."""
    found = []
    old_lines = [f"release {current['release']}", *_units(current)] if current else []
    new_lines = [f"release {wanted['release']}", *_units(wanted)] if wanted else []
    pairs: list[tuple[str, str, str]] = [("deployment", "\n".join(old_lines) + "\n", "\n".join(new_lines) + "\n")]
    wanted_files = wanted["files"] if wanted else {}
    for path in sorted({*(current["files"] if current else {}), *wanted_files}):
        pairs.append((f"/{path}", _text(host.at(path)) or "", wanted_files.get(path, "")))
    for name, key in (keys or {}).items():
        if _text(host.at(f"{KEYS}/{name}")) != key:
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
        raise HostError(f"release {release} is not complete here ({folder}/manifest.json is missing); run site.yml")
    cache = folder / "cache"
    if not cache.is_dir():
        cache.mkdir(mode=0o750)
    if host.uid is not None and (cache.stat().st_uid, cache.stat().st_gid) != (host.uid, host.gid):
        os.chown(cache, host.uid, host.gid or 0)


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
    same = current is not None and current["id"] == wanted["id"]
    result: Data = {"changed": bool(what) or not same, "what": what, "diff": _diff(host, current, wanted, keys)}
    if check or not result["changed"]:
        return {**result, "stopped": [], "notes": host.notes}
    _ready_release(host, wanted)
    _readable(host, wanted)
    known = {instance["name"] for instance in (current or wanted)["instances"]}
    new = [instance for instance in wanted["instances"] if instance["name"] not in known]
    previous, older = load(host, "previous"), load(host, "older")

    def change() -> None:
        _folders(host)
        for name, key in keys.items():
            if _differs(host, f"{KEYS}/{name}", key):
                write(host.at(f"{KEYS}/{name}"), key, 0o640, host.gid or 0)
        if same:
            transition(host, wanted, previous, older)
        else:
            transition(host, wanted, current, previous)

    units = [instance[kind] for instance in stale + new for kind in ("unit", "baseline_unit")]
    moved = [i for i in wanted["instances"] if i["name"] in {s["name"] for s in stale + new}]
    result |= _guarded(host, units, _uuids(stale + moved), change)
    _forget_keys(host)
    return {**result, "notes": host.notes}


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
            _remove(path)


# --- start ------------------------------------------------------------------------------------------


def _failure(host: Host, unit: str, state: dict[str, str], complaint: str) -> str:
    """Everything a person needs to know about a start that failed."""
    lines = host.systemd.journal(state.get("InvocationID", ""), host.journal_lines)
    ended = int(state.get("ExecMainExitTimestampMonotonic") or 0) / 1e6
    ago = f", {time.monotonic() - ended:.1f} s after its process ended" if ended else ""
    head = (
        f"{unit} did not start (result {state.get('Result', 'unknown')}, main process code {state.get('ExecMainCode')} "
        f"status {state.get('ExecMainStatus')}{ago}): {complaint or 'no word from systemd'}"
    )
    return "\n".join([head, "last lines of its journal:", *(f"  {line}" for line in lines or ["(none)"])])


def _start(host: Host, units: list[str]) -> tuple[list[str], list[str]]:
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
    units = expected if check and expected is not None else _units(current)
    if current is None and not check:
        raise HostError("nothing is deployed on this host; run site.yml, which swaps a deployment in first")
    if check:
        states = host.systemd.show(units)
        idle = [unit for unit in units if states[unit].get("ActiveState") != "active"]
        return {"changed": bool(idle), "started": idle, "seconds": 0.0, "notes": host.notes}
    begin = time.monotonic()
    started, failures = _start(host, units)
    if failures:
        raise HostError("\n".join(failures))
    return {
        "changed": bool(started),
        "started": started,
        "seconds": round(time.monotonic() - begin, 1),
        "notes": host.notes,
    }


# --- rollback ---------------------------------------------------------------------------------------


def rollback(host: Host, discard: str | None = None, check: bool = False) -> Data:
    """Back to the previous deployment, and start it.

    Without `discard` current and previous change places, so a second call goes forward again. With the id of a deployment that
    failed, that one is put aside as failed.json and can't come back; is another one live, only what should run is started.
    Result: {changed, rolled_back, deployment (or None), failed, started, diff, notes}.
    """
    if not check:
        recover(host)
    current, previous, older = (load(host, name) for name in ("current", "previous", "older"))
    if discard is not None and (current is None or current["id"] != discard):
        host.notes.append(
            f"{discard or 'the failed deployment'} is not live, so nothing is swapped; {_name(current)} stays"
        )
        done = start(host, check) if current else {"changed": False, "started": []}
        state = {"rolled_back": False, "deployment": current, "diff": [], "notes": host.notes}
        return {**state, "changed": done["changed"], "started": done["started"]}
    if current is None and previous is None:
        raise HostError(
            "nothing is deployed here and nothing was before, so there is nothing to go back to; run site.yml"
        )
    result: Data = {
        "changed": True,
        "rolled_back": True,
        "deployment": previous,
        "diff": _diff(host, current, previous),
    }
    if previous is None:
        host.notes.append(
            f"nothing was deployed before {_name(current)}; its units are stopped and no deployment is live"
        )
    if check:
        return {**result, "started": _units(previous), "notes": host.notes}
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
    result |= _guarded(host, units, _uuids(stale + new), change)
    started, failures = _start(host, _units(previous))
    if failures:
        raise HostError(f"rolled back to {_name(previous)}, but it does not run:\n" + "\n".join(failures))
    return {**result, "started": started, "notes": host.notes}
