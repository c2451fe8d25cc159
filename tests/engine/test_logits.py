# SPDX-License-Identifier: Apache-2.0
"""Penalties at every slot of random trees against the engine's own penalizers, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.engine import launch
from tests.engine.conftest import HERE


def test_penalties_are_the_engines(engine_python: Path, tmp_path: Path) -> None:
    _, env = launch.lay_out(tmp_path)
    home = {key: os.environ[key] for key in ("HOME", "PATH")}
    done = subprocess.run(
        [engine_python, HERE / "logit_checks.py"], env=home | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["compared"] > 1000
    assert counts["changed"] > counts["compared"] // 2
