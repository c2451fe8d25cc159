# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads, paired ratios and the sign test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile with linear interpolation between neighbours. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """{n, median, q1, q3, low, high}; without values only n."""
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        "median": quantile(values, 0.5),
        "q1": quantile(values, 0.25),
        "q3": quantile(values, 0.75),
        "low": min(values),
        "high": max(values),
    }


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value that wins and losses come from a fair coin; ties are left out before."""
    n = wins + losses
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(max(wins, losses), n + 1)) / 2**n
    return min(1.0, 2.0 * float(tail))


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> dict[str, Any]:
    """Ratio to a reference in each round that both have: its spread, wins, losses, and the sign test."""
    rounds = sorted(values.keys() & reference.keys())
    ratios = [values[r] / reference[r] for r in rounds if reference[r] > 0]
    wins, losses = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
    return {**spread(ratios), "wins": wins, "losses": losses, "p": sign_test(wins, losses)}
