# SPDX-License-Identifier: Apache-2.0
"""Requests that share a batch, and requests that a tree cannot serve exactly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import cases
from tests.engine.conftest import Served
from tests.engine.launch import EngineFailed

SAMPLED = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.95, "min_p": 0.02}]
REFUSED: dict[str, dict[str, Any]] = {
    "return_logprob": {"return_logprob": True},
    "grammar": {"sampling_params": {"regex": "[a-z]+"}},
}


@pytest.mark.modes("ddtree-15")
def test_greedy_beside_sampled(served: Served) -> None:
    """A sampled neighbour changes nothing for a greedy request, and every filter of the sampler serves on a tree."""
    bodies = []
    for index in range(8):
        bodies.append(cases.body(served.walk.prompts[index], ignore_eos=True, max_new_tokens=cases.NEW))
        sampled = cases.body(served.walk.prompts[index], ignore_eos=True, max_new_tokens=cases.NEW)
        sampled["sampling_params"] |= {"temperature": 1.0} | SAMPLED[index % len(SAMPLED)]
        bodies.append(sampled)
    answers = cases.ask(served.engine, bodies, together=16)
    assert [answer["output_ids"] for answer in answers[::2]] == served.walk.greedy[:8]
    assert all(len(answer["output_ids"]) == cases.NEW for answer in answers[1::2])
    assert any(a["output_ids"] != g for a, g in zip(answers[1::2], served.walk.greedy[:8], strict=True))


@pytest.mark.modes("ddtree-15")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_tree_cannot_serve_is_refused(served: Served, name: str) -> None:
    """One clear answer for this request; the next one is served."""
    request = cases.body(served.walk.prompts[0], ignore_eos=True, max_new_tokens=8)
    extra = dict(REFUSED[name])
    request["sampling_params"] |= extra.pop("sampling_params", {})
    with pytest.raises(EngineFailed, match=r"^POST /generate: 400 .*does not support") as refused:
        served.engine.generate(**request, **extra)
    assert name.split("_", maxsplit=1)[0] in str(refused.value)
    plain = cases.body(served.walk.prompts[0], ignore_eos=True, max_new_tokens=8)
    assert served.engine.generate(**plain)["output_ids"] == served.walk.greedy[0][:8]
