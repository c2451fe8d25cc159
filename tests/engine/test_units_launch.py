# SPDX-License-Identifier: Apache-2.0
"""The real engine accepts every rendered config, takes the key from the launcher and does not show it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import yaml
from ansible.module_utils import gpu_units_render as render

from tests.engine import engine_venv, launch


def test_the_engine_reads_what_the_role_renders(engine_python: Path, repo: Path, tmp_path: Path) -> None:
    role = repo / "roles/gpu_units"
    modes = yaml.safe_load((role / "files/modes.yml").read_text())
    args, env = launch.lay_out(tmp_path / "release")
    deployment = render.render(
        instances=[{"name": mode, "mode": mode, "port": 30000 + at} for at, mode in enumerate(modes)],
        defaults={
            "model_path": str(repo / "models/nano/target"),
            "draft_model_path": str(repo / "models/nano/draft"),
            "budget": 7,
        },
        profile={"name": "cpu", "args": args, "env": env},
        modes=modes,
        gpus=[],
        release="r",
        common={},
        start_timeout=60,
    )  # fmt: skip
    configs = []
    for mode in modes:
        configs.append(tmp_path / f"{mode}.yaml")
        configs[-1].write_text(deployment["files"][f"{render.ETC}/{mode}.yaml"])
    base = {
        "PATH": os.environ["PATH"],
        "PYTHONPYCACHEPREFIX": str(engine_venv.CACHE / "pycache"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [engine_python, Path(__file__).with_name("units_launch_check.py"), role / "files", *configs],
        env=base | env | {"HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(seen["key"] and seen["hidden"] and seen["child"] for seen in found.values()), found
    assert "s3cret" not in done.stderr
    assert {mode: (seen["algorithm"], seen["shadow"]) for mode, seen in found.items()} == {
        "baseline": (None, False),
        "dflash": ("DFLASH", False),
        "ddtree-shadow": ("DDTREE", True),
        "ddtree": ("DDTREE", False),
    }
    assert (found["ddtree"]["budget"], found["ddtree"]["port"]) == (7, 30003)
