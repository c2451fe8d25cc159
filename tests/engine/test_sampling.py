# SPDX-License-Identifier: Apache-2.0
"""Sampling at temperature 1: 2,000 continuations of 3 tokens follow the model's exact distribution.

Compared is with the distribution itself, computed outside the engine, which halves the noise of comparing two samples.
Pearson's chi-square over cells that expect at least 10 draws; a right engine fails with probability 1e-4 per test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.engine import cases
from tests.engine.conftest import NANO, Offline, Served

DRAWS, LENGTH, ALPHA, EXPECTED = 2000, 3, 1e-4, 10
PROMPT = 1  # its continuation is open: no text of 3 tokens has more than an eighth of the probability

Prefix = tuple[int, ...]


class Exact:
    """The exact distribution in cells: whole continuations, and what leaves a listed prefix."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.leaves: dict[Prefix, float] = {tuple(path): mass for path, mass in answer["leaves"]}
        self.rests: dict[Prefix, float] = {tuple(path): mass for path, mass in answer["rests"]}
        self.critical: float = answer["critical"]
        paths = [*self.leaves, *self.rests]
        self.known = {path[:length] for path in paths for length in range(len(path) + 1)}

    def cell(self, draw: Prefix) -> tuple[str, Prefix]:
        """Follow the listed prefixes as far as the draw goes with them."""
        if draw in self.leaves:
            return "leaf", draw
        length = 0
        while draw[: length + 1] in self.known:
            length += 1
        return "rest", draw[:length] if draw[:length] in self.rests else ()

    def chi_square(self, draws: list[Prefix]) -> float:
        """Pearson's statistic; compare with `critical`."""
        seen = Counter(self.cell(draw) for draw in draws)
        masses = {("leaf", p): m for p, m in self.leaves.items()} | {("rest", p): m for p, m in self.rests.items()}
        assert sum(masses.values()) == pytest.approx(1)
        return sum((seen[cell] - len(draws) * mass) ** 2 / (len(draws) * mass) for cell, mass in masses.items())


@pytest.fixture(scope="session")
def exact(engine_python: Any, walk: cases.Walk) -> Exact:
    request = {
        "what": "distribution", "target": str(NANO / "target"), "prompt": walk.prompts[PROMPT], "length": LENGTH,
        "draws": DRAWS, "expected": EXPECTED, "alpha": ALPHA, "temperature": 1.0,
    }  # fmt: skip
    found = Exact(Offline(engine_python, request).answer)
    assert len(found.leaves) + len(found.rests) >= 30, "too few cells to tell samplers apart; choose another prompt"
    return found


def _draw(served: Served, temperature: float) -> list[dict[str, Any]]:
    sampling = {
        "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": LENGTH, "ignore_eos": True,
        "n": DRAWS // 4,
    }  # fmt: skip
    ids = served.walk.prompts[PROMPT]
    answers: list[dict[str, Any]] = []
    for _ in range(4):
        answers += served.engine.generate(input_ids=ids, sampling_params=sampling)
    assert len(answers) == DRAWS
    return answers


def _tokens(answers: list[dict[str, Any]]) -> list[Prefix]:
    return [tuple(answer["output_ids"]) for answer in answers]


@pytest.mark.modes("baseline", "ddtree-15")
def test_distribution_is_the_models(served: Served, exact: Exact) -> None:
    answers = _draw(served, 1.0)
    assert exact.chi_square(_tokens(answers)) < exact.critical
    if served.mode.tree:
        accepted = [answer["meta_info"]["spec_accepted_drafts"] for answer in answers]
        steps = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
        assert sum(accepted) > DRAWS // 20, "hardly any draw went through a tree's branch"
        assert max(steps) == 2, "no draw left its tree"


@pytest.mark.modes("baseline")
def test_another_distribution_is_noticed(served: Served, exact: Exact) -> None:
    """Negative control: the same number of draws at temperature 0.85."""
    assert exact.chi_square(_tokens(_draw(served, 0.85))) > exact.critical
