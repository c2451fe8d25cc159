# SPDX-License-Identifier: Apache-2.0
"""The waiter of a start: a token makes it ready, an end, a refusal or a hang ends it. Decisions are tested on samples alone,
and once more on real processes that sleep, burn CPU, or lose a worker."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

FILES = Path(__file__).resolve().parents[2] / "roles/gpu_units/files"
GB = 10**9
MIB = 1 << 20


@pytest.fixture(scope="module")
def progress() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FILES))
    import sglang_progress

    yield sglang_progress
    sys.path.remove(str(FILES))


@pytest.fixture
def ready(progress: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_ready", FILES / "sglang_ready.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAUSE_S", 0.02)
    return module


# --- decisions ------------------------------------------------------------------------------------


def told(judge: Any, progress: ModuleType, seconds: float, step: float = 2.0, **rates: Any) -> tuple[float, str] | None:
    """Feed samples until the judge gives up: (seconds since the begin of this phase, reason), None if it never does.

    A number of `rates` grows by that much a second, anything else is set as it is; totals go on from the last sample.
    """
    last = judge._last or progress.Sample(0.0)
    begin = last.at
    values = {name: getattr(last, name) for name in ("cpu", "read", "written", "rss", "gpu")}
    fixed = {name: v for name, v in rates.items() if name not in values}
    while last.at - begin < seconds:
        for name, rate in rates.items():
            if name in values:
                values[name] = (values[name] or 0) + (rate * step if name == "cpu" else int(rate * step))
        last = progress.Sample(last.at + step, **values, **fixed)
        if reason := judge.see(last):
            return last.at - begin, reason
    return None


def judge(progress: ModuleType, weights: int = 60 * GB, **more: Any) -> Any:
    made = progress.Judge(weights, **more)
    assert made.see(progress.Sample(0.0)) is None
    return made


@pytest.mark.parametrize(
    "work",
    [
        {"cpu": 1.0, "written": 50},  # it computes and logs
        {"read": 200 * MIB},  # a disk gives weights, no CPU to speak of
        {"read": MIB // 8},  # a very slow one
        {"gpu": 16 * MIB},  # pools and graphs
        {"rss": 16 * MIB},  # weights out of the page cache by page faults
        {"compiling": True},  # nvcc, here or in another instance that holds the cache's lock
        {"written": 40},
    ],
)
def test_any_kind_of_work_is_waited_for(progress, work):
    assert told(judge(progress), progress, 3000, **work) is None


@pytest.mark.parametrize(
    "idle",
    [
        {},
        {"cpu": 0.03},  # timers and probes
        {"cpu": 0.03, "written": 100, "answering": True},  # its own log lines about the waiter's requests
        {"written": 4},  # an event loop counts
        {"rss": 1000, "gpu": 1000},
    ],
)
def test_a_quiet_engine_hangs_after_a_minute(progress, idle):
    after, reason = told(judge(progress), progress, 900, **idle)
    assert 60 <= after <= 64
    assert "it hangs: for 6" in reason
    assert "the weights were not read yet" in reason


@pytest.mark.parametrize(
    ("weights", "rate", "expected"),
    [(60 * GB, 1 * GB, 60), (60 * GB, 5 * GB, 30), (400 * GB, 2 * GB, 200), (400 * GB, GB // 4, 300), (GB, GB, 30)],
)
def test_patience_is_the_time_that_all_weights_take(progress, weights, rate, expected):
    """Bounded by 30 s and 300 s; the rate is what was measured while the weights came."""
    made = judge(progress, weights)
    assert told(made, progress, max(2.0, 0.1 * weights / rate), read=rate, cpu=0.5) is None
    after, reason = told(made, progress, 900)
    assert expected < after <= expected + 4
    assert f"{weights / 1e9:.1f} GB of weights at {rate / 1e6:.0f} MB/s" in reason


def test_the_rate_of_imports_is_not_that_of_the_weights(progress):
    made = judge(progress)
    assert told(made, progress, 20, read=30 * MIB, cpu=1.0, written=50) is None
    assert made.patience() == 60


def test_a_pause_shorter_than_patience_is_forgotten(progress):
    made = judge(progress)
    for _ in range(20):
        assert told(made, progress, 50) is None
        assert told(made, progress, 4, cpu=1.0, written=50) is None
    assert made.see(progress.Sample(made._last.at + 55, cpu=made._last.cpu)) is None


def test_burning_cpu_alone_is_a_spin_in_the_end(progress):
    """A collective on a broken link: every CPU is busy, nothing changes."""
    made = judge(progress)
    after, reason = told(made, progress, 900, cpu=4.0)
    assert 300 < after <= 304
    assert "it spins: for 30" in reason
    assert "collective" in reason


def test_cpu_that_comes_in_bursts_is_no_hang(progress):
    made = judge(progress, spin_s=10_000)
    for _ in range(40):
        assert told(made, progress, 40) is None
        assert told(made, progress, 2, cpu=0.5) is None


def test_a_worker_that_ends_alone_is_told_after_the_engines_own_time(progress):
    made = judge(progress)
    dead = ("sglang::schedul (pid 7)",)
    after, reason = told(made, progress, 60, cpu=1.0, written=50, dead=dead)
    assert 5 <= after <= 10
    assert reason == "sglang::schedul (pid 7) ended, and the engine goes on without"


def test_weights_are_counted_by_their_files(progress, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "config.json").write_bytes(b"x" * 10)
    assert progress.weights_of([str(tmp_path), str(tmp_path / "none")]) == 1000


# --- real processes -------------------------------------------------------------------------------


def decide(progress: ModuleType, child: subprocess.Popen[bytes], seconds: float, **bounds: Any) -> str | None:
    """Sample a real process every 0.2 s; the reason to give up, None if there was none. Only the child counts."""
    processes = progress.Processes(child.pid)
    own = {child.pid, *(int(p) for p in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split())}
    real = processes.proc

    class Only:
        """/proc with the processes of the test alone: its control group is shared with whatever else runs here."""

        def glob(self, _pattern: str) -> list[Path]:
            return [real / str(pid) for pid in own if (real / str(pid)).exists()]

    processes.proc = Only()
    made = progress.Judge(GB, **bounds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if reason := made.see(processes.sample(None, False)):
            return f"{reason}; {processes.describe()}"
        time.sleep(0.2)
    return None


@pytest.fixture
def child() -> Iterator[Any]:
    made: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        assert made[-1].stdout and made[-1].stdout.readline() == b"up\n"
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_a_process_that_sleeps_for_ever_hangs(progress, child):
    reason = decide(progress, child("print('up', flush=True); import time; time.sleep(600)"), 8, quiet_s=1.0)
    assert reason and "it hangs" in reason
    assert "python" in reason


def test_a_process_that_burns_cpu_works_until_it_only_spins(progress, child):
    burner = child("print('up', flush=True)\nwhile True: pass")
    assert decide(progress, burner, 3, quiet_s=0.5) is None
    reason = decide(progress, burner, 8, quiet_s=0.5, spin_s=1.0)
    assert reason and "it spins" in reason


def test_a_process_that_reads_works(progress, child, tmp_path):
    (tmp_path / "weights").write_bytes(b"x" * MIB)
    code = (
        "print('up', flush=True)\nimport time\n"
        f"while True:\n    open({str(tmp_path / 'weights')!r}, 'rb').read(); time.sleep(0.1)"
    )
    assert decide(progress, child(code), 3, quiet_s=0.5, spin_s=0.5) is None


def test_a_scheduler_that_dies_under_its_parent_is_found(progress, child, monkeypatch):
    monkeypatch.setattr(progress, "GRACE_S", 0.5)
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    open('/proc/self/comm', 'w').write('sglang::schedul'); print('up', flush=True); time.sleep(1); os._exit(9)\n"
        "time.sleep(600)"
    )
    reason = decide(progress, child(code), 8, quiet_s=60.0)
    assert reason and "sglang::schedul (pid " in reason
    assert "ended, and the engine goes on without" in reason


# --- readiness ------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """The engine's HTTP surface; `script` holds the status of each request to come, the last one stays."""

    script: ClassVar[list[tuple[int, Any]]] = []
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.path, self.headers.get("Authorization")))
        status, data = 200, {}
        if self.path == "/generate":
            status, data = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer  # noqa: N815


TOKEN = (200, {"meta_info": {"completion_tokens": 2}})


@pytest.fixture
def engine() -> Iterator[str]:
    Answers.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def wait(ready: ModuleType, url: str, pid: int, limit_s: float, key: str | None = None, **bounds: Any) -> str:
    return ready.wait(url, key, pid, limit_s, ready.Judge(GB, **bounds), [])


def test_ready_needs_a_token_not_only_health(ready, engine):
    Answers.script = [(503, {}), (200, {"meta_info": {"completion_tokens": 0}}), (200, {"text": "x"}), TOKEN]
    assert "2 tokens came back" in wait(ready, engine, os.getpid(), 10, "k")
    assert [path for path, _ in Answers.asked] == ["/health", "/generate"] * 4
    assert {key for _, key in Answers.asked} == {"Bearer k"}


def test_ready_ends_with_the_process(ready):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    with pytest.raises(ready.Gone):
        wait(ready, "http://127.0.0.1:9", child.pid, 30)
    child.wait()
    with pytest.raises(ready.Gone):
        wait(ready, "http://127.0.0.1:9", child.pid, 30)


def test_ready_gives_up_with_the_last_answer(ready, engine):
    Answers.script = [(503, {"error": "loading"})]
    with pytest.raises(TimeoutError, match=r"no token within 1 s; last answer /(health: 200|generate: 503 .*loading)"):
        wait(ready, engine, os.getpid(), 1.0)


def test_ready_does_not_wait_when_the_engine_refuses(ready, engine):
    Answers.script = [(401, {"error": "Unauthorized"})]
    with pytest.raises(RuntimeError, match=r"refuses a plain request: /generate: 401 .*Unauthorized"):
        wait(ready, engine, os.getpid(), 30)


def test_ready_ends_a_hang_with_what_was_last_seen(ready, progress, tmp_path, monkeypatch):
    """Long before its limit, with the last answer, each process and the lock of a killed build."""
    monkeypatch.setattr(ready, "SAMPLE_S", 0.1)
    monkeypatch.setattr(progress, "BUSY", 1000.0)  # what else runs in the control group of this test
    monkeypatch.setattr(progress, "CHANGED", 1 << 60)
    monkeypatch.setattr(progress, "READ", 1 << 60)
    monkeypatch.setattr(progress, "WRITTEN", 1 << 60)
    monkeypatch.setattr(progress, "COMPILERS", frozenset())
    lock = tmp_path / "torch_extensions/py312/kernel/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="it hangs") as caught:
        wait(ready, "http://127.0.0.1:9", os.getppid(), 60, quiet_s=0.5)
    assert time.monotonic() - begin < 10
    assert "last seen: /health: " in str(caught.value)
    assert f"remove it if nothing compiles: {lock}" in str(caught.value)


def test_ready_asks_whose_socket_answers(ready, engine, monkeypatch):
    Answers.script = [TOKEN]
    port = int(engine.rsplit(":", 1)[1])
    assert ready.ours(port, os.getpid())
    assert not ready.ours(port + 1 if port < 65535 else port - 1, os.getpid())
    monkeypatch.setattr(ready, "ours", lambda port, pid: False)
    with pytest.raises(RuntimeError, match="another process answers"):
        wait(ready, engine, os.getpid(), 30)


def test_the_key_is_the_credential_that_the_engine_sees(ready, tmp_path):
    (tmp_path / "api_key").write_text("k\n")

    def key(**environment: str) -> Any:
        with subprocess.Popen(["/bin/sleep", "60"], env=environment) as engine:
            try:
                # what the process was started with is there once it runs its own program
                while b"sleep" not in Path(f"/proc/{engine.pid}/cmdline").read_bytes():
                    time.sleep(0.01)
                return ready.api_key(engine.pid)
            finally:
                engine.kill()

    assert key(CREDENTIALS_DIRECTORY=str(tmp_path)) == "k"
    assert key(CREDENTIALS_DIRECTORY=str(tmp_path / "none")) is None
    assert key() is None
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    with pytest.raises(ready.Gone):
        ready.api_key(gone.pid)
