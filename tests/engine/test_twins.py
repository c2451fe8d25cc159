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
    assert len(found) == 20
    assert {case: worst for case, worst in found.items() if worst > BOUND.get(case, 3e-6)} == {}


REGISTER = """
import sys
import sglang_fleet_cpu
sglang_fleet_cpu.register()
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
print("module:", extend_attention_fwd.__module__)
"""


@pytest.mark.parametrize(
    ("change", "module"),
    [
        ({}, "sglang_fleet_cpu.attention"),
        ({"SGLANG_FLEET_CPU_KERNELS": "interpreter"}, "sglang.srt.layers.attention.triton_ops.extend_attention"),
        ({"SGLANG_USE_CPU_ENGINE": "0"}, "sglang.srt.layers.attention.triton_ops.extend_attention"),
    ],
    ids=["torch", "interpreter", "not a CPU engine"],
)
def test_plugin_acts_only_when_asked(
    engine_python: Path, profile: dict[str, str], change: dict[str, str], module: str
) -> None:
    done = _run(engine_python, profile | change, "-c", REGISTER)
    assert f"module: {module}\n" in done.stdout, done.stderr[-2000:]


def test_plugin_refuses_another_engine(engine_python: Path, profile: dict[str, str]) -> None:
    """A kernel with other parameters is no place for the twin."""
    change = (
        "import sglang.srt.layers.attention.triton_ops.extend_attention as module\n"
        "module.extend_attention_fwd = lambda q, k: None\n"
    )
    done = _run(engine_python, profile, "-c", change + REGISTER)
    assert done.returncode == 1
    assert "extend_attention_fwd takes ['q', 'k'], its twin" in done.stderr
    assert "Traceback" not in done.stderr
