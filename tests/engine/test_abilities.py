# SPDX-License-Identifier: Apache-2.0
"""One server in distress: hardly any memory, prompts in chunks, a window for the drafter, preemption by priority.

What is written must not depend on any of it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine import cases
from tests.engine.conftest import Mode, Served

CHUNK = 32
WINDOW = 32
RUNNING = 5
SLOTS = 720  # a request takes up to 190, and 16 more in a step: 5 can start, not all of them can end
TIGHT = Mode(
    "ddtree-tight",
    "ddtree",
    "tree-15",
    {
        "speculative-algorithm": "DDTREE",
        "speculative-ddtree-budget": 15,
        "speculative-dflash-draft-window-size": WINDOW,
        "chunked-prefill-size": CHUNK,
        "max-total-tokens": SLOTS,
        "max-running-requests": RUNNING,
        "schedule-conservativeness": 0.05,  # take requests in although their answers will not fit
        "enable-priority-scheduling": True,
    },
)


@pytest.fixture(scope="module")
def tight(start: Any, walk: cases.Walk, processors: dict[str, str]) -> Iterator[Served]:
    with start(TIGHT) as engine:
        yield Served(TIGHT, engine, walk, processors)


def _taken_back(answers: list[dict[str, Any]]) -> int:
    """How often requests were taken back, for want of memory or for one of higher priority."""
    return sum(answer["meta_info"]["total_retractions"] for answer in answers)


def _out_of_memory(tight: Served) -> int:
    """How often for want of memory, since the start."""
    return sum(map(int, re.findall(r"Retract requests\. #retracted_reqs: (\d+)", tight.engine.log())))


def test_prompts_in_chunks(tight: Served) -> None:
    """With a window the drafter sees `WINDOW` tokens and proposes less; what is accepted stays the target's."""
    answers = tight.alone
    assert [answer["output_ids"] for answer in answers] == tight.walk.greedy
    assert all(len(ids) > CHUNK for ids in tight.walk.prompts)
    assert f"#new-token: {CHUNK}," in tight.engine.log()
    accepted = sum(answer["meta_info"]["spec_accepted_drafts"] for answer in answers)
    assert accepted > len(answers) * cases.NEW // 4, "the drafter proposes next to nothing of use"
    assert f"draft_window_size={WINDOW}" in tight.engine.log()


def test_out_of_memory(tight: Served) -> None:
    """Requests are taken back in the middle of their answers and start again: same text, every slot comes back."""
    before = _out_of_memory(tight)
    answers = cases.ask(tight.engine, cases.plain(tight.walk), together=16)
    assert _taken_back(answers) == _out_of_memory(tight) - before
    assert _out_of_memory(tight) > before, "memory was enough: the test shows nothing"
    assert [answer["output_ids"] for answer in answers] == tight.walk.greedy
    assert tight.idle()["num_used_tokens"] == 0
    tight.flush()
    load = tight.idle()
    assert (load["num_used_tokens"], load["token_usage"]) == (0, 0)
    assert "memory leak" not in tight.engine.log()
    assert "Traceback" not in tight.engine.log()


def test_preempted_by_priority(tight: Served) -> None:
    """An urgent request takes the place of a running one, which starts again later: same text."""
    tight.flush()
    before = _out_of_memory(tight)
    plain = cases.plain(tight.walk)
    ordered: list[str] = []

    def ask(name: str, body: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        answers.append(tight.engine.generate(**body))
        ordered.append(name)

    patient: list[list[dict[str, Any]]] = [[] for _ in range(8)]
    urgent: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=ask, args=("patient", body | {"priority": 0}, answers))
        for body, answers in zip(plain, patient, strict=False)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while (load := tight.load())["num_running_reqs"] < RUNNING or not load["num_waiting_reqs"]:
        assert time.monotonic() < deadline and not ordered, f"never full: {load}"
    short = cases.body(tight.walk.prompts[15], ignore_eos=True, max_new_tokens=8)
    ask("urgent", short | {"priority": 1000}, urgent)
    for thread in threads:
        thread.join(120)
    assert ordered.index("urgent") < 8, "waited for all others"
    assert urgent[0]["output_ids"] == tight.walk.greedy[15][:8]
    assert [answers[0]["output_ids"] for answers in patient] == tight.walk.greedy[:8]
    everyone = [answers[0] for answers in [*patient, urgent]]
    assert _taken_back(everyone) > _out_of_memory(tight) - before, "nobody had to make room"
    assert tight.idle()["num_used_tokens"] == 0
