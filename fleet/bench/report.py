# SPDX-License-Identifier: Apache-2.0
"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]


def _n(value: Any, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> list[str]:
    """A Markdown table, or the line `nothing` where it would be empty."""
    if not rows:
        return [nothing]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [list(head), ["---"] * len(head), *cells]]


def speed(part: Data, loops: bool) -> list[str]:
    """Speed at one concurrency: medians with quartiles, ratios with sign test."""
    titles = list(part["references"])
    head = ["arm", "rounds", "tok/s median", "quartiles", *(f"over {t}" for t in titles), "tokens/step", "ms/step"]
    head += ["best prompt tok/s"] + (["requests without loops", "their tok/s", "tokens/step"] if loops else [])
    rows = []
    for name, f in part["arms"].items():
        tok_s = f["tok_s"]
        if not tok_s["n"]:
            rows.append([name, "0", *["-"] * (len(head) - 2)])
            continue
        cells = [name, str(tok_s["n"]), _n(tok_s["median"]), f"{_n(tok_s['q1'])} to {_n(tok_s['q3'])}"]
        cells += [ratio(f["ratios"].get(title)) for title in titles]
        cells += [_n(f["tokens_per_step"], 3), _n(f["latency"] and f["latency"]["step_ms"], 3)]
        cells.append(_n(f["best_prompt"] and f["best_prompt"]["tok_s"]))
        if loops:
            clean = f["without_loops"]
            cells += [str(clean["requests"]), _n(clean["stream_tok_s"]), _n(clean["tokens_per_step"], 3)]
        rows.append(cells)
    return table(head, rows, NO_ROUND)


def short(summary: Data) -> list[str]:
    """The fastest arm of every kind by concurrency."""
    rows = []
    for concurrency, part in summary.items():
        best: dict[str, tuple[float, str]] = {}
        for name, f in part["arms"].items():
            kind = name.partition(":")[0].partition("@")[0]
            if f["tok_s"]["n"] and f["tok_s"]["median"] > best.get(kind, (0.0, ""))[0]:
                best[kind] = (f["tok_s"]["median"], name)
        for median, name in best.values():
            ratios = part["arms"][name]["ratios"]
            over = [f"{r['median']:.3f} over {title}" for title, r in ratios.items() if r["n"]]
            rows.append([f"c{concurrency}", name, _n(median), ", ".join(over) or "-"])
    return table(["asked", "fastest of its kind", "tok/s median", "median ratio"], rows, NO_ROUND)


def ratio(row: Data | None) -> str:
    """`1.352 (1.340 to 1.361), 10 of 10, p 0.002`."""
    if row is None or not row["n"]:
        return "-"
    quartiles = f"{row['q1']:.3f} to {row['q3']:.3f}"
    return f"{row['median']:.3f} ({quartiles}), {row['wins']} of {row['n']}, p {row['p']:.2g}"


def latency(part: Data, asked: int) -> list[str]:
    """Streaming rounds of one concurrency; `asked` is how many there should have been."""
    rows = []
    for name, f in part["arms"].items():
        if found := f["latency"]:
            pairs = [found["ttft_ms"], found["message_ms"], found["token_ms"]]
            rows.append([name, *(f"{_n(p and p['p50'], 2)} / {_n(p and p['p99'], 2)}" for p in pairs)])
    head = ["arm", "TTFT ms p50 / p99", "between messages ms p50 / p99", "per token ms p50 / p99"]
    missing = "No streaming round came to its end." if asked else "Latencies: not asked for (`--latency-rounds 0`)."
    return table(head, rows, missing)


def equality(rows: Sequence[Data], bound: float) -> list[str]:
    """One row per arm and concurrency."""
    head = [
        "arm",
        "asked",
        "texts",
        "same",
        f"near ties (gap up to {bound})",
        "largest of them",
        "other differences",
    ]
    cells = []
    for row in rows:
        count = row["count"]
        numbers = [count["compared"], count["same"], count["near_ties"]]
        others = str(count["different"]) + (" (expected: negative control)" if row["negative"] else "")
        cells.append(
            [row["arm"], f"c{row['concurrency']}", *map(str, numbers), _n(count["largest_near_gap"], 4), others]
        )
    return table(head, cells, "Nothing to compare.")


def timing(found: Data | None) -> list[str]:
    """The split of a step by arm."""
    if found is None:
        return ["Not asked for (`--timing`)."]
    nothing = "No drafting arm was measured."
    names: list[str] = []
    for rows in found.values():
        for row in rows:
            names += [key for key in row if key.endswith("_ms") and key not in names]
    cells = []
    for arm, rows in found.items():
        if not rows:
            cells.append([arm, "not reported", "-", *["-"] * len(names)])
        cells += [[arm, str(row["batch"]), str(row["steps"]), *(_n(row.get(n), 3) for n in names)] for row in rows]
    return table(["arm", "batch", "steps", *(n.removesuffix("_ms") + " ms" for n in names)], cells, nothing)


def soak(found: Data | None) -> list[str]:
    """The soak, a line per thing."""
    if found is None:
        return ["Not asked for (`--soak`)."]
    output, before, after = found["output"], found["pool_before"], found["pool_after"]
    load = f"{found['requests']} requests, {found['together']} at once, {found['seconds']:.0f} s, {found['tok_s']:.0f} tok/s"
    same = f"{output['same']} same, {output['near_ties']} near ties, {output['different']} different"
    pool = f"{before['used']} of {before['size']} tokens used before, {after['used']} of {after['size']} after"
    return [
        f"- {found['arm']}: {load}, {len(found['errors'])} errors",
        f"- output against the same arm alone: {same}",
        f"- KV pool: {pool}",
    ]


NO_ROUND = "No round was measured."

HOW = """\
Greedy, {new} new tokens per request, {prompts} prompts. All servers are resident at once and one is loaded at a time; in a round
every arm answers the same prompts, in an order shuffled per round. Warm-up rounds are dropped. Rounds ended with: {ended}.

Ratios are medians over rounds of the arm's tok/s divided by the reference's in the same round, with quartiles, rounds won and a
two-sided sign test. `dflash best` is the dflash arm with the highest median at that concurrency. Tokens per step leave the
token of prefill out. ms per step is from streaming rounds, from a stream's first message to its last."""

NO_OVERLAP = """\
Speculating arms of this engine always run without overlap scheduling (it is switched off for DFLASH, DDTREE and NGRAM), so there
is no dflash arm with it. Baseline runs with it unless its flags say otherwise."""

OUTPUT = """\
Against {reference} asked alone. A gap is how far the two tokens of a first difference are apart in the reference's
log-probabilities (nats). Texts are an arm's distinct answers: a prompt that it answered in two ways in two rounds has two."""


def markdown(report: Data) -> str:
    """The whole report."""
    setup, loops = report["setup"], report["loops"]
    lines = [f"# Benchmark: {setup['title']}", ""]
    lines += [
        f"{'ok' if report['ok'] else 'FAILED'}, {setup['started']}, {report['seconds']:.0f} s. {setup['device']}.",
        "",
    ]
    lines += ["```", setup["command"], "```", ""]
    lines += [HOW.format(new=setup["new"], prompts=len(report["prompts"]), ended=report["ended"])]
    if any(arm["overlap_off"] for arm in setup["arms"]):
        lines += ["", NO_OVERLAP]
    failed = [check for check in report["checks"] if not check["ok"]]
    if failed:
        lines += ["", "## Failed checks", ""]
        lines += [f"- {c['id']}: observed {c['observed']}; expected {c['expected']}" for c in failed]
    lines += ["", "## In short", "", *short(report["summary"])]
    for concurrency, part in report["summary"].items():
        named = ", ".join(f"{title} is {arm}" for title, arm in part["references"].items() if title != arm)
        lines += ["", f"## c{concurrency}", "", *([f"{named}.", ""] if named else []), *speed(part, bool(loops))]
        lines += ["", *latency(part, setup["latency_rounds"])]
    lines += ["", "## Output", "", OUTPUT.format(reference=setup["reference"]), ""]
    lines += [*equality(report["equality"], setup["near_tie"]), "", degenerate(report)]
    lines += ["", "## Split of a step", "", *timing(report["timing"]), "", "## Soak", "", *soak(report["soak"])]
    lines += ["", "## Servers", ""]
    rows = [
        [a["name"], _n(a["start_seconds"], 0), a["error"] or "ok", " ".join(a["flags"]) or "-"] for a in setup["arms"]
    ]
    lines += table(["arm", "start s", "state", "own flags"], rows, "None.")
    lines += ["", f"All: `{' '.join(setup['base'])}`"]
    lines += ["", memory(report["gpu_memory"])]
    for note in report["notes"]:
        lines += ["", f"Note: {note}."]
    return "\n".join(lines) + "\n"


def memory(found: Mapping[str, Sequence[int] | None]) -> str:
    """Used memory of the GPUs by phase."""
    phases = {"before": "before", "resident": "while all arms were served", "after": "after"}
    told = [f"{' and '.join(map(str, found[key] or ()))} {words}" for key, words in phases.items() if found.get(key)]
    return (
        f"GPU memory used, MiB: {', '.join(told)}." if told else "GPU memory used: not known, nvidia-smi gave nothing."
    )


def degenerate(report: Data) -> str:
    """Which prompts loop; where most do, which do not."""
    loops, prompts = report["loops"], report["prompts"]
    if not loops:
        return "No answer of the reference is a loop."
    others = [row["id"] for number, row in enumerate(prompts) if number not in set(loops)]
    if not others:
        names = "all of them"
    elif len(others) < len(loops):
        names = f"all but {', '.join(others)}"
    else:
        names = ", ".join(prompts[number]["id"] for number in loops)
    return (
        f"{len(loops)} of {len(prompts)} prompts have an answer that loops, which flatters every drafter (half of the "
        f"reference's answer is a cycle of at most 32 tokens, told three times or more): {names}."
    )
