# SPDX-License-Identifier: Apache-2.0
"""Measured rounds. At any moment one arm is loaded; within a round every arm answers the same prompts, in a shuffled order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.bench import client
from fleet.bench.servers import Server

Ids = list[int]


class ArmFailed(Exception):
    """An arm's server gave an error instead of an answer."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(f"{arm}: {reason}")
        self.arm, self.reason = arm, reason


@dataclass(frozen=True)
class Turn:
    """One round of one concurrency. `kind` is warm (dropped), speed (answers at once) or latency (streams)."""

    kind: str
    concurrency: int
    index: int


@dataclass
class Texts:
    """Distinct answers by (arm, concurrency, prompt), in the order they came."""

    found: dict[tuple[str, int, int], list[Ids]] = field(default_factory=dict)
    words: dict[tuple[int, ...], str] = field(default_factory=dict)

    def add(self, arm: str, concurrency: int, answers: Sequence[client.Answer]) -> None:
        for answer in answers:
            if answer.error is None:
                known = self.found.setdefault((arm, concurrency, answer.prompt), [])
                if answer.ids not in known:
                    known.append(answer.ids)
                    self.words[tuple(answer.ids)] = answer.text

    def of(self, arm: str, concurrency: int) -> dict[int, list[Ids]]:
        """By prompt."""
        return {key[2]: ids for key, ids in self.found.items() if key[:2] == (arm, concurrency)}


def schedule(rounds: Mapping[int, int], warm: int, latency: int) -> list[Turn]:
    """All rounds in the order they run: concurrencies take turns, so that an early end leaves each about as many."""
    turns = [Turn("warm", concurrency, index) for index in range(warm) for concurrency in rounds]
    for index in range(max([*rounds.values(), latency], default=0)):
        turns += [Turn("speed", concurrency, index) for concurrency, count in rounds.items() if index < count]
        turns += [Turn("latency", concurrency, index) for concurrency in rounds if index < latency]
    return turns


def window(turn: Turn, prompts: int, requests: int, rounds: int) -> list[int]:
    """The prompts of a round: the next `requests` of all, from the start again after the last.

    Speed rounds take the first ones, latency rounds go on behind all of the `rounds` speed rounds, warm-up comes from the end.
    """
    place = {"warm": -turn.index - 1, "speed": turn.index, "latency": rounds + turn.index}[turn.kind]
    return [(place * requests + i) % prompts for i in range(requests)]


def order(turn: Turn, names: Sequence[str], seed: int) -> list[str]:
    """Arms in the order of this round."""
    shuffled = list(names)
    random.Random(f"{seed} {turn.kind} {turn.concurrency} {turn.index}").shuffle(shuffled)  # noqa: S311 (no secret)
    return shuffled


def settle(server: Server, concurrency: int) -> None:
    """A level start: caches and seen n-grams forgotten, then a short unrelated load that warms the memory pools again.

    Raises client.Refused or OSError.
    """
    client.post(server.port, "/flush_cache?timeout=30", {}, timeout=60)
    warm = [(number, [5 + number % 7] * 16) for number in range(concurrency)]
    for answer in client.load(server.port, warm, 4, concurrency).answers:
        if answer.error is not None:
            raise client.Refused(f"before a round: {answer.error}")


def run_turn(
    turn: Turn, servers: Mapping[str, Server], names: Sequence[str], chosen: Sequence[tuple[int, Ids]], new: int
) -> tuple[list[dict[str, Any]], dict[str, list[client.Answer]]]:
    """Every arm of a round once; rows in the order they ran, and the answers by arm. Raises ArmFailed."""
    rows, answers = [], {}
    for place, name in enumerate(names):
        try:
            settle(servers[name], turn.concurrency)
            load = client.load(servers[name].port, chosen, new, turn.concurrency, stream=turn.kind == "latency")
            bad = next((answer.error for answer in load.answers if answer.error), None)
            if bad is not None:
                raise client.Refused(bad)
        except (client.Refused, OSError) as error:
            raise ArmFailed(name, str(error) or type(error).__name__) from error
        rows.append(row(turn, name, place, load))
        answers[name] = load.answers
    return rows, answers


def row(turn: Turn, name: str, place: int, load: client.Load) -> dict[str, Any]:
    """One arm's part of a round as data; times in seconds."""
    found: dict[str, Any] = {
        "kind": turn.kind,
        "concurrency": turn.concurrency,
        "round": turn.index,
        "place": place,
        "arm": name,
        "seconds": load.seconds,
        "tokens": load.tokens,
        "tok_s": load.tokens / load.seconds,
        "cpu_share": load.cpu_share,
        "requests": [
            {"prompt": a.prompt, "seconds": a.seconds, "tokens": len(a.ids), "steps": a.steps} for a in load.answers
        ],
    }
    if turn.kind == "latency":
        found["streams"] = [[[round(second, 6), count] for second, count in a.at] for a in load.answers]
    return found


@dataclass
class Measured:
    """What the rounds gave. `dropped` are the names of arms that failed on the way, with the reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    texts: Texts = field(default_factory=Texts)
    dropped: dict[str, str] = field(default_factory=dict)
    ended: str = "no server ready"


def measure(
    turns: Sequence[Turn],
    servers: Mapping[str, Server],
    prompts: Sequence[Ids],
    *,
    requests: Mapping[int, int],
    new: int,
    seed: int,
    deadline: float,
    say: Callable[[str], None],
) -> Measured:
    """Run the rounds until they are done or the next would end after `deadline` (monotonic). An arm that fails is dropped."""
    out = Measured(ended="all rounds")
    took: dict[tuple[str, int], float] = {}
    for turn in turns:
        alike = [took[key] for key in took if key[1] == turn.concurrency]
        if time.monotonic() + max(alike, default=0.0) > deadline:
            out.ended = f"the time limit, before round {turn.index} ({turn.kind}) of c{turn.concurrency}"
            say(f"stopping at {out.ended}")
            break
        names = order(turn, [name for name in servers if name not in out.dropped], seed)
        count = sum(other.kind == "speed" and other.concurrency == turn.concurrency for other in turns)
        numbers = window(turn, len(prompts), requests[turn.concurrency], count)
        chosen = [(number, prompts[number]) for number in numbers]
        begin = time.monotonic()
        while names:
            try:
                rows, answers = run_turn(turn, servers, names, chosen, new)
                break
            except ArmFailed as error:
                out.dropped[error.arm] = f"{error.reason}; {servers[error.arm].reason()}"
                say(f"{error.arm} failed and is dropped: {out.dropped[error.arm]}")
                names = [name for name in names if name != error.arm]
        else:
            out.ended = f"no arm left, in round {turn.index} ({turn.kind}) of c{turn.concurrency}"
            say(f"stopping with {out.ended}")
            break
        took[(turn.kind, turn.concurrency)] = time.monotonic() - begin
        for name in names:
            out.texts.add(name, turn.concurrency, answers[name])
        if turn.kind != "warm":
            out.rows += rows
        speeds = ", ".join(f"{r['arm']} {r['tok_s']:.0f}" for r in rows)
        say(f"c{turn.concurrency} {turn.kind} {turn.index}: {speeds}")
    return out
