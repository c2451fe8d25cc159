# SPDX-License-Identifier: Apache-2.0
"""Are an arm's answers the reference's? Log-probabilities come from the reference's server, in one prefill per text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.bench import client, texts
from fleet.bench.rounds import Ids, Texts
from fleet.bench.servers import Server

LIKELIEST = 20


@dataclass
class Likely:
    """Log-probabilities of the likeliest tokens along texts, asked once each."""

    server: Server
    prompts: Sequence[Ids]
    known: dict[tuple[int, tuple[int, ...]], list[dict[int, float]] | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def along(self, prompt: int, ids: Ids) -> list[dict[int, float]] | None:
        """[{token: log-probability}] per token of an answer, None where the engine gave none."""
        key = (prompt, tuple(ids))
        if key not in self.known:
            try:
                self.known[key] = self._ask(self.prompts[prompt], ids)
            except (client.Refused, OSError, KeyError, TypeError, ValueError) as error:
                self.known[key] = None
                self.notes.append(f"no log-probabilities for prompt {prompt}: {type(error).__name__}: {error}")
        return self.known[key]

    def _ask(self, prompt: Ids, ids: Ids) -> list[dict[int, float]]:
        answer = client.post(
            self.server.port,
            "/generate",
            {
                "input_ids": [*prompt, *ids],
                "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": len(prompt) - 1,
                "top_logprobs_num": LIKELIEST,
            },
        )
        return along(answer["meta_info"], ids)


def along(meta: Mapping[str, Any], ids: Ids) -> list[dict[int, float]]:
    """The engine's answer as [{token: log-probability}] for the last len(ids) input tokens; ValueError if they are others."""
    told = [entry[1] for entry in meta["input_token_logprobs"][-len(ids) :]]
    if told != ids:
        raise ValueError("the engine told log-probabilities of other tokens")
    rows = meta["input_top_logprobs"][-len(ids) :]
    return [{int(token): float(logprob) for logprob, token, *_ in entry or ()} for entry in rows]


def complete(
    found: Texts,
    servers: Mapping[str, Server],
    prompts: Sequence[Ids],
    wanted: Sequence[int],
    new: int,
    deadline: float,
    say: Callable[[str], None],
) -> dict[str, str]:
    """Ask what is missing of the answers given alone. Nothing is timed here, so the arms work at the same time.

    Ends early at `deadline` (monotonic). Returns {arm: error}.
    """
    failed: dict[str, str] = {}

    def work(name: str, server: Server, missing: list[int]) -> None:
        for number in missing:
            if time.monotonic() > deadline:
                return
            load = client.load(server.port, [(number, prompts[number])], new, 1)
            found.add(name, 1, load.answers)
            bad = next((answer.error for answer in load.answers if answer.error), None)
            if bad is not None:
                failed[name] = bad
                return

    threads = []
    for name, server in servers.items():
        known = found.of(name, 1)
        if missing := [number for number in wanted if number not in known]:
            threads.append(threading.Thread(target=work, args=(name, server, missing), daemon=True))
    if threads:
        say(f"asking {len(wanted)} prompts alone where that is missing")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def compare(
    found: Texts, arm: str, concurrency: int, reference: str, likely: Likely, bound: float
) -> list[dict[str, Any]]:
    """Every distinct answer of an arm against the reference's answer given alone."""
    want = found.of(reference, 1)
    rows = []
    for prompt, answers in sorted(found.of(arm, concurrency).items()):
        if prompt not in want:
            continue
        alone = want[prompt][0]
        for ids in answers:
            differs = texts.first_difference(alone, ids) is not None
            told = likely.along(prompt, alone) if differs else None
            rows.append({"prompt": prompt, **texts.judge(alone, ids, told, bound)})
    return rows
