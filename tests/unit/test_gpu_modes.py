# SPDX-License-Identifier: Apache-2.0
"""How tests/gpu/modes.py judges, with answers made up for it; the engines are for the GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fleet.bench.arms import arms


@pytest.fixture(scope="module")
def modes(repo: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_modes", repo / "tests/gpu/modes.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_modes"] = module
    spec.loader.exec_module(module)
    return module


class Likely:
    """Baseline's log-probabilities: token 7 is `gap` below the text's own token everywhere."""

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def along(self, prompt: int, ids: list[int]) -> list[dict[int, float]]:
        return [{token: -1.0, 7: -1.0 - self.gap} for token in ids]


def pair(folder: Path, **config: Any) -> Path:
    (folder / "target").mkdir(parents=True)
    (folder / "target/config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("gap", "ties", "others"), [(0.125, 1, 0), (0.5, 0, 1)])
def test_a_difference_counts_by_its_gap(modes: ModuleType, gap: float, ties: int, others: int) -> None:
    want = {"alone": {0: [1, 2, 3]}, "batch": {0: [1, 2, 3], 1: [4, 5, 6]}}
    got = {"alone": {0: [1, 2, 3]}, "batch": {0: [1, 2, 3], 1: [4, 7, 6]}}
    found = modes.compare(want, got, Likely(gap), 0.25)
    assert (found["alone"]["same"], found["alone"]["compared"]) == (1, 1)
    assert (found["batch"]["same"], found["batch"]["near_ties"], found["batch"]["different"]) == (1, ties, others)


def test_baseline_is_compared_with_itself_only_where_it_was_asked_twice(modes: ModuleType) -> None:
    want = {"alone": {0: [1, 2, 3]}, "batch": {0: [1, 7, 3], 1: [4, 5, 6]}}
    found = modes.compare(want, want, Likely(0.0), 0.25)
    assert found["alone"]["compared"] == 0
    assert (found["batch"]["compared"], found["batch"]["near_ties"]) == (1, 1)


def test_a_token_that_baseline_never_thought_of_is_no_near_tie(modes: ModuleType) -> None:
    found = modes.compare({"alone": {}, "batch": {0: [1, 2]}}, {"batch": {0: [1, 9]}}, Likely(0.0), 0.25)
    assert found["batch"]["different"] == 1


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dflash:16", (15, 1)), ("dflash:8", (7, 1)), ("dflash", (15, 1)), ("ddtree-shadow:15", (15, 1)),
        ("ddtree:22", (22, 8)), ("ddtree:7@few=--speculative-ddtree-topk 3", (7, 3)), ("ddtree:auto", None), ("baseline", None),
    ],
)  # fmt: skip
def test_the_walk_follows_what_an_arm_verifies(modes: ModuleType, name: str, shape: tuple[int, int] | None) -> None:
    (arm,) = arms([name], Path("/drafter"))
    assert modes.walk_arm(arm) == shape


def test_every_group_leaves_room_for_baseline(modes: ModuleType) -> None:
    chosen = arms(["dflash:16", "ddtree:7", "ddtree:15", "ddtree:31"], Path("/drafter"))
    assert [len(group) for group in modes.groups(chosen, 3)] == [2, 2]
    assert [len(group) for group in modes.groups(chosen, 1)] == [1, 1, 1, 1]


def test_only_a_hybrid_gets_the_leak(modes: ModuleType, tmp_path: Path) -> None:
    dense = modes.from_environment(pair(tmp_path / "dense"), tmp_path, {"GPU_NEW": "32", "GPU_ARMS": "ddtree:31"})
    hybrid = modes.from_environment(pair(tmp_path / "hybrid", full_attention_interval=4), tmp_path, {})
    assert (dense.negative, dense.names, dense.new, dense.soak) == ([], ["ddtree:31"], 32, "ddtree:31")
    assert hybrid.negative == ["ddtree:15@leak"]
    leak = arms(hybrid.names, Path("/drafter"))[-1]
    assert (leak.name, leak.kind) == ("ddtree:15@leak", "ddtree")
    assert leak.flags["speculative-ddtree-allow-hybrid-unsafe"] == []


@pytest.mark.parametrize(
    ("negative", "different", "ok"), [(False, 0, True), (False, 1, False), (True, 0, False), (True, 1, True)]
)
def test_a_negative_control_has_to_differ(
    modes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, negative: bool, different: int, ok: bool
) -> None:
    (arm,) = arms(["ddtree:15"], Path("/drafter"))
    monkeypatch.setattr(modes, "missing_hooks", lambda server: [])
    counts = {"compared": 4, "same": 3, "near_ties": 1 - different, "different": different, "largest_near_gap": 0.1,
              "others": [{}] * different}  # fmt: skip
    options = modes.Options(pair=tmp_path, out=tmp_path, names=[], negative=["ddtree:15"] if negative else [])
    report = modes.Report()
    server = type("Server", (), {"arm": arm})()
    modes.judge_arm(server, {"errors": [], "equality": {"alone": counts}}, options, report)
    assert (not report.failed) is ok


def test_an_arm_without_a_single_comparison_fails(
    modes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (arm,) = arms(["ddtree:15"], Path("/drafter"))
    monkeypatch.setattr(modes, "missing_hooks", lambda server: [])
    nothing = {"compared": 0, "same": 0, "near_ties": 0, "different": 0, "largest_near_gap": None, "others": []}
    report = modes.Report()
    server = type("Server", (), {"arm": arm})()
    options = modes.Options(pair=tmp_path, out=tmp_path, names=[])
    modes.judge_arm(server, {"errors": ["x"], "equality": {"alone": nothing}}, options, report)
    assert {check["id"] for check in report.failed} == {"answers.ddtree:15", "output.ddtree:15"}
