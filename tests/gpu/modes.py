# SPDX-License-Identifier: Apache-2.0
"""Is every mode right on this GPU? Hooks, output equality, tokens per step against the offline walk, KV pool and memory.

    tests/gpu/run.sh .pack/series -- python3 tests/gpu/modes.py --pair DIR --out DIR [--arms ddtree:15,..] [--negative ARM]

The servers of a group run on the GPU at the same time (`--parallel`), baseline in every group: an answer that
differs from baseline's is judged by the log-probabilities that baseline itself gives along its own text. Arms are those of
bin/bench (fleet/bench/arms.yml). Nothing here is a speed: the servers slow one another. Writes report.json, answers.json and
the engines' logs; exits 1 if a check fails. tests/gpu/test_modes.py runs the same for every pair of $GPU_PAIRS.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE.parents[1], HERE.parents[1] / "models", HERE.parent / "engine", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from fleet.bench import cli, client, equality, servers, soak, texts  # noqa: E402
from fleet.bench.arms import Arm, Flags, arms, parse_flags  # noqa: E402
from fleet.bench.run import missing_hooks  # noqa: E402
from fleet.bench.servers import Server  # noqa: E402

ARMS = "dflash:16,ddtree-shadow:15,ddtree:15"
REFERENCE = "baseline"
TOGETHER = 8
START_LIMIT = 420.0  # seconds
MEMORY_LIMIT = 30.0  # seconds until the driver has the memory of ended processes back
MEMORY_SLACK = 256  # MiB
WALK_BOUND = 0.03
CHAIN = 15  # drafts of DFLASH's block of 16
# As the benchmark serves: several fit on one GPU, whatever the order of their starts.
BASE: Flags = cli.BASE | {
    "max-running-requests": [str(TOGETHER)],
    "cuda-graph-max-bs": [str(TOGETHER)],
    "disable-radix-cache": [],
}


@dataclass
class Options:
    """What to check. `alone` prompts are asked one after the other, `batch` prompts eight at a time."""

    pair: Path
    out: Path
    names: list[str]
    prompts: Path | None = None
    negative: list[str] = field(default_factory=list)
    alone: int = 64
    batch: int = 64
    new: int = 256
    near_tie: float = 0.25
    parallel: int = 4
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    soak: str | None = None
    soak_seconds: float = 120.0
    walk: str = "cuda"  # device of the walk; "" leaves it out


@dataclass
class Report:
    """Checks as {id, ok, observed, expected}, and what they were made from."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self, name: str, ok: bool, observed: Any, expected: str) -> None:
        self.checks.append({"id": name, "ok": bool(ok), "observed": observed, "expected": expected})
        print(
            f"{'ok    ' if ok else 'FAILED'} {name}: {observed}" + ("" if ok else f"; expected {expected}"), flush=True
        )

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [check for check in self.checks if not check["ok"]]


Answers = dict[str, dict[int, list[int]]]  # way: {prompt: token ids}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def gpus() -> int:
    """How many GPUs the driver shows, without loading torch."""
    return len(servers.gpu_memory() or [])


def read_prompts(options: Options) -> list[list[int]]:
    """Token ids of as many prompts as are asked for; prompts of a pair by default."""
    from tokenizers import Tokenizer

    file = options.prompts or options.pair / "prompts.jsonl"
    tokenizer = Tokenizer.from_file(str(options.pair / "target/tokenizer.json"))
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows: list[list[int]] = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    wanted = max(options.alone, options.batch)
    if len(rows) < wanted:
        say(f"{file} has {len(rows)} prompts, {wanted} were asked for")
    return rows[:wanted]


def ask(everyone: Sequence[Server], prompts: Sequence[Sequence[int]], options: Options) -> dict[str, dict[str, Any]]:
    """Every server's answers, all servers at the same time: {arm: {answers, steps, errors}}."""
    found: dict[str, dict[str, Any]] = {server.arm.name: {"answers": {}, "errors": []} for server in everyone}
    ways = {"alone": (options.alone, 1), "batch": (options.batch, TOGETHER)}

    def work(server: Server) -> None:
        mine = found[server.arm.name]
        for way, (count, together) in ways.items():
            load = client.load(server.port, list(enumerate(prompts))[:count], options.new, together)
            mine["errors"] += [f"{way}: {answer.error}" for answer in load.answers if answer.error]
            mine["answers"][way] = {answer.prompt: answer.ids for answer in load.answers if not answer.error}
            mine[f"{way}_steps"] = sum(answer.steps for answer in load.answers)
            mine[f"{way}_seconds"] = round(load.seconds, 2)

    threads = [threading.Thread(target=work, args=(server,), daemon=True) for server in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def compare(want: Answers, got: Answers, likely: equality.Likely, bound: float) -> dict[str, dict[str, Any]]:
    """Per way of asking: answers that are baseline's, near ties, and others. Baseline's answer given alone counts first."""
    reference = want["batch"] | want["alone"]
    out = {}
    for way, answers in got.items():
        rows = []
        for prompt, ids in sorted(answers.items()):
            alone = reference.get(prompt)
            if alone is None or alone is ids:
                continue
            told = likely.along(prompt, alone) if texts.first_difference(alone, ids) is not None else None
            rows.append({"prompt": prompt, **texts.judge(alone, ids, told, bound)})
        out[way] = texts.count(rows)
    return out


def groups(chosen: Sequence[Arm], parallel: int) -> Iterator[list[Arm]]:
    """Arms in groups that leave room for baseline beside them."""
    size = max(1, parallel - 1)
    for first in range(0, len(chosen), size):
        yield list(chosen[first : first + size])


def walk_arm(arm: Arm) -> tuple[int, int] | None:
    """(nodes, candidates) of what an arm verifies, None where it has no fixed answer."""
    if arm.kind in ("dflash", "ddtree-shadow"):
        block = int(arm.flags.get("speculative-dflash-block-size", [str(CHAIN + 1)])[0])
        return block - 1, 1
    budget = arm.flags.get("speculative-ddtree-budget", ["auto"])[0]
    if arm.kind != "ddtree" or budget == "auto":
        return None
    return int(budget), int(arm.flags.get("speculative-ddtree-topk", ["8"])[0])


def judge_arm(server: Server, found: dict[str, Any], options: Options, report: Report) -> None:
    """Checks of one arm that need its server's log or its answers against baseline's."""
    name = server.arm.name
    report.check(f"answers.{name}", not found["errors"], found["errors"][:3] or "all", "every request is answered")
    report.check(f"path.{name}", not (bad := missing_hooks(server)), bad or "proven", "the log proves the mode")
    counts = found["equality"]
    bad_ways = {way: count["others"][:3] for way, count in counts.items() if count["different"]}
    short = {
        way: f"{c['same']} of {c['compared']} same, {c['near_ties']} near ties (largest {c['largest_near_gap']}), "
        f"{c['different']} others"
        for way, c in counts.items()
        if c["compared"]
    }
    if name in options.negative:
        report.check(f"caught.{name}", bool(bad_ways), short, "differences that are no near ties (negative control)")
    else:
        report.check(
            f"output.{name}", not bad_ways and bool(short), bad_ways or short, f"no gap above {options.near_tie}"
        )


def judge_walk(options: Options, chosen: Sequence[Arm], prompts: Sequence[Sequence[int]], report: Report) -> None:
    """Tokens per step of the answers given alone, against the walk along the same texts."""
    from walk_texts import tokens_per_step

    asked = {arm.name: kind for arm in chosen if (kind := walk_arm(arm)) and arm.name not in options.negative}
    answers = {name: report.arms[name]["answers"]["alone"] for name in asked if name in report.arms}
    numbers = [n for n in range(options.alone) if n < len(prompts) and all(n in a for a in answers.values())]
    if not numbers or not answers:
        report.check("walk", not asked, "no answers to walk along", "answers of every arm")
        return
    began = time.monotonic()
    walks = tokens_per_step(
        options.pair, [prompts[n] for n in numbers], {name: [a[n] for n in numbers] for name, a in answers.items()},
        {name: asked[name] for name in answers}, options.walk,
    )  # fmt: skip
    say(f"walked {len(numbers)} texts for {len(walks)} arms in {time.monotonic() - began:.1f} s")
    for name, walk in walks.items():
        tokens = sum(len(ids) - 1 for ids in answers[name].values())
        seen = tokens / max(report.arms[name]["alone_steps"], 1)
        report.arms[name] |= {"tokens_per_step": round(seen, 4), "walk": round(walk, 4)}
        report.check(
            f"walk.{name}", abs(seen / walk - 1) <= WALK_BOUND, f"{seen:.4f} tokens per step, walk {walk:.4f}",
            f"within {WALK_BOUND:.0%} of the walk",
        )  # fmt: skip


def judge_soak(
    server: Server,
    options: Options,
    prompts: Sequence[Sequence[int]],
    mine: Answers,
    likely: equality.Likely,
    report: Report,
) -> None:
    """Eight at a time for a while: the arm's own answers, no lost KV slot."""
    alone = {prompt: [ids] for prompt, ids in (mine["batch"] | mine["alone"]).items()}
    result = soak.run(
        server, [list(p) for p in prompts], alone, likely, new=options.new, together=TOGETHER,
        seconds=options.soak_seconds, bound=options.near_tie, say=say,
    )  # fmt: skip
    report.arms[server.arm.name]["soak"] = result
    name, output = server.arm.name, result["output"]
    report.check(f"soak.answers.{name}", not result["errors"] and result["requests"] > 0,
                 f"{result['requests']} answers, {len(result['errors'])} errors", "answers, no errors")  # fmt: skip
    report.check(f"soak.output.{name}", output["different"] == 0, f"{output['same']} same, {output['near_ties']} near ties, "
                 f"{output['different']} others", "what the arm answers otherwise")  # fmt: skip
    report.check(f"soak.pool.{name}", result["pool_before"] == result["pool_after"],
                 f"{result['pool_before']} before, {result['pool_after']} after", "the same pool")  # fmt: skip


def judge_memory(before: list[int] | None, report: Report) -> None:
    """GPU memory after the last server's end, once the driver has it back."""
    if before is None:
        return
    deadline = time.monotonic() + MEMORY_LIMIT
    while True:
        now = servers.gpu_memory() or []
        back = len(now) == len(before) and all(n <= b + MEMORY_SLACK for n, b in zip(now, before, strict=True))
        if back or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    report.check("gpu.memory", back, f"{now} MiB after, {before} before", f"at most {MEMORY_SLACK} MiB more")


def serve_group(
    alive: Sequence[Server], prompts: Sequence[Sequence[int]], likely: equality.Likely, options: Options, report: Report
) -> None:
    """Asks servers that are ready and judges what they answered."""
    say(f"asking {', '.join(server.arm.name for server in alive)}")
    report.arms |= ask(alive, prompts, options)
    want = report.arms[REFERENCE]["answers"]
    for server in alive:
        mine = report.arms[server.arm.name]
        mine["start_seconds"] = round(server.seconds or 0.0, 1)
        mine["equality"] = compare(want, mine["answers"], likely, options.near_tie)
        judge_arm(server, mine, options, report)
        if server.arm.name == options.soak:
            judge_soak(server, options, prompts, mine["answers"], likely, report)


def check(options: Options) -> Report:
    """Everything for one pair. Raises OSError or bench's Misuse where nothing can be started."""
    options.out.mkdir(parents=True, exist_ok=True)
    draft = (options.pair / "draft").resolve()
    reference, *chosen = arms([REFERENCE, *options.names], draft)
    prompts = read_prompts(options)
    longest = max(map(len, prompts)) + options.new + 80  # a step may reserve a block or a tree beyond the answer
    base = BASE | {
        "model-path": [str((options.pair / "target").resolve())],
        "max-total-tokens": [str(TOGETHER * longest)],
    }
    for text in options.flags:
        base |= parse_flags(shlex.split(text))
    report, memory = Report(), servers.gpu_memory()
    common: dict[str, Any] = {
        "python": sys.executable, "base": base, "env": options.env, "folder": options.out,
        "wave": max(1, options.parallel), "say": say,
    }  # fmt: skip
    for group in groups(chosen, options.parallel):
        deadline = time.monotonic() + START_LIMIT
        with servers.resident([reference, *group], deadline=deadline, **common) as started:
            for server in started:
                report.check(f"start.{server.arm.name}", server.error is None,
                             server.error or f"{server.seconds:.0f} s", "a first token")  # fmt: skip
            alive = {server.arm.name: server for server in started if server.error is None}
            if REFERENCE not in alive:
                break
            likely = equality.Likely(alive[REFERENCE], prompts)
            serve_group([s for name, s in alive.items() if name not in report.arms], prompts, likely, options, report)
            if likely.notes:
                say("; ".join(likely.notes[:3]))
    judge_memory(memory, report)
    if options.walk:
        judge_walk(options, chosen, prompts, report)
    (options.out / "answers.json").write_text(json.dumps({name: arm["answers"] for name, arm in report.arms.items()}))
    slim = {name: {k: v for k, v in arm.items() if k != "answers"} for name, arm in report.arms.items()}
    (options.out / "report.json").write_text(
        json.dumps(
            {"ok": not report.failed, "pair": str(options.pair), "checks": report.checks, "arms": slim}, indent=1
        )
    )
    return report


def from_environment(pair: Path, out: Path, environ: Mapping[str, str]) -> Options:
    """Options of the pytest suite. A hybrid pair also gets the leak mode as negative control.

    GPU_ARMS, GPU_ALONE, GPU_BATCH, GPU_NEW, GPU_PARALLEL, GPU_SOAK (seconds), GPU_PROMPTS, GPU_FLAGS; see docs/gpu-h200.md.
    """
    names = environ.get("GPU_ARMS", ARMS).split(",")
    config = json.loads((pair / "target/config.json").read_text())
    negative = []
    if config.get("full_attention_interval") or "linear_attention" in config.get("layer_types", []):
        negative = ["ddtree:15@leak"]
        # Never linearly: a server that sees what its leaking trees give soon leaves them.
        names.append("ddtree:15@leak=--speculative-ddtree-linear off --speculative-ddtree-allow-hybrid-unsafe")
    prompts = environ.get("GPU_PROMPTS")
    return Options(
        pair=pair, out=out, names=names, negative=negative,
        prompts=Path(prompts) if prompts else None,
        alone=int(environ.get("GPU_ALONE", "64")), batch=int(environ.get("GPU_BATCH", "64")),
        new=int(environ.get("GPU_NEW", "256")), parallel=int(environ.get("GPU_PARALLEL", "5")),
        soak=next((name for name in names if name.startswith("ddtree:") and "@" not in name), None),
        soak_seconds=float(environ.get("GPU_SOAK", "120")),
        flags=[environ["GPU_FLAGS"]] if environ.get("GPU_FLAGS") else [],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default=ARMS, help="beside baseline (default: %(default)s)")
    parser.add_argument("--arm", action="append", default=[], help="one more arm, may carry flags after =")
    parser.add_argument("--negative", action="append", default=[], metavar="ARM", help="arm whose output must differ")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a prompt each (default: the pair's)")
    parser.add_argument("--alone", type=int, default=16, help="prompts asked one by one (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="prompts asked eight at a time (default: %(default)s)")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--near-tie", type=float, default=0.25, help="nats (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=4, help="servers at the same time (default: %(default)s)")
    parser.add_argument("--soak", metavar="ARM")
    parser.add_argument("--soak-seconds", type=float, default=120)
    parser.add_argument("--flags", action="append", default=[], help="further engine flags for all, one argument")
    parser.add_argument("--walk", default="cuda", help="device of the offline walk, '' for none (default: %(default)s)")
    a = parser.parse_args()
    report = check(
        Options(
            pair=a.pair, out=a.out, names=[*filter(None, a.arms.split(",")), *a.arm], prompts=a.prompts,
            negative=a.negative, alone=a.alone, batch=a.batch, new=a.new, near_tie=a.near_tie, parallel=a.parallel,
            flags=a.flags, soak=a.soak, soak_seconds=a.soak_seconds, walk=a.walk,
        )
    )  # fmt: skip
    print(f"{len(report.checks) - len(report.failed)} of {len(report.checks)} checks hold", flush=True)
    return 1 if report.failed or not report.arms else 0


if __name__ == "__main__":
    raise SystemExit(main())
