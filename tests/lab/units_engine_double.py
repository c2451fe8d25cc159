# SPDX-License-Identifier: Apache-2.0
"""TEST DOUBLE of the engine's outside: flags from a file, HTTP, a worker process, the way it ends. It serves no model.

It lets tests of units take seconds and fail on demand. The flag `double-does` says how it behaves:
    well (default)  healthy after 1 s, tokens after 2 s
    die             an error and exit status 3 after 1 s; its worker stays
    die-as-worker   the whole tree is killed after 1 s, as the engine does when a worker dies
    hang            never healthy
    deaf            runs, but listens on nothing
It asks for the API key that the launcher gave to its `ServerArgs`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BEGIN = time.monotonic()
COUNT = {"health": 0, "generate": 0, "early": 0}
KEY: str | None = None


def kill_tree(worker: subprocess.Popen[bytes]) -> None:
    """How the engine ends: workers first, then itself, without a word to anyone."""
    worker.kill()
    os.kill(os.getpid(), signal.SIGKILL)


class Answers(BaseHTTPRequestHandler):
    """The endpoints that readiness and tests ask for."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def say(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/double":
            self.say(200, {"release": os.path.realpath("."), "pid": os.getpid(), "env": dict(os.environ), **COUNT})
            return
        COUNT["health"] += 1
        self.say(200 if time.monotonic() - BEGIN > 1 else 503, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = request["sampling_params"]["max_new_tokens"]
        if KEY and self.headers["Authorization"] != f"Bearer {KEY}":
            self.say(401, {"error": "Unauthorized"})
            return
        if time.monotonic() - BEGIN < 2:
            COUNT["early"] += 1
            self.say(503, {"error": "weights are still loading"})
            return
        COUNT["generate"] += 1
        if seconds := request.get("double_seconds"):
            time.sleep(seconds)
        self.say(200, {"text": "x", "output_ids": [1] * tokens, "meta_info": {"completion_tokens": tokens}})


def main() -> None:
    """Serve until SIGTERM."""
    path = sys.argv[sys.argv.index("--config") + 1]
    with open(path, encoding="utf-8") as stream:
        flags = {
            key: json.loads(value) for key, _, value in (line.partition(": ") for line in stream if line[0] != "#")
        }
    from sglang.srt.server_args import ServerArgs

    global KEY  # noqa: PLW0603
    args = ServerArgs()
    args.__post_init__()
    KEY = args.api_key
    does = flags.get("double-does", "well")
    # A worker that does not care for SIGTERM, as a process in a kernel does not.
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(86400)"
    worker = subprocess.Popen([sys.executable, "-c", script])
    print(f"double: worker {worker.pid}, flags {flags}", flush=True)
    if does in ("die", "die-as-worker"):
        time.sleep(1)
        print("double: RuntimeError: CUDA error: no kernel image is available", file=sys.stderr, flush=True)
        if does == "die":
            sys.exit(3)
        kill_tree(worker)
    if does in ("hang", "deaf"):
        time.sleep(86400)
    server = ThreadingHTTPServer((flags["host"], flags["port"]), Answers)
    server.daemon_threads = False  # requests are finished before the end, as the engine drains them
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stop.wait()
    server.shutdown()
    server.server_close()
    kill_tree(worker)


if __name__ == "__main__":
    main()
