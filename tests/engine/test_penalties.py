# SPDX-License-Identifier: Apache-2.0
"""Penalties, minimum lengths, logit biases and custom logit processors: on a tree as without speculation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import abilities, cases
from tests.engine.conftest import Served
from tests.engine.launch import EngineFailed

Answers = dict[str, list[dict[str, Any]]]
OURS = ("ddtree-shadow", "ddtree-15", "ddtree-by-size")
LOST = ("frequency_penalty", "presence_penalty", "repetition_penalty", "frequency and presence", "Rhythm")


def _of(served: Served, answers: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    kinds = [name for name, _ in abilities.asking(served.walk, served.processors)]
    return [answer for name, answer in zip(kinds, answers, strict=True) if name == kind]


def _seen(served: Served, answers: list[dict[str, Any]], kind: str) -> list[Any]:
    return [cases.seen(answer) for answer in _of(served, answers, kind)]


@pytest.mark.modes(*OURS)
@pytest.mark.parametrize("kind", ["plain", *abilities.KINDS])
def test_answers_are_baselines(served: Served, reference: Answers, kind: str) -> None:
    assert _seen(served, served.asked, kind) == _seen(served, reference["asked"], kind)
    accepted = [answer["meta_info"]["spec_accepted_drafts"] for answer in _of(served, served.asked, kind)]
    assert sum(accepted) > abilities.PROMPTS, "nothing was asked inside of a path"


@pytest.mark.modes("baseline")
@pytest.mark.parametrize("kind", abilities.KINDS)
def test_what_is_asked_shows(served: Served, kind: str) -> None:
    """Else equal answers would show nothing."""
    texts = [answer["output_ids"] for answer in _of(served, served.asked, kind)]
    plain = served.walk.greedy[: abilities.PROMPTS]
    changed = [ids != greedy[: len(ids)] for ids, greedy in zip(texts, plain, strict=True)]
    if kind == "min_new_tokens":
        assert min(len(ids) for ids in texts) == 13, "no answer that the minimum has held up"
        assert sum(changed) >= 1
    else:
        assert sum(changed) >= 2


@pytest.mark.modes("dflash")
def test_what_dflash_makes_of_it(served: Served, reference: Answers) -> None:
    """What docs/abilities.md says of the released engine: why nothing of this goes DFLASH's way."""
    plain = _seen(served, served.asked, "plain")
    for kind in LOST:
        assert _seen(served, served.asked, kind) != _seen(served, reference["asked"], kind), kind
    for kind in LOST[:4]:
        assert _seen(served, served.asked, kind) == plain, kind
    lengths = [len(answer["output_ids"]) for answer in _of(served, served.asked, "min_new_tokens")]
    assert lengths == [abilities.NEW] * abilities.PROMPTS, "ended after all"
    for kind in ("logit_bias", "Forbid"):
        assert _seen(served, served.asked, kind) == _seen(served, reference["asked"], kind), kind


@pytest.mark.modes("ddtree-15", "ddtree-by-size")
def test_processor_with_a_memory_is_refused(served: Served) -> None:
    """It is told why, at its first step; neighbours and slots are not harmed."""
    served.flush()
    ids = served.walk.prompts
    stateful = cases.body(ids[0], ignore_eos=True) | {
        "custom_logit_processor": served.processors["Counter"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True, "custom_params": {"by": 1}},
    }
    with pytest.raises(EngineFailed, match=r"400 .*does not support a custom_logit_processor that changes"):
        served.engine.generate(**stateful)
    assert cases.ask(served.engine, cases.plain(served.walk)[:2])[1]["output_ids"] == served.walk.greedy[1]
    assert served.idle()["num_used_tokens"] == 0
