# SPDX-License-Identifier: Apache-2.0
"""Release build against a bare `uv pip install` of the same lock: python -m tests.bench_release [--rounds N] [--json]

Both run in turn, by the same uv, from the same warm cache, by links, on the same file system; what is compared is the best
round of each, since a busy machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fleet.importer

fleet.importer.install()

from ansible.module_utils import sglang_venv_build as building  # noqa: E402

from fleet import engine as engines  # noqa: E402
from fleet import lock  # noqa: E402
from tests import venv  # noqa: E402

BAR = 1.5


def bare(root: Path, number: int) -> float:
    """Seconds of `uv pip install --require-hashes -r lock.txt` into a new venv; making the venv is not counted."""
    folder = root / f"bare-{number}"
    env = {**os.environ, "UV_CACHE_DIR": str(venv.CACHE)}
    _, python = venv.find_python(engines.load(venv.ENGINE).pythons)
    uv = lock.find_uv()
    subprocess.run([uv, "venv", "-q", "--no-project", "--python", python, folder], check=True, env=env)
    command = [uv, "pip", "install", "-q", "--python", folder / "bin" / "python", "--no-deps", "--require-hashes"]
    start = time.monotonic()
    subprocess.run([*command, "-r", engines.load(venv.ENGINE).lock], check=True, env=env)
    return time.monotonic() - start


def ours(root: Path, plan: dict[str, Any], number: int) -> float:
    """Seconds of a whole build of the release: venv, install, versions, audit, profile with its stub, manifest."""
    options = venv.make_options(root / f"ours-{number}")
    start = time.monotonic()
    building.build(plan, options)
    return time.monotonic() - start


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of each round and the ratio of the best ones."""
    plan = venv.make_plan()
    found: dict[str, Any] = {"bare": [], "build": []}
    with venv.scratch() as root:
        bare(root, -1)  # warms cache and page cache for both
        for number in range(rounds):
            found["bare"].append(round(bare(root, number), 2))
            found["build"].append(round(ours(root, plan, number), 2))
            found["ratio"] = round(min(found["build"]) / min(found["bare"]), 2)
    return found


def main() -> int:
    """Prints the rounds; 0 if the bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench_release", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"bare uv pip install  {found['bare']} s\nrelease build        {found['build']} s")
        print(f"best against best    {found['ratio']} (bar {BAR})")
    return 0 if found["ratio"] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
