# SPDX-License-Identifier: Apache-2.0
"""Figures out of measured rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fleet.bench import stats

Row = Mapping[str, Any]


def _requests(rows: Iterable[Row], without: set[int]) -> list[Mapping[str, Any]]:
    return [request for row in rows for request in row["requests"] if request["prompt"] not in without]


def tokens_per_step(requests: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens that a step gave, the one of prefill left out."""
    steps = sum(request["steps"] for request in requests)
    return sum(request["tokens"] - 1 for request in requests) / steps if steps else None


def stream_speed(requests: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per second of one stream, prefill included."""
    seconds = sum(request["seconds"] for request in requests)
    return sum(request["tokens"] for request in requests) / seconds if seconds else None


def latencies(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Percentiles in ms from streaming rounds: first token, between messages, per token; and ms of a step; None without any.

    A message brings all tokens of a step; per token its gap is shared out evenly among them.
    """
    first, gaps, tokens = [], [], []
    wall, steps = 0.0, 0
    for row in rows:
        for stream, request in zip(row["streams"], row["requests"], strict=True):
            if not stream:
                continue
            first.append(stream[0][0] * 1e3)
            for (before, had), (after, has) in pairwise(stream):
                gaps.append((after - before) * 1e3)
                tokens += [(after - before) * 1e3 / (has - had)] * (has - had)
            wall += stream[-1][0] - stream[0][0]
            steps += request["steps"]
    if not first:
        return None

    def both(values: list[float]) -> dict[str, float] | None:
        return {"p50": stats.quantile(values, 0.5), "p99": stats.quantile(values, 0.99)} if values else None

    return {
        "ttft_ms": both(first),
        "message_ms": both(gaps),
        "token_ms": both(tokens),
        "step_ms": wall * 1e3 / steps if steps else None,
        "cpu_share": max(row["cpu_share"] for row in rows),
    }


def best_prompt(rows: Sequence[Row], without: set[int]) -> dict[str, Any] | None:
    """The prompt with the fastest stream and its tok/s, best of its askings."""
    requests = _requests(rows, without)
    if not requests:
        return None
    best = max(requests, key=lambda request: request["tokens"] / request["seconds"])
    return {"prompt": best["prompt"], "tok_s": best["tokens"] / best["seconds"]}


def one(rows: Sequence[Row], loops: set[int]) -> dict[str, Any]:
    """All figures of one arm at one concurrency; `loops` are prompts whose text is degenerate."""
    speed = [row for row in rows if row["kind"] == "speed"]
    every, clean = _requests(speed, set()), _requests(speed, loops)
    return {
        "tok_s": stats.spread([row["tok_s"] for row in speed]),
        "by_round": {row["round"]: row["tok_s"] for row in speed},
        "requests": len(every),
        "stream_tok_s": stream_speed(every),
        "tokens_per_step": tokens_per_step(every),
        "without_loops": {
            "requests": len(clean),
            "stream_tok_s": stream_speed(clean),
            "tokens_per_step": tokens_per_step(clean),
        },
        "best_prompt": best_prompt(speed, set()),
        "best_prompt_without_loops": best_prompt(speed, loops),
        "latency": latencies([row for row in rows if row["kind"] == "latency"]),
        "cpu_share": max((row["cpu_share"] for row in speed), default=None),
    }


def references(names: Sequence[str], medians: Mapping[str, float], kinds: Mapping[str, str]) -> dict[str, str]:
    """What arms are compared with: {title: arm}. The best dflash is the one with the highest median."""
    found = {}
    chains = [name for name in names if kinds[name] == "dflash" and name in medians]
    if chains:
        found["dflash best"] = max(chains, key=lambda name: medians[name])
    for title in ("dflash:16", "dflash", "baseline"):
        if title in medians and title not in found.values():
            found[title] = title
    return found


def summarize(rows: Sequence[Row], kinds: Mapping[str, str], loops: set[int]) -> dict[str, Any]:
    """{concurrency: {references: {title: arm}, arms: {name: figures with ratios}}}; `kinds` is {arm: kind} in table order."""
    out: dict[str, Any] = {}
    for concurrency in sorted({row["concurrency"] for row in rows}):
        mine = [row for row in rows if row["concurrency"] == concurrency]
        figures = {name: one([row for row in mine if row["arm"] == name], loops) for name in kinds}
        medians = {name: f["tok_s"]["median"] for name, f in figures.items() if f["tok_s"]["n"]}
        against = references(list(kinds), medians, kinds)
        for name, figure in figures.items():
            figure["ratios"] = {
                title: stats.paired(figure["by_round"], figures[other]["by_round"])
                for title, other in against.items()
                if other != name and figure["tok_s"]["n"]
            }
        out[str(concurrency)] = {"references": against, "arms": figures}
    return out
