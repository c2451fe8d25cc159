# SPDX-License-Identifier: Apache-2.0
"""Rules about models: a fault is told once, and the commands of their fixes are what a shell takes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.gpu_host_rules import Case
from ansible.module_utils.gpu_host_rules_files import copy

from tests.unit.judge_cases_models import CLOSED, CUT, NONE, gone
from tests.unit.judge_kit import Change, both, drafter, findings, inventory, target

FAULTS: dict[str, Change] = {
    "no folder": gone(),
    "a broken file": target(broken=[CUT]),
    "a closed folder": target(barred=[CLOSED]),
    "no tokenizer": target(tokenizer=NONE),
    "another vocabulary": drafter(vocab_size=7),
    "another kind": drafter(architectures=["LlamaForCausalLM"]),
    "a block of one": drafter(block_size=1),
    "a hidden folder": target(leads=["/root/m"]),
    "a broken target that is its own drafter": both(
        inventory(defaults={"mode": "ddtree", "model_path": "/srv/target", "draft_model_path": "/srv/target"}),
        target(broken=[CUT]),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_model_is_told_once_for_all_of_its_instances(name: str) -> None:
    found = [
        one
        for one in findings(FAULTS[name])
        if name != "a broken target that is its own drafter" or "weights" in one["id"]
    ]
    assert [one["thing"] for one in found] == ["instance gpu0 and 7 more"]


def test_the_copy_does_what_it_says(tmp_path: Path) -> None:
    """With FOLDER filled in, the command makes a whole folder of one that holds links, at a path with a space."""
    folder, blobs, to = tmp_path / "from here", tmp_path / "blobs", tmp_path / "to there"
    for path in (folder, blobs):
        path.mkdir()
    (blobs / "1f").write_text("weights")
    (folder / "model.safetensors").symlink_to("../blobs/1f")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    case = Case("ct200", {"reach": ""})
    for names, told in ((["tokenizer*"], {"tokenizer.json", "tokenizer_config.json"}), (None, {"model.safetensors"})):
        command = copy(case, str(to), names).replace("FOLDER", shlex.quote(str(folder)))
        subprocess.run(["sh", "-c", command], check=True)
        assert told <= {path.name for path in to.iterdir()}
    assert (to / "model.safetensors").is_file() and not (to / "model.safetensors").is_symlink()
