# SPDX-License-Identifier: Apache-2.0
"""A hybrid target on real servers: trees answer exactly as baseline does, and the check catches leaking states.

The prompts are chosen from the offline walk: on them trees accept what the drafter's first choice misses, so that
siblings with other states lie before accepted slots.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import cases, engine_venv, launch
from tests.engine.conftest import HERE, Offline, wrong_backends

PAIR = HERE.parents[1] / "models/nano-hybrid"
PROMPTS = HERE.parents[1] / "models/nano/prompts.jsonl"
CHOSEN = (2, 4, 5, 6, 8)
NEW = 24
LONG = 64  # how far an answer is followed behind a state from the cache: a wrong one shows late
ARMS = {"dflash": (15, 1), "tree-7": (7, 8)}
MARK = 128  # where radix modes keep a state of these prompts; most pass it while they decode
RADIX = {"disable-radix-cache": False, "mamba-scheduler-strategy": "extra_buffer", "mamba-track-interval": 64}
# Linear verification is on by default, so that budget 7 verifies 8 slots with buffers for 16.
MODES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "dflash": RADIX | {"speculative-algorithm": "DFLASH"},
    "tree-7": RADIX | {"speculative-ddtree-budget": 7},
    "leak-15": {"speculative-ddtree-budget": 15, "speculative-ddtree-allow-hybrid-unsafe": True},
}
ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "SGLANG_DDTREE_METRICS_INTERVAL": "10"}


@dataclass(frozen=True)
class Answers:
    alone: list[dict[str, Any]]
    batch: list[dict[str, Any]]
    again: list[dict[str, Any]]
    log: str

    def texts(self, how: str) -> list[list[int]]:
        return [answer["output_ids"] for answer in getattr(self, how)]


@pytest.fixture(scope="module")
def walk(engine_python: Path) -> cases.Walk:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    request = {
        "what": "walk", "target": str(PAIR / "target"), "draft": str(PAIR / "draft"), "new": LONG, "arms": ARMS,
        "prompts": [json.loads(lines[row])["prompt"] for row in CHOSEN],
    }  # fmt: skip
    return cases.Walk(**Offline(engine_python, request).answer)


@pytest.fixture(scope="module")
def baseline(engine_python: Path, walk: cases.Walk, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _answers("baseline", engine_python, walk, tmp_path_factory.mktemp("baseline"))


@pytest.fixture(scope="module", params=[mode for mode in MODES if mode != "baseline"])
def served(
    request: pytest.FixtureRequest, engine_python: Path, walk: cases.Walk, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Answers]:
    mode = str(request.param)
    return mode, _answers(mode, engine_python, walk, tmp_path_factory.mktemp(mode))


def _answers(mode: str, python: Path, walk: cases.Walk, work: Path) -> Answers:
    """All prompts at once; in radix modes again just behind the mark; each alone."""
    args: dict[str, Any] = {"model-path": PAIR / "target", "disable-radix-cache": True}
    if mode != "baseline":
        args |= {"speculative-algorithm": "DDTREE", "speculative-draft-model-path": PAIR / "draft"}
    args |= MODES[mode]
    bodies = [cases.body(ids, ignore_eos=True, max_new_tokens=NEW) for ids in walk.prompts]
    with launch.serve(python, work, args, env=ENV) as engine:
        batch = cases.ask(engine, bodies, together=len(bodies))
        again = []
        if "mamba-track-interval" in args:
            longer = [cases.body(ids, ignore_eos=True, max_new_tokens=LONG - done) for ids, done, _ in _behind(walk)]
            again = cases.ask(engine, longer, together=2)
        hooks = {"baseline": "baseline", "dflash": "dflash"}.get(mode, "ddtree")
        assert wrong_backends(engine, hooks) == []
        assert "GDN kernel dispatcher: decode=TritonGDNKernel" in engine.log()
        return Answers(cases.ask(engine, bodies, together=1), batch, again, engine.log())


def _steps(accepted: list[int]) -> int:
    """Verify steps until `NEW` tokens are there; prefill gives the first one."""
    tokens, steps = 1, 0
    while tokens < NEW:
        tokens += accepted[steps] + 1
        steps += 1
    return steps


def _behind(walk: cases.Walk) -> list[tuple[list[int], int, list[int]]]:
    """Prompts that pass the mark while they decode, with their answer as far as two tokens behind it, and its rest."""
    found = []
    for ids, text in zip(walk.prompts, walk.greedy, strict=True):
        done = MARK + 2 - len(ids)
        if 2 < done < NEW:
            found.append((ids + text[:done], done, text[done:]))
    return found


def test_baseline_writes_the_models_text(baseline: Answers, walk: cases.Walk) -> None:
    assert baseline.texts("alone") == baseline.texts("batch") == [text[:NEW] for text in walk.greedy]


@pytest.mark.parametrize("how", ["alone", "batch"])
def test_tree_is_exact_and_leak_is_not(
    served: tuple[str, Answers], baseline: Answers, walk: cases.Walk, how: str
) -> None:
    """Token for token in float32. The same comparison fails for most prompts once branches leak: the negative control."""
    mode, answers = served
    differing = [
        row for row, (ours, theirs) in enumerate(zip(answers.texts(how), baseline.texts("alone"), strict=True))
        if ours != theirs
    ]  # fmt: skip
    if mode.startswith("leak"):
        assert len(differing) >= len(CHOSEN) // 2
        return
    assert differing == []
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in getattr(answers, how)]
    assert steps == [_steps(accepted) for accepted in walk.accepted[mode]]


def test_radix_cache_keeps_the_state_at_the_mark(served: tuple[str, Answers], walk: cases.Walk) -> None:
    """The batch changes while requests pass the mark; what was kept there is still the state that the text has led to."""
    mode, answers = served
    if MODES[mode].get("disable-radix-cache", True):
        assert answers.again == []
        return
    expected = [rest for _, _, rest in _behind(walk)]
    assert len(expected) >= 3
    assert [answer["output_ids"] for answer in answers.again] == expected
    assert {answer["meta_info"]["cached_tokens"] for answer in answers.again} == {MARK}


def test_log_says_what_is_planned_and_what_leaks(served: tuple[str, Answers]) -> None:
    mode, answers = served
    if mode == "dflash":
        assert "DDTREE" not in "".join(line for line in answers.log.splitlines() if "server_args=" not in line)
        return
    metrics = [line for line in answers.log.splitlines() if "DDTREE metrics" in line]
    assert len(metrics) > 3
    leaking = mode.startswith("leak")
    assert all(line.endswith(" unsafe=leak") == leaking for line in metrics)
    assert ("branches leak recurrent state into their siblings, outputs are wrong" in answers.log) == leaking
    budget = MODES[mode]["speculative-ddtree-budget"]
    assert f"DDTREE hybrid: budget={max(budget, 15)} requests=8 " in answers.log
    assert "Traceback" not in answers.log


def test_budget_without_room_does_not_start(engine_python: Path, tmp_path: Path) -> None:
    """Refused before any pool is built, and the budget that it names fits."""
    args = {
        "model-path": PAIR / "target", "disable-radix-cache": True, "speculative-algorithm": "DDTREE",
        "speculative-draft-model-path": PAIR / "draft", "speculative-ddtree-budget": 100_000, "max-running-requests": 48,
    }  # fmt: skip
    with (
        pytest.raises(launch.EngineFailed) as failure,
        launch.serve(engine_python, tmp_path, args, env=ENV, turn=False),
    ):
        pass
    text = str(failure.value)
    assert "ValueError: DDTREE budget 100000 does not fit on" in text
    assert "100001 slots x 48 running requests" in text
    assert "is the largest that fits" in text
    assert "Mamba Cache is allocated" not in (tmp_path / "engine.log").read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def checked(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    env = launch.lay_out(tmp_path_factory.mktemp("release"))[1]
    env |= {
        "PYTHONPYCACHEPREFIX": str(engine_venv.CACHE / "pycache"),
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
    }
    done = subprocess.run(
        [engine_python, HERE / "hybrid_checks.py"], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("check", "count"), {"tracked": 300, "track_buffers": 3, "plans": 300, "words": 3, "forks": 6}.items()
)
def test_parts(checked: dict[str, int], check: str, count: int) -> None:
    assert checked[check] == count
