# SPDX-License-Identifier: Apache-2.0
"""Starts SGLang as `python -m sglang.launch_server` does, with the release's programs at hand and the API key taken from a file.

The engine itself takes the key as a flag only, and logs all flags at start (`server_args=`). Here it reaches the engine in
neither argv nor config file, and the engine's text of its own arguments shows it masked.
"""

from __future__ import annotations

import copy
import os
import runpy
import sys
from pathlib import Path
from typing import Any

MASK = "(hidden)"


def guard(server_args: type, key: str) -> None:
    """Give every new `server_args` the key, and hide keys in its text."""
    prepare, text = server_args.__post_init__, server_args.__repr__  # type: ignore[attr-defined]

    def post_init(self: Any) -> None:
        self.api_key = key
        prepare(self)

    def masked(self: Any) -> str:
        shown = copy.copy(self)
        for field in ("api_key", "admin_api_key"):
            if getattr(shown, field, None):
                setattr(shown, field, MASK)
        return text(shown)

    server_args.__post_init__, server_args.__repr__ = post_init, masked  # type: ignore[attr-defined, method-assign]


def fit(cache: Path) -> str | None:
    """Why kernels can't be compiled into a folder, None if they can. Seen from inside the unit, with all that hides there."""
    if not os.access(cache, os.W_OK | os.X_OK):
        return f"{cache} is not writable for uid {os.getuid()}; it is the release's cache/ and belongs to the engine's user"
    if os.statvfs(cache).f_flag & os.ST_NOEXEC:
        return f"{cache} is mounted noexec, so no kernel that is compiled there can be loaded; mount it with exec"
    return None


def programs(path: str) -> str:
    """PATH with the release's own programs first: engine and FlashInfer call ninja by name when they build kernels."""
    return os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [path])])


def main() -> None:
    """Run the engine in this process; it ends as the engine ends."""
    os.environ["PATH"] = programs(os.environ.get("PATH", ""))
    if wrong := fit(Path.cwd()):
        sys.exit(f"sglang-fleet: {wrong}")
    path = Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"), "api_key")
    if path.is_file():
        key = path.read_text(encoding="utf-8").strip()
        if not key:
            sys.exit("sglang-fleet: the API key is empty; write one into the instance's api_key_file and run site.yml")
        from sglang.srt.server_args import ServerArgs

        guard(ServerArgs, key)
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
