# SPDX-License-Identifier: Apache-2.0
"""The deployments of one host and the change from one to another.

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
from typing import Protocol

from ansible.module_utils import gpu_units_files as files
from ansible.module_utils.gpu_units_host import HostError, describe, pids_of, strays
from ansible.module_utils.gpu_units_instances import Data
from ansible.module_utils.gpu_units_render import ETC, HOME, KEYS, LIBEXEC, UNIT

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
    strays: Callable[[list[str]], list[int]] = strays
    start_timeout_s: float = 900.0
    stop_timeout_s: float = 90.0
    free_timeout_s: float = 30.0
    lock_timeout_s: float = 30.0
    journal_lines: int = 40
    site: str = "ansible-playbook site.yml"
    notes: list[str] = field(default_factory=list)

    def at(self, path: str) -> Path:
        """Where a path below / lies."""
        return self.root / path.lstrip("/")

    @property
    def deployments(self) -> Path:
        """The folder of the state."""
        return self.at(f"{STATE}/deployments")

    def rights(self, path: str, deployment: Data | None = None) -> tuple[int, int]:
        """(mode, group id) of a deployed file."""
        legacy = deployment is not None and reads_keys(deployment, Path(path).name)
        mode, shared = files.rights(path, legacy)
        return mode, (self.gid or 0) if shared else 0

    def differs(self, path: str, text: str) -> bool:
        """Whether a file is not just this text with its rights."""
        mode, gid = self.rights(path)
        # Nobody's group before the engine's user is there: whatever lies there then is not ours.
        return files.differs(self.at(path), text, mode, gid)

    def put(self, path: str, text: str) -> None:
        """Write a deployed file with its rights."""
        files.write(self.at(path), text, *self.rights(path))


def reads_keys(deployment: Data, name: str) -> bool:
    """Whether an instance of a deployment reads its key from the file itself, as all did before credentials."""
    return "FLEET_API_KEY_FILE=" in deployment["files"].get(f"{ETC}/{name}.env", "")


def folders(host: Host) -> None:
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


def load(host: Host, name: str) -> Data | None:
    """A deployment by its role: current, previous, older, failed."""
    path = host.deployments / f"{name}.json"
    text = files.text_of(path)
    try:
        return None if text is None else dict(json.loads(text))
    except ValueError as error:
        raise HostError(
            f"{path} is no JSON ({error}); restore it from a backup, or remove it and run site.yml again"
        ) from error


def save(host: Host, name: str, data: Data | None) -> None:
    """Write a deployment by its role; None removes it."""
    path = host.deployments / f"{name}.json"
    if data is None:
        files.remove(path)
    else:
        files.write(path, json.dumps(data, indent=1, sort_keys=True) + "\n", 0o640, host.gid or 0)


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


def units_of(*deployments: Data | None) -> list[str]:
    """Units of all instances, without those of baselines."""
    return sorted({instance["unit"] for d in deployments if d for instance in d["instances"]})


def enact(host: Host, to: Data | None, previous: Data | None, paths: list[str], units: list[str]) -> None:
    """Make files, links and enabled units agree with a deployment; `paths` and `units` are all that may be there."""
    wanted = to["files"] if to else {}
    if host.at(UNIT).exists():  # without its template systemd knows no such unit, and none is enabled
        host.systemd.disable([unit for unit in units if unit not in units_of(to)])
    if to:
        folders(host)
    for path, text in wanted.items():
        if host.differs(path, text):
            host.at(path).parent.mkdir(mode=0o755, exist_ok=True)
            host.put(path, text)
    for path in paths:
        if path not in wanted:
            files.remove(host.at(path))
            if path.endswith(".conf"):
                files.remove_empty(host.at(path).parent)
    for instance in to["instances"] if to else []:
        key = f"{KEYS}/{instance['name']}"
        if instance["api_key_file"] and (text := files.text_of(host.at(key))) is not None:
            mode, gid = host.rights(key, to)
            if files.differs(host.at(key), text, mode, gid):
                files.write(host.at(key), text, mode, gid)
    for link, deployment in (("previous", previous), ("current", to)):
        files.link(host.at(f"{HOME}/{link}"), f"releases/{deployment['release']}" if deployment else None)
    host.systemd.reload()
    host.systemd.enable(units_of(to))


def transition(
    host: Host, to: Data | None, previous: Data | None, older: Data | None, failed: Data | None = None
) -> None:
    """From the live deployment to another one (None: to nothing). What changes has to be stopped before."""
    now = {name: load(host, name) for name in ("current", "previous", "older")}
    current = now["current"]
    paths = sorted({path for d in (current, to) if d for path in d["files"]})
    units = units_of(current, to)
    save(host, "swap", {"to": to and to["id"], "before": now, "files": paths, "units": units})
    enact(host, to, previous, paths, units)
    if failed is not None:
        save(host, "failed", failed)
    save(host, "older", older)
    save(host, "previous", previous)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    save(host, "current", to and {**to, "activated_at": stamp})
    save(host, "swap", None)


def recover(host: Host) -> bool:
    """Finish or undo a change that a crash cut; true if there was one."""
    intent = load(host, "swap")
    if intent is None:
        return False
    current = load(host, "current")
    if (current and current["id"]) != intent["to"]:
        for name in ("older", "previous"):
            save(host, name, intent["before"][name])
    enact(host, current, load(host, "previous"), intent["files"], intent["units"])
    save(host, "swap", None)
    host.notes.append(f"an earlier change was cut short; the host agrees again with {name_of(current)}")
    return True


def name_of(deployment: Data | None) -> str:
    """A deployment as a person is told of it."""
    return f"deployment {deployment['id']} (release {deployment['release']})" if deployment else "no deployment"
