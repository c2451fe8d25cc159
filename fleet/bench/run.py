# SPDX-License-Identifier: Apache-2.0
"""One benchmark from the first server's start to the last one's end."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from fleet.bench import client, equality, servers, soak, summary, texts, timing
from fleet.bench.arms import ROOT, Arm, Flags, words
from fleet.bench.rounds import Ids, Measured, measure, schedule
from fleet.bench.servers import EngineFailed, Server

HOOKS = ROOT / "roles/smoke/files/hooks.yml"
REPORTS = ("report.json", "report.md", "report.svg")
FREE_LIMIT = 30.0  # seconds until the driver has taken the memory of ended processes back
IDLE_SLACK = 256  # MiB

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What was asked for; seconds where it is time."""

    title: str
    command: str
    arms: list[Arm]
    base: Flags
    env: Mapping[str, str]
    python: str
    out: Path
    prompts: list[dict[str, str]]
    rounds: dict[int, int]  # by concurrency
    requests: dict[int, int]  # by concurrency
    new: int
    warm: int
    latency: int
    seed: int
    wave: int
    limit: float | None
    start_limit: float
    near_tie: float
    reference: str
    negative: frozenset[str] = frozenset()
    soak: str | None = None
    soak_seconds: float = 120
    soak_together: int = 8
    timing: bool = False
    timing_at: tuple[int, ...] = (1,)


@dataclass
class Findings:
    """What the phases found; the report is made of it."""

    servers: list[Server] = field(default_factory=list)
    measured: Measured = field(default_factory=Measured)
    tokens: list[Ids] = field(default_factory=list)
    equality: list[dict[str, Any]] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    hooks: dict[str, list[str]] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)
    soak: dict[str, Any] | None = None
    timing: dict[str, list[dict[str, Any]]] | None = None
    notes: list[str] = field(default_factory=list)
    memory: dict[str, list[int] | None] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def device() -> str:
    """The GPU's name and driver, or the machine where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return "; ".join(done.stdout.strip().splitlines())
    except (OSError, subprocess.TimeoutExpired):
        pass
    return f"No GPU ({platform.machine()})"


def missing_hooks(server: Server) -> list[str]:
    """Lines that a mode must (or, for baseline, must never) print and that are missing (or there), as the smoke reads them."""
    if server.arm.mode is None:
        return []
    data = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))
    lines = [line for line in server.lines() if data["ignore"] not in line]

    def seen(name: str) -> bool:
        pattern = re.compile(data["hooks"][name]["pattern"])
        return any(pattern.search(line) for line in lines)

    bad = [name for name in data["modes"][server.arm.mode]["must"] if not seen(name)]
    if server.arm.mode == "baseline":
        bad += [name for name in data["modes"]["baseline"]["never"] if seen(name)]
    return bad


def said(server: Server) -> list[str]:
    """What a drafting worker said about itself, without what it repeats: runner, graphs, a budget that it chose."""
    lines = [
        line.strip() for line in server.lines() if re.search(r"DDTREE|DFLASH", line) and "server_args=" not in line
    ]
    return [line for line in lines if not re.search(r"verify completed|metrics steps|timing steps", line)][:20]


def _tokenize(server: Server, prompts: Sequence[Mapping[str, str]]) -> list[Ids]:
    """Token ids of prompts, as the engine's own tokenizer makes them.

    /tokenize of 0.5.11 fails for tokenizers that state no longest text, but log-probabilities of a prompt carry its ids.
    """
    found: list[Ids] = []
    for row in prompts:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"text": row["prompt"], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = client.post(server.port, "/generate", body)
        found.append([int(entry[1]) for entry in answer["meta_info"]["input_token_logprobs"]])
    return found


def reserve(soak_seconds: float | None, timing: bool, start_seconds: float) -> float:
    """Seconds of the limit that phases after the rounds need."""
    seconds = 35.0  # one answer that is on its way, log-probabilities, and the end of all servers
    if soak_seconds is not None:
        seconds += soak_seconds + 10
    if timing:
        seconds += 1.2 * start_seconds + 20
    return seconds


def conduct(settings: Settings, say: Say) -> Findings:
    """All phases. An arm that fails is left out and noted; only a failure of the harness itself is raised."""
    begin = time.monotonic()
    found = Findings()
    end = begin + settings.limit if settings.limit else float("inf")
    found.memory["before"] = servers.gpu_memory(settings.env)
    common: dict[str, Any] = {
        "python": settings.python, "base": settings.base, "folder": settings.out / "servers", "wave": settings.wave, "say": say,
    }  # fmt: skip
    start_by = min(begin + settings.start_limit, end - 20)
    try:
        with servers.resident(settings.arms, env=settings.env, deadline=start_by, **common) as everyone:
            found.servers = everyone
            found.memory["resident"] = servers.gpu_memory(settings.env)
            ready = {server.arm.name: server for server in everyone if server.error is None}
            started = time.monotonic() - begin
            if ready:
                kept = reserve(settings.soak_seconds if settings.soak else None, settings.timing, started)
                _with_servers(settings, found, ready, end - kept, say)
    except (EngineFailed, client.Refused) as error:  # what was measured until then is worth its report
        found.errors["servers"] = str(error)
        say(str(error))
    _wait_for_memory(settings, found)
    if settings.timing:
        found.timing = {}
        try:
            found.timing = _timing(settings, found, common, end, say)
        except EngineFailed as error:
            found.errors["servers"] = str(error)
        _wait_for_memory(settings, found)
    return found


def _with_servers(settings: Settings, found: Findings, ready: Mapping[str, Server], deadline: float, say: Say) -> None:
    reference = ready.get(settings.reference)
    found.tokens = _tokenize(reference or next(iter(ready.values())), settings.prompts)
    found.measured = measure(
        schedule(settings.rounds, settings.warm, settings.latency),
        ready,
        found.tokens,
        requests=settings.requests,
        new=settings.new,
        seed=settings.seed,
        deadline=deadline,
        say=say,
    )
    left = {name: server for name, server in ready.items() if name not in found.measured.dropped}
    answers = found.measured.texts
    numbers = list(range(len(found.tokens)))
    found.errors |= equality.complete(answers, left, found.tokens, numbers, settings.new, deadline + 5, say)
    for name in left:
        if (got := len(answers.of(name, 1))) < len(numbers):
            found.notes.append(f"{name} was asked {got} of {len(numbers)} prompts alone, for lack of time")
    if reference is not None:
        likely = equality.Likely(reference, found.tokens)
        _compare(settings, found, left, likely)
        if settings.soak:
            _soak(settings, found, left, likely, say)
        found.notes += likely.notes
    for name, server in left.items():
        found.hooks[name] = missing_hooks(server)
        found.said[name] = said(server)
        if server.process.poll() is not None:
            found.errors[name] = f"ended with {server.process.returncode} before it was stopped: {server.reason()}"


def _compare(settings: Settings, found: Findings, left: Mapping[str, Server], likely: equality.Likely) -> None:
    answers = found.measured.texts
    alone = answers.of(settings.reference, 1)
    found.loops = [number for number, ids in sorted(alone.items()) if texts.degenerate(ids[0])]
    for name in left:
        for concurrency in sorted({1, *settings.rounds}):
            rows = equality.compare(answers, name, concurrency, settings.reference, likely, settings.near_tie)
            if rows and (name, concurrency) != (settings.reference, 1):
                row = {"arm": name, "concurrency": concurrency, "negative": name in settings.negative}
                found.equality.append({**row, "count": texts.count(rows), "rows": rows})


def _soak(settings: Settings, found: Findings, left: Mapping[str, Server], likely: equality.Likely, say: Say) -> None:
    name = settings.soak
    if name is None or name not in left:
        found.errors[f"soak {name}"] = "the arm did not live until the soak"
        return
    try:
        found.soak = soak.run(
            left[name],
            found.tokens,
            found.measured.texts.of(name, 1),
            likely,
            new=settings.new,
            together=settings.soak_together,
            seconds=settings.soak_seconds,
            bound=settings.near_tie,
            say=say,
        )
    except (client.Refused, OSError, KeyError) as error:
        found.errors[f"soak {name}"] = f"{error}; {left[name].reason()}"


def _wait_for_memory(settings: Settings, found: Findings) -> None:
    """Note the GPU memory once it is back, or what is left of it."""
    before, deadline = found.memory["before"], time.monotonic() + FREE_LIMIT
    while True:
        now = servers.gpu_memory(settings.env)
        found.memory["after"] = now
        back = before is None or now is None or all(n <= b + IDLE_SLACK for n, b in zip(now, before, strict=True))
        if back or time.monotonic() > deadline:
            return
        time.sleep(0.5)


def _timing(
    settings: Settings, found: Findings, common: Mapping[str, Any], end: float, say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Drafting arms once more with the engine's own timers on: those slow a step, so no round was measured with them."""
    good = {s.arm.name for s in found.servers if s.error is None} - set(found.measured.dropped)
    chosen = [arm for arm in settings.arms if arm.name in good and arm.mode not in (None, "baseline")]
    parts: dict[str, list[dict[str, Any]]] = {}
    if not chosen or not found.tokens:
        return parts
    say("timing pass")
    env = {**settings.env, **timing.ENV}
    deadline = min(time.monotonic() + settings.start_limit, end - 30)
    with servers.resident(chosen, env=env, deadline=deadline, suffix="-timing", **common) as everyone:
        for server in everyone:
            name = server.arm.name
            if server.error is not None:
                found.notes.append(f"timing of {name}: {server.error}")
                continue
            try:
                _ask_for_timing(settings, found.tokens, server, settings.timing_at[0])
                lines: list[str] = []
                for concurrency in settings.timing_at:
                    offset = server.log.stat().st_size  # what came before was warm-up, or another load
                    _ask_for_timing(settings, found.tokens, server, concurrency)
                    lines += timing.lines_of(server.lines(offset))
                parts[name] = timing.parse(lines)
            except OSError as error:
                found.notes.append(f"timing of {name}: {error}")
    return parts


def _ask_for_timing(settings: Settings, tokens: Sequence[Ids], server: Server, concurrency: int) -> None:
    some = [(number, tokens[number % len(tokens)]) for number in range(4 * concurrency)]
    for answer in client.load(server.port, some, settings.new, concurrency).answers:
        if answer.error is not None:
            raise OSError(answer.error)


# --- verdict -----------------------------------------------------------------------------------------------------


def checks(settings: Settings, found: Findings) -> list[dict[str, Any]]:
    """Everything that has to hold: [{id, ok, observed, expected}]."""
    out: list[dict[str, Any]] = []

    def check(name: str, ok: bool, observed: str, expected: str) -> None:
        out.append({"id": name, "ok": ok, "observed": observed, "expected": expected})

    for server in found.servers:
        name = server.arm.name
        error = server.error or found.measured.dropped.get(name) or found.errors.get(name)
        check(f"engine.{name}", error is None, error or "served to the end", "started, and served to the end")
        if name in found.hooks:
            bad = found.hooks[name]
            check(f"path.{name}", not bad, ", ".join(bad) or "as it has to be", "the log proves the mode")
    trouble = found.errors.get("servers")
    check(
        "servers.whole", trouble is None, trouble or "all started or told why, and all ended", "no trouble with servers"
    )
    count = sum(row["kind"] == "speed" for row in found.measured.rows)
    check("rounds.measured", count > 0, f"{count} arm rounds; ended with {found.measured.ended}", "at least one round")
    check("output.reference", bool(found.equality) or len(found.servers) == 1, f"{len(found.equality)} comparisons",
          f"answers of {settings.reference} to compare with")  # fmt: skip
    for row in found.equality:
        if row["negative"]:
            continue
        result = row["count"]
        observed = f"{result['same']} same, {result['near_ties']} near ties, {result['different']} other differences"
        ident = f"output.{row['arm']}.c{row['concurrency']}"
        check(ident, result["different"] == 0, observed, f"no difference beyond a gap of {settings.near_tie}")
    for name in sorted(settings.negative):
        caught = sum(row["count"]["different"] for row in found.equality if row["arm"] == name)
        check(f"output.{name}", caught > 0, f"{caught} other differences", "at least one, as it is a negative control")
    if settings.soak:
        _soak_checks(settings, found, check)
    before, after = found.memory.get("before"), found.memory.get("after")
    if before is not None and after is not None:
        back = all(a <= b + IDLE_SLACK for a, b in zip(after, before, strict=True))
        check("gpu.memory", back, f"{after} MiB after, {before} before", f"at most {IDLE_SLACK} MiB more than before")
    return out


def _soak_checks(settings: Settings, found: Findings, check: Callable[[str, bool, str, str], None]) -> None:
    result = found.soak
    if result is None:
        why = found.errors.get(f"soak {settings.soak}", f"no {settings.reference} to compare with")
        check("soak.ran", False, why, "a soak to its end")
        return
    errors = result["errors"]
    check("soak.answers", not errors and result["requests"] > 0, f"{result['requests']} answers, {len(errors)} errors "
          f"{errors[:1]}", "answers without an error")  # fmt: skip
    output = result["output"]
    check("soak.output", output["different"] == 0, f"{output['same']} same, {output['near_ties']} near ties, "
          f"{output['different']} other differences", "what the arm answers alone")  # fmt: skip
    before, after = result["pool_before"], result["pool_after"]
    whole = after["used"] <= before["used"] and after["size"] == before["size"]
    check(
        "soak.pool", whole, f"{after['used']} of {after['size']} tokens used", f"{before['used']} of {before['size']}"
    )


def report(settings: Settings, found: Findings, started: datetime, seconds: float) -> dict[str, Any]:
    """The report as data; what Markdown and plot are made of."""
    kinds = {arm.name: arm.kind for arm in settings.arms}
    by_name = {server.arm.name: server for server in found.servers}
    judged = checks(settings, found)
    answers = found.measured.texts
    return {
        "ok": all(check["ok"] for check in judged),
        "checks": judged,
        "seconds": round(seconds, 1),
        "ended": found.measured.ended,
        "setup": {
            "title": settings.title,
            "command": settings.command,
            "started": started.isoformat(timespec="seconds"),
            "device": device(),
            "python": settings.python,
            "base": words(settings.base),
            "env": dict(settings.env),
            "new": settings.new,
            "reference": settings.reference,
            "near_tie": settings.near_tie,
            "latency_rounds": settings.latency,
            "rounds": settings.rounds,
            "requests": settings.requests,
            "seed": settings.seed,
            "arms": [
                {
                    "name": arm.name,
                    "kind": arm.kind,
                    "flags": words(arm.flags),
                    "overlap_off": arm.speculates,
                    "command": by_name[arm.name].command if arm.name in by_name else [],
                    "start_seconds": by_name[arm.name].seconds if arm.name in by_name else None,
                    "error": _error(found, arm.name),
                    "said": found.said.get(arm.name, []),
                }
                for arm in settings.arms
            ],
        },
        "prompts": [
            {**row, "ids": found.tokens[number] if found.tokens else []} for number, row in enumerate(settings.prompts)
        ],
        "loops": found.loops,
        "summary": summary.summarize(found.measured.rows, kinds, set(found.loops)),
        "equality": found.equality,
        "timing": found.timing,
        "soak": found.soak,
        "gpu_memory": found.memory,
        "notes": found.notes,
        "rows": found.measured.rows,
        "texts": [
            {"arm": arm, "concurrency": concurrency, "prompt": prompt, "ids": ids, "text": answers.words[tuple(ids)]}
            for (arm, concurrency, prompt), every in sorted(answers.found.items())
            for ids in every
        ],
    }


def _error(found: Findings, name: str) -> str | None:
    server = next((s for s in found.servers if s.arm.name == name), None)
    return (server and server.error) or found.measured.dropped.get(name) or found.errors.get(name)


def run(settings: Settings, say: Say) -> dict[str, Any]:
    """Measure and write report.json, report.md and report.svg into `out`; returns the report. Raises EngineFailed."""
    from fleet.bench import plot
    from fleet.bench import report as text

    started, begin = datetime.now(UTC), time.monotonic()
    settings.out.mkdir(parents=True, exist_ok=True)
    for old in [*(settings.out / name for name in REPORTS), *settings.out.glob("servers/*/engine.log")]:
        old.unlink(missing_ok=True)  # whatever happens, an older report or log must not be taken for this run's
    found = conduct(settings, say)
    result = report(settings, found, started, time.monotonic() - begin)
    if why := plot.draw(result["summary"], settings.title, settings.out / "report.svg"):
        result["notes"].append(why)
        say(why)
    _write(settings.out / "report.json", json.dumps(result))
    _write(settings.out / "report.md", text.markdown(result))
    return result


def _write(path: Path, text: str) -> None:
    """A whole file or none: who copies reports while a benchmark ends must not get a half."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


__all__ = ["EngineFailed", "Settings", "run"]
