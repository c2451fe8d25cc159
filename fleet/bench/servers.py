# SPDX-License-Identifier: Apache-2.0
"""The arms' servers: all resident at once, each in a process group and on a port of its own, all gone at the end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.bench import client
from fleet.bench.arms import Arm, Flags, words

STOP_LIMIT = 15.0  # seconds until SIGKILL
POLL = 0.3  # seconds between two looks at starting servers


class EngineFailed(Exception):
    """An engine did not start, died or gave no answer."""


@dataclass
class Server:
    """One arm's server. `seconds` is how long it took to its first token, None until then."""

    arm: Arm
    port: int
    log: Path
    process: subprocess.Popen[bytes]
    command: list[str]
    started: float
    seconds: float | None = None
    error: str | None = None

    def lines(self, offset: int = 0) -> list[str]:
        """The log from a byte on."""
        with self.log.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace").splitlines()

    def tail(self, count: int = 15) -> str:
        return "\n".join(self.lines()[-count:])

    def reason(self) -> str:
        """The log's line that says why an engine ended: its last error, or its last line."""
        lines = [line.strip() for line in self.lines() if line.strip()]
        errors = [line for line in lines if "Error" in line and "server_args=" not in line]
        return (errors or lines or ["it printed nothing"])[-1][-400:]


def free_ports(taken: set[int]) -> tuple[int, int]:
    """Two neighbouring free ports of the loopback, for HTTP and for NCCL; the engine wants port + 10000 free as well."""
    for port in random.sample(range(20000, 30000, 2), 500):
        if port in taken:
            continue
        with suppress(OSError):
            for number in (port, port + 1, port + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            taken.add(port)
            return port, port + 1
    raise EngineFailed("no free port of the loopback between 20000 and 29999")


def environment(python: str, more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and more, with the programs beside `python` first (engines call ninja by name).

    A relative PYTHONPATH means the same in the server's own folder.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **more}
    beside = Path(shutil.which(python) or python).absolute().parent
    env["PATH"] = os.pathsep.join([str(beside), *filter(None, [env.get("PATH")])])
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in path.split(os.pathsep) if part)
    return env


def start(
    arm: Arm, python: str, base: Flags, env: Mapping[str, str], folder: Path, taken: set[int], suffix: str = ""
) -> Server:
    """Start an arm's server; it is not ready yet."""
    port, second = free_ports(taken)
    own: Flags = {"host": ["127.0.0.1"], "port": [str(port)], "nccl-port": [str(second)]}
    command = [python, "-m", "sglang.launch_server", *words({**base, **arm.flags, **own})]
    if shutil.which("setpriv"):  # a harness that is killed outright takes its engines along
        command = ["setpriv", "--pdeathsig", "KILL", *command]
    work = folder / f"{arm.slug}{suffix}"
    work.mkdir(parents=True, exist_ok=True)
    log = work / "engine.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=work,
            env=environment(python, env),
            start_new_session=True,
        )
    return Server(arm, port, log, process, command, time.monotonic())


def _look(server: Server) -> bool:
    """Is a starting server decided: ready, or failed with `error`?"""
    code = server.process.poll()
    if code is not None:
        server.error = f"ended with {code} before it was ready: {server.reason()}"
        return True
    try:
        client.get(server.port, "/health", timeout=5)
        answer = client.post(
            server.port,
            "/generate",
            {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}},
            timeout=120,
        )
    except (OSError, client.Refused):
        return False
    if not answer.get("output_ids"):
        return False
    server.seconds = time.monotonic() - server.started
    return True


def wait(servers: Sequence[Server], deadline: float, say: Callable[[str], None]) -> None:
    """Return when every server is ready or has failed; those that are late at `deadline` (monotonic) have failed."""
    open_ones = list(servers)
    while open_ones:
        for server in list(open_ones):
            if _look(server):
                open_ones.remove(server)
                what = f"ready after {server.seconds:.0f} s" if server.error is None else server.error
                say(f"{server.arm.name}: {what}")
        if open_ones and time.monotonic() > deadline:
            for server in open_ones:
                server.error = f"not ready after {time.monotonic() - server.started:.0f} s: {server.reason()}"
                say(f"{server.arm.name}: {server.error}")
                stop([server])
            return
        if open_ones:
            time.sleep(POLL)


def members(group: int, proc: Path = Path("/proc")) -> list[int]:
    """Living processes of a process group; one that only waits to be reaped is dead."""
    found = []
    for stat in proc.glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # ended meanwhile
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def stop(servers: Sequence[Server]) -> None:
    """End servers and all that they started: ask, then kill. Raises EngineFailed if something outlives that."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for server in servers:
            if members(server.process.pid):
                with suppress(ProcessLookupError):
                    os.killpg(server.process.pid, sign)
        deadline = time.monotonic() + STOP_LIMIT
        while time.monotonic() < deadline:
            for server in servers:
                server.process.poll()  # reap
            if not any(members(server.process.pid) for server in servers):
                return
            time.sleep(0.1)
    left = {server.arm.name: members(server.process.pid) for server in servers}
    raise EngineFailed(f"processes outlived SIGKILL: { {name: pids for name, pids in left.items() if pids} }")


@contextmanager
def resident(
    arms: Sequence[Arm],
    *,
    python: str,
    base: Flags,
    env: Mapping[str, str],
    folder: Path,
    wave: int,
    deadline: float,
    say: Callable[[str], None],
    suffix: str = "",
) -> Iterator[list[Server]]:
    """Serve all arms for a `with` block, started `wave` at a time; failed ones carry `error` and are stopped."""
    servers: list[Server] = []
    taken: set[int] = set()
    try:
        for first in range(0, len(arms), wave):
            batch = []
            for arm in arms[first : first + wave]:
                batch.append(start(arm, python, base, env, folder, taken, suffix))
                servers.append(batch[-1])
            say(f"starting {', '.join(server.arm.name for server in batch)}")
            wait(batch, deadline, say)
            stop([server for server in batch if server.error])
        yield servers
    finally:
        held = hold_signals()
        try:
            stop(servers)
        finally:
            release_signals(held)


def hold_signals() -> dict[int, Any]:
    """A second Ctrl-C or SIGTERM must not keep servers from being stopped."""
    return {sign: signal.signal(sign, signal.SIG_IGN) for sign in (signal.SIGINT, signal.SIGTERM)}


def release_signals(held: Mapping[int, Any]) -> None:
    """Back to the handlers before."""
    for sign, handler in held.items():
        signal.signal(sign, handler)


def gpu_memory(env: Mapping[str, str] | None = None) -> list[int] | None:
    """Used MiB of the GPUs that servers with this environment see (others may be busy), None without nvidia-smi."""
    visible = (env or {}).get("CUDA_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES")
    only = ["-i", visible] if visible else []
    try:
        done = subprocess.run(
            ["nvidia-smi", *only, "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return [int(line) for line in done.stdout.split() if line.isdigit()]
