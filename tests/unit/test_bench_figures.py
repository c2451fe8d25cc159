# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmark: statistics, loops, near ties, timers, and the text that tells them."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fleet.bench import client, equality, plot, report, rounds, stats, summary, texts, timing

# --- statistics --------------------------------------------------------------------------------------------------


def test_spread() -> None:
    assert stats.spread([]) == {"n": 0}
    assert stats.spread([4.0]) == {"n": 1, "median": 4, "q1": 4, "q3": 4, "low": 4, "high": 4}
    assert stats.spread([5, 1, 3, 2, 4]) == {"n": 5, "median": 3, "q1": 2, "q3": 4, "low": 1, "high": 5}
    assert stats.quantile([1, 2], 0.25) == 1.25
    with pytest.raises(ValueError, match="no values"):
        stats.quantile([], 0.5)


@pytest.mark.parametrize(
    ("wins", "losses", "p"), [(0, 0, 1), (10, 0, 2 / 1024), (0, 10, 2 / 1024), (9, 1, 22 / 1024), (5, 5, 1), (1, 0, 1)]
)
def test_sign_test(wins: int, losses: int, p: float) -> None:
    assert stats.sign_test(wins, losses) == pytest.approx(p)


def test_paired_takes_rounds_that_both_have() -> None:
    got = stats.paired({0: 12.0, 1: 30.0, 2: 10.0, 9: 1.0}, {0: 10.0, 1: 20.0, 2: 10.0, 7: 1.0})
    assert (got["n"], got["median"], got["wins"], got["losses"], got["p"]) == (3, 1.2, 2, 0, 0.5)
    assert stats.paired({0: 1.0}, {1: 1.0}) == {"n": 0, "wins": 0, "losses": 0, "p": 1.0}


# --- loops -------------------------------------------------------------------------------------------------------


def words(count: int, seed: int = 3) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(count)]


def test_text_is_no_loop() -> None:
    assert texts.looping(words(256)) == 0
    assert texts.looping([]) == 0
    assert not texts.degenerate(words(100) + [7] * 20 + words(100, 4)), "a short run of one token is text"
    assert not texts.degenerate(words(40) * 3), "a cycle longer than 32 tokens is a repeated passage"
    assert not texts.degenerate(words(30) * 2 + words(100, 5)), "told twice is a repetition"


@pytest.mark.parametrize("period", [1, 2, 7, 20, 32])
def test_a_cycle_is_a_loop(period: int) -> None:
    cycle = words(period)
    told = (cycle * 200)[:150]
    ids = words(100, 8) + told
    assert texts.looping(ids) == pytest.approx(150 / 250, abs=0.02)
    assert texts.degenerate(ids)
    assert texts.degenerate(told + words(100, 8)), "wherever it stands"
    assert not texts.degenerate(words(200, 8) + told), "less than half of the answer"
    assert abs(texts.loops_from(ids) - 100) <= 1
    assert texts.loops_from(words(100, 8)) == 100


# --- near ties ---------------------------------------------------------------------------------------------------

# Recorded: bfloat16 target, one answer alone and in a batch of 8, log-probabilities of the text alone.
ALONE = [318, 271, 94, 530, 17]
BATCH = [318, 271, 505, 12, 9]
TOLD = [{318: -0.02}, {271: -0.3, 12: -1.9}, {94: -0.8125, 505: -0.875, 3: -2.5}, {530: -0.1}, {17: -0.1}]


def test_the_first_difference_decides() -> None:
    got = texts.judge(ALONE, BATCH, TOLD, 0.25)
    assert got == {"result": "near-tie", "position": 2, "expected": 94, "observed": 505, "gap": 0.0625}
    assert texts.judge(ALONE, BATCH, TOLD, 0.06)["result"] == "different"
    assert texts.judge(ALONE, ALONE, None, 0)["result"] == "same"
    assert texts.judge(ALONE, [318, 271, 3, 0, 0], TOLD, 0.25) | {"observed": 0} == {
        "result": "different", "position": 2, "expected": 94, "observed": 0, "gap": 1.6875
    }  # fmt: skip


def test_what_nobody_thought_likely_is_no_near_tie() -> None:
    got = texts.judge(ALONE, [318, 271, 777, 1, 1], TOLD, 0.25)
    assert (got["result"], got["gap"]) == ("different", None)
    assert texts.judge(ALONE, BATCH, None, 99)["result"] == "different", "without log-probabilities nothing is excused"
    assert texts.judge(ALONE, ALONE[:3], TOLD, 99)["result"] == "length"


def test_count() -> None:
    rows = [texts.judge(ALONE, ids, TOLD, 0.25) for ids in (ALONE, BATCH, ALONE[:2], [1, 1, 1, 1, 1])]
    got = texts.count(rows)
    assert (got["compared"], got["same"], got["near_ties"], got["different"]) == (4, 1, 1, 2)
    assert got["largest_near_gap"] == 0.0625 and [row["result"] for row in got["others"]] == ["length", "different"]


def test_log_probabilities_are_those_of_the_answer() -> None:
    meta = {
        "input_token_logprobs": [[None, 5, None], [-0.1, 318, None], [-0.4, 271, None]],
        "input_top_logprobs": [None, [[-0.1, 318, None], [-2.0, 9, None]], [[-0.4, 271, None]]],
    }
    assert equality.along(meta, [318, 271]) == [{318: -0.1, 9: -2.0}, {271: -0.4}]
    with pytest.raises(ValueError, match="other tokens"):
        equality.along(meta, [318, 272])


# --- timers ------------------------------------------------------------------------------------------------------


def test_timing_lines_are_weighted_with_steps() -> None:
    lines = [
        "[23:00:00] DDTREE timing steps=100 draft_ms=2.0 build_ms=0.10 verify_ms=3.0 commit_ms=0.05 host_ms=0.2 batch=1",
        "DDTREE timing steps=300 draft_ms=1.0 build_ms=0.10 verify_ms=3.0 commit_ms=0.05 host_ms=1e-1 batch=1.00",
        "DDTREE timing steps=10 draft_ms=4.0 batch=7.90",
        "DDTREE timing steps=0 draft_ms=9.0 batch=8",
        "DDTREE metrics steps=100 requests=100",
        "server_args=DDTREE timing steps=1 draft_ms=9 batch=1",
    ]
    assert timing.lines_of(lines) == lines[1:4] and timing.lines_of(lines[:1]) == lines[:1]
    one, eight = timing.parse(lines[:5])
    assert one == {
        "batch": 1, "steps": 400, "draft_ms": 1.25, "build_ms": pytest.approx(0.1), "verify_ms": pytest.approx(3),
        "commit_ms": pytest.approx(0.05), "host_ms": pytest.approx(0.125),
    }  # fmt: skip
    assert eight == {"batch": 8, "steps": 10, "draft_ms": 4}
    assert timing.parse(["nothing of it"]) == []


# --- rounds ------------------------------------------------------------------------------------------------------


def test_concurrencies_take_turns() -> None:
    turns = rounds.schedule({1: 3, 8: 1}, 1, 2)
    assert [(t.kind, t.concurrency, t.index) for t in turns] == [
        ("warm", 1, 0), ("warm", 8, 0), ("speed", 1, 0), ("speed", 8, 0), ("latency", 1, 0), ("latency", 8, 0),
        ("speed", 1, 1), ("latency", 1, 1), ("latency", 8, 1), ("speed", 1, 2),
    ]  # fmt: skip


def test_rounds_go_through_the_prompts() -> None:
    turns = rounds.schedule({1: 10}, 1, 2)
    asked = [rounds.window(turn, 64, 6, 10) for turn in turns if turn.kind != "warm"]
    assert {number for numbers in asked for number in numbers} == set(range(64))
    assert rounds.window(turns[0], 64, 6, 10) == [58, 59, 60, 61, 62, 63]


def test_the_order_of_arms_is_fair_and_repeatable() -> None:
    names = ["a", "b", "c", "d"]
    turns = [rounds.Turn("speed", 1, index) for index in range(400)]
    orders = [rounds.order(turn, names, 1) for turn in turns]
    assert orders == [rounds.order(turn, names, 1) for turn in turns]
    assert orders != [rounds.order(turn, names, 2) for turn in turns]
    for name in names:
        assert 70 < sum(order[0] == name for order in orders) < 130


def test_a_stream_is_read_afterwards() -> None:
    chunks = [
        (0.10, b'data: {"output_ids": [4], "meta_info": {}}\n'),
        (0.12, b'data: {"output_ids": [4], "meta_info": {}}\n'),
        (0.15, b'data: {"output_ids": [4, 5, 6], "text": "abc", "meta_info": {"spec_verify_ct": 1}}\n'),
        (0.16, b"data: [DONE]\n"),
    ]
    last, at = client.read_stream(chunks)
    assert at == [(0.10, 1), (0.15, 3)] and last["text"] == "abc"
    with pytest.raises(client.Refused, match="without a message"):
        client.read_stream([])
    with pytest.raises(client.Refused, match="no room"):
        client.read_stream([(0.1, b'data: {"error": {"message": "no room"}}\n')])


# --- figures -----------------------------------------------------------------------------------------------------


def row(arm: str, index: int, seconds: float, steps: int, kind: str = "speed", concurrency: int = 1) -> dict[str, Any]:
    request = {"prompt": index, "seconds": seconds, "tokens": 101, "steps": steps}
    made: dict[str, Any] = {
        "kind": kind, "concurrency": concurrency, "round": index, "place": 0, "arm": arm, "seconds": seconds, "tokens": 101,
        "tok_s": 101 / seconds, "cpu_share": 0.1, "requests": [request],
    }  # fmt: skip
    if kind == "latency":
        made["streams"] = [[[0.05, 1], [0.05 + (seconds - 0.05) / 2, 51], [seconds, 101]]]
    return made


KINDS = {"baseline": "baseline", "dflash:16": "dflash", "dflash:8": "dflash", "ddtree:15": "ddtree"}


def measured() -> dict[str, Any]:
    rows = []
    for index in range(10):
        rows += [
            row("baseline", index, 1.0, 100),
            row("dflash:16", index, 0.5, 40),
            row("dflash:8", index, 0.4, 50),
            row("ddtree:15", index, 0.3 if index else 0.41, 25),
        ]
    rows.append(row("ddtree:15", 0, 0.35, 30, "latency"))
    return summary.summarize(rows, KINDS, {0})


def test_figures() -> None:
    part = measured()["1"]
    assert part["references"] == {"dflash best": "dflash:8", "dflash:16": "dflash:16", "baseline": "baseline"}
    tree = part["arms"]["ddtree:15"]
    assert tree["tokens_per_step"] == 4 and tree["tok_s"]["n"] == 10
    over = tree["ratios"]["dflash best"]
    assert over["median"] == pytest.approx(4 / 3) and (over["wins"], over["losses"]) == (9, 1)
    assert over["p"] == pytest.approx(22 / 1024)
    assert tree["without_loops"]["requests"] == 9
    assert tree["without_loops"]["stream_tok_s"] == pytest.approx(101 / 0.3)
    assert tree["latency"]["step_ms"] == pytest.approx(10)
    assert tree["latency"]["message_ms"]["p50"] == pytest.approx(150)
    assert tree["latency"]["token_ms"]["p50"] == pytest.approx(3)
    assert tree["best_prompt"]["tok_s"] == pytest.approx(101 / 0.3)
    assert part["arms"]["dflash:8"]["latency"] is None
    assert "dflash best" not in part["arms"]["dflash:8"]["ratios"]


def test_a_chain_alone_at_sixteen_is_named_once() -> None:
    assert summary.references(["baseline", "dflash:16"], {"baseline": 1.0, "dflash:16": 2.0}, KINDS) == {
        "dflash best": "dflash:16", "baseline": "baseline"
    }  # fmt: skip
    assert summary.references(["dflash:8"], {}, KINDS) == {}


def whole() -> dict[str, Any]:
    judged = texts.count([texts.judge(ALONE, BATCH, TOLD, 0.25), texts.judge(ALONE, ALONE[:2], TOLD, 0.25)])
    arm = {"name": "ddtree:15", "flags": ["--x", "1"], "overlap_off": True, "start_seconds": 50.4, "error": None}
    return {
        "ok": False, "seconds": 500.2, "ended": "all rounds", "loops": [0],
        "checks": [{"id": "output.ddtree:15.c1", "ok": False, "observed": "1 other", "expected": "none"}],
        "setup": {
            "title": "pair", "command": "python3 -m fleet.bench", "started": "2026-11-29T23:00:00+00:00", "device": "H200",
            "new": 256, "reference": "baseline", "near_tie": 0.25, "latency_rounds": 2,
            "base": ["--page-size", "1"], "arms": [arm],
        },
        "prompts": [{"id": "class-stack"}, {"id": "b"}], "summary": measured(),
        "equality": [{"arm": "ddtree:15", "concurrency": 1, "negative": False, "count": judged}],
        "timing": {"ddtree:15": timing.parse(["DDTREE timing steps=9 draft_ms=2 build_ms=0.1 batch=1"]), "dflash:16": []},
        "soak": None, "gpu_memory": {"before": [1], "after": [1]}, "notes": ["no plot: x"],
    }  # fmt: skip


def test_markdown_tells_what_was_found() -> None:
    text = report.markdown(whole())
    lines = text.splitlines()
    assert lines[2].startswith("FAILED, 2026-11-29")
    assert "- output.ddtree:15.c1: observed 1 other; expected none" in lines
    tree = next(line for line in lines if line.startswith("| ddtree:15 | 10 |"))
    assert "336.7" in tree and "1.333 (1.333 to 1.333), 9 of 10, p 0.021" in tree and "| 4.000 | 10.000 |" in tree
    assert "| ddtree:15 | c1 | 2 | 0 | 1 | 0.0625 | 1 |" in lines
    assert "| ddtree:15 | 1 | 9 | 2.000 | 0.100 |" in lines and "| dflash:16 | not reported | - | - | - |" in lines
    assert "| c1 | dflash:8 | 252.5 | 1.250 over dflash:16, 2.500 over baseline |" in lines
    assert "dflash best is dflash:8." in lines
    assert "1 of 2 prompts have an answer that loops" in text and "class-stack" in text
    assert "| requests without loops |" in text and tree.endswith("| 9 | 336.7 | 4.000 |")
    assert "GPU memory used, MiB: 1 before, 1 after." in lines
    tables = [line for line in lines if line.startswith("|")]
    for one, other in pairwise(lines):
        if one.startswith("|") and other.startswith("|"):
            assert one.count("|") == other.count("|"), (one, other)
    assert len(tables) > 15


def test_what_was_not_asked_for_is_told() -> None:
    told = whole()
    for part in told["summary"].values():
        for figures in part["arms"].values():
            figures["latency"] = None
    assert "No streaming round came to its end." in report.markdown(told).splitlines()
    told["setup"]["latency_rounds"] = 0
    told |= {"equality": [], "timing": {}, "summary": {}, "gpu_memory": {"before": None, "after": None}}
    text = report.markdown(told)
    assert "(nothing)" not in text
    for line in ("No round was measured.", "Nothing to compare.", "No drafting arm was measured."):
        assert line in text.splitlines()
    assert "GPU memory used: not known, nvidia-smi gave nothing." in text
    told["summary"] = {"1": {"references": {}, "arms": {}}}
    assert "Latencies: not asked for (`--latency-rounds 0`)." in report.markdown(told).splitlines()


@pytest.mark.parametrize(
    ("loops", "named"),
    [([0], "a."), ([0, 1], "a, b."), ([0, 1, 3], "all but c."), ([0, 1, 2, 3], "all of them."), ([], None)],
)
def test_loops_are_named_the_short_way(loops: list[int], named: str | None) -> None:
    text = report.degenerate({"loops": loops, "prompts": [{"id": name} for name in "abcd"]})
    assert text.endswith(f": {named}") if named else text == "No answer of the reference is a loop."


def test_plot_or_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = plot.importlib.import_module

    def without(name: str) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name)

    monkeypatch.setattr(plot.importlib, "import_module", without)
    assert plot.draw(measured(), "pair", tmp_path / "a.svg") == "no plot: No module named 'matplotlib'"
    assert not (tmp_path / "a.svg").exists()


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot.draw(measured(), "pair", tmp_path / "a.svg") is None
    text = (tmp_path / "a.svg").read_text()
    assert "ddtree:15" in text and "c1" in text
    assert plot.draw({}, "pair", tmp_path / "b.svg") == "no plot: no round was measured"
    assert math.isfinite((tmp_path / "a.svg").stat().st_size)
