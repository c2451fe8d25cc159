# SPDX-License-Identifier: Apache-2.0
"""Tokens per step of a benchmark's report beside the offline walk along the same texts; needs torch and transformers, no engine.

    python3 tests/gpu/walk_report.py OUT/report.json --pair PAIR [--device cuda]      each arm, texts of requests asked alone
    python3 tests/gpu/walk_report.py OUT/report.json --pair PAIR --before-loops       the reference's texts up to where they loop

PAIR has target/ and draft/; for an inflated pair name the small one that it was made of. Arms whose trees are not of one size
(budget auto) and blocks beside the drafter's own have no walk here and are left out. Exit codes: 0 each arm is within 3 % of its
walk, 1 one is not, 2 misuse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "models", ROOT / "tests/engine", ROOT / "tests/gpu"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

BOUND = 0.03  # of the walk
LEAST = 33  # tokens before a loop that make a text worth walking: one of the prefill, then two steps of a full block
BUDGETS, TOPK = (7, 15, 22, 31, 63), 8  # trees that --before-loops compares with the chain

Arm = tuple[int, int]  # nodes without the root, candidates per position


def shape(flags: Sequence[str], block: int) -> Arm | None:
    """Nodes and candidates that an arm verifies, from its server's flags; None if it does not draft, or not always the same.

    `block` is the drafter's own: another one changes what it proposes, which the walk does not know.
    """
    told = {flag: value for flag, value in zip_longest(flags, flags[1:]) if flag.startswith("--speculative")}
    if int(told.get("--speculative-dflash-block-size", block)) != block:
        return None
    linear = "--speculative-ddtree-shadow-linear" in told
    if told.get("--speculative-algorithm") == "DFLASH" or (told.get("--speculative-algorithm") == "DDTREE" and linear):
        return block - 1, 1
    if told.get("--speculative-algorithm") != "DDTREE" or told["--speculative-ddtree-budget"] == "auto":
        return None
    if told.get("--speculative-ddtree-linear") == "on" or told.get("--speculative-ddtree-spine", "0") != "0":
        return None
    return int(told["--speculative-ddtree-budget"]), int(told["--speculative-ddtree-topk"])


def told_alone(report: Mapping[str, Any], arm: str) -> dict[int, list[int]]:
    """{prompt: token ids} of an arm's answers given alone, the first of each prompt."""
    ids: dict[int, list[int]] = {}
    for text in report["texts"]:
        if text["arm"] == arm and text["concurrency"] == 1:
            ids.setdefault(text["prompt"], text["ids"])
    return ids


def alone(report: Mapping[str, Any], arm: str) -> dict[int, tuple[list[int], int, int]]:
    """{prompt: (token ids, tokens after the first, verify steps)} of an arm's requests asked alone, the first of each prompt."""
    ids = told_alone(report, arm)
    found: dict[int, tuple[list[int], int, int]] = {}
    for row in report["rows"]:
        if row["arm"] == arm and row["concurrency"] == 1:
            for asked in row["requests"]:
                if asked.get("steps") and asked["prompt"] in ids:
                    found.setdefault(asked["prompt"], (ids[asked["prompt"]], asked["tokens"] - 1, asked["steps"]))
    return found


def compare(report: Mapping[str, Any], pair: Path, device: str) -> list[dict[str, Any]]:
    """A row per arm: {arm, prompts, tokens_per_step, walk, off}; off is the relative difference."""
    from walk_texts import tokens_per_step

    block = int(json.loads((pair / "draft/config.json").read_text())["block_size"])
    arms = {arm["name"]: found for arm in report["setup"]["arms"] if (found := shape(arm["flags"], block))}
    seen = {name: alone(report, name) for name in arms}
    both = sorted(set.intersection(*map(set, seen.values()))) if seen else []
    if not both:
        return []
    walks = tokens_per_step(
        pair, [report["prompts"][number]["ids"] for number in both],
        {name: [answers[number][0] for number in both] for name, answers in seen.items()}, arms, device,
    )  # fmt: skip
    rows = []
    for name, answers in seen.items():
        engine = sum(answers[number][1] for number in both) / sum(answers[number][2] for number in both)
        rows.append({
            "arm": name, "prompts": len(both), "tokens_per_step": round(engine, 4), "walk": round(walks[name], 4),
            "off": round(engine / walks[name] - 1, 4),
        })  # fmt: skip
    return rows


def before_loops(report: Mapping[str, Any], pair: Path, device: str) -> list[dict[str, Any]]:
    """A row for the chain and each budget: {arm, prompts, tokens, walk}, along the reference's texts up to the first loop."""
    from walk_texts import tokens_per_step

    from fleet.bench.texts import loops_from

    told = {number: ids[: loops_from(ids)] for number, ids in told_alone(report, report["setup"]["reference"]).items()}
    texts = {number: ids for number, ids in sorted(told.items()) if len(ids) >= LEAST}
    if not texts:
        return []
    block = int(json.loads((pair / "draft/config.json").read_text())["block_size"])
    arms = {"chain": (block - 1, 1), **{f"tree {nodes}": (nodes, TOPK) for nodes in BUDGETS}}
    walks = tokens_per_step(
        pair, [report["prompts"][number]["ids"] for number in texts], {name: list(texts.values()) for name in arms}, arms, device
    )  # fmt: skip
    count = sum(map(len, texts.values()))
    return [
        {"arm": name, "prompts": len(texts), "tokens": count, "walk": round(walk, 4)} for name, walk in walks.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; prints one JSON object a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--before-loops", action="store_true")
    args = parser.parse_args(argv)
    for path in (args.report, args.pair / "target/config.json", args.pair / "draft/config.json"):
        if not path.is_file():
            parser.error(f"{path} is missing")
    report = json.loads(args.report.read_text())
    rows = (before_loops if args.before_loops else compare)(report, args.pair, args.device)
    for row in rows:
        print(json.dumps(row))
    if not rows:
        print(
            "walk_report: no answer to walk along: the report needs arms of one size, asked at concurrency 1",
            file=sys.stderr,
        )
        return 1
    return 0 if all(abs(row.get("off", 0)) <= BOUND for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
