# SPDX-License-Identifier: Apache-2.0
"""Outputs: are they the same, and are they text at all or a loop?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_CYCLE = 32  # tokens
TURNS = 3  # a cycle counts once it was told this often
LEAST_RUN = 24  # tokens, so that `)))` is no cycle
SHARE = 0.5  # of an answer


def loops(ids: Sequence[int]) -> list[bool]:
    """Which of an answer's tokens lie in a cycle of at most 32 tokens, told at least three times in a row."""
    covered = [False] * len(ids)
    for period in range(1, min(LONGEST_CYCLE, len(ids) // TURNS) + 1):
        start = 0
        for at in range(period, len(ids) + 1):
            if at < len(ids) and ids[at] == ids[at - period]:
                continue
            if at - start >= max(TURNS * period, LEAST_RUN):
                covered[start:at] = [True] * (at - start)
            start = at - period + 1
    return covered


def loops_from(ids: Sequence[int]) -> int:
    """Index of the first token that lies in a loop; the length if none does."""
    covered = loops(ids)
    return covered.index(True) if True in covered else len(ids)


def looping(ids: Sequence[int]) -> float:
    """Share of an answer's tokens that lie in a loop."""
    return sum(loops(ids)) / len(ids) if ids else 0.0


def degenerate(ids: Sequence[int]) -> bool:
    """Is at least half of an answer a loop? Such text flatters every drafter."""
    return looping(ids) >= SHARE


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one is the start of the other, None if equal."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def judge(
    want: Sequence[int], got: Sequence[int], likely: Sequence[Mapping[int, float]] | None, bound: float
) -> dict[str, Any]:
    """Compare an answer with the reference's.

    `likely[i]` holds the log-probabilities (nats) of the likeliest tokens after the first i tokens of `want`. Returns {result,
    position, expected, observed, gap}: result is same, near-tie, different or length; gap is how far the two tokens are
    apart, None where one of them is not among the likeliest.
    """
    at = first_difference(want, got)
    row: dict[str, Any] = {"result": "same", "position": at, "expected": None, "observed": None, "gap": None}
    if at is None:
        return row
    if at >= min(len(want), len(got)):
        return row | {"result": "length"}
    gap = None
    if likely is not None and at < len(likely) and want[at] in likely[at] and got[at] in likely[at]:
        gap = round(abs(likely[at][want[at]] - likely[at][got[at]]), 6)
    near = gap is not None and gap <= bound
    return row | {"result": "near-tie" if near else "different", "expected": want[at], "observed": got[at], "gap": gap}


def count(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How a set of judged answers came out: {same, near_ties, different, largest_near_gap, others}."""
    gaps = [row["gap"] for row in rows if row["result"] == "near-tie"]
    others = [dict(row) for row in rows if row["result"] in ("different", "length")]
    return {
        "compared": len(rows),
        "same": sum(row["result"] == "same" for row in rows),
        "near_ties": len(gaps),
        "different": len(others),
        "largest_near_gap": max(gaps, default=None),
        "others": others,
    }
