# SPDX-License-Identifier: Apache-2.0
"""What is asked of the host: processes of a control group, holders of GPUs, keys, readiness. Small real things stand in."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import gpu_deployment
import pytest
from ansible.errors import AnsibleError
from ansible.module_utils import gpu_units_host as h
from ansible.plugins.loader import lookup_loader


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- control groups -------------------------------------------------------------------------------


def test_processes_of_a_group_with_either_kind_of_cgroup(tmp_path):
    unit = "/system.slice/system-sglang.slice/sglang@a.service"
    groups = {
        1: "0::/init.scope\n",
        10: f"0::{unit}\n",
        11: f"0::{unit}/worker\n",
        12: f"9:name=systemd:{unit}\n8:pids:{unit}\n0::/\n",
        13: f"0::{unit.replace('@a', '@ab')}\n",
    }
    for pid, text in groups.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(text)
    (tmp_path / "14").mkdir()  # ended while it was looked at
    assert h.pids_of(unit, tmp_path) == [10, 11, 12]
    assert h.pids_of("", tmp_path) == []


def test_this_process_is_found_by_its_own_group():
    group = Path("/proc/self/cgroup").read_text().splitlines()[0].split(":", 2)[2]
    if group != "/":
        assert os.getpid() in h.pids_of(group)


def test_a_process_is_described_without_its_arguments():
    child = subprocess.Popen([sys.executable, "-c", "input()", "--api-key=s3cret"], stdin=subprocess.PIPE)
    try:
        text = h.describe(child.pid)
    finally:
        child.communicate(b"\n")
    assert f"pid {child.pid} (" in text
    assert "python" in text
    assert "s3cret" not in text
    assert h.describe(2**22 + 1) == f"pid {2**22 + 1}"


# --- GPUs -----------------------------------------------------------------------------------------


def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apps: str, memory: str, status: int = 0) -> h.Gpus:
    """A stand-in for nvidia-smi that prints what the real one prints for these queries."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase $1 in *compute-apps*) printf '{apps}';; *) printf '{memory}';; esac\nexit {status}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return h.Gpus(idle_mib=1024)


def test_free_gpus(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, "", "GPU-1, 4\\nGPU-2, 90000\\n")
    assert gpus.holders({"GPU-1"}) == []


def test_process_on_a_gpu_is_named(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, f"GPU-1, {os.getpid()}, 812\\nGPU-2, 1, 5\\n", "GPU-1, 900\\n")
    (text,) = gpus.holders({"GPU-1"})
    assert text.startswith(f"GPU GPU-1: pid {os.getpid()} (")
    assert text.endswith("uses 812 MiB")


def test_process_of_another_container_has_no_pid(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, "GPU-1, [N/A], 812\\n", "GPU-1, 900\\n")
    assert gpus.holders({"GPU-1"}) == ["GPU GPU-1: a process that shows no pid uses 812 MiB"]


def test_memory_without_a_process_is_not_free(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, "", "GPU-1, 30000\\nGPU-2, 1\\n")
    assert gpus.holders({"GPU-1", "GPU-2"}) == [
        "GPU GPU-1: 30000 MiB used and no process shown (more than 1024 MiB of an idle GPU)"
    ]


def test_without_an_answer_nothing_is_proven(tmp_path, monkeypatch):
    with pytest.raises(h.HostError, match="nothing shows that the GPUs are free: driver gone"):
        smi(tmp_path, monkeypatch, "driver gone", "", status=9).holders({"GPU-1"})
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(h.HostError, match="nvidia-smi is not there"):
        h.Gpus(1024).holders({"GPU-1"})


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def keys(repo: Path) -> Any:
    lookup_loader.add_directory(str(repo / "roles/gpu_units/lookup_plugins"))
    return lookup_loader.get("gpu_units_api_keys")


def test_keys_by_instance(keys, tmp_path):
    (tmp_path / "one").write_text("k1\n")
    (tmp_path / "all").write_text("k2\n")
    instances = [{"name": "a", "api_key_file": str(tmp_path / "one")}, {"name": "b"}]
    assert keys.run(instances, {}, defaults={}) == [{"a": "k1"}]
    assert keys.run(instances, {}, defaults={"api_key_file": str(tmp_path / "all")}) == [{"a": "k1", "b": "k2"}]
    assert keys.run([], {}, defaults={}) == [{}]
    # The inventory names it, so the inventory's folder is where a relative path begins.
    assert keys.run([{"name": "a", "api_key_file": "one"}], {"inventory_dir": str(tmp_path)}, defaults={}) == [
        {"a": "k1"}
    ]


def test_missing_key_names_instance_and_file(keys, tmp_path):
    with pytest.raises(
        AnsibleError, match=rf"instance a: api_key_file {tmp_path}/no of the control machine can't be read"
    ):
        keys.run([{"name": "a", "api_key_file": str(tmp_path / "no")}], {}, defaults={})


def test_the_engine_gets_the_key_and_hides_it(repo, tmp_path):
    launch = load(repo / "roles/gpu_units/files/sglang_launch.py")

    @dataclass
    class ServerArgs:
        """As the engine's: a dataclass that checks itself and is logged as text."""

        host: str
        api_key: str | None = None
        admin_api_key: str | None = None

        def __post_init__(self) -> None:
            self.had_key = self.api_key

    launch.guard(ServerArgs, "s3cret")
    args = ServerArgs("127.0.0.1")
    assert (args.api_key, args.had_key) == ("s3cret", "s3cret")
    assert "s3cret" not in f"{args=} {args}"
    assert "api_key='(hidden)'" in repr(args)
    assert "admin_api_key=None" in repr(args)
    assert args.api_key == "s3cret"


def test_an_empty_key_file_ends_the_start(repo, tmp_path):
    (tmp_path / "key").write_text("\n")
    done = subprocess.run(
        [sys.executable, repo / "roles/gpu_units/files/sglang_launch.py"],
        env={"FLEET_API_KEY_FILE": str(tmp_path / "key")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{tmp_path}/key is empty" in done.stderr


# --- readiness ------------------------------------------------------------------------------------


@pytest.fixture
def ready(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load(repo / "roles/gpu_units/files/sglang_ready.py")
    monkeypatch.setattr(module, "PAUSE_S", 0.02)
    return module


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


def test_ready_needs_a_token_not_only_health(ready, engine):
    Answers.script = [(503, {}), (200, {"meta_info": {"completion_tokens": 0}}), (200, {"text": "x"}), TOKEN]
    assert "2 tokens came back" in ready.wait(engine, "k", os.getpid(), 10)
    assert [path for path, _ in Answers.asked] == ["/health", "/generate"] * 4
    assert {key for _, key in Answers.asked} == {"Bearer k"}


def test_ready_ends_with_the_process(ready):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    with pytest.raises(ready.Gone):
        ready.wait("http://127.0.0.1:9", None, child.pid, 30)
    child.wait()
    with pytest.raises(ready.Gone):
        ready.wait("http://127.0.0.1:9", None, child.pid, 30)


def test_ready_gives_up_with_the_last_answer(ready, engine):
    Answers.script = [(503, {"error": "loading"})]
    with pytest.raises(TimeoutError, match=r"no token within 0 s; last answer /generate: 503 .*loading"):
        ready.wait(engine, None, os.getpid(), 0.3)


def test_ready_does_not_wait_when_the_engine_refuses(ready, engine):
    Answers.script = [(401, {"error": "Unauthorized"})]
    with pytest.raises(RuntimeError, match=r"refuses a plain request: /generate: 401 .*Unauthorized"):
        ready.wait(engine, None, os.getpid(), 30)


def test_ready_asks_whose_socket_answers(ready, engine, monkeypatch):
    Answers.script = [TOKEN]
    port = int(engine.rsplit(":", 1)[1])
    assert ready.ours(port, os.getpid())
    assert not ready.ours(port + 1 if port < 65535 else port - 1, os.getpid())
    monkeypatch.setattr(ready, "ours", lambda port, pid: False)
    with pytest.raises(RuntimeError, match="another process answers"):
        ready.wait(engine, None, os.getpid(), 30)


# --- module ---------------------------------------------------------------------------------------


def test_documentation_and_arguments_agree():
    """Every option is documented with the same type and default."""
    import yaml

    documented = yaml.safe_load(gpu_deployment.DOCUMENTATION)["options"]
    caught: dict[str, Any] = {}

    class StoppedError(Exception):
        pass

    def record(**kwargs: Any) -> None:
        caught.update(kwargs)
        raise StoppedError

    original, gpu_deployment.AnsibleModule = gpu_deployment.AnsibleModule, record
    try:
        with pytest.raises(StoppedError):
            gpu_deployment.main()
    finally:
        gpu_deployment.AnsibleModule = original
    plain = [
        {
            name: {k: v for k, v in option.items() if k not in ("description", "no_log")}
            for name, option in options.items()
        }
        for options in (documented, caught["argument_spec"])
    ]
    assert plain[0] == plain[1]
    assert caught["supports_check_mode"]
    assert caught["argument_spec"]["api_keys"]["no_log"]


def test_role_defaults_and_specification_agree(repo):
    import yaml

    role = repo / "roles/gpu_units"
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    assert {name: option["default"] for name, option in specs["main"]["options"].items()} == defaults
    for entry in ("swap", "start", "rollback"):
        for name, option in specs[entry]["options"].items():
            assert name == "gpu_units_discard" or option == specs["main"]["options"][name]
