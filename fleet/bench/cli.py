# SPDX-License-Identifier: Apache-2.0
"""Measures decoding arms side by side on this machine's GPU.

    bin/bench --pair DIR --out DIR --arms baseline,dflash:16,dflash:8,ddtree:15
    python3 -m fleet.bench ...          the same with the Python that has the engine, needs nothing else
    bin/bench -l HOST --out DIR ...     on hosts of the inventory, in the place of an instance, with its models and flags

Writes report.json, report.md and report.svg into --out (on hosts a folder per host). Exit codes: 0 every check holds, 1 one
does not, 2 misuse.
An arm is KIND[:NUMBER][@LABEL][=FLAGS]; kinds are in fleet/bench/arms.yml. See docs/bench.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fleet.bench import arms, asked, hosts, instance, places
from fleet.bench import run as bench
from fleet.bench.arms import Flags, Misuse
from fleet.bench.client import Refused

ARMS = "baseline,ngram,dflash:16,dflash:8,ddtree-shadow:15,ddtree:15,ddtree:22"
FROM_ONE = [
    "new",
    "start_wave",
    "soak_concurrency",
    "soak_seconds",
    "count",
    "max_running",
    "max_total_tokens",
    "start_limit",
]
PROMPTS = Path(__file__).with_name("prompts.jsonl")
# For every arm alike. Their servers share one GPU: mem-fraction-static only says how much has to stay free, max-total-tokens
# bounds what each takes. Every prompt is asked after a flush, so a prefix cache has nothing to give.
BASE: Flags = {
    "attention-backend": ["triton"],
    "sampling-backend": ["pytorch"],
    "grammar-backend": ["xgrammar"],
    "page-size": ["1"],
    "mem-fraction-static": ["0.95"],
    "disable-piecewise-cuda-graph": [],
    "skip-server-warmup": [],
    "sleep-on-idle": [],  # waiting arms must not take a core each
    "random-seed": ["1"],
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bin/bench",
        usage="bin/bench (--pair DIR | -l HOST,..) --out DIR [--arms A,B,..] [OPTIONS], see bin/bench --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pair", type=Path, metavar="DIR", help="folder with target/ and draft/")
    add("--target", type=Path, metavar="DIR", help="the target, instead of --pair")
    add("--draft", type=Path, metavar="DIR", help="the drafter, instead of --pair")
    add("--instance", metavar="FILE", help="a served instance's YAML: its models, flags, environment; with -l its name")
    add("-l", "--hosts", metavar="HOST,..", help="run on these hosts or groups instead of here")
    add("-i", "--inventory", action="append", default=[], metavar="FILE", help="with -l; default: that of ansible.cfg")
    add("--out", type=Path, required=True, metavar="DIR", help="where reports and logs go")
    add(
        "--prompts",
        type=Path,
        default=PROMPTS,
        metavar="FILE",
        help="JSON lines with id and prompt (default: 64 own ones)",
    )
    add("--count", type=int, metavar="N", help="only the first N prompts")
    add("--arms", default=None, metavar="A,B,..", help=f"arms without own flags (default: {ARMS})")
    add("--arm", action="append", default=[], metavar="ARM", help="one more arm, may carry flags after =")
    add("--reference", metavar="ARM", help="whose output counts (default: baseline, else the first arm)")
    add("--negative", action="append", default=[], metavar="ARM", help="arm whose output has to differ (control)")
    add("--concurrency", default="1,4,8,16", metavar="N,..", help="requests at once (default: %(default)s)")
    add(
        "--rounds", default="10", metavar="N | C:N,..", help="measured rounds, per concurrency C (default: %(default)s)"
    )
    add("--requests", default=None, metavar="N | C:N,..", help="requests of a round (default: 6 alone, else 2 C)")
    add("--new", type=int, default=256, metavar="N", help="new tokens per request (default: %(default)s)")
    add("--warm", type=int, default=1, metavar="N", help="rounds dropped at the start (default: %(default)s)")
    add("--latency-rounds", type=int, default=2, metavar="N", help="streaming rounds (default: %(default)s)")
    add("--near-tie", type=float, default=0.25, metavar="NATS", help="bound of a near tie (default: %(default)s)")
    add("--limit", type=float, metavar="S", help="finish within S seconds, start included, with what there is by then")
    add("--start-limit", type=float, default=900, metavar="S", help="seconds until all serve (default: %(default)s)")
    add("--start-wave", type=int, default=4, metavar="N", help="servers that start at a time (default: %(default)s)")
    add("--soak", metavar="ARM", help="afterwards keep this arm busy and check output, KV pool and memory")
    add("--soak-seconds", type=float, default=120, metavar="S", help="(default: %(default)s)")
    add("--soak-concurrency", type=int, default=8, metavar="N", help="(default: %(default)s)")
    add("--timing", action="store_true", help="afterwards serve drafting arms again with the engine's timers on")
    add("--timing-concurrency", default="1", metavar="N,..", help="(default: %(default)s)")
    add("--max-total-tokens", type=int, metavar="N", help="KV pool of each server (default: fits the largest round)")
    add(
        "--max-running",
        type=int,
        metavar="N",
        help="requests a server takes at once (default: the largest concurrency)",
    )
    add("--radix", action="store_true", help="keep the prefix cache on (flushed before every round)")
    add("--engine-flags", action="append", default=[], metavar="FLAGS", help="more flags for every arm, one argument")
    add("--engine-env", action="append", default=[], metavar="K=V", help="more environment for every arm")
    add("--python", default=sys.executable, metavar="FILE", help="Python that has the engine (default: this one)")
    add("--seed", type=int, default=1, metavar="N", help="of the order of arms (default: %(default)s)")
    return parser.parse_args(argv)


def models(args: argparse.Namespace, served: instance.Served | None) -> tuple[Path, Path | None]:
    """Target and drafter. Raises Misuse if one is not there."""
    target, draft = args.target, args.draft
    if args.pair:
        target, draft = target or args.pair / "target", draft or args.pair / "draft"
    if served is not None:
        target, draft = target or served.target, draft or served.draft
    if target is None:
        raise Misuse("no model; name a folder with target/ and draft/ with --pair, or one with --target")
    for folder in (target, draft):
        if folder is not None and not (folder / "config.json").is_file():
            raise Misuse(f"{folder} is no model folder: config.json is missing")
    return target.resolve(), draft and draft.resolve()


def base_flags(
    args: argparse.Namespace, served: instance.Served | None, target: Path, largest: int, tokens: int
) -> Flags:
    """Flags of every arm: ours, then the instance's, then what only this benchmark knows, then the caller's."""
    own: Flags = {
        "model-path": [str(target)],
        "max-running-requests": [str(args.max_running or largest)],
        "cuda-graph-max-bs": [str(args.max_running or largest)],
        "max-total-tokens": [str(args.max_total_tokens or tokens)],
    }
    if not args.radix:
        own["disable-radix-cache"] = []
    given: Flags = {}
    for text in args.engine_flags:
        given |= arms.parse_flags(arms.split(text))
    return BASE | (served.flags if served else {}) | own | given


def environment(args: argparse.Namespace, served: instance.Served | None) -> dict[str, str]:
    env = dict(served.env) if served else {}
    for text in args.engine_env:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Misuse(f"--engine-env {text!r} is not K=V")
        env[name] = value
    return env


def choices(args: argparse.Namespace, draft: Path | None) -> tuple[list[arms.Arm], str, dict[int, int], dict[int, int]]:
    """(arms, reference, rounds, requests): all that can be checked without looking at models. Raises Misuse."""
    names = (args.arms if args.arms is not None or args.arm else ARMS) or ""
    chosen = arms.arms([*filter(None, names.split(",")), *args.arm], draft)
    known = [arm.name for arm in chosen]
    reference = args.reference or ("baseline" if "baseline" in known else known[0])
    for what, name in [("--reference", reference), ("--soak", args.soak), *(("--negative", n) for n in args.negative)]:
        if name is not None and name not in known:
            raise Misuse(f"{what} {name!r} is none of the arms {', '.join(known)}")
    if next(arm for arm in chosen if arm.name == reference).drafts:
        raise Misuse(
            f"the reference {reference} drafts, and such an engine gives no log-probabilities; add the arm baseline"
        )
    concurrencies = asked.numbers(args.concurrency, "--concurrency")
    standard = ",".join(f"{c}:{6 if c == 1 else 2 * c}" for c in concurrencies)
    requests = asked.by_concurrency(args.requests or standard, concurrencies, "--requests")
    for concurrency, number in requests.items():
        if number < concurrency:
            raise Misuse(
                f"--requests {number} at concurrency {concurrency} never has {concurrency} at once; at least that many"
            )
    for name in FROM_ONE:
        if (got := getattr(args, name)) is not None and got < 1:
            raise Misuse(f"--{name.replace('_', '-')} has to be at least 1")
    least = bench.reserve(args.soak_seconds if args.soak else None, args.timing, 0)
    if args.limit is not None and args.limit <= least:
        raise Misuse(
            f"--limit {args.limit:g} has no time for rounds: {least:g} s of it are kept for what comes after them"
        )
    for name in ("warm", "latency_rounds", "near_tie"):
        if getattr(args, name) < 0:
            raise Misuse(f"--{name.replace('_', '-')} can't be negative")
    asked.numbers(args.timing_concurrency, "--timing-concurrency")
    return chosen, reference, asked.by_concurrency(args.rounds, concurrencies, "--rounds"), requests


def on_hosts(argv: Sequence[str]) -> int:
    """Run on hosts: what is meant for this side is taken out, the rest is checked here and goes there."""
    here = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    here.add_argument("-l", "--hosts")
    here.add_argument("-i", "--inventory", action="append", default=[])
    here.add_argument("--instance")
    here.add_argument("--out", type=Path)
    here.add_argument("--prompts", type=Path)
    mine, rest = here.parse_known_args(argv)
    choices(arguments([*rest, "--out", "x"]), Path("drafter"))
    if mine.prompts:
        asked.prompts(mine.prompts, None)
    held = places.take(mine.out)
    try:
        return hosts.run(
            hosts.command(mine.hosts, mine.inventory, mine.instance, mine.out, mine.prompts, rest),
            hosts.ending(mine.hosts, mine.inventory),
        )
    finally:
        os.close(held)


def settings(args: argparse.Namespace, argv: Sequence[str]) -> bench.Settings:
    """What was asked for, checked. Raises Misuse."""
    if args.inventory:
        raise Misuse("-i names an inventory, but no host is named with -l")
    served = instance.load(Path(args.instance)) if args.instance else None
    target, draft = models(args, served)
    chosen, reference, rounds, requests = choices(args, draft)
    rows = asked.prompts(args.prompts, args.count)
    largest = max([*rounds, args.soak_concurrency if args.soak else 1])
    # A token has at least one byte; a step may reserve a block or a tree of 64 beyond the answer.
    longest = min(max(len(row["prompt"].encode()) for row in rows), 2048) + args.new + 80
    return bench.Settings(
        title=Path(args.instance).stem if args.instance else (args.pair or target).resolve().name,
        command=shlex.join(["python3 -m fleet.bench", *argv]).replace(
            "'python3 -m fleet.bench'", "python3 -m fleet.bench"
        ),
        arms=chosen,
        base=base_flags(args, served, target, largest, largest * longest),
        env=environment(args, served),
        python=args.python,
        out=args.out.resolve(),
        prompts=rows,
        rounds=rounds,
        requests=requests,
        new=args.new,
        warm=args.warm,
        latency=args.latency_rounds,
        seed=args.seed,
        wave=args.start_wave,
        limit=args.limit,
        start_limit=args.start_limit,
        near_tie=args.near_tie,
        reference=reference,
        negative=frozenset(args.negative),
        soak=args.soak,
        soak_seconds=args.soak_seconds,
        soak_together=args.soak_concurrency,
        timing=args.timing,
        timing_at=tuple(asked.numbers(args.timing_concurrency, "--timing-concurrency")),
    )


def _ended(sign: int, _frame: Any) -> NoReturn:
    raise SystemExit(128 + sign)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = arguments(words)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    try:
        if args.hosts:
            return on_hosts(words)
        chosen = settings(args, words)
        places.engine(chosen.python, chosen.env)
        held = places.take(chosen.out)
    except Misuse as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _ended)
    try:
        result = bench.run(chosen, say)
    except (bench.EngineFailed, Refused, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; all servers are stopped", file=sys.stderr)
        return 130
    finally:
        os.close(held)
    for check in result["checks"]:
        if not check["ok"]:
            say(f"FAILED {check['id']}: observed {check['observed']}; expected {check['expected']}")
    say(f"{'ok' if result['ok'] else 'FAILED'}, report in {os.path.relpath(chosen.out)}/report.md")
    return 0 if result["ok"] else 1
