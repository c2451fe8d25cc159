# SPDX-License-Identifier: Apache-2.0
"""What the engine is asked in every mode: requests whose answers must not depend on the mode.

All are greedy. Ends are chosen from the offline walk, so that many of them fall inside a step's accepted path: there a
tree has to cut its own answer, not just stop drafting.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.engine.launch import Engine

NEW = 64  # tokens of a plain answer
BATCH = 8


@dataclass(frozen=True)
class Walk:
    """The offline walk: `greedy`, `pieces` per prompt; `accepted[arm]` per prompt and step."""

    prompts: list[list[int]]
    greedy: list[list[int]]
    pieces: list[list[str]]
    accepted: dict[str, list[list[int]]]

    def steps(self, arm: str) -> list[int]:
        """Verify steps of each plain answer."""
        return [len(steps) for steps in self.accepted[arm]]

    def inside(self, arm: str, prompt: int, index: int) -> bool:
        """Does token `index` (0 = from prefill) of an answer lie in a step's path with more accepted after it?"""
        first = 1
        for accepted in self.accepted[arm][prompt]:
            if first <= index < first + accepted:
                return True
            first += accepted + 1
        return False


@dataclass(frozen=True)
class Case:
    """One request. `prompt` and `last` (index of the final token) locate its end in the walk."""

    name: str
    body: dict[str, Any]
    prompt: int
    last: int


def body(ids: list[int], **sampling: Any) -> dict[str, Any]:
    """A greedy request."""
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": NEW, **sampling}}


def plain(walk: Walk) -> list[dict[str, Any]]:
    """The 16 plain requests."""
    return [body(ids, ignore_eos=True) for ids in walk.prompts]


def lengths(walk: Walk) -> list[Case]:
    """Answers of 1, 2, 3 .. tokens."""
    return [
        Case(
            f"length-{prompt}-{count}",
            body(walk.prompts[prompt], ignore_eos=True, max_new_tokens=count),
            prompt,
            count - 1,
        )
        for prompt in (0, 1)
        for count in range(1, 19)
    ]


def stops(walk: Walk, eos: int) -> list[Case]:
    """Stop tokens and stop strings at every early place where they can end an answer.

    The engine's `ignore_eos` switches stop tokens off as well, so these come before the first end of sequence.
    """
    cases = []
    for prompt in range(4, 12):
        ids, tokens, pieces = walk.prompts[prompt], walk.greedy[prompt], walk.pieces[prompt]
        for at in range(1, 20):
            if tokens[at] not in tokens[:at] and eos not in tokens[: at + 1]:
                cases.append(Case(f"token-{prompt}-{at}", body(ids, stop_token_ids=[tokens[at]]), prompt, at))
            text, before = pieces[at - 1] + pieces[at], "".join(pieces[:at])
            if prompt < 8 and text.strip() and text not in before:
                cases.append(Case(f"text-{prompt}-{at}", body(ids, ignore_eos=True, stop=[text]), prompt, at))
    return cases


def ends(walk: Walk, eos: int) -> list[Case]:
    """Answers that the model ends itself (`eos` is an end-of-sequence token of the served model)."""
    return [
        Case(f"eos-{prompt}", body(ids), prompt, tokens.index(eos))
        for prompt, (ids, tokens) in enumerate(zip(walk.prompts, walk.greedy, strict=True))
        if eos in tokens[1:]
    ]


def mixed(walk: Walk) -> list[dict[str, Any]]:
    """Requests of very different lengths: 1 to some hundred prompt tokens, 3 to 100 new ones."""
    ids = walk.prompts
    prompts = [
        ids[8][:1],
        ids[9],
        ids[10] + ids[11] + ids[12],
        ids[13][:17],
        ids[14] + ids[15],
        ids[3][:5],
        ids[2],
        ids[1] * 3,
    ]
    counts = [100, 3, 40, 64, 7, 90, 1, 33]
    return [body(p, ignore_eos=True, max_new_tokens=n) for p, n in zip(prompts, counts, strict=True)]


def ask(engine: Engine, bodies: Iterable[dict[str, Any]], together: int = BATCH) -> list[dict[str, Any]]:
    """Send requests, `together` at a time; answers in order."""
    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(lambda request: engine.generate(**request), bodies))


def seen(answer: dict[str, Any]) -> tuple[list[int], str, Any]:
    """What a user sees of an answer: tokens, text, reason of its end."""
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]
