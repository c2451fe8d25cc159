# SPDX-License-Identifier: Apache-2.0
"""How a batch is verified, from costs and acceptance to a choice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = "ddtree_patches/sglang-0.5.11/overlay/sglang/srt/speculative/ddtree_policy.py"


@pytest.fixture(scope="module")
def policy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ddtree_policy", Path(__file__).resolve().parents[2] / SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FLAT = {1: 5.0, 2: 5.1, 4: 5.3, 8: 6.0, 16: 8.0}
STEEP = {1: 5.0, 2: 5.5, 4: 7.0, 8: 11.0, 16: 20.0}


def make(policy: ModuleType, costs: Any, budgets: Any = None, **more: Any) -> Any:
    more.setdefault("linear", True)
    return policy.VerifyPolicy(budgets or {"tree-15": 15}, costs=costs, **more)


def test_without_costs_trees_are_verified_whatever_the_batch(policy: ModuleType) -> None:
    chosen = make(policy, None)
    assert {chosen.choose(batch) for batch in (1, 8, 500)} == {"tree-15"}


def test_a_server_without_trees_verifies_linearly(policy: ModuleType) -> None:
    assert policy.VerifyPolicy({}, linear=True).choose(1) == "linear"


def test_a_set_bound_holds_exactly(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": FLAT, "linear": FLAT}, above=4)
    assert [chosen.choose(batch) for batch in (1, 4, 5, 64)] == ["tree-15", "tree-15", "linear", "linear"]


def test_bound_zero_never_verifies_trees(policy: ModuleType) -> None:
    assert make(policy, None, above=0).choose(1) == "linear"


def test_off_never_verifies_linearly(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": STEEP}, linear=False)
    assert chosen.choose(16) == "tree-15"


def look(policy: ModuleType, chosen: Any, drafts: int = 2, chain: int = 2, within: tuple[int, ...] = ()) -> None:
    """What a server does first: its widest tree, then a chain."""
    for turn in range(policy.ENOUGH + (policy.PROBE if chosen.linear and chosen.above is None else 0)):
        shape = chosen.choose(1)
        assert shape == (chosen.widest if turn < policy.ENOUGH else "linear")
        chosen.saw(
            shape, *(([chain], [chain], []) if shape == "linear" else ([drafts], [chain], [list(within) or [drafts]]))
        )


def test_equal_costs_take_the_tree_and_dear_trees_the_chain(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": STEEP, "linear": FLAT})
    look(policy, chosen, drafts=3)
    assert chosen.choose(1) == "tree-15"  # 4 tokens against 3 for the same time
    assert chosen.choose(16) == "linear"  # 20 ms against 8


def test_cost_is_a_line_between_measured_sizes_and_grows_behind_them(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": STEEP, "linear": FLAT})
    assert chosen.cost("tree-15", 6) == pytest.approx(9.0)
    assert chosen.cost("tree-15", 32) == pytest.approx(40.0)
    assert chosen.cost("tree-15", 1) == 5.0


def test_what_was_seen_replaces_the_prior(policy: ModuleType) -> None:
    lines: list[str] = []
    chosen = make(policy, {"tree-15": {1: 5.5, 8: 6.4}, "linear": {1: 5.0, 8: 6.0}}, log=lines.append)
    look(policy, chosen)  # a tree that never leaves the chain: no gain for 10 % more cost
    assert chosen.tokens("tree-15") == chosen.tokens("linear") == 3.0
    assert chosen.choose(1) == "linear"
    assert lines == ["batch=1 verify=linear tree-15=3.000tokens/5.500ms linear=3.000tokens/5.000ms"]


def verified(policy: ModuleType, chosen: Any) -> None:
    """Enough requests for a new decision."""
    for _ in range(policy.ENOUGH):
        chosen.saw("linear", [2], [2], [])


def times(chosen: Any, shape: str, *milliseconds: float, batch: int = 1) -> None:
    for time in milliseconds:
        chosen.took(shape, batch, time)


def test_a_steps_own_time_replaces_what_was_measured_at_start(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": {1: 9.0}, "linear": {1: 5.0}})  # a neighbour disturbed the tree's
    look(policy, chosen, drafts=3)
    assert chosen.choose(1) == "linear"
    times(chosen, "linear", *[5.0] * 8)
    times(chosen, "tree-15", *[5.1] * 8)
    assert chosen.cost("tree-15", 1) == pytest.approx(5.1)
    verified(policy, chosen)
    assert chosen.choose(1) == "tree-15"


def test_what_has_no_time_of_its_own_is_scaled_as_what_ran_last(policy: ModuleType) -> None:
    """Measured at start without the host; so all shapes are slower than that by about the same factor."""
    chosen = make(policy, {"tree-15": {1: 8.0, 2: 10.0}, "linear": {1: 6.0}})
    times(chosen, "tree-15", *[10.0] * 8)
    assert chosen.cost("linear", 1) == pytest.approx(7.5)
    assert chosen.cost("tree-15", 2) == pytest.approx(12.5)


def test_one_hiccup_is_no_cost(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": FLAT, "linear": FLAT})
    times(chosen, "tree-15", *[5.0] * 8, 900.0, 5.0)
    assert chosen.cost("tree-15", 1) == 5.0


def test_a_time_that_is_not_measured_again_grows_stale(policy: ModuleType) -> None:
    """A disturbance while a shape ran must not keep it from ever running again."""
    chosen = make(policy, {"tree-15": {1: 5.0}, "linear": {1: 5.0}})
    times(chosen, "tree-15", *[30.0] * 8)
    times(chosen, "linear", *[5.0] * policy._FRESH)
    assert chosen.cost("tree-15", 1) == 30.0
    times(chosen, "linear", 5.0)
    assert chosen.cost("tree-15", 1) == 5.0
    times(chosen, "tree-15", 6.0)  # one step is not enough, and the old ones do not count again
    assert chosen.cost("tree-15", 1) == 5.0


def test_a_small_advantage_changes_nothing(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": {1: 5.0}, "linear": {1: 5.0}})
    look(policy, chosen, drafts=3)
    assert chosen.choose(1) == "tree-15"
    times(chosen, "linear", *[5.0] * 8)
    times(chosen, "tree-15", *[6.7] * 8)  # 4 / 6.7 against 3 / 5: 0.5 % worse
    verified(policy, chosen)
    assert chosen.choose(1) == "tree-15"


def test_too_few_requests_change_nothing(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": FLAT, "linear": FLAT})
    for _ in range(policy.ENOUGH - 1):
        chosen.saw("tree-15", [0], [0], [[0]])
    assert chosen.tokens("tree-15") == policy.CHAIN_PRIOR * policy.TREE_PRIOR


BUDGETS = {"tree-7": 7, "tree-15": 15, "tree-31": 31}
COSTS = {"tree-7": {1: 5.0}, "tree-15": {1: 5.2}, "tree-31": {1: 8.0}, "linear": {1: 5.0}}


def test_auto_looks_at_the_widest_tree_first_and_takes_the_best_one(policy: ModuleType) -> None:
    chosen = make(policy, COSTS, BUDGETS)
    look(policy, chosen, drafts=4, within=(2, 3, 4))
    # 3/5.0, 4/5.2, 5/8.0, 3/5.0 tokens a millisecond
    assert chosen.choose(1) == "tree-15"


def test_auto_looks_again_after_a_while(policy: ModuleType) -> None:
    chosen = make(policy, COSTS, BUDGETS)
    look(policy, chosen, drafts=4, within=(2, 3, 4))
    seen = []
    for _ in range(policy.REFRESH):
        seen.append(chosen.choose(1))
        chosen.saw(seen[-1], [3], [2], [[2, 3, 4]] if seen[-1] == "tree-31" else [[2, 3]])
    assert seen[0] == chosen.choose(1) == "tree-15"
    assert (seen.count("tree-31"), seen.count("linear")) == (policy.ENOUGH, policy.PROBE)


def test_a_smaller_tree_teaches_nothing_about_a_wider_one(policy: ModuleType) -> None:
    chosen = make(policy, COSTS, BUDGETS)
    for _ in range(policy.ENOUGH):
        chosen.saw("tree-31", [4], [2], [[2, 3, 4]])
    for _ in range(10):
        chosen.saw("tree-15", [1], [1], [[1, 1]])
    assert chosen.tokens("tree-31") == 5.0
    assert chosen.tokens("tree-15") < 4.0


def test_old_means_fade(policy: ModuleType) -> None:
    chosen = make(policy, {"tree-15": FLAT, "linear": FLAT})
    for _ in range(6000):
        chosen.saw("linear", [0], [0], [])
    for _ in range(6000):
        chosen.saw("linear", [4], [4], [])
    assert chosen.tokens("linear") > 4.0  # a plain mean would say 3
