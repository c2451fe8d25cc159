# SPDX-License-Identifier: Apache-2.0
"""All facts together: of this machine, alone and under Ansible, and as recordings of others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ansible.module_utils import gpu_host_gather as gather
from ansible.module_utils import gpu_host_gather_base as base
from ansible.module_utils.gpu_host_judge import judge

ROLE = Path(__file__).parents[2] / "roles/gpu_host"


def test_a_program_that_is_missing_or_hangs_is_told() -> None:
    assert base.run(["/nonexistent/program"])[0] == 127
    assert base.run(["sleep", "60"], timeout=0.1)[0] == 124


def test_small_files_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(" 12\n")
    assert base.read(tmp_path / "f") == "12"
    assert base.read(tmp_path / "none") is None
    assert [base.whole(text) for text in ("12", "-1", "max", "", None)] == [12, -1, None, None, None]
    assert base.table("Node 0 MemTotal:   8 kB\nHugePages_Total:   3\nodd\n") == {
        "MemTotal": 8192,
        "HugePages_Total": 3,
    }


def test_recording_runs_alone_without_ansible() -> None:
    script = ROLE / "module_utils/gpu_host_gather.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--record", "the test machine"],
        capture_output=True,
        text=True,
        check=True,
    )
    recorded = json.loads(done.stdout)
    assert (recorded["recorded"]["machine"], recorded["recorded"]["kind"]) == ("the test machine", "real")
    assert set(recorded) == {"recorded", *gather.RECORDED}


def test_facts_of_this_machine_can_be_judged() -> None:
    facts = gather.gather("/opt/sglang-fleet", ["3.12", "3.11"], ["/nonexistent"], ["127.0.0.1"])
    json.dumps(facts)
    verdict = judge("here", {"profile": "auto", "instances": [{"name": "a"}]}, facts)
    assert not verdict["ok"]
