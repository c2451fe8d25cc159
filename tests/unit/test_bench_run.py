# SPDX-License-Identifier: Apache-2.0
"""The course of a benchmark, with processes that answer as engines do: what it notices, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleet.bench import servers

REPO = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).parent / "data/bench_engine"
FAST = ["--new", "16", "--concurrency", "1,4", "--rounds", "3", "--requests", "4", "--latency-rounds", "1"]


def command(out: Path, *words: str) -> list[str]:
    pair = out.parent / "pair"
    for name in ("target", "draft"):
        (pair / name).mkdir(parents=True, exist_ok=True)
        (pair / name / "config.json").write_text("{}")
    prompts = out.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"def f{i}(x):"}) + "\n" for i in range(8)))
    base = [sys.executable, "-m", "fleet.bench", "--pair", str(pair), "--out", str(out), "--prompts", str(prompts)]
    return [*base, *FAST, *words]


ENV = {**os.environ, "PYTHONPATH": str(ENGINE)}


def bench(out: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """A finished run: its report and its stdout."""
    done = subprocess.run(command(out, *words), cwd=REPO, env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return json.loads((out / "report.json").read_text()), done.stdout


def failed(report: dict[str, Any]) -> list[str]:
    return [check["id"] for check in report["checks"] if not check["ok"]]


def engines(out: Path) -> list[int]:
    """Living processes whose working folder is below `out`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink().is_relative_to(out):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_programs_beside_the_engines_python_come_first(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    env = servers.environment(str(python), {"PATH": "/own", "PYTHONPATH": "a"})
    assert env["PATH"] == f"{python.parent}:/own"
    assert env["PYTHONPATH"] == str(Path("a").absolute())


def test_a_faster_arm_is_told(tmp_path: Path) -> None:
    arms = ["--arms", "baseline,ddtree:7", "--arm", "dflash:8=--fake-step 2", "--arm", "ddtree:15=--fake-step 4"]
    report, said = bench(tmp_path / "out", *arms, "--timing", "--start-wave", "2", "--new", "32")
    one = report["summary"]["1"]
    assert one["references"] == {"dflash best": "dflash:8", "baseline": "baseline"}
    tree = one["arms"]["ddtree:15"]
    assert tree["tokens_per_step"] == pytest.approx(31 / 8)
    assert tree["ratios"]["dflash best"]["median"] > 1.2 and tree["ratios"]["dflash best"]["wins"] == 3
    assert tree["ratios"]["baseline"]["median"] > tree["ratios"]["dflash best"]["median"]
    assert tree["latency"]["step_ms"] > 1.1, "the stand-in sleeps 1.2 ms a step; a busy machine adds to it"
    assert tree["latency"]["token_ms"]["p50"] < tree["latency"]["message_ms"]["p50"]
    assert report["timing"]["ddtree:15"][0]["draft_ms"] == 1.5 and report["timing"]["dflash:8"] == []
    text = (tmp_path / "out/report.md").read_text()
    assert "| ddtree:15 | 1 | " in text and "| dflash:8 | not reported |" in text
    assert "c4 speed 2: " in said
    assert report["setup"]["arms"][3]["said"] == ["Initialized DDTREE draft runner. budget=7"]
    assert engines(tmp_path) == []


def test_arms_take_turns_on_the_same_prompts(tmp_path: Path) -> None:
    report, _ = bench(tmp_path / "out", "--arms", "baseline,baseline-nooverlap,ngram")
    rows = [row for row in report["rows"] if row["kind"] == "speed"]
    orders = set()
    for number in range(3):
        mine = [row for row in rows if (row["concurrency"], row["round"]) == (1, number)]
        assert sorted(row["place"] for row in mine) == [0, 1, 2]
        asked = [[request["prompt"] for request in row["requests"]] for row in mine]
        assert asked[0] == asked[1] == asked[2] == [(4 * number + i) % 8 for i in range(4)]
        orders.add(tuple(row["arm"] for row in sorted(mine, key=lambda row: row["place"])))
    assert len(orders) > 1


def test_near_ties_pass_and_other_differences_fail(tmp_path: Path) -> None:
    arm = ["--arms", "baseline,ddtree:7", "--arm", "ddtree:15=--fake-change 10"]
    report, _ = bench(tmp_path / "near", *arm)
    count = next(r["count"] for r in report["equality"] if r["arm"] == "ddtree:15" and r["concurrency"] == 1)
    assert (count["same"], count["near_ties"], count["different"]) == (0, 8, 0)
    assert count["largest_near_gap"] == pytest.approx(0.1)
    report, said = bench(tmp_path / "far", *arm, "--near-tie", "0.05", code=1)
    assert failed(report) == ["output.ddtree:15.c1", "output.ddtree:15.c4"]
    row = next(r["rows"][0] for r in report["equality"] if r["arm"] == "ddtree:15" and r["concurrency"] == 1)
    assert (row["position"], row["gap"], row["observed"]) == (10, pytest.approx(0.1), row["expected"] + 1)
    assert "FAILED output.ddtree:15.c1: observed 0 same" in said


def test_a_negative_control_has_to_differ(tmp_path: Path) -> None:
    leak = ["--arms", "baseline", "--arm", "ddtree:15@leak=--fake-change 9", "--negative", "ddtree:15@leak"]
    report, _ = bench(tmp_path / "caught", *leak, "--near-tie", "0")
    assert report["ok"]
    report, _ = bench(tmp_path / "missed", "--arms", "baseline,ddtree:15", "--negative", "ddtree:15", code=1)
    assert failed(report) == ["output.ddtree:15"]


def test_an_arm_that_does_not_start_leaves_the_others(tmp_path: Path) -> None:
    report, said = bench(tmp_path / "out", "--arms", "baseline,ddtree:7", "--arm", "ddtree:63=--fake-refuse", code=1)
    assert failed(report) == ["engine.ddtree:63"]
    assert "ddtree:63: ended with 1 before it was ready: ValueError: budget 63 does not fit, the largest" in said
    assert report["summary"]["1"]["arms"]["ddtree:7"]["tok_s"]["n"] == 3
    assert report["summary"]["1"]["arms"]["ddtree:63"]["tok_s"] == {"n": 0}


def test_an_arm_that_dies_leaves_the_others(tmp_path: Path) -> None:
    report, _ = bench(tmp_path / "out", "--arms", "baseline,ddtree:7", "--arm", "ddtree:31=--fake-die 12", code=1)
    assert failed(report) == ["engine.ddtree:31"]
    check = next(c for c in report["checks"] if c["id"] == "engine.ddtree:31")
    assert "RuntimeError: it was too much" in check["observed"]
    assert report["summary"]["4"]["arms"]["ddtree:7"]["tok_s"]["n"] == 3
    assert engines(tmp_path) == []


def test_an_arm_that_errs_leaves_the_others(tmp_path: Path) -> None:
    report, said = bench(tmp_path / "out", "--arms", "baseline", "--arm", "ddtree:31=--fake-keep 3", code=1)
    assert failed(report) == ["engine.ddtree:31"]
    assert "ddtree:31 failed and is dropped: POST /flush_cache?timeout=30: 400" in said
    assert report["summary"]["1"]["arms"]["baseline"]["tok_s"]["n"] == 3
    assert report["summary"]["1"]["arms"]["ddtree:31"]["tok_s"]["n"] == 1


def test_a_time_limit_keeps_whole_rounds(tmp_path: Path) -> None:
    words = [
        "--arms",
        "baseline,ddtree:7",
        "--rounds",
        "400",
        "--limit",
        "43",
        "--new",
        "64",
        "--engine-flags=--fake-ms 3",
    ]
    began = time.monotonic()
    report, _ = bench(tmp_path / "out", *words)
    assert time.monotonic() - began < 43
    assert report["ended"].startswith("the time limit, before round")
    counts = {c: {a: f["tok_s"]["n"] for a, f in part["arms"].items()} for c, part in report["summary"].items()}
    assert counts["1"]["baseline"] == counts["1"]["ddtree:7"] > 0
    assert abs(counts["1"]["baseline"] - counts["4"]["baseline"]) <= 1


def test_soak_finds_a_leak_and_a_loop_is_told(tmp_path: Path) -> None:
    soak = ["--new", "32", "--soak", "ddtree:7", "--soak-seconds", "1", "--soak-concurrency", "4"]
    report, _ = bench(tmp_path / "good", "--arms", "baseline,ddtree:7", *soak)
    assert report["soak"]["requests"] > 20 and report["soak"]["output"]["different"] == 0
    leak = ["--arms", "baseline", "--arm", "ddtree:7=--fake-leak --fake-loop", *soak, "--near-tie", "99"]
    report, _ = bench(tmp_path / "leak", *leak, "--engine-flags=--fake-loop", code=1)
    assert failed(report) == ["soak.pool"]
    assert report["loops"] == list(range(8))
    assert "8 of 8 prompts have an answer that loops" in (tmp_path / "leak/report.md").read_text()
    assert report["summary"]["1"]["arms"]["baseline"]["without_loops"]["requests"] == 0


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_no_engine_is_left(tmp_path: Path, sign: signal.Signals) -> None:
    words = command(tmp_path / "out", "--arms", "baseline,ddtree:7", "--rounds", "1000", "--engine-flags=--fake-ms 5")
    process = subprocess.Popen(words, cwd=REPO, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    for line in process.stdout:
        if "warm" in line:
            break
    assert len(engines(tmp_path)) == 2
    process.send_signal(sign)
    code = process.wait(20)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[sign]
    deadline = time.monotonic() + 5
    while engines(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engines(tmp_path) == []
