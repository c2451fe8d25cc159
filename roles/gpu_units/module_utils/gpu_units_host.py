# SPDX-License-Identifier: Apache-2.0
"""What a deployment needs of the host itself: systemd, the journal, control groups, and who holds a GPU."""

from __future__ import annotations

import csv
import io
import json
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SHOW = (
    "Id,LoadState,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,InvocationID,NRestarts,ControlGroup,"
    "ExecMainExitTimestampMonotonic,UnitFileState,MainPID,ExecMainPID,StartLimitBurst,User,MemoryMax,FragmentPath,DropInPaths"
)


class HostError(RuntimeError):
    """The host did something else than it was asked for; the text says what, and what to do."""


def run(argv: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """One command, output as text, never a shell."""
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


class Systemd:
    """systemctl and journalctl of the host."""

    def _do(self, *words: str, timeout_s: float = 60.0) -> str:
        done = run(["systemctl", "--no-ask-password", *words], timeout_s)
        if done.returncode:
            raise HostError(f"systemctl {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def reload(self) -> None:
        self._do("daemon-reload")

    def enable(self, units: list[str]) -> None:
        if units:
            self._do("enable", "--quiet", *units)

    def disable(self, units: list[str]) -> None:
        if units:
            self._do("disable", "--quiet", *units)

    def show(self, units: Iterable[str]) -> dict[str, dict[str, str]]:
        """Properties by unit; a unit that systemd does not know has ActiveState inactive."""
        units = list(units)
        if not units:
            return {}
        blocks = self._do("show", f"--property={SHOW}", *units).strip().split("\n\n")
        states = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]
        return dict(zip(units, states, strict=True))

    def stop(self, units: list[str], timeout_s: float) -> None:
        if units:
            self._do("stop", *units, timeout_s=timeout_s)

    def begin_start(self, unit: str) -> subprocess.Popen[str]:
        """A running `systemctl start`: several units start at the same time, each with systemd's own result."""
        # An old failure must not use up the limit of restarts; fails where there is none.
        run(["systemctl", "reset-failed", unit])
        return subprocess.Popen(
            ["systemctl", "--no-ask-password", "start", unit],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def journal(self, invocation: str, lines: int) -> list[str]:
        """Last lines of one invocation, the engine's and systemd's own about it."""
        if not invocation:
            return []
        of = [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
        done = run(["journalctl", "--quiet", "--no-pager", "--output=json", f"--lines={lines}", *of])
        texts = []
        for line in done.stdout.splitlines():
            message = json.loads(line).get("MESSAGE", "")
            texts.append(message if isinstance(message, str) else bytes(message or []).decode(errors="replace"))
        return texts


PROC = Path("/proc")
OWN_UNIT = "FLEET_UNIT"  # in the environment of every engine; children inherit it, wherever they go
SERVED_FROM = "/opt/sglang-fleet/releases/"


def unit_of_process(folder: Path) -> str:
    """The service or scope that a process (its folder in /proc) runs in, empty if in none."""
    for line in (folder / "cgroup").read_text(encoding="utf-8").splitlines():
        for part in reversed(line.rpartition(":")[2].split("/")):
            if part.endswith((".service", ".scope")):
                return part
    return ""


def _made_by(folder: Path) -> str:
    """The unit whose engine a process descends from, as its environment tells; empty if none, or out of sight."""
    try:
        entries = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{OWN_UNIT}=".encode()
    return next((entry[len(prefix) :].decode(errors="replace") for entry in entries if entry.startswith(prefix)), "")


def describe(pid: int, proc: Path = PROC) -> str:
    """A process as a person knows it: pid, user, program (arguments may hold secrets), its unit, whose orphan it is."""
    folder = proc / str(pid)
    try:
        uid = folder.stat().st_uid
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        name, parent = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()[1]
        program = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        unit = unit_of_process(folder)
    except (OSError, ValueError, IndexError):
        return f"pid {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    words = [f"{user}: {program or name}"]
    if unit:
        words.append(f"in {unit}")
    if (maker := _made_by(folder)) and maker != unit:
        words.append(f"left by {maker}")
    if parent == "1" and not unit.startswith("sglang@"):
        words.append("its parent is PID 1")
    return f"pid {pid} ({', '.join(words)})"


def strays(units: list[str], proc: Path = PROC) -> list[int]:
    """Processes of these units' engines that are in no sglang unit any more.

    They are known by their environment, or by the release's cache as working folder (a process that renames itself may
    have written over its environment); the latter tells no unit, so such a one counts for all.
    """
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            if folder.stat().st_uid == 0 or unit_of_process(folder).startswith("sglang@"):
                continue  # an administrator's shell is no engine
            at = str((folder / "cwd").readlink())
        except OSError:  # ended meanwhile, or a kernel thread
            continue
        if _made_by(folder) in units or (at.startswith(SERVED_FROM) and at.endswith("/cache")):
            found.append(int(folder.name))
    return sorted(found)


def pids_of(group: str, proc: Path = PROC) -> list[int]:
    """Processes in a control group and below it. Read from the processes' side, which is the same with cgroup 1 and 2."""
    if group in ("", "/"):
        return []
    found = []
    for listing in proc.glob("[0-9]*/cgroup"):
        try:
            paths = [line.split(":", 2)[2] for line in listing.read_text(encoding="utf-8").splitlines()]
        except (OSError, IndexError):  # ended meanwhile
            continue
        if any(path == group or path.startswith(f"{group}/") for path in paths):
            found.append(int(listing.parent.name))
    return sorted(found)


def minors(proc: Path = PROC) -> dict[str, int]:
    """Number of the device node by UUID, as the driver tells; empty without one. The number is no index of any order."""
    found = {}
    for path in proc.glob("driver/nvidia/gpus/*/information"):
        rows = dict(re.split(r":\s+", line, maxsplit=1) for line in path.read_text().splitlines() if ": " in line + " ")
        uuid, minor = rows.get("GPU UUID", "").strip(), rows.get("Device Minor", "").strip()
        if uuid and minor.isdigit():
            found[uuid] = int(minor)
    return found


def openers(uuids: set[str], proc: Path = PROC) -> list[int]:
    """Processes that have the device node of a GPU open, of whatever kind; needs root."""
    nodes = {f"/dev/nvidia{minor}" for uuid, minor in minors(proc).items() if uuid in uuids}
    found = set()
    for folder in proc.glob("[0-9]*/fd") if nodes else []:
        try:
            links = list(folder.iterdir())
        except OSError:  # ended meanwhile
            continue
        for link in links:
            try:
                if str(link.readlink()) in nodes:
                    found.add(int(folder.parent.name))
            except OSError:  # closed meanwhile
                continue
    return sorted(found)


class Gpus:
    """Who uses a GPU, asked of nvidia-smi."""

    def __init__(self, idle_mib: int) -> None:
        self.idle_mib = idle_mib

    def _query(self, what: str, fields: str) -> list[list[str]]:
        program = shutil.which("nvidia-smi")
        if program is None:
            raise HostError(
                "nvidia-smi is not there, so nothing shows that the GPUs are free; install the driver's tools"
            )
        done = run([program, f"--query-{what}={fields}", "--format=csv,noheader,nounits"])
        if done.returncode:
            raise HostError(
                f"nvidia-smi fails, so nothing shows that the GPUs are free: {(done.stderr or done.stdout).strip()}"
            )
        return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(done.stdout)) if row]

    def holders(self, uuids: set[str]) -> list[str]:
        """Why GPUs are not free, one text per process or GPU; empty when they are."""
        found = [
            f"GPU {uuid}: {describe(int(pid)) if pid.isdigit() else 'a process that shows no pid'} uses {memory} MiB"
            for uuid, pid, memory in self._query("compute-apps", "gpu_uuid,pid,used_memory")
            if uuid in uuids
        ]
        if not found:
            found = [
                f"GPU {uuid}: {memory} MiB used and no process shown (more than {self.idle_mib} MiB of an idle GPU)"
                + "".join(f"; {describe(pid)} has it open" for pid in openers({uuid}))
                for uuid, memory in self._query("gpu", "uuid,memory.used")
                if uuid in uuids and memory.isdigit() and int(memory) > self.idle_mib
            ]
        return found


def until(empty: Callable[[], list[Any]], limit_s: float, pause_s: float = 0.2) -> list[Any]:
    """Wait until a list is empty; what is left of it after the limit."""
    end = time.monotonic() + limit_s
    while (left := empty()) and time.monotonic() < end:
        time.sleep(pause_s)
    return left
