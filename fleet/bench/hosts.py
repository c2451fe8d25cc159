# SPDX-License-Identifier: Apache-2.0
"""`bin/bench -l HOST,..`: the same benchmark on hosts, by playbooks/bench.yml in the place of an instance."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fleet.bench.arms import ROOT, Misuse


def command(
    limit: str, inventory: Sequence[str], instance: str | None, out: Path, prompts: Path | None, words: Sequence[str]
) -> list[str]:
    """The play's command line; `words` go to the benchmark on the host."""
    variables = {"bench_arguments": list(words), "bench_out": str(out.resolve())}
    if instance:
        variables["bench_instance"] = instance
    if prompts:
        variables["bench_prompts"] = str(prompts.resolve())
    places = [word for file in inventory for word in ("-i", file)]
    return ["ansible-playbook", str(ROOT / "playbooks/bench.yml"), *places, "-l", limit, "-e", json.dumps(variables)]


def run(argv: Sequence[str]) -> int:
    """0 all hosts are fine, 1 one is not. Raises Misuse without Ansible, or for a play that can't run at all."""
    try:
        code = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode
    except FileNotFoundError as error:
        raise Misuse("ansible-playbook is not there; start this with bin/bench") from error
    if code not in (0, 2, 4):
        raise Misuse(f"ansible-playbook ended with {code}; see its message above")
    return 0 if code == 0 else 1
