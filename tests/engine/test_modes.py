# SPDX-License-Identifier: Apache-2.0
"""Every mode on a real server: same answers as baseline, exactly the steps of the offline walk, its own log lines."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import smoke_judge

from tests.engine import cases
from tests.engine.conftest import EOS, Book, Served, wrong_backends

Answers = dict[str, list[dict[str, Any]]]


def _outputs(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def _steps(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


@pytest.mark.parametrize("how", ["alone", "batch"])
def test_output_is_baselines(served: Served, reference: Answers, how: str) -> None:
    answers = getattr(served, how)
    assert [len(ids) for ids in _outputs(answers)] == [cases.NEW] * 16
    assert _outputs(answers) == _outputs(reference["alone"])
    assert _outputs(answers) == served.walk.greedy, "not the text that the model writes outside the engine"


@pytest.mark.parametrize("how", ["alone", "batch"])
def test_steps_are_the_offline_walks(served: Served, how: str) -> None:
    """Fewer steps would mean that wrong drafts were accepted, more that branches were lost."""
    answers = getattr(served, how)
    if served.mode.arm is None:
        assert all("spec_verify_ct" not in answer["meta_info"] for answer in answers)
        return
    expected = served.walk.steps(served.mode.arm)
    if served.mode.by_size and how == "batch":
        # neither all trees nor all chains: the last requests of a batch are few enough for trees
        assert sum(expected) < sum(_steps(answers)) < sum(served.walk.steps("chain"))
        expected = _steps(answers)
    assert _steps(answers) == expected
    for answer, steps in zip(answers, expected, strict=True):
        meta = answer["meta_info"]
        # prefill gives one token, every step its accepted drafts and one more
        assert meta["spec_accepted_drafts"] == meta["completion_tokens"] - 1 - steps
        assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / steps)


@pytest.mark.modes("ddtree-by-size")
def test_large_batches_are_verified_linearly(served: Served) -> None:
    """The metrics say so; `batch` above has shown the answers."""
    assert served.batch
    lines = re.findall(r"DDTREE metrics steps=\d+ requests=(\d+) .* linear=(\d+)", served.engine.log())
    requests, linear = map(int, lines[-1])
    assert len(lines) > 2
    assert requests // 4 < linear < requests, "not a mixture of both"


@pytest.mark.modes("ddtree-by-size")
def test_auto_has_room_for_the_widest_tree(served: Served) -> None:
    """What it chooses by is measured on a GPU; here it takes the widest preset, and steps are that tree's."""
    assert "Initialized DDTREE draft runner. budget=31," in served.engine.log()
    assert "DDTREE policy nothing measured without graphs, verify=tree-31" in served.engine.log()


@pytest.mark.modes("ddtree-15", "ddtree-by-size")
def test_tree_takes_fewer_steps_than_chain(served: Served) -> None:
    chain = sum(served.walk.steps("chain"))
    assert sum(_steps(served.alone)) < 0.9 * chain


@pytest.mark.modes("ddtree-shadow")
def test_chain_is_dflash(served: Served, book: Book) -> None:
    """A tree without branches does exactly what DFLASH does, request by request: the shadow verifies one."""
    for how in ("alone", "batch", "endings", "mixed"):
        ours, theirs = book.answers[served.mode.name][how], book.answers["dflash"][how]
        for ours_one, theirs_one in zip(ours, theirs, strict=True):
            assert cases.seen(ours_one) == cases.seen(theirs_one)
            for count in ("spec_verify_ct", "spec_accepted_drafts"):
                assert ours_one["meta_info"].get(count) == theirs_one["meta_info"].get(count), count


def test_endings(served: Served, reference: Answers) -> None:
    """Length, stop token, stop string and end of sequence cut an answer at the same token, also inside a step's path."""
    walk = served.walk
    chosen = cases.lengths(walk) + cases.stops(walk, EOS) + cases.ends(walk, EOS)
    differing = [
        case.name
        for case, answer, other in zip(chosen, served.endings, reference["endings"], strict=True)
        if cases.seen(answer) != cases.seen(other)
    ]
    assert differing == []
    reasons = [answer["meta_info"]["finish_reason"] for answer in served.endings]
    for case, answer, reason in zip(chosen, served.endings, reasons, strict=True):
        kind = case.name.split("-")[0]
        assert reason["type"] == ("length" if kind == "length" else "stop"), case.name
        assert len(answer["output_ids"]) == case.last + 1, case.name
    if served.mode.arm:
        for kind, least in {"length": 8, "token": 8, "text": 8, "eos": 1}.items():
            cut = [c for c in chosen if c.name.startswith(kind) and walk.inside(served.mode.arm, c.prompt, c.last)]
            assert len(cut) >= least, f"only {len(cut)} cases of {kind} end inside a path; choose others"


def test_mixed_lengths_in_one_batch(served: Served, reference: Answers) -> None:
    assert [cases.seen(a) for a in served.mixed] == [cases.seen(a) for a in reference["mixed"]]


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_radix_cache_hit(served: Served) -> None:
    """A prompt that goes on where an answer ended finds its tokens in the cache, and the same text follows."""
    for prompt, cut in ((0, 13), (1, 32), (2, 50)):
        served.flush()
        ids, text = served.walk.prompts[prompt], served.walk.greedy[prompt]
        first = served.engine.generate(**cases.body(ids, ignore_eos=True))
        assert (first["meta_info"]["cached_tokens"], first["output_ids"]) == (0, text)
        again = served.engine.generate(**cases.body(ids + text[:cut], ignore_eos=True, max_new_tokens=cases.NEW - cut))
        # the last token of a prompt is always computed; all before it was written by the first request's steps
        assert again["meta_info"]["cached_tokens"] == len(ids) + cut - 1
        assert again["output_ids"] == text[cut:]


def test_radix_cache_hit_on_part_of_a_prompt(served: Served) -> None:
    """A prompt that leaves a cached one in the middle is answered as on a cold cache."""
    base, other = served.walk.prompts[2], served.walk.prompts[2][:40] + served.walk.prompts[5]
    served.flush()
    cold = served.engine.generate(**cases.body(other, ignore_eos=True))
    served.flush()
    served.engine.generate(**cases.body(base, ignore_eos=True))
    warm = served.engine.generate(**cases.body(other, ignore_eos=True))
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] == _common(base, other) >= 40
    assert warm["output_ids"] == cold["output_ids"]


def _stream_until(served: Served, body: dict[str, Any], tokens: int, reached: threading.Event) -> dict[str, Any]:
    """Read a streamed answer to its end; sets `reached` when `tokens` tokens are there. Returns the last message."""
    request = urllib.request.Request(
        served.engine.url + "/generate",
        json.dumps(body | {"stream": True}).encode(),
        {"content-type": "application/json"},
    )
    last: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                last = json.loads(line[6:])
                if last["meta_info"]["completion_tokens"] >= tokens:
                    reached.set()
    return last


def test_abort_in_mid_flight(served: Served) -> None:
    """An aborted request stops early, its neighbours and followers answer exactly, its slots come back."""
    served.flush()
    before = served.idle()
    long = cases.body(served.walk.prompts[15], ignore_eos=True, max_new_tokens=1500) | {"rid": "doomed"}
    reached = threading.Event()
    ended: list[dict[str, Any]] = []
    stream = threading.Thread(target=lambda: ended.append(_stream_until(served, long, 8, reached)))
    neighbours: list[dict[str, Any]] = []
    others = threading.Thread(target=lambda: neighbours.extend(cases.ask(served.engine, cases.plain(served.walk)[:4])))
    stream.start()
    others.start()
    assert reached.wait(60), "no 8 tokens within 60 s"
    served.engine.post("/abort_request", {"rid": "doomed"})
    stream.join(60)
    others.join(60)
    assert ended, "the aborted stream did not end within 60 s"
    assert ended[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 8 <= ended[0]["meta_info"]["completion_tokens"] < 1500
    assert _outputs(neighbours) == served.walk.greedy[:4]
    after = served.idle()
    assert after["num_used_tokens"] == before["num_used_tokens"] == 0
    assert _outputs(cases.ask(served.engine, cases.plain(served.walk)[:8])) == served.walk.greedy[:8]


def test_every_slot_comes_back(served: Served) -> None:
    """After all of the above no slot is held by a request, and an emptied cache leaves none in use."""
    assert served.idle()["num_used_tokens"] == 0
    served.flush()
    load = served.idle()
    assert (load["num_used_tokens"], load["token_usage"]) == (0, 0)
    assert served.engine.process.poll() is None
    assert "memory leak" not in served.engine.log()


def test_hooks_in_the_log(served: Served, repo: Path) -> None:
    """The product's own patterns, on a real log."""
    hooks = yaml.safe_load((repo / "roles/smoke/files/hooks.yml").read_text())
    scan = smoke_judge.JournalScan(hooks, served.mode.hooks)
    for line in served.engine.log().splitlines():
        scan.feed(line)
    failed = [check for check in smoke_judge.judge_hooks(hooks, scan, served.mode.name) if not check["ok"]]
    assert failed == []
    assert wrong_backends(served.engine, served.mode.hooks) == []
    assert "Traceback" not in served.engine.log()
