# SPDX-License-Identifier: Apache-2.0
"""The real engine accepts every rendered config, takes the key from the launcher and hides it; its flags are the listed ones."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import gpu_host_judge
from ansible.module_utils import gpu_units_render as render
from ansible.module_utils.gpu_host_rules import args_of

from fleet import declared
from tests.engine import engine_venv, launch
from tests.unit.judge_cases_inventory import INVENTORY, RIGHT
from tests.unit.judge_kit import good

HOW = "the engine's flags changed: run its Python with -m fleet.flags > engines/sglang-0.5.11/flags.yml, and look at the diff"


def asked() -> dict[str, tuple[dict[str, Any], bool]]:
    """Flags of every case of the two rules about the parser: as a config, and whether the preflight refuses them."""
    found = {}
    refused = [(f"{rule} {n}", change, True) for n, (rule, change, _) in enumerate(INVENTORY) if rule in RULES]
    for name, change, ends in [*refused, *((name, change, False) for name, change in RIGHT.items())]:
        wanted, facts = good()
        change(wanted, facts)
        (one, *_) = gpu_host_judge.instances_of(wanted)
        args = {flag: value for flag, value in args_of(one).items() if value is not None}
        if declared.flags(wanted["engine"], [{"args": args}], None):
            found[name] = (args, ends)
    return found


RULES = ("flag-unknown", "flag-value")


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
        [
            engine_python, Path(__file__).with_name("units_launch_check.py"), role / "files", *configs,
            json.dumps({name: args for name, (args, _) in asked().items()}),
        ],
        env=base | env | {"HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["flags"] == yaml.safe_load((repo / "engines/sglang-0.5.11/flags.yml").read_text()), HOW
    assert told["ends"] == {name: ends for name, (_, ends) in asked().items()}
    assert sum(told["ends"].values()) > 15
    found = told["configs"]
    assert all(seen["key"] and seen["hidden"] and seen["child"] for seen in found.values()), found
    assert "s3cret" not in done.stderr
    assert {mode: (seen["algorithm"], seen["shadow"]) for mode, seen in found.items()} == {
        "baseline": (None, False),
        "dflash": ("DFLASH", False),
        "ddtree-shadow": ("DDTREE", True),
        "ddtree": ("DDTREE", False),
    }
    assert (found["ddtree"]["budget"], found["ddtree"]["port"]) == (7, 30003)
