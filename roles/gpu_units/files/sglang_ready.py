# SPDX-License-Identifier: Apache-2.0
"""Ends with 0 when the engine of this unit gave a real token, with 1 and the reason at once when it can't any more.

Runs as ExecStartPost, so `systemctl start` returns with its result. Health alone is not enough: some paths of the engine are
healthy before the first forward pass. An engine that hangs is not waited for to the end, see sglang_progress.py.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # started with -I, which leaves it out
from sglang_progress import GpuMemory, Judge, Processes, stale_locks, weights_of

PAUSE_S = 0.25
SAMPLE_S = 2.0
HEALTH_S, TOKEN_S = 30.0, 300.0  # of one request; the first token may have to wait for compilers
REPORT_S = 15.0
PROBE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}


class Gone(Exception):
    """The engine's process ended."""


def say(text: str) -> None:
    print(f"sglang-fleet: {text}", flush=True)


def api_key(pid: int) -> str | None:
    """The key of this instance: a credential of the unit, read where its engine sees it.

    systemd 252 hides credentials from ExecStartPost, while the same user may look through the engine's own root.
    """
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        folder = next(
            (word.partition(b"=")[2] for word in environment if word.startswith(b"CREDENTIALS_DIRECTORY=")), None
        )
        path = Path(f"/proc/{pid}/root", (folder or b"nonexistent").decode().lstrip("/"), "api_key")
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None
    except (FileNotFoundError, ProcessLookupError):
        raise Gone from None


def watch(pid: int) -> int:
    """A descriptor that becomes readable when the process ends."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise Gone from None


def pause(process: int, seconds: float) -> None:
    """Wait, but not beyond the end of the process."""
    if select.select([process], [], [], seconds)[0]:
        raise Gone


def ask(url: str, body: dict[str, Any] | None, key: str | None, timeout: float) -> tuple[int, bytes]:
    """Status and body of one request; status 0 and the reason where no answer came."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    # An instance is on this host: a proxy of the environment would only be in the way.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(getattr(error, "reason", error)).encode()


def listeners(port: int, tables: tuple[str, ...] = ("/proc/net/tcp", "/proc/net/tcp6")) -> set[str]:
    """Inodes of the sockets that listen on a port."""
    found = set()
    for table in tables:
        try:
            rows = [line.split() for line in Path(table).read_text(encoding="ascii").splitlines()[1:]]
        except FileNotFoundError:  # no IPv6
            continue
        found |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port}
    return found


def ours(port: int, pid: int) -> bool:
    """Whether a process of this unit (same control group as `pid`) listens on the port."""
    sockets = {f"socket:[{inode}]" for inode in listeners(port)}
    group = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii") if sockets else ""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if sockets and (folder / "cgroup").read_text(encoding="ascii") == group:
                for entry in (folder / "fd").iterdir():
                    with suppress(FileNotFoundError):  # closed meanwhile; the socket may come after it
                        if str(entry.readlink()) in sockets:
                            return True
        except OSError:  # ended meanwhile, or another user's
            continue
    return False


def tokens(answer: bytes) -> int:
    """Tokens that an answer of /generate counts, 0 if it is none."""
    try:
        return int(json.loads(answer)["meta_info"]["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return 0


class Prober(threading.Thread):
    """Asks for health, then for a token, until one came or none can come; a thread, as a request may hang with the engine."""

    def __init__(self, url: str, key: str | None, pid: int, limit_s: float) -> None:
        super().__init__(daemon=True)
        self.url, self.key, self.pid, self.limit_s = url, key, pid, limit_s
        self.port = urllib.parse.urlsplit(url).port or 80
        self.last = "no answer yet"
        self.answering = False
        self.tokens = 0
        self.refused: str | None = None

    def run(self) -> None:
        """Ends with `tokens` or `refused` set."""
        while not self.tokens and self.refused is None:
            self.ask()
            time.sleep(PAUSE_S)

    def ask(self) -> None:
        """One round."""
        status, body = ask(f"{self.url}/health", None, self.key, min(HEALTH_S, self.limit_s))
        self.answering = status > 0
        self.last = f"/health: {status or body.decode(errors='replace')}"
        if status != 200:
            return
        if not ours(self.port, self.pid):
            self.refused = f"another process answers on {self.url}; stop it or give the instance another port"
            return
        self.last = "/health: 200, and a request for a token is under way"
        status, body = ask(f"{self.url}/generate", PROBE, self.key, min(TOKEN_S, self.limit_s))
        self.last = f"/generate: {status} {body.decode(errors='replace')[:200]}"
        if status == 200:
            self.tokens = tokens(body)
        elif 400 <= status < 500:
            self.refused = f"the engine refuses a plain request: {self.last}"


def wait(url: str, key: str | None, pid: int, limit_s: float, judge: Judge, uuids: list[str]) -> str:
    """Wait for health and a token; the text says how long it took.

    Raises Gone, TimeoutError with the last answer, or RuntimeError with what makes waiting pointless.
    """
    process, gpu = watch(pid), GpuMemory(uuids)
    try:
        processes = Processes(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise Gone from None
    prober = Prober(url, key, pid, limit_s)
    begin = time.monotonic()
    tell, look = REPORT_S, 0.0
    for thread in (gpu, prober):
        thread.start()
    while (now := time.monotonic() - begin) < limit_s:
        if prober.tokens:
            return f"ready after {now:.1f} s ({prober.tokens} tokens came back)"
        if prober.refused is not None:
            raise RuntimeError(prober.refused)
        if now >= look:
            look = now + SAMPLE_S
            if reason := judge.see(processes.sample(gpu.used, prober.answering)):
                raise RuntimeError(f"{reason}; last seen: {prober.last}; {seen(processes, gpu)}")
        pause(process, PAUSE_S)
        if now > tell:
            tell *= 2  # ever more seldom, or these lines would push the engine's own out of what a failure shows
            say(f"not ready after {now:.0f} s, {prober.last}; {seen(processes, gpu)}")
    raise TimeoutError(f"no token within {limit_s:.0f} s; last answer {prober.last}; {seen(processes, gpu)}")


def seen(processes: Processes, gpu: GpuMemory) -> str:
    """The state of things in one line."""
    parts = [f"{processes.read / 1e9:.1f} GB read"]
    if gpu.used is not None:
        parts.append(f"{gpu.used >> 20} MiB on its GPUs")
    if locks := stale_locks(Path.cwd()):
        parts.append(f"a build's lock lies there, remove it if nothing compiles: {', '.join(locks[:3])}")
    return "; ".join([*parts, processes.describe() or "no process"])


def main() -> int:
    """Exit status for systemd."""
    env = os.environ
    pid = int(env["MAINPID"])
    try:
        weights = weights_of([path for path in env.get("FLEET_MODELS", "").split(":") if path])
        judge = Judge(weights, float(env["FLEET_QUIET_S"]), float(env["FLEET_SPIN_S"]))
        uuids = [uuid for uuid in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
        say(wait(env["FLEET_URL"], api_key(pid), pid, float(env["FLEET_START_TIMEOUT"]), judge, uuids))
    except Gone:
        say(f"the engine's process {pid} ended before it gave a token; its own lines say why")
        return 1
    except (TimeoutError, RuntimeError) as error:
        say(f"not ready: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
