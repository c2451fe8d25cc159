# SPDX-License-Identifier: Apache-2.0
"""Checks of ddtree_hybrid.py that need no server; run with the engine's Python.

python tests/engine/hybrid_checks.py        runs every check, prints {check: cases}; raises at the first that fails
"""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative import ddtree_hybrid as hybrid

CASES = 300


def tracked() -> int:
    """The slot kept for the radix cache is where the length passes a mark, and no step passes two."""
    rng = random.Random(4)
    for _ in range(CASES):
        interval, width = rng.randint(16, 64), rng.randint(1, 16)
        befores = [rng.randint(1, 500) for _ in range(4)]
        lengths = [rng.randint(1, width) for _ in range(4)]
        path = torch.stack([torch.randperm(64)[:width] for _ in range(4)])
        found = hybrid.track_slots(path, torch.tensor(befores), torch.tensor(lengths), interval).tolist()
        for row, (before, length) in enumerate(zip(befores, lengths, strict=True)):
            marks = [at for at in range(1, length + 1) if (before + at) % interval == 0]
            assert len(marks) <= 1
            assert found[row] == (int(path[row, marks[0] - 1]) if marks else -1)
    return CASES


def track_buffers() -> int:
    """Where a state is kept is looked up again when the batch has changed, and only then."""
    args = SimpleNamespace(enable_mamba_extra_buffer=lambda: True)
    reqs = [
        SimpleNamespace(mamba_ping_pong_track_buffer=torch.tensor([row + 5]), mamba_next_track_idx=0)
        for row in (4, 2, 9)
    ]
    batch: Any = SimpleNamespace(reqs=reqs, mamba_track_indices=None)
    assert hybrid.track_indices(batch, args).tolist() == [9, 7, 14]  # type: ignore[arg-type, union-attr]
    kept = batch.mamba_track_indices
    assert hybrid.track_indices(batch, args) is kept  # type: ignore[arg-type]
    args.enable_mamba_extra_buffer = lambda: False
    assert hybrid.track_indices(batch, args) is None  # type: ignore[arg-type]
    return 3


def plans() -> int:
    """The largest budget and the most requests are the largest and the most, by trying all."""
    rng = random.Random(5)
    for case in range(CASES):
        state, requests = rng.choice([60_000, 4_000_000]), rng.choice([1, 3, 8, 48])
        plan = hybrid.StatePlan(
            state=state, kv=rng.choice([0, 1024, 100_000]), requests=requests,
            request_states=requests if case % 2 else rng.randint(1, 50), elements=rng.choice([4096, 524_288, 1 << 23]),
            free=rng.randint(0, 400) * state * rng.randint(1, 9),
        )  # fmt: skip
        budgets = [budget for budget in range(1, 4000) if plan.fits(budget)]
        assert plan.largest_budget() == max(budgets, default=0) or plan.largest_budget() >= 3999
        assert budgets == list(range(1, len(budgets) + 1))  # all smaller ones fit too
        for budget in (1, 15, 63):
            most = plan.most_requests(budget)

            def fits(count: int, budget: int = budget, plan: Any = plan) -> bool:
                other = count if plan.request_states == plan.requests else plan.request_states
                return hybrid.StatePlan(plan.state, plan.kv, count, other, plan.elements, plan.free).fits(budget)

            assert not most or fits(most)
            assert not fits(most + 1)
    return CASES


def words() -> int:
    """The refusal names need, room, the largest budget and the most requests; or the kernels' limit."""
    gib = 1 << 30
    plan = hybrid.StatePlan(state=gib // 100, kv=1 << 16, requests=8, request_states=8, elements=4096, free=10 * gib)
    assert plan.largest_budget() == 108
    text = plan.refusal(127, "/models/m")
    for part in (
        "DDTREE budget 127 does not fit on /models/m", "128 slots x 8 running requests", "11.58 GiB", "10.00 GiB are free",
        "--speculative-ddtree-budget 108 is the largest that fits", "--max-running-requests 6 is the most for budget 127",
        "--mem-fraction-static",
    ):  # fmt: skip
        assert part in text, (part, text)
    wide = hybrid.StatePlan(state=1, kv=0, requests=48, request_states=48, elements=1 << 20, free=gib)
    assert wide.fits(41) and not wide.fits(42) and wide.largest_budget() == 41
    assert "can index" in wide.refusal(63, "m") and "--max-running-requests 32" in wide.refusal(63, "m")
    none = hybrid.StatePlan(state=gib, kv=0, requests=8, request_states=8, elements=1, free=gib)
    assert "no budget fits" in none.refusal(7, "m") and "--max-running-requests" not in none.refusal(7, "m")
    return 3


def forks() -> int:
    """Recurrent layers fork where trees are verified exactly, and EAGLE's own top-k stays what it is."""
    cases = {
        ("DDTREE", False, False, 1): 2,
        ("DDTREE", True, False, 1): 1,
        ("DDTREE", False, True, 1): 1,
        ("DFLASH", False, False, 1): 1,
        ("EAGLE", False, False, 4): 4,
        (None, False, False, None): 0,
    }
    for (algorithm, shadow, unsafe, topk), expected in cases.items():
        args: Any = SimpleNamespace(
            speculative_algorithm=algorithm, speculative_ddtree_shadow_linear=shadow,
            speculative_ddtree_allow_hybrid_unsafe=unsafe, speculative_eagle_topk=topk,
        )  # fmt: skip
        assert hybrid.linear_attn_topk(args) == expected
    return len(cases)


def main() -> int:
    torch.manual_seed(0)
    checks = (tracked, track_buffers, plans, words, forks)
    json.dump({check.__name__: check() for check in checks}, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
