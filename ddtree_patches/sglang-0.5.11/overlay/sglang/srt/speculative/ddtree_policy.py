# SPDX-License-Identifier: Apache-2.0
"""How a batch is verified: as trees of which budget, or linearly. Expected tokens over measured cost.

No torch here, nothing of the engine: numbers in, a name out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median
from typing import Callable, Deque, Dict, Mapping, Optional, Sequence, Tuple

LINEAR = "linear"

TREE_PRIOR = 1.2
"""Tokens of a tree over tokens of a chain, as long as nothing has been verified: the low end of what is published."""

CHAIN_PRIOR = 3.0
"""Tokens per step of a chain, as long as nothing has been verified."""

ENOUGH = 64
"""Verified requests of a kind before their mean counts."""

REFRESH = 2048
"""Verified requests between two looks at what is not chosen: the widest tree for `ENOUGH` requests, then a chain for `PROBE`."""

PROBE = 32
"""Requests that are verified linearly then."""

_MARGIN = 1.02
"""By so much another choice has to be better than the present one."""

_TIMED = 8
"""Steps of a shape and batch size before their own time counts."""

_FRESH = 2048
"""Steps after which a time that was not measured again no longer counts."""

_KEEP = 4096
"""Verified requests that a mean remembers: older ones fade."""


class _Mean:
    """A mean that forgets slowly."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0.0
        self.seen = 0

    def add(self, value: float) -> None:
        if self.count >= _KEEP:
            self.total *= 0.5
            self.count *= 0.5
        self.total += value
        self.count += 1
        self.seen += 1

    @property
    def value(self) -> float:
        return self.total / self.count


class _Times:
    """The times of a shape's latest steps. Their median: one hiccup of the host is no cost of the shape."""

    def __init__(self) -> None:
        self.latest: Deque[float] = deque(maxlen=32)
        self.at = 0

    @property
    def value(self) -> float:
        return median(self.latest)


class VerifyPolicy:
    """Chooses among the ways to verify that a server has.

    Args:
        budgets: tree shapes by name, with their budgets; empty where nothing verifies trees.
        linear: whether batches may be verified linearly.
        above: with a number, every batch above it is verified linearly and none below; None chooses by cost.
        costs: milliseconds of a step by shape and batch size, measured at start; `took` corrects them. Without
            any, trees are always taken, the widest one.
        log: takes a line whenever a choice changes.
    """

    def __init__(
        self,
        budgets: Mapping[str, int],
        *,
        linear: bool,
        above: Optional[int] = None,
        costs: Optional[Mapping[str, Mapping[int, float]]] = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.budgets = dict(sorted(budgets.items(), key=lambda item: item[1]))
        self.widest = list(self.budgets)[-1] if self.budgets else LINEAR
        self.linear = linear
        self.above = above
        self.costs = {name: dict(sorted(points.items())) for name, points in (costs or {}).items()}
        self._log = log
        self._means: Dict[str, _Mean] = {name: _Mean() for name in (*self.budgets, LINEAR)}
        self._timed: Dict[Tuple[str, int], _Times] = {}
        self._steps = 0
        self._slower = 1.0  # latest step's time over what was measured at start: the host, and neighbours on the GPU
        self._choices: Dict[int, str] = {}
        self._since = 0

    def choose(self, batch: int) -> str:
        """The shape for a batch of this many requests."""
        if not self.budgets:
            return LINEAR
        if self.linear and self.above is not None:
            if batch > self.above:
                return LINEAR
        elif not self.linear and len(self.budgets) == 1:
            return self.widest
        if not self.costs:
            return self.widest
        at = self._since % REFRESH
        if at < ENOUGH:
            return self.widest  # what a wider tree would give is only seen on a wider tree
        if at < ENOUGH + PROBE and self.linear and self.above is None:
            return LINEAR  # what a chain would take is only seen on a chain
        if batch not in self._choices:
            self._decide(batch)
        return self._choices[batch]

    def took(self, shape: str, batch: int, milliseconds: float) -> None:
        """Learn from a step's time, host included."""
        self._steps += 1
        times = self._timed.setdefault((shape, batch), _Times())
        if self._steps - times.at > _FRESH:
            times.latest.clear()
        times.latest.append(milliseconds)
        times.at = self._steps
        if len(times.latest) >= _TIMED and shape in self.costs:
            self._slower = times.value / self._at_start(shape, batch)

    def saw(self, shape: str, accepted: Sequence[int], along_chain: Sequence[int], within: Sequence[Sequence[int]]) -> None:
        """Learn from a verified batch.

        Args:
            shape: how it was verified.
            accepted: accepted drafts per request.
            along_chain: leading emitted tokens per request that the greedy chain had.
            within: per request, accepted nodes within each budget up to the shape's own, smallest first; of a
                linear batch nothing.
        """
        names = list(self.budgets)
        for request, (drafts, chain) in enumerate(zip(accepted, along_chain, strict=True)):
            self._means[LINEAR].add(1 + (drafts if shape == LINEAR else chain))
            if shape != LINEAR:
                for name, nodes in zip(names, within[request], strict=False):
                    self._means[name].add(1 + nodes)
        before = self._since // ENOUGH
        self._since += len(accepted)
        if self._since // ENOUGH != before:
            for batch in list(self._choices):
                self._decide(batch)

    def tokens(self, shape: str) -> float:
        """Tokens per step that a shape is expected to give."""
        chain = self._means[LINEAR]
        base = chain.value if chain.seen >= ENOUGH else CHAIN_PRIOR
        if shape == LINEAR:
            return base
        mean = self._means[shape]
        return mean.value if mean.seen >= ENOUGH else base * TREE_PRIOR

    def cost(self, shape: str, batch: int) -> float:
        """Milliseconds of a step: its own latest where there are enough, else as measured at start, scaled as what ran last."""
        times = self._timed.get((shape, batch))
        if times is not None and len(times.latest) >= _TIMED and self._steps - times.at <= _FRESH:
            return times.value
        return self._at_start(shape, batch) * self._slower

    def _at_start(self, shape: str, batch: int) -> float:
        """As measured at start, a line between batch sizes."""
        points = self.costs[shape]
        sizes = list(points)
        at = bisect_left(sizes, batch)
        if at == len(sizes):
            return points[sizes[-1]] * batch / sizes[-1]
        if at == 0 or sizes[at] == batch:
            return points[sizes[at]]
        low, high = sizes[at - 1], sizes[at]
        share = (batch - low) / (high - low)
        return points[low] + share * (points[high] - points[low])

    def _decide(self, batch: int) -> None:
        names = [*self.budgets, *([LINEAR] if self.linear and self.above is None else [])]
        known = {name: (self.tokens(name), self.cost(name, batch)) for name in names}
        rate = {name: tokens / cost for name, (tokens, cost) in known.items()}
        choice, present = max(rate, key=lambda name: rate[name]), self._choices.get(batch)
        if present is not None and rate[choice] < _MARGIN * rate[present]:
            return
        if choice != present:
            self._log(f"batch={batch} verify={choice} {_table(known)}")
        self._choices[batch] = choice


def _table(known: Mapping[str, Tuple[float, float]]) -> str:
    return " ".join(f"{name}={tokens:.3f}tokens/{cost:.3f}ms" for name, (tokens, cost) in known.items())
