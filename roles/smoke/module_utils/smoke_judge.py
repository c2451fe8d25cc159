# SPDX-License-Identifier: Apache-2.0
"""What the smoke makes of what it saw: pure functions, no input or output.

Shapes used here (all plain dicts, so that they travel as JSON):

check      {id, instance, ok, observed, expected, why, fix}
hooks      {ignore: regex, hooks: {id: {pattern, why, fix}}, modes: {mode: {speculative, must: [id], never: [id]}},
            backends: {id: {topic, fields, line, groups, ..}}}
answer     {prompt: id, way: "batch"|"alone", ids: [int], meta: {..}, error: str|None, seconds: float}
recording  {prompts: {prompt id: {ids: [int], top: [[[logprob, token id], ..] per position]}}, ..}

Python 3.11+, standard library only: this file runs on the host and on the control side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.module_utils import gpu_units_ended as ended

Check = dict[str, Any]
WAYS = ("batch", "alone")

# A difference is a near tie when the token that came is at most this many nats less likely than baseline's. Logits
# are rounded to the model's type before they are compared; between 16 and 32, where top logits of a trained model lie,
# two neighbouring numbers are 0.125 apart in bfloat16 and 0.016 in float16, and each of the two logits may be off by
# one of them. float32 gets no allowance: there the tokens must be equal.
NEAR_TIE_GAPS = {"float32": 0.0, "float16": 0.032, "bfloat16": 0.25}
DTYPE_WORDS = {"half": "float16", "float": "float32", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

# The engine's names for the drafts that a request took: 0.5.11 has the first.
ACCEPTED_FIELDS = ("spec_accepted_drafts", "spec_num_correct_drafts")


def check(
    ident: str, ok: bool, observed: Any, expected: Any, why: str = "", fix: str = "", instance: str | None = None
) -> Check:
    return {
        "id": ident,
        "instance": instance,
        "ok": bool(ok),
        "observed": observed,
        "expected": expected,
        "why": why,
        "fix": fix,
    }


def near_tie_gap(dtype: str, gaps: Mapping[str, float] | None = None) -> float:
    """Nats that a differing token may be less likely than baseline's; 0 means token for token.

    `gaps` holds the site's own bounds by type; none of them loosens float32.
    Raises ValueError for a type with no known bound.
    """
    name = DTYPE_WORDS.get(dtype, dtype)
    known = {**NEAR_TIE_GAPS, **(gaps or {}), "float32": 0.0}
    if name not in known:
        raise ValueError(f"no near-tie bound is known for dtype {dtype!r}; known: {', '.join(sorted(known))}")
    return float(known[name])


# --- last words --------------------------------------------------------------------------------------------------


def last_words(lines: Sequence[str], count: int = 3, width: int = 200) -> str:
    """What an engine that ended said: the first line that tells an error, and the last ones."""
    first = ended.first_error(lines, width)
    last = " | ".join(ended.bare(line).strip()[:width] for line in lines[-count:] if line.strip()) or "none"
    return (f"first error: {first}; " if first else "") + f"last lines: {last}"


# --- journal -----------------------------------------------------------------------------------------------------


def hook_ids(hooks: Mapping[str, Any], mode: str) -> tuple[list[str], list[str]]:
    """(must, never) check ids of a mode. Raises ValueError for an unknown mode or an id without a pattern."""
    modes = hooks["modes"]
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(modes)}")
    must, never = list(modes[mode].get("must") or []), list(modes[mode].get("never") or [])
    missing = [i for i in must + never if i not in hooks["hooks"]]
    if missing:
        raise ValueError(f"mode {mode}: no pattern for {', '.join(missing)}")
    return must, never


class JournalScan:
    """First line that matches each pattern of a mode. Feed it lines one by one; a journal may be long."""

    def __init__(self, hooks: Mapping[str, Any], mode: str) -> None:
        self.must, self.never = hook_ids(hooks, mode)
        self._ignore = re.compile(hooks["ignore"])
        self._patterns = {i: re.compile(hooks["hooks"][i]["pattern"]) for i in self.must + self.never}
        self._patterns |= {i: re.compile(b["line"]) for i, b in hooks.get("backends", {}).items() if "line" in b}
        self.reset({})

    def reset(self, known: Mapping[str, str]) -> None:
        """Begin again, with the lines that an earlier smoke of the same invocation has found."""
        self.found: dict[str, str] = {i: line for i, line in known.items() if i in self._patterns}
        self._open = {i: pattern for i, pattern in self._patterns.items() if i not in self.found}
        self.lines = 0

    def feed(self, line: str) -> None:
        self.lines += 1
        if not self._open or self._ignore.search(line):
            return
        for ident in [i for i, pattern in self._open.items() if pattern.search(line)]:
            self.found[ident] = line.strip()[:500]
            del self._open[ident]

    def missing(self) -> list[str]:
        return [i for i in self.must if i not in self.found]


def judge_hooks(hooks: Mapping[str, Any], scan: JournalScan, instance: str) -> list[Check]:
    checks = []
    for ident in scan.must:
        hook = hooks["hooks"][ident]
        line = scan.found.get(ident)
        seen = line[:300] if line else f"no such line among {scan.lines} of this invocation"
        expected = f"a line like /{hook['pattern']}/"
        checks.append(check(ident, line is not None, seen, expected, hook["why"], hook["fix"], instance))
    for ident in scan.never:
        hook = hooks["hooks"][ident]
        line = scan.found.get(ident)
        seen = line[:300] if line else f"none among {scan.lines} lines"
        expected = f"no line like /{hook['pattern']}/"
        checks.append(check(ident, line is None, seen, expected, hook["why"], hook["fix"], instance))
    return checks


# --- output ------------------------------------------------------------------------------------------------------


def compare(reference: Mapping[str, Any], ids: Sequence[int], tokens: int, bound: float) -> dict[str, Any]:
    """Compare the first `tokens` ids of an answer with a recording of the same prompt.

    Returns {result, compared, position, expected, observed, gap}: `result` is identical, near-tie, different or short;
    `compared` counts the equal tokens before the first difference; `gap` (nats) is how much less likely baseline held
    the token that came, None when it was not among the recorded likeliest.
    """
    want = list(reference["ids"][:tokens])
    got = list(ids[:tokens])
    same = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    out: dict[str, Any] = {"compared": same, "position": None, "expected": None, "observed": None, "gap": None}
    if same == len(want) == len(got) == tokens:
        return {"result": "identical", **out}
    if same == min(len(want), len(got)):
        return {"result": "short", **out, "position": same}
    top = (reference.get("top") or [])[same] if same < len(reference.get("top") or []) else []
    likely = {int(token): float(logprob) for logprob, token in top}
    gap = None
    if want[same] in likely and got[same] in likely:
        gap = round(likely[want[same]] - likely[got[same]], 6)
    near = bound > 0 and gap is not None and gap <= bound
    out |= {"position": same, "expected": want[same], "observed": got[same], "gap": gap}
    return {"result": "near-tie" if near else "different", **out}


def judge_answers(answers: Sequence[Mapping[str, Any]], tokens: int, instance: str, least: int) -> Check:
    bad = []
    for answer in answers:
        if answer.get("error"):
            bad.append(f"{answer['prompt']} ({answer['way']}): {answer['error']}")
        elif len(answer["ids"]) != tokens:
            bad.append(f"{answer['prompt']} ({answer['way']}): {len(answer['ids'])} tokens")
    good = len(answers) - len(bad)
    observed = f"{good} of {len(answers)} whole" + (f"; {'; '.join(bad[:3])}" if bad else "")
    return check(
        "engine.answers",
        not bad and good >= least,
        observed,
        f"at least {least} requests, each with {tokens} tokens",
        "one request proves nothing; a request that fails or stops early is a broken path",
        "read `journalctl -u {unit} -e` on the host for the traceback of the failed request",
        instance,
    )


def judge_output(
    recording: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    tokens: int,
    bound: float,
    instance: str,
    reference: str = "baseline",
) -> tuple[list[Check], dict[str, Any]]:
    """Lossless checks (one per way that has answers) and their figures."""
    checks: list[Check] = []
    figures: dict[str, Any] = {"identical": 0, "near_ties": [], "different": [], "compared_tokens": 0}
    rule = "token for token" if bound == 0 else f"token for token; a first difference within {bound} nats is a near tie"
    for way in WAYS:
        mine = [a for a in answers if a["way"] == way and not a.get("error")]
        if not mine:
            continue
        same, ties, bad = 0, [], []
        for answer in mine:
            known = recording["prompts"].get(answer["prompt"])
            if known is None:
                bad.append({"prompt": answer["prompt"], "way": way, "result": "not recorded"})
                continue
            got = compare(known, answer["ids"], tokens, bound)
            figures["compared_tokens"] += got["compared"]
            if got["result"] == "identical":
                same += 1
            elif got["result"] == "near-tie":
                ties.append({"prompt": answer["prompt"], "way": way, **got})
            else:
                bad.append({"prompt": answer["prompt"], "way": way, **got})
        figures["identical"] += same
        figures["near_ties"] += ties
        figures["different"] += bad
        observed = f"{same} of {len(mine)} identical, {len(ties)} near ties, {len(bad)} different"
        if bad:
            observed += f"; {_difference(bad[0])}"
        checks.append(
            check(
                f"output.{way}",
                not bad,
                observed,
                f"all {len(mine)} equal to {reference}, {rule}",
                "speculation may change the speed, never the text",
                "do not serve this: `{site} --tags rollback`, and report the prompt and position with the release id",
                instance,
            )
        )
    asked = tokens * sum(1 for a in answers if not a.get("error"))
    enough = figures["compared_tokens"] * 2 >= asked > 0
    checks.append(
        check(
            "output.compared",
            enough,
            f"{figures['compared_tokens']} of {asked} tokens compared before a first difference",
            f"at least {(asked + 1) // 2}",
            "after its first difference a text can no longer be compared, so early near ties hide errors",
            "run the smoke with dtype float32 on a small pair, or look at the near ties of the verdict",
            instance,
        )
    )
    return checks, figures


def _difference(bad: Mapping[str, Any]) -> str:
    where = f"{bad['prompt']} ({bad['way']})"
    if bad["result"] == "not recorded":
        return f"{where}: prompt not in the recording"
    if bad["result"] == "short":
        return f"{where}: ends after {bad['position']} tokens"
    gap = "not among the likeliest of baseline" if bad["gap"] is None else f"{bad['gap']:.3f} nats less likely"
    return f"{where}: token {bad['position']} is {bad['observed']}, baseline {bad['expected']} ({gap})"


def accepted_drafts(answers: Iterable[Mapping[str, Any]]) -> tuple[int, int, bool]:
    """(accepted drafts, verify steps, did any answer carry the fields) over all answers."""
    drafts = steps = 0
    known = False
    for answer in answers:
        meta = answer.get("meta") or {}
        for field in ACCEPTED_FIELDS:
            if field in meta:
                known = True
                drafts += int(meta[field])
                break
        steps += int(meta.get("spec_verify_ct", 0))
    return drafts, steps, known


def judge_accepted(answers: Sequence[Mapping[str, Any]], instance: str, least: int) -> Check:
    drafts, steps, known = accepted_drafts(answers)
    observed = f"{drafts} accepted in {steps} verify steps" if known else "no spec_* field in any answer"
    return check(
        "draft.accepted",
        known and drafts >= least,
        observed,
        f"at least {least} over all requests",
        "a drafter whose drafts are never taken costs time and gives nothing",
        "name the drafter of this target, in its revision, as draft_model_path, then `{site} --tags activate`",
        instance,
    )


# --- verdict -----------------------------------------------------------------------------------------------------


def verdict(
    host: str,
    release: str | None,
    checks: Sequence[Check],
    instances: Sequence[Mapping[str, Any]],
    started: str,
    seconds: float,
) -> dict[str, Any]:
    """The answer of the verb. No checks at all is a failure, not a success."""
    return {
        "verb": "smoke",
        "host": host,
        "release": release,
        "ok": bool(checks) and all(c["ok"] for c in checks),
        "checks": list(checks),
        "instances": list(instances),
        "started": started,
        "seconds": round(seconds, 2),
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """One readable line per failed check."""
    return [
        f"{c['id']}{' (' + c['instance'] + ')' if c['instance'] else ''}: observed {c['observed']}; "
        f"expected {c['expected']}; fix: {c['fix']}"
        for c in result["checks"]
        if not c["ok"]
    ]
