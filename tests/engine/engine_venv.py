# SPDX-License-Identifier: Apache-2.0
"""A private, patched copy of the engine for tests: from the lock, by hard links out of uv's cache, about 3 s when warm.

Patching replaces files by rename, so the cache and other venvs never see it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fleet import engine as engines
from fleet import lock, series

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-fleet"


def _run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True, text=True, env={"UV_CACHE_DIR": str(CACHE / "uv"), "UV_LINK_MODE": "hardlink"} | os.environ,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:3]))} failed:\n{done.stderr.strip()[-4000:]}")


def build(name: str = "sglang-0.5.11", *, patched: bool = True, root: Path | None = None) -> Path:
    """Build the venv unless it is there with the same lock and series; return its Python.

    The place stays the same when the inputs change, so that byte code of unchanged files is kept.
    """
    engine = engines.load(name)
    root = root or CACHE / "engine-tests"
    venv = root / (name if patched else f"{name}-clean")
    stamp = venv / "sglang-fleet-test"
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{venv.name}.lock", "w", encoding="utf-8") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        digest = hashlib.sha256(engine.lock.read_bytes())
        digest.update(f"{sys.version_info[:3]} {series.load(name).digest if patched else ''}".encode())
        if not stamp.is_file() or stamp.read_text() != digest.hexdigest():
            shutil.rmtree(venv, ignore_errors=True)
            uv = lock.find_uv()
            _run(uv, "venv", "--python", sys.executable, venv)
            _run(uv, "pip", "sync", "--require-hashes", "--python", venv / "bin/python", engine.lock)
            if patched:
                site = next((venv / "lib").glob("python3.*")) / "site-packages"
                _run(engines.ROOT / "bin/series", "apply", name, "--site", site)
            stamp.write_text(digest.hexdigest())
    return venv / "bin/python"
