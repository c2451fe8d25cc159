# SPDX-License-Identifier: Apache-2.0
"""Ends with 0 when the engine of this unit gave a real token, with 1 and the reason at once when it can't any more.

Runs as ExecStartPost, so `systemctl start` returns with its result. Health alone is not enough: some paths of the engine are
healthy before the first forward pass.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

PAUSE_S = 0.25
REPORT_S = 15.0
PROBE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}


class Gone(Exception):
    """The engine's process ended."""


def say(text: str) -> None:
    print(f"sglang-fleet: {text}", flush=True)


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


def wait(url: str, key: str | None, pid: int, limit_s: float) -> str:
    """Wait for health and a token; the text says how long it took. Raises Gone, or TimeoutError with the last answer."""
    process = watch(pid)
    port = urllib.parse.urlsplit(url).port or 80
    begin = time.monotonic()
    tell = REPORT_S
    last = "no answer yet"
    while (now := time.monotonic()) - begin < limit_s:
        # A request may hang while the engine dies, so it is short; the next round looks at the process first.
        status, body = ask(f"{url}/health", None, key, min(5.0, limit_s))
        last = f"/health: {status or body.decode(errors='replace')}"
        if status == 200:
            if not ours(port, pid):
                raise RuntimeError(f"another process answers on {url}; stop it or give the instance another port")
            status, body = ask(f"{url}/generate", PROBE, key, min(60.0, limit_s))
            if status == 200 and tokens(body) > 0:
                return f"ready after {time.monotonic() - begin:.1f} s ({tokens(body)} tokens came back)"
            last = f"/generate: {status} {body.decode(errors='replace')[:200]}"
            if 400 <= status < 500:
                raise RuntimeError(f"the engine refuses a plain request: {last}")
        pause(process, PAUSE_S)
        if now - begin > tell:
            tell *= 2  # ever more seldom, or these lines would push the engine's own out of what a failure shows
            say(f"not ready after {now - begin:.0f} s, {last}")
    raise TimeoutError(f"no token within {limit_s:.0f} s; last answer {last}")


def main() -> int:
    """Exit status for systemd."""
    pid = int(os.environ["MAINPID"])
    key_file = os.environ.get("FLEET_API_KEY_FILE")
    key = Path(key_file).read_text(encoding="utf-8").strip() if key_file else None
    try:
        limit = float(os.environ["FLEET_START_TIMEOUT"])
        say(wait(os.environ["FLEET_URL"], key, pid, limit))
    except Gone:
        say(f"the engine's process {pid} ended before it gave a token; its own lines say why")
        return 1
    except (TimeoutError, RuntimeError) as error:
        say(f"not ready: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
