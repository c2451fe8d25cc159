# SPDX-License-Identifier: Apache-2.0
"""Runs on a lab host in an engine's place: says again what a real engine said, and has the flaw that a test asks for.

    stand_in_engine.py CONFIG       serve; CONFIG holds `name: value` lines with mode, port, data and flaw
    stand_in_engine.py CONFIG wait  return when it answers

Journal lines come from a child process, as an engine's do from its scheduler. `data` is a JSON file: answers as in
tests/unit/data/smoke, prompt texts by id, and the journal lines of every mode (at start and with the first verify).
"""

from __future__ import annotations

import http.client
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server(ThreadingHTTPServer):
    def __init__(self, config: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", int(config["port"])), Handler)
        self.data = json.loads(Path(config["data"]).read_text())
        self.mode, self.flaw = config["mode"], config.get("flaw", "")
        self.ids = {text: ident for ident, text in self.data["prompts"].items()}
        self.first, self.count = threading.Lock(), 0
        self.verified = False
        source = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
        self.child = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, text=True)

    def say(self, lines: list[str]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("".join(f"{line}\n" for line in lines))
        self.child.stdin.flush()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.first:
            self.count += 1
            count = self.count
            if not self.verified:
                self.verified = True
                self.say([] if self.flaw == "silent" else self.data["lines"][self.mode]["verify"])
        if self.flaw == "dies" and count > 5:
            self.child.kill()
            threading.Thread(target=self.shutdown).start()
        ident, tokens = self.ids[body["text"]], body["sampling_params"]["max_new_tokens"]
        said = self.data["baseline"][ident]
        ids = list(said["output_ids"][:tokens])
        meta: dict[str, Any] = {"completion_tokens": tokens}
        if self.mode == "baseline":
            if body.get("return_logprob"):
                meta["output_top_logprobs"] = [[[*pair, None] for pair in pairs] for pairs in said["top"][:tokens]]
        else:
            meta |= self.data["dflash"]["alone"][ident]["meta_info"]
            if self.flaw == "different" and count % 4 == 0:
                ids[3] += 1
            if self.flaw == "rejected":
                meta["spec_accepted_drafts"] = 0
        return {"output_ids": ids, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    server: Server
    wbufsize = -1

    def reply(self, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        info = json.loads(json.dumps(self.server.data["server_info"]))
        if self.server.flaw == "other attention":
            info["internal_states"][0]["decode_attention_backend"] = "torch_native"
        self.reply(info if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        self.reply(self.server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def log_message(self, *_args: Any) -> None:
        pass


def wait(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            link.request("GET", "/health")
            if link.getresponse().status == 200:
                return
        except OSError as error:
            if not Path(f"/proc/{os.environ['MAINPID']}").exists() or time.monotonic() > deadline:
                sys.exit(f"no answer: {error}")
            time.sleep(0.05)


def main() -> None:
    lines = [line.split(":", 1) for line in Path(sys.argv[1]).read_text().splitlines() if ":" in line]
    config = {name.strip(): value.strip() for name, value in lines}
    if sys.argv[2:] == ["wait"]:
        return wait(int(config["port"]))
    if config.get("flaw") == "no start":
        sys.exit("RuntimeError: not enough memory for the KV cache")
    with (
        Path(__file__).open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ),
    ):  # as an engine maps its libraries
        server = Server(config)
        server.say(["serving"] if config.get("flaw") == "silent" else server.data["lines"][config["mode"]]["start"])
        if config.get("flaw") == "forbidden":
            server.say(["DFLASH fused KV initialization failed, falling back to sequential path: no kernel"])
        server.serve_forever(poll_interval=0.05)
        sys.exit("the scheduler died")


if __name__ == "__main__":
    main()
