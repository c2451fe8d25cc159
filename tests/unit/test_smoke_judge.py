# SPDX-License-Identifier: Apache-2.0
"""Hooks and lossless rule, on lines and answers that a real engine gave."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible.module_utils import smoke_judge as judge

from tests.unit.smoke_fakes import HOOKS, PROMPTS, RECORDED, STAMP, log, of

MODES = list(HOOKS["modes"])
MUST = [(mode, ident) for mode in MODES for ident in HOOKS["modes"][mode]["must"]]
NEVER = [(mode, ident) for mode in MODES for ident in HOOKS["modes"][mode]["never"]]
# A line that each forbidden pattern is there for.
BAD_LINES = {
    "never.ddtree": of("ddtree", "Initialized DDTREE"),
    "never.dflash": of("dflash", "Initialized DFLASH"),
    "never.ddtree-verify": of("ddtree", "DDTREE verify"),
    "never.shadow-linear": of("ddtree-shadow", "DDTREE shadow"),
    "never.dflash-verify": of("dflash", "DFLASH verify"),
    "never.fallback": STAMP + "DFLASH draft worker does not support 'trtllm_mha' here. Falling back to 'flashinfer'.",
}


def scan(mode: str, lines: list[str]) -> dict[str, bool]:
    found = judge.JournalScan(HOOKS, mode)
    for line in lines:
        found.feed(line)
    return {c["id"]: c["ok"] for c in judge.judge_hooks(HOOKS, found, "gpu0")}


@pytest.mark.parametrize("mode", MODES)
def test_the_journal_of_a_mode_passes_as_itself_and_fails_as_any_other(mode: str) -> None:
    assert all(scan(mode, log(mode)).values())
    for other in MODES:
        if other != mode:
            assert not all(scan(other, log(mode)).values()), f"{mode} passes as {other}"


@pytest.mark.parametrize(("mode", "ident"), MUST)
def test_a_missing_line_fails_its_check_only(mode: str, ident: str) -> None:
    pattern = re.compile(HOOKS["hooks"][ident]["pattern"])
    without = [line for line in log(mode) if not pattern.search(line)]
    assert len(without) < len(log(mode))
    assert [i for i, ok in scan(mode, without).items() if not ok] == [ident]


@pytest.mark.parametrize(("mode", "ident"), NEVER)
def test_a_forbidden_line_fails_its_check(mode: str, ident: str) -> None:
    assert scan(mode, [*log(mode), BAD_LINES[ident]])[ident] is False


@pytest.mark.parametrize(("mode", "ident"), MUST + NEVER)
def test_the_engines_own_flags_prove_nothing(mode: str, ident: str) -> None:
    line = {**BAD_LINES, **{i: next(x for x in log(m) if re.search(HOOKS["hooks"][i]["pattern"], x)) for m, i in MUST}}[
        ident
    ]
    flags = STAMP + "server_args=ServerArgs(" + line + ")"
    assert scan(mode, [flags])[ident] is (ident in HOOKS["modes"][mode]["never"])


def test_a_line_without_counts_is_no_verify() -> None:
    assert not scan("dflash", [STAMP + "DFLASH verify completed. num_accepted_drafts_per_req=[]"])["hook.dflash-verify"]


@pytest.mark.parametrize(
    "line",
    [
        "Failed to load the tokenizer fast, falling back to AutoTokenizer result.",
        "torch.cuda.mem_get_info is used: Falling back to torch.cuda.mem_get_info().",
    ],
)
def test_a_fallback_that_has_nothing_to_do_with_drafts_is_no_failure(line: str) -> None:
    assert scan("ddtree", [*log("ddtree"), STAMP + line])["never.fallback"]


def test_an_unknown_mode_or_hook_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown mode 'eagle'"):
        judge.hook_ids(HOOKS, "eagle")
    with pytest.raises(ValueError, match=r"no pattern for hook\.new"):
        judge.hook_ids({"hooks": {}, "modes": {"m": {"must": ["hook.new"]}}}, "m")


# --- lossless ----------------------------------------------------------------------------------------------------


def recording() -> dict[str, Any]:
    return {"prompts": {i: {"ids": r["output_ids"], "top": r["top"]} for i, r in RECORDED["baseline"].items()}}


def answers(mode: str = "dflash", count: int = 16) -> list[dict[str, Any]]:
    rows = []
    for way in ("batch", "alone"):
        for prompt in PROMPTS[:count]:
            said = RECORDED[mode][way][prompt["id"]]
            row = {
                "prompt": prompt["id"],
                "way": way,
                "ids": said["output_ids"][:24],
                "meta": said["meta_info"],
                "error": None,
            }
            rows.append(row)
    return rows


def verdicts(given: list[dict[str, Any]], bound: float) -> tuple[dict[str, bool], dict[str, Any]]:
    checks, figures = judge.judge_output(recording(), given, 24, bound, "gpu0")
    return {c["id"]: c["ok"] for c in checks}, figures


def test_recorded_dflash_equals_recorded_baseline() -> None:
    checks, figures = verdicts(answers(), 0.0)
    assert checks == {"output.batch": True, "output.alone": True, "output.compared": True}
    assert figures == {"identical": 32, "near_ties": [], "different": [], "compared_tokens": 32 * 24}


def differing(rank: int, position: int = 5) -> tuple[list[dict[str, Any]], float]:
    """Answers of which one takes baseline's token of a rank at a position, and how much less likely that is."""
    given = answers()
    top = RECORDED["baseline"][given[0]["prompt"]]["top"][position]
    given[0] = {**given[0], "ids": [*given[0]["ids"]]}
    given[0]["ids"][position] = top[rank][1]
    return given, top[0][0] - top[rank][0]


@pytest.mark.parametrize("way", ["batch", "alone"])
def test_float32_knows_no_near_tie(way: str) -> None:
    given, gap = differing(1)
    assert gap > 0
    given[0]["way"] = way
    checks, figures = verdicts(given, judge.near_tie_gap("float32", {"float32": 9.0}))
    assert checks == {"output.batch": way != "batch", "output.alone": way != "alone", "output.compared": True}
    assert figures["different"][0]["position"] == 5
    assert figures["compared_tokens"] == 31 * 24 + 5


def test_a_near_tie_is_reported_and_anything_beyond_fails() -> None:
    given, gap = differing(1)
    checks, figures = verdicts(given, gap + 0.001)
    assert all(checks.values())
    assert (figures["identical"], len(figures["near_ties"]), figures["near_ties"][0]["position"]) == (31, 1, 5)
    checks, figures = verdicts(given, gap - 0.001)
    assert not checks["output.batch"]
    assert len(figures["different"]) == 1


def test_a_token_that_baseline_did_not_hold_likely_is_never_a_near_tie() -> None:
    given, _ = differing(1)
    likely = {t for _, t in RECORDED["baseline"][given[0]["prompt"]]["top"][5]}
    given[0]["ids"][5] = next(t for t in range(1000) if t not in likely)
    checks, figures = verdicts(given, 1000.0)
    assert not checks["output.batch"]
    assert figures["different"][0]["gap"] is None


def test_a_short_answer_or_an_unrecorded_prompt_fails() -> None:
    given = answers()
    given[0] = {**given[0], "ids": given[0]["ids"][:20]}
    assert not verdicts(given, 0.25)[0]["output.batch"]
    given = answers()
    given[0] = {**given[0], "prompt": "unheard"}
    assert not verdicts(given, 0.25)[0]["output.batch"]


def test_early_near_ties_leave_too_little_to_compare() -> None:
    given = answers()
    for answer in given:
        top = RECORDED["baseline"][answer["prompt"]]["top"][3]
        answer["ids"] = [*answer["ids"][:3], top[1][1], *answer["ids"][4:]]
    checks, _ = verdicts(given, 100.0)
    assert checks == {"output.batch": True, "output.alone": True, "output.compared": False}
    assert not verdicts([], 0.0)[0]["output.compared"]


def test_bounds_by_type() -> None:
    assert judge.near_tie_gap("bfloat16") == 0.25
    assert judge.near_tie_gap("half") == 0.032
    assert judge.near_tie_gap("bf16", {"bfloat16": 0.1}) == 0.1
    assert judge.near_tie_gap("float32", {"float32": 1.0}) == 0.0
    with pytest.raises(ValueError, match="fp8"):
        judge.near_tie_gap("fp8")


# --- drafts and verdict ------------------------------------------------------------------------------------------


def test_accepted_drafts_of_the_recorded_engine() -> None:
    given = answers()
    drafts, steps, known = judge.accepted_drafts(given)
    assert known
    assert drafts == sum(a["meta"]["spec_accepted_drafts"] for a in given) > 0
    # prefill gives one token, every verify one and its accepted drafts
    assert drafts + steps == sum(a["meta"]["completion_tokens"] - 1 for a in given)
    assert judge.judge_accepted(given, "gpu0", 1)["ok"]


def test_no_acceptance_fails() -> None:
    none = [{**a, "meta": {**a["meta"], "spec_accepted_drafts": 0}} for a in answers()]
    assert not judge.judge_accepted(none, "gpu0", 1)["ok"]
    bare = [{**a, "meta": {}} for a in answers()]
    got = judge.judge_accepted(bare, "gpu0", 1)
    assert not got["ok"]
    assert "no spec_* field" in got["observed"]


def test_a_verdict_without_checks_is_no_success() -> None:
    assert judge.verdict("h", "r", [], [], "now", 0.0)["ok"] is False
    good = judge.check("a.b", True, 1, 1)
    assert judge.verdict("h", "r", [good], [], "now", 0.0)["ok"] is True
    bad = judge.check("c.d", False, "x", "y", "why", "do this", "gpu0")
    result = judge.verdict("h", "r", [good, bad], [], "now", 0.0)
    assert result["ok"] is False
    assert judge.failures(result) == ["c.d (gpu0): observed x; expected y; fix: do this"]


# --- last words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            ["server_args=ServerArgs(error: 1)", "[2026-12-01 00:00:00] loading", "Traceback (most recent call last):",
             '  File "x.py", line 1', "RuntimeError: CUDA error: no kernel image is available", "killed", "end"],
            "first error: RuntimeError: CUDA error: no kernel image is available; last lines: RuntimeError: CUDA error: ",
        ),
        (["[2026-12-01 00:00:00] torch.OutOfMemoryError: CUDA out of memory. Tried"], "first error: torch.OutOfMemoryError"),
        (["  raise RuntimeError('x')", "", "bye"], "last lines: raise RuntimeError('x') | bye"),
        ([], "last lines: none"),
    ],
)  # fmt: skip
def test_last_words_begin_with_the_first_error(lines: list[str], told: str) -> None:
    assert judge.last_words(lines).startswith(told)


def test_last_words_are_short() -> None:
    assert len(judge.last_words(["ValueError: " + "x" * 5000] * 50)) < 1000
