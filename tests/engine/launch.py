# SPDX-License-Identifier: Apache-2.0
"""Start a real SGLang server on this machine's CPU, wait for a real token, stop it with everything it started.

The profile is the product's own (`roles/kernel_backends`); nothing here knows what a CPU engine needs.
Needs Linux, gcc and a Python with the engine's packages.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

REPO = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-fleet"
START_LIMIT = 600.0  # seconds; 25 to 50 on two idle cores, minutes on crowded ones
STOP_LIMIT = 10.0  # seconds until SIGKILL; 2 are usual


class EngineFailed(RuntimeError):
    """The engine did not start, died or gave no token; the text ends with the log's tail."""


def _profiles() -> ModuleType:
    path = REPO / "roles/kernel_backends/lookup_plugins/kernel_backends_profile.py"
    spec = importlib.util.spec_from_file_location("kernel_backends_profile", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lay_out(release: Path, name: str = "cpu") -> tuple[dict[str, Any], dict[str, str]]:
    """Write a profile's files and its stub libcuda below `release/profile`; return its (args, env), placeholders expanded."""
    profile = _profiles().load(name)
    root = release / "profile"
    for path, text in profile["files"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    if profile["stub_libcuda"]:
        (root / "lib").mkdir(parents=True, exist_ok=True)
        code = "".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in profile["stub_symbols"])
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", root / "lib/libcuda.so.1"],
            input=code, text=True, check=True,
        )  # fmt: skip
    env = {key: value.replace("{release}", str(release)) for key, value in profile["env"].items()}
    return profile["args"], env


def flags(args: Mapping[str, Any]) -> list[str]:
    """Command-line form of `{flag: value}`: True is the bare flag, False and None leave it out."""
    words: list[str] = []
    for flag, value in args.items():
        if value is True:
            words.append(f"--{flag}")
        elif value is not False and value is not None:
            words += [f"--{flag}", str(value)]
    return words


def free_port() -> int:
    """A TCP port of the loopback that nobody uses now; below 55536, since the engine also checks port + 10000."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise EngineFailed("no free port of the loopback between 20000 and 29999 in 100 tries")


@dataclass
class Engine:
    """A running server. `url` has no trailing slash, `start_seconds` ends with the first token."""

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]
    args: dict[str, Any]
    start_seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """GET a JSON answer; raises urllib's errors."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 300.0) -> Any:
        """POST JSON; returns the JSON answer, or the text of one that is none. An HTTP error is raised as EngineFailed."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                data = answer.read()
                plain = answer.headers.get_content_type() != "application/json"
        except urllib.error.HTTPError as error:
            raise EngineFailed(f"POST {path}: {error.code} {error.read().decode(errors='replace')[:2000]}") from error
        return data.decode() if plain or not data else json.loads(data)

    def generate(self, **body: Any) -> Any:
        """POST /generate; keyword `input_ids` or `text`, `sampling_params`, ..."""
        return self.post("/generate", body)

    def end(self) -> int:
        """Ask the server to end as systemd does; return how many requests it was waiting for. It looks every five seconds."""
        self.process.terminate()
        told = re.compile(r"Gracefully exiting\.\.\. Remaining number of requests (\d+)")
        deadline = time.monotonic() + STOP_LIMIT
        while not (counts := told.findall(self.log())):
            if time.monotonic() > deadline:
                raise EngineFailed(f"no word of its end {STOP_LIMIT} s after SIGTERM\n{self.tail()}")
            time.sleep(0.05)
        return int(counts[-1])


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and everything it started: ask, then kill; returns when its process group is empty."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        deadline = time.monotonic() + STOP_LIMIT
        while time.monotonic() < deadline:
            process.poll()  # reap, else the leader stays in its group
            if not _group_alive(process.pid):
                process.wait()
                return
            time.sleep(0.05)
    raise EngineFailed(f"process group {process.pid} outlived SIGKILL")


@contextmanager
def _turn() -> Iterator[None]:
    """One engine at a time on this machine, whoever starts it: a second one waits here."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "engine.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wait_for_token(engine: Engine, limit: float) -> None:
    """Return when one real token came back; raise EngineFailed when the process ends or the time is over."""
    deadline = time.monotonic() + limit
    problem = "never answered"
    while time.monotonic() < deadline:
        try:
            engine.process.wait(timeout=0.2)
            raise EngineFailed(f"engine ended with {engine.process.returncode} before it was ready\n{engine.tail()}")
        except subprocess.TimeoutExpired:
            pass
        try:
            engine.get("/health", timeout=5)
            answer = engine.post(
                "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}, timeout=60
            )
            if len(answer["output_ids"]) == 1:
                return
            problem = f"answered without a token: {answer}"
        except (OSError, EngineFailed) as error:
            problem = str(error)
    raise EngineFailed(f"engine was not ready after {limit:.0f} s ({problem})\n{engine.tail()}")


@contextmanager
def serve(
    python: Path | str,
    work: Path,
    args: Mapping[str, Any],
    *,
    profile: str = "cpu",
    env: Mapping[str, str] | None = None,
    limit: float = START_LIMIT,
    turn: bool = True,
) -> Iterator[Engine]:
    """Serve one engine for the length of a `with` block.

    Args:
        python: interpreter of the engine's venv.
        work: folder for the profile, the log and temporary files.
        args: SGLang flags of the mode, over those of the profile.
        profile: device profile.
        env: further environment of the server.
        limit: seconds until the first token.
        turn: wait until no other engine of these tests runs; not needed for one that ends at its arguments.

    Raises:
        EngineFailed: with the last lines of the log.
    """
    work.mkdir(parents=True, exist_ok=True)
    profile_args, profile_env = lay_out(work, profile)
    port = free_port()
    merged = {**profile_args, "host": "127.0.0.1", "port": port, **args}
    home = {key: os.environ[key] for key in ("HOME", "PATH", "LANG") if key in os.environ}
    environment = {
        **home,
        "PYTHONPYCACHEPREFIX": str(CACHE / "pycache"),  # compiled once for all runs, and never into a shared venv
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **profile_env,
        **(env or {}),
    }
    log_path = work / "engine.log"
    command = [str(python), "-m", "sglang.launch_server", *flags(merged)]
    with _turn() if turn else nullcontext(), open(log_path, "wb") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        engine = Engine(f"http://127.0.0.1:{port}", log_path, process, merged)
        try:
            _wait_for_token(engine, limit)
            engine.start_seconds = time.monotonic() - started
            yield engine
        finally:
            _stop(process)


def main() -> int:
    """`launch.py PYTHON WORK [--flag value ...]`: serve until interrupted; for trying things by hand."""
    python, work, *rest = sys.argv[1:]
    args: dict[str, Any] = {}
    while rest:
        flag = rest.pop(0).removeprefix("--")
        args[flag] = rest.pop(0) if rest and not rest[0].startswith("--") else True
    with serve(python, Path(work).resolve(), args) as engine:
        print(f"{engine.url} ready after {engine.start_seconds:.1f} s, log {engine.log_path}", flush=True)
        engine.process.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
