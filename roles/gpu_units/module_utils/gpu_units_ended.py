# SPDX-License-Identifier: Apache-2.0
"""Why a unit does not serve, and the command that mends it: from systemd's properties, its journal and its release.

Shared by the start, which fails with it, and by the smoke (`unit.active`). Nothing is changed. Standard library only.
"""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils import gpu_units_damage as damage

# Of `systemctl show`, read by `why`; a property that is not there counts as unknown.
PROPERTIES = (
    *("ActiveState", "SubState", "Result", "LoadState", "UnitFileState", "NRestarts", "StartLimitBurst", "User"),
    *("ExecMainCode", "ExecMainStatus", "ExecMainPID", "MemoryMax", "FragmentPath", "DropInPaths"),
)
CURRENT = "opt/sglang-fleet/current"
MIB = 1 << 20
FULL = MIB  # bytes; with less than that nothing can be written
CHDIR = 200  # exit codes from 200 are systemd's own, before the program: systemd.exec(5), "Process Exit Codes"
THEN = "{then}"
STEPS = {CHDIR: "CHDIR", 203: "EXEC", 206: "OOM_ADJUST", 217: "USER", 226: "NAMESPACE", 243: "CREDENTIALS"}

# --- what it said -------------------------------------------------------------------------------------------------

ERROR = re.compile(
    r"^(?!\s)(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b|\bCUDA error\b|[Oo]ut of memory|^terminate called|^Fatal|"
    r"undefined symbol|cannot open shared object|^sglang-fleet: |\b(?:error|fatal):|oom-kill|No space left on device|"
    r"Disk quota exceeded|^Subprocess \S+ .*\bcrashed with exit code|: Failed at step \w+ spawning"
)
READY = re.compile(r"^sglang-fleet: ready after ")
# Lines of our own that tell of progress, or point at the engine's.
PROGRESS = re.compile(
    r"^sglang-fleet: (?:not ready after |ready after |byte code |the engine's process \d+ ended)|server_args="
)
STAMP = re.compile(r"^\[[^\]]*\]\s*|^\w+: (?=\w*Error\b)")


def bare(line: str) -> str:
    """A line without the engine's stamp."""
    return STAMP.sub("", line.rstrip())


def since_ready(lines: Sequence[str]) -> list[str]:
    """Lines after the last start that succeeded: what was said before is no reason for the end."""
    last = max((at for at, line in enumerate(lines) if READY.search(line)), default=-1)
    return list(lines[last + 1 :])


def first_error(lines: Sequence[str], width: int = 300) -> str | None:
    """The first line that says what went wrong; None if none looks like it."""
    for line in map(bare, since_ready(lines)):
        if ERROR.search(line) and not PROGRESS.search(line):
            return line.strip()[:width]
    return None


# --- how it ended -------------------------------------------------------------------------------------------------


def number(state: Mapping[str, str], name: str) -> int:
    """A property as a number, 0 where it is none."""
    text = state.get(name, "")
    return int(text) if text.isdigit() else 0


def killed(state: Mapping[str, str]) -> str:
    """The signal that ended the main process, empty if none did."""
    if number(state, "ExecMainCode") not in (2, 3):  # CLD_KILLED, CLD_DUMPED
        return ""
    try:
        return signal.Signals(number(state, "ExecMainStatus")).name
    except ValueError:
        return f"signal {state.get('ExecMainStatus')}"


def ending(state: Mapping[str, str]) -> str:
    """How the main process ended, in words; empty if it did not, or never ran."""
    if name := killed(state):
        return f"its process was killed by {name}"
    if number(state, "ExecMainCode") == 1:
        status = number(state, "ExecMainStatus")
        return f"its process ended with status {status}{f'/{STEPS[status]}' if status in STEPS else ''}"
    return ""


def restarts(state: Mapping[str, str]) -> int:
    """How often systemd started it again; NRestarts also counts the attempt that the limit refused."""
    limit = number(state, "StartLimitBurst")
    return min(number(state, "NRestarts"), limit - 1) if limit else number(state, "NRestarts")


def coming(state: Mapping[str, str]) -> bool:
    """Whether it is on its way, so that a restart would only begin anew."""
    return state.get("ActiveState") in ("activating", "reloading")


# --- why ----------------------------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """`observed` says what was found beside the journal (empty: nothing), `fix` is the next step."""

    observed: str
    fix: str


def again(unit: str) -> str:
    """Starts a unit whatever it is in now: systemd refuses one that was started too often until its counter is reset."""
    return f"systemctl reset-failed {unit} && systemctl restart {unit}"


def kernel_lines() -> list[str]:
    """The kernel's messages, as far as this host may read them; none in most containers."""
    try:
        done = subprocess.run(
            ["journalctl", "--dmesg", "--quiet", "--no-pager", "--output=cat", "--lines=500"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # what it could tell is only a hint
        return []
    return done.stdout.splitlines()


def why(
    unit: str,
    state: Mapping[str, str],
    lines: Sequence[str],
    site: str,
    then: str | None = None,
    root: Path = Path("/"),
    kernel: Callable[[], list[str]] = kernel_lines,
) -> Cause:
    """Why a unit is not active.

    `lines` are the last of its journal, `site` the command that deploys the host, `then` what comes after a repair: by
    default the unit is started again.
    """
    then = then or again(unit)
    if (word := masked(state)) is not None:
        return Cause("the unit is masked", f"on the host: `systemctl unmask{word} {unit}`, then `{then}`")
    if state.get("LoadState") == "not-found":
        return Cause("systemd knows no such unit", f"`{site} --tags activate`")
    wait = Cause(
        "it is starting", f"wait for it: on the host, `systemctl start {unit}` returns when it serves or has failed"
    )
    if coming(state) and state.get("SubState") != "auto-restart":  # between two tries the last one is judged
        return wait
    if found := (
        _cache(state, root)
        or _space(lines, root)
        or _memory(state, lines, root, kernel)
        or _code(lines, root)
        or _damage(lines, site, root)
    ):
        return Cause(found.observed, f"on the host: {found.fix.replace(THEN, f'`{then}`')}")
    if coming(state):
        return wait
    if not first_error(lines) and state.get("Result") == "start-limit-hit":
        return Cause("systemd refuses one more start so soon after the others", f"on the host: `{then}`")
    if not first_error(lines) and state.get("ActiveState") == "inactive":
        return Cause("no error is in its journal: it was stopped, or never started", f"on the host: `{then}`")
    return Cause("", f"on the host: read `journalctl -u {unit} -e`, put its first error right, then `{then}`")


def masked(state: Mapping[str, str]) -> str | None:
    """None for a unit that may start; for one that somebody has masked, the option that `systemctl unmask` needs for it."""
    words = (state.get("UnitFileState", ""), state.get("LoadState", ""))
    if not any(word.startswith("masked") for word in words):
        return None
    return " --runtime" if "masked-runtime" in words else ""


def _release(root: Path) -> Path:
    """The release that is live, by its own name: `current` may be another one when the text is read."""
    return (root / CURRENT).resolve()


def _shown(path: Path, root: Path) -> str:
    return f"/{path.relative_to(root.resolve())}"


def _cache(state: Mapping[str, str], root: Path) -> Cause | None:
    cache, user = _release(root) / "cache", state.get("User") or ""
    try:
        owner, wanted = cache.stat().st_uid, pwd.getpwnam(user).pw_uid
    except (OSError, KeyError):
        return None
    if owner == wanted:
        return None
    return Cause(
        f"{_shown(cache, root)} belongs to uid {owner}, not to {user} ({wanted})",
        f"`chown -R {user}: {_shown(cache, root)}`, then {{then}}",
    )


def _space(lines: Sequence[str], root: Path) -> Cause | None:
    cache = _release(root) / "cache"
    try:
        room = os.statvfs(cache)
    except OSError:
        return None
    said = next((x for x in since_ready(lines) if "No space left" in x or "quota exceeded" in x), None)
    free = room.f_bavail * room.f_frsize
    inodes = room.f_favail if room.f_files else 1
    if free >= FULL and inodes and not said:
        return None
    text = f"{free // MIB} MiB and {room.f_favail} inodes are free in {_shown(cache, root)}"
    said = f"it says: {bare(said).strip()[:160]}; {text}" if said else f"No space left: {text}"
    return Cause(said, f"free some room (`df -h {_shown(cache, root)} /tmp /dev/shm` shows where), then {{then}}")


def _memory(
    state: Mapping[str, str], lines: Sequence[str], root: Path, kernel: Callable[[], list[str]]
) -> Cause | None:
    """The kernel killed it for memory: systemd or the kernel says so, or a limit is set and nothing else explains a SIGKILL."""
    said = since_ready(lines)
    stopped = state.get("ActiveState") == "inactive" and state.get("Result") == "success"
    dead = killed(state) == "SIGKILL" and first_error(lines) is None and not stopped
    dead |= any(re.search(r"\bcrashed with exit code -9\b", line) for line in said)
    told = state.get("Result") == "oom-kill" or any("oom-kill" in line for line in said)
    if not (dead or told):
        return None
    if state.get("MemoryMax", "infinity") not in ("infinity", ""):
        limit, place = _limit(state, root)
        what = "out of memory" if told else "probably out of memory"
        where = f" in {place}" if place else ""
        return Cause(
            f"{what}: {limit}{where} is its limit",
            f"raise {limit.split('=')[0]}{where} or take it out, then `systemctl daemon-reload` and {{then}}",
        )
    pid = number(state, "ExecMainPID")
    line = next((x for x in reversed(kernel()) if _kills(x, pid)), None)
    if line is None and not told:
        return None
    text = "the kernel killed it: the host was out of memory" + (f" ({line.strip()[:160]})" if line else "")
    users = "`ps axo rss,pid,user,comm --sort=-rss | head` shows who uses it"
    return Cause(text, f"make room in memory ({users}), then {{then}}")


def _kills(line: str, pid: int) -> bool:
    found = re.search(r"[Oo]ut of memory: Killed process (\d+) \((.*?)\)", line)
    return bool(found and (int(found[1]) == pid or found[2].startswith(("sglang", "python"))))


def _limit(state: Mapping[str, str], root: Path) -> tuple[str, str]:
    """(limit as it is written, the file that sets it); a later drop-in wins."""
    found = f"MemoryMax={number(state, 'MemoryMax') // MIB}M", ""
    for path in [state.get("FragmentPath", ""), *state.get("DropInPaths", "").split()]:
        try:
            text = (root / path.lstrip("/")).read_text(encoding="utf-8") if path else ""
        except OSError:
            continue
        for name, value in re.findall(r"^\s*(MemoryMax|MemoryLimit)\s*=\s*(\S+)", text, re.M):
            found = f"{name}={value}", path
    return found


def _code(lines: Sequence[str], root: Path) -> Cause | None:
    """Byte code that was cut when it was written, and that the check before the start did not recognize."""
    if not any(re.search(r"marshal data|EOFError: read over \d+ bytes", line) for line in since_ready(lines)):
        return None
    folder = _shown(_release(root) / "cache/pycache", root)
    return Cause("byte code in the release's cache is damaged", f"`rm -rf {folder}`, then {{then}}")


def _damage(lines: Sequence[str], site: str, root: Path) -> Cause | None:
    """Files of packages are gone; looked for only where an error speaks of it, as it takes a look at every file."""
    error = first_error(lines) or ""
    if not re.search(
        r"^ModuleNotFoundError|^ImportError|FileNotFoundError|cannot open shared object|No such file", error
    ):
        return None
    release = _release(root)
    if not (gone := damage.missing(release)):
        return None
    return Cause(
        f"the release is damaged: {'; '.join(gone[:3])}{f'; and {len(gone) - 3} more' if len(gone) > 3 else ''}",
        f"`rm -rf {_shown(release, root)}` (what still serves from it loses its files, too), then build it again: `{site}`",
    )
