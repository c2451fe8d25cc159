# SPDX-License-Identifier: Apache-2.0
"""The rescue of the main job: what it says where nothing was changed. The way back is proven on a lab host (test_site.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml


def test_a_dry_run_that_fails_after_the_predicted_swap_claims_no_way_back(tmp_path: Path, repo: Path) -> None:
    tasks = [
        {"ansible.builtin.set_fact": {"gpu_units_deployment": {"release": "abc", "changed": True}}},
        {
            "block": [{"name": "Baseline", "ansible.builtin.fail": {"msg": "no baseline"}}],
            "rescue": [{"ansible.builtin.import_tasks": str(repo / "playbooks/tasks/go_back.yml")}],
        },
    ]
    play = tmp_path / "play.yml"
    play.write_text(yaml.safe_dump([{"hosts": "ct200", "connection": "local", "gather_facts": False, "tasks": tasks}]))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", play, "--check", "-i", "ct200,"],
        env={**os.environ, "ANSIBLE_CONFIG": str(repo / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ct200 failed, in a dry run (--check), so nothing was changed. Baseline: no baseline" in said
    assert "is back on" not in said
