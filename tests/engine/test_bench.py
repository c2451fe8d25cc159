# SPDX-License-Identifier: Apache-2.0
"""The benchmark with two real engines on the CPU: what it reports is right. Speed is no subject here."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import launch

NANO = launch.REPO / "models/nano"
NEW = 24
PROMPTS = 4


@pytest.fixture(scope="module")
def bench(
    engine_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A finished run with everything on, as a GPU machine would run it: no ansible, the engine's own Python."""
    work = tmp_path_factory.mktemp("bench")
    args, env = launch.lay_out(work)
    other = work / "other"
    shutil.copytree(NANO / "target", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    command: list[str | Path] = [
        engine_python, "-m", "fleet.bench", "--pair", NANO, "--out", work / "out", "--count", str(PROMPTS),
        "--arms", "baseline,ddtree:7", "--arm", f"baseline@other=--model-path {other}",
        "--negative", "baseline@other", "--concurrency", "1,2", "--rounds", "1:2,2:1", "--requests", "2", "--new", str(NEW),
        "--latency-rounds", "1", "--start-wave", "3", "--soak", "ddtree:7", "--soak-seconds", "2", "--soak-concurrency", "2",
        "--near-tie", "0", "--engine-flags", shlex.join(launch.flags(args)),
        *(word for item in env.items() for word in ("--engine-env", "=".join(item))),
    ]  # fmt: skip
    home = {key: os.environ[key] for key in ("HOME", "PATH", "LANG") if key in os.environ}
    with launch._turn():
        done = subprocess.run(
            command, cwd=launch.REPO, capture_output=True, text=True, timeout=600,
            env={**home, "PYTHONPYCACHEPREFIX": str(launch.CACHE / "pycache")},
        )  # fmt: skip
    return done, work / "out"


@pytest.fixture(scope="module")
def report(bench: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    done, out = bench
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return dict(json.loads((out / "report.json").read_text()))


def test_all_checks_hold(report: dict[str, Any]) -> None:
    assert report["ok"] and report["ended"] == "all rounds"
    ids = {check["id"] for check in report["checks"]}
    assert {"engine.baseline", "engine.ddtree:7", "path.ddtree:7", "output.ddtree:7.c1", "output.ddtree:7.c2"} <= ids
    assert {"output.baseline.c2", "soak.answers", "soak.output", "soak.pool"} <= ids


def test_float32_output_is_the_same(report: dict[str, Any]) -> None:
    row = next(r for r in report["equality"] if (r["arm"], r["concurrency"]) == ("ddtree:7", 1))
    assert row["count"] | {"others": []} == {
        "compared": PROMPTS, "same": PROMPTS, "near_ties": 0, "different": 0, "largest_near_gap": None, "others": []
    }  # fmt: skip
    mine = [t for t in report["texts"] if t["arm"] == "ddtree:7" and t["concurrency"] == 1]
    assert sorted(t["prompt"] for t in mine) == list(range(PROMPTS))
    assert all(len(t["ids"]) == NEW and t["text"] for t in mine)


def test_walk_along_the_report(report: dict[str, Any], engine_python: Path, tmp_path: Path) -> None:
    """tests/gpu/walk_report.py finds the engine's own count, and a count that is off."""

    lost = json.loads(json.dumps(report))
    for row in lost["rows"]:
        for asked in row["requests"]:
            asked["steps"] = int(asked["steps"] * 1.2)
    longer = json.loads(json.dumps(report))  # answers long enough to walk along: distinct tokens, then a loop
    for text in longer["texts"]:
        text["ids"] = [*range(5, 45), *[7] * 40]
    for name, told in {"good": report, "lost": lost, "longer": longer}.items():
        (tmp_path / name).write_text(json.dumps(told))
    asked_for = [["good"], ["lost"], ["longer", "--before-loops"], ["good", "--before-loops"]]
    once = "import walk_report, json, sys\n" + "".join(
        f"print(json.dumps(walk_report.main({[*args, '--pair', str(NANO)]!r})))\n" for args in asked_for
    )  # one process: most of the time goes into its imports
    done = subprocess.run(
        [engine_python, "-c", once], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(launch.REPO / "tests/gpu")},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, codes = [], []
    for line in done.stdout.splitlines():
        told = json.loads(line)
        (codes if isinstance(told, int) else rows).append(told)
    assert codes == [0, 1, 0, 1] and "no answer to walk along" in done.stderr
    assert [row["arm"] for row in rows] == ["ddtree:7"] * 2 + ["chain", *(f"tree {n}" for n in (7, 15, 22, 31, 63))]
    assert rows[0]["prompts"] == PROMPTS
    assert {row["tokens"] for row in rows[2:]} == {40 * PROMPTS}, "up to the loop"
    assert 1 <= rows[2]["walk"] <= rows[-1]["walk"]


def test_another_model_is_caught(report: dict[str, Any]) -> None:
    """The negative control: almost the same model. Its first differences have gaps, told by baseline's engine."""
    row = next(r for r in report["equality"] if (r["arm"], r["concurrency"]) == ("baseline@other", 1))
    assert row["negative"] and row["count"]["different"] > 0
    gaps = [other["gap"] for other in row["count"]["others"]]
    assert sum(gap is not None and 0 < gap < 3 for gap in gaps) >= 2, gaps
    assert not report["notes"] or all("log-prob" not in note for note in report["notes"])


def test_rounds_and_figures(report: dict[str, Any]) -> None:
    counts = {
        (kind, c): sum(r["kind"] == kind and r["concurrency"] == c for r in report["rows"])
        for kind in ("speed", "latency", "warm")
        for c in (1, 2)
    }
    assert counts == {
        ("speed", 1): 6, ("speed", 2): 3, ("latency", 1): 3, ("latency", 2): 3, ("warm", 1): 0, ("warm", 2): 0
    }  # fmt: skip
    for row in report["rows"]:
        assert row["tokens"] == 2 * NEW and 0 < row["tok_s"] == row["tokens"] / row["seconds"]
    arms = report["summary"]["1"]["arms"]
    assert arms["baseline"]["tokens_per_step"] == 1
    assert arms["ddtree:7"]["tokens_per_step"] > 1.2  # 1.5 to 2 on these prompts
    assert arms["ddtree:7"]["ratios"]["baseline"]["n"] == 2
    for name in ("baseline", "ddtree:7"):
        latency = arms[name]["latency"]
        assert 0 < latency["ttft_ms"]["p50"] <= latency["ttft_ms"]["p99"]
        assert 0 < latency["token_ms"]["p50"] <= latency["message_ms"]["p99"]
    # a tree's message brings several tokens
    assert arms["ddtree:7"]["latency"]["token_ms"]["p50"] < arms["ddtree:7"]["latency"]["message_ms"]["p50"]


def test_soak(report: dict[str, Any]) -> None:
    soak = report["soak"]
    assert soak["requests"] >= 2 and soak["errors"] == [] and soak["seconds"] >= 2
    assert soak["output"]["same"] == soak["requests"]
    assert soak["pool_before"] == soak["pool_after"] and soak["pool_after"]["used"] == 0


def test_markdown(bench: tuple[subprocess.CompletedProcess[str], Path], report: dict[str, Any]) -> None:
    done, out = bench
    text = (out / "report.md").read_text()
    for part in ("# Benchmark: nano", "## c1", "## c2", "## Output", "## Split of a step", "## Soak", "| ddtree:7 |"):
        assert part in text
    median = report["summary"]["1"]["arms"]["ddtree:7"]["tok_s"]["median"]
    assert f"{median:.1f}" in text
    assert "c1 speed 1: " in done.stdout


def test_nothing_is_left_running(bench: tuple[subprocess.CompletedProcess[str], Path], report: dict[str, Any]) -> None:
    marks = {a["command"][a["command"].index("--nccl-port") + 1] for a in report["setup"]["arms"]}
    assert len(marks) == 3
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # ended meanwhile
            continue
        assert "--nccl-port" not in words or not marks & set(words), words


def test_an_engine_that_does_not_start_is_told(engine_python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [engine_python, "-m", "fleet.bench", "--pair", NANO, "--out", tmp_path / "out", "--arms", "baseline",
         "--engine-flags=--no-such-flag 1"],
        cwd=launch.REPO, capture_output=True, text=True, timeout=300,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED engine.baseline: observed ended with" in done.stdout
    assert "no-such-flag" in done.stdout or "libcuda" in done.stdout
    assert sys.version_info >= (3, 11)
