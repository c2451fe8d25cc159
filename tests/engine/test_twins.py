# SPDX-License-Identifier: Apache-2.0
"""The cpu profile computes what the engine's own kernels compute."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engine import engine_venv, launch

HERE = Path(__file__).parent
# float32 sums in another order; float16 results are rounded to 11 bits
BOUND = {"float16": 4e-3, "index lists": 0.0, "index lists with starts": 0.0, "slot bookkeeping": 0.0}


def _run(python: Path, env: dict[str, str], *words: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    base = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "PYTHONPYCACHEPREFIX": str(engine_venv.CACHE / "pycache"),
    }
    return subprocess.run([str(python), *map(str, words)], env=base | env, input=stdin, capture_output=True, text=True)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a laid-out cpu profile."""
    return launch.lay_out(tmp_path_factory.mktemp("release"))[1]


def test_twins_equal_interpreted_kernels(engine_python: Path, profile: dict[str, str]) -> None:
    done = _run(engine_python, profile, HERE / "twins_check.py")
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 31
    assert {case: worst for case, worst in found.items() if worst > BOUND.get(case, 3e-6)} == {}


# One process for all variants, since importing the engine takes seconds: each one is decided in a fork of it.
VARIANTS: dict[str, tuple[dict[str, str], str]] = {
    "torch": ({}, "0 sglang_fleet_cpu.attention"),
    "interpreter": (
        {"SGLANG_FLEET_CPU_KERNELS": "interpreter"},
        "0 sglang.srt.layers.attention.triton_ops.extend_attention",
    ),
    "not a CPU engine": ({"SGLANG_USE_CPU_ENGINE": "0"}, "0 sglang.srt.layers.attention.triton_ops.extend_attention"),
    "another engine": (
        {"OTHER_ENGINE": "1"},
        "1 sglang-fleet cpu profile: {module}.extend_attention_fwd takes ['q', 'k'], its twin",
    ),
}
FORKS = """
import json, os, sys
import sglang.srt.layers.attention.triton_ops.extend_attention as module
import sglang.srt.models.dflash
import sglang_fleet_cpu

for name, change in json.load(sys.stdin).items():
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.environ.update(change)
        if change.get("OTHER_ENGINE"):
            module.extend_attention_fwd = lambda q, k: None
        try:
            sglang_fleet_cpu.register()
            said, code = module.extend_attention_fwd.__module__, 0
        except SystemExit as stop:
            said, code = str(stop), 1
        os.write(writing, said.encode())
        os._exit(code)
    os.close(writing)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps({name: f"{code} {os.read(reading, 4096).decode()}"}))
"""


@pytest.fixture(scope="module")
def decided(engine_python: Path, profile: dict[str, str]) -> dict[str, str]:
    wanted = json.dumps({name: change for name, (change, _) in VARIANTS.items()})
    done = _run(engine_python, profile, "-c", FORKS, stdin=wanted)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            answers |= json.loads(line)
    return answers


@pytest.mark.parametrize("variant", VARIANTS)
def test_plugin_acts_only_when_it_may(decided: dict[str, str], variant: str) -> None:
    """Asked for, or left alone, or ended because the engine's kernel takes other parameters than its twin."""
    module = "sglang.srt.layers.attention.triton_ops.extend_attention"
    assert decided[variant].startswith(VARIANTS[variant][1].format(module=module))
