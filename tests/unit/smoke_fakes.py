# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a host and an engine, fed with what a real engine said (tests/unit/data/smoke)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import smoke_host as sh

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data" / "smoke"
HOOKS = yaml.safe_load((ROOT / "roles/smoke/files/hooks.yml").read_text())
PROMPTS = [json.loads(x) for x in (ROOT / "roles/smoke/files/prompts.jsonl").read_text().splitlines()]
RECORDED = json.loads((DATA / "answers.json").read_text())
SERVER_INFO = json.loads((DATA / "server_info.json").read_text())
# What the file of an instance of the cpu profile asks for, as gpu_units writes it.
INSTANCE_FILE = """\
# Written by sglang-fleet; the next run replaces changes made here.
attention-backend: "triton"
device: "cpu"
dtype: "float32"
grammar-backend: "xgrammar"
linear-attn-backend: "triton"
moe-runner-backend: "triton"
sampling-backend: "pytorch"
"""
SETTINGS = {
    "host": "ct200", "requests": 16, "alone": 4, "tokens": 24, "concurrency": 8, "min_accepted": 1, "near_tie_gaps": {},
    "request_timeout": 10, "hook_timeout": 0.5, "journal_lines": 5, "start_timeout": 5,
}  # fmt: skip
RELEASE = "0123456789abcdef"

STAMP = "[2026-11-29 19:20:46] "


def log(mode: str) -> list[str]:
    """The journal of a real engine in a mode."""
    return (DATA / f"{mode}.log").read_text().splitlines()


def of(mode: str, words: str) -> str:
    """The first line of a mode's journal that begins with words after its stamp."""
    return next(line for line in log(mode) if line.partition("] ")[2].startswith(words))


class FakeHost(sh.Host):
    """A host with one unit per name; `states` and `lines` may be changed by a test."""

    def __init__(self, root: Path, mode: str, url: str) -> None:
        super().__init__(str(root / "state"), str(root / "config"), str(root / "releases"), str(root))
        self.lines = log(mode)
        self.states: dict[str, dict[str, str]] = {}
        self.calls: list[tuple[str, str]] = []
        self.fail: dict[tuple[str, str], str] = {}
        self.releases_running = [RELEASE]
        self.has_start = True
        self.settings = ""
        self.left: list[int] = []
        self.instance: dict[str, Any] = {
            "name": "gpu0", "mode": mode, "unit": "sglang@gpu0.service", "baseline_unit": "sglang@gpu0.baseline.service",
            "url": url, "gpus": [], "budget": 15, "topk": 8, "model_path": str(root / "model"), "dtype": "float32",
            "profile": "cpu", "api_key_file": None,
        }  # fmt: skip
        self.deploy([self.instance])
        self.config.mkdir(exist_ok=True)
        (self.config / "gpu0.yaml").write_text(INSTANCE_FILE)

    def deploy(self, instances: list[dict[str, Any]]) -> None:
        files = {"config/gpu0.yaml": INSTANCE_FILE}
        current = {"release": RELEASE, "instances": instances, "files": files}
        sh.write_json(self.state / "deployments" / "current.json", current)

    def unit(self, unit: str) -> dict[str, str]:
        usual = {"ActiveState": "active", "SubState": "running", "InvocationID": "aa11", "NRestarts": "0"}
        usual |= {"Result": "success", "MainPID": "0", "ControlGroup": f"/system.slice/{unit}", "LoadState": "loaded"}
        if unit.endswith(".baseline.service"):
            usual |= {"ActiveState": "inactive", "SubState": "dead"}
        return {**usual, **self.states.get(unit, {})}

    def systemctl(self, verb: str, unit: str, timeout: float) -> str | None:
        self.calls.append((verb, unit))
        if said := self.fail.get((verb, unit)):
            self.states[unit] = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}
            return said
        state = {"start": "active", "stop": "inactive"}[verb]
        self.states[unit] = {"ActiveState": state, "SubState": "running" if state == "active" else "dead"}
        return None

    def journal(self, invocation: str) -> Iterator[str]:
        assert invocation == self.unit(self.instance["unit"])["InvocationID"]
        yield from self.lines

    def journal_tail(self, unit: str, invocation: str, lines: int) -> list[str]:
        return ["RuntimeError: CUDA out of memory", "Main process exited, code=exited, status=1/FAILURE"][-lines:]

    def journal_settings(self) -> str:
        return self.settings

    def journal_has_start(self, invocation: str) -> bool:
        return self.has_start

    def processes(self, cgroup: str) -> list[int]:
        return self.left

    def running_releases(self, cgroup: str) -> list[str]:
        return self.releases_running


Answer = Callable[[str, dict[str, Any]], dict[str, Any]]


def replay(mode: str) -> Answer:
    """An engine that says again what the recorded one said."""
    by_text = {p["text"]: p["id"] for p in PROMPTS}

    def answer(_path: str, body: dict[str, Any]) -> dict[str, Any]:
        ident, tokens = by_text[body["text"]], body["sampling_params"]["max_new_tokens"]
        base = RECORDED["baseline"][ident]
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": tokens}, "completion_tokens": tokens}
        if body.get("return_logprob"):
            assert mode == "baseline", "DFLASH and DDTREE refuse return_logprob"
            meta["output_top_logprobs"] = [[[*pair, None] for pair in pairs] for pairs in base["top"][:tokens]]
        if mode != "baseline":
            meta |= RECORDED["dflash"]["alone"][ident]["meta_info"]
        return {"text": "", "output_ids": base["output_ids"][:tokens], "meta_info": meta}

    return answer


@contextmanager
def engine(answer: Answer, key: str | None = None, info: Any = SERVER_INFO["dense-ddtree"]) -> Iterator[str]:
    """An HTTP server with /health, /server_info and /generate; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        wbufsize = -1  # one packet per answer; two of them wait for one another

        def reply(self, status: int, value: Any) -> None:
            raw = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200, {})
            elif key and self.headers.get("Authorization") != f"Bearer {key}":
                self.reply(401, {"error": "Unauthorized"})
            else:
                self.reply(200 if info and self.path == "/server_info" else 404, info or {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                return self.reply(401, {"error": "Unauthorized"})
            try:
                return self.reply(200, answer(self.path, body))
            except RuntimeError as error:
                return self.reply(500, {"error": str(error)})

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
