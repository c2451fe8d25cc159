# SPDX-License-Identifier: Apache-2.0
"""Requests that share a batch, requests that are streamed or ask for several answers, and requests that are refused."""

from __future__ import annotations

import http.client
import itertools
import json
import math
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine import cases
from tests.engine.conftest import Served
from tests.engine.launch import EngineFailed

SAMPLED = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.95, "min_p": 0.02}]
REFUSED: dict[str, dict[str, Any]] = {
    "return_logprob": {"return_logprob": True},
    "grammar": {"sampling_params": {"regex": "[a-z]+"}},
    "grammar_json": {"sampling_params": {"json_schema": '{"type": "object"}'}},
    "return_hidden_states": {"return_hidden_states": True},
}


@pytest.mark.modes("ddtree-15")
def test_greedy_beside_sampled(served: Served) -> None:
    """A sampled neighbour changes nothing for a greedy request, and every filter of the sampler serves on a tree."""
    bodies = []
    for index in range(8):
        bodies.append(cases.body(served.walk.prompts[index], ignore_eos=True, max_new_tokens=cases.NEW))
        sampled = cases.body(served.walk.prompts[index], ignore_eos=True, max_new_tokens=cases.NEW)
        sampled["sampling_params"] |= {"temperature": 1.0} | SAMPLED[index % len(SAMPLED)]
        bodies.append(sampled)
    answers = cases.ask(served.engine, bodies, together=16)
    assert [answer["output_ids"] for answer in answers[::2]] == served.walk.greedy[:8]
    assert all(len(answer["output_ids"]) == cases.NEW for answer in answers[1::2])
    assert any(a["output_ids"] != g for a, g in zip(answers[1::2], served.walk.greedy[:8], strict=True))


@pytest.mark.modes("ddtree-15", "ddtree-by-size")
def test_streamed(served: Served) -> None:
    """Pieces of a stream are what one answer would be, a step's tokens at a time, also behind a stop string's end."""
    ids, greedy, pieces = (column[2] for column in (served.walk.prompts, served.walk.greedy, served.walk.pieces))
    request = urllib.request.Request(
        served.engine.url + "/generate",
        json.dumps(cases.body(ids, ignore_eos=True) | {"stream": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        messages = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    counts = [message["meta_info"]["completion_tokens"] for message in messages]
    assert counts == sorted(counts)
    assert max(b - a for a, b in itertools.pairwise(counts)) > 1, "no step gave several tokens"
    for message, count in zip(messages, counts, strict=True):
        assert message["output_ids"] == greedy[:count]
        assert "".join(pieces).startswith(message["text"])
    assert counts[-1] == cases.NEW


@pytest.mark.modes("ddtree-15")
def test_several_answers_to_one_prompt(served: Served) -> None:
    """Greedy ones are equal; sampled ones are drawn apart (how they are distributed: test_sampling.py)."""
    ids = served.walk.prompts[1]
    greedy = served.engine.generate(**cases.body(ids, ignore_eos=True, n=3))
    assert [answer["output_ids"] for answer in greedy] == [served.walk.greedy[1]] * 3
    drawn = served.engine.generate(**cases.body(ids, ignore_eos=True, n=4, temperature=1.0))
    assert len({tuple(answer["output_ids"]) for answer in drawn}) == 4


@pytest.mark.modes("ddtree-15", "ddtree-shadow")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_tree_cannot_serve_is_refused(served: Served, name: str) -> None:
    """One clear answer for this request; the next one is served."""
    request = cases.body(served.walk.prompts[0], ignore_eos=True, max_new_tokens=8)
    extra = dict(REFUSED[name])
    request["sampling_params"] |= extra.pop("sampling_params", {})
    with pytest.raises(EngineFailed, match=r"^POST /generate: 400 .*does not support") as refused:
        served.engine.generate(**request, **extra)
    assert name.split("_", maxsplit=1)[0] in str(refused.value)
    plain = cases.body(served.walk.prompts[0], ignore_eos=True, max_new_tokens=8)
    assert served.engine.generate(**plain)["output_ids"] == served.walk.greedy[0][:8]


# Each of them ends the scheduler of the released engine.
BAD: dict[str, dict[str, Any]] = {
    "a token that there is not": {"input_ids": [5, 99999999]},
    "a negative token": {"input_ids": [5, -1]},
    "a huge token": {"input_ids": [2**70]},
    "no temperature": {"sampling_params": {"temperature": math.nan, "max_new_tokens": 4}},
    "a top-k beyond 32 bits": {"sampling_params": {"temperature": 0.8, "top_k": 2**40}},
    "half a token": {"sampling_params": {"max_new_tokens": 3.5}},
    "a bias that is a list": {"sampling_params": {"max_new_tokens": 4, "logit_bias": [1]}},
    "a bias without end": {"sampling_params": {"max_new_tokens": 4, "logit_bias": {"5": math.inf}}},
    "a held up stop token that there is not": {"sampling_params": {"min_new_tokens": 2, "stop_token_ids": [99999999]}},
    "the log-probability of no token": {"token_ids_logprob": [99999999]},
}


@pytest.mark.modes("baseline", "ddtree-15")
@pytest.mark.parametrize("name", BAD)
def test_values_that_would_end_the_engine_are_refused(served: Served, name: str) -> None:
    good = cases.body(served.walk.prompts[0], ignore_eos=True, max_new_tokens=8)
    field = r"(_ids|temperature|top_k|tokens|bias)"
    with pytest.raises(EngineFailed, match=rf"^POST /generate: 400 .*{field}"):
        served.engine.generate(**good | BAD[name])
    assert re.match(
        rf'data: {{"error": ?{{"message": ?"[^"]*{field}', served.engine.generate(**good | BAD[name] | {"stream": True})
    )
    assert served.engine.generate(**good)["output_ids"] == served.walk.greedy[0][:8]


@pytest.mark.modes("ddtree-15")
def test_log_probabilities_are_refused_in_a_stream_too(served: Served) -> None:
    chat = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True}
    with pytest.raises(EngineFailed, match=r"400 .*does not support return_logprob"):
        served.engine.post("/v1/chat/completions", chat | {"stream": True})


@pytest.mark.modes("ddtree-15")
def test_a_request_that_fails_takes_no_other_along(served: Served) -> None:
    """Ids that clients give: the one of a running request, and the one that several answers would have had."""
    ids = served.walk.prompts[0]
    running = cases.body(ids, ignore_eos=True, max_new_tokens=cases.NEW) | {"rid": "mine_1"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.engine.generate, **running)
        served.wait_for(lambda load: load["num_running_reqs"] > 0 or answer.done())
        with pytest.raises(EngineFailed, match=r"400 .*longer than"):
            served.engine.generate(rid="mine", input_ids=[5] * 5000, sampling_params={"n": 2, "max_new_tokens": 8})
        assert answer.result(timeout=60)["output_ids"] == served.walk.greedy[0]
    with pytest.raises(EngineFailed, match=r"400 .*Duplicate request ID"):
        served.engine.generate(rid=["twice", "twice"], input_ids=[ids, ids], sampling_params={"max_new_tokens": 8})
    again = cases.body(ids, ignore_eos=True, max_new_tokens=8) | {"rid": "twice"}
    assert served.engine.generate(**again)["output_ids"] == served.walk.greedy[0][:8]


@pytest.mark.modes("ddtree-15")
@pytest.mark.parametrize("several", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_away(served: Served, several: int, stream: bool) -> None:
    """What they asked for ends; that the engine forgets it shows when it is stopped (conftest.py)."""
    asked = cases.body(served.walk.prompts[0], ignore_eos=True, max_new_tokens=100, n=several) | {"stream": stream}
    for reached in ("sent", "running"):
        client = http.client.HTTPConnection(served.engine.url.removeprefix("http://"))
        client.request("POST", "/generate", json.dumps(asked), {"content-type": "application/json"})
        if reached == "running":
            served.wait_for(lambda load: load["num_running_reqs"] > 0)
        client.close()
    assert served.idle()["num_used_tokens"] == 0


@pytest.mark.modes("ddtree-15")
def test_prompts_that_are_too_long_are_refused(served: Served) -> None:
    """Alone and beside one that is not; that the engine forgets them shows when it is stopped (conftest.py)."""
    long, short = [5] * 5000, served.walk.prompts[0]
    for ids in (long, [short, long]):
        with pytest.raises(EngineFailed, match=r"400 .*longer than the model's context length"):
            served.engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 8})


@pytest.mark.modes("ddtree-15")
def test_aborted_while_they_wait(served: Served) -> None:
    """Those that run and those that wait end; all slots come back."""
    crowd = [cases.body(ids, ignore_eos=True, max_new_tokens=300) for ids in served.walk.prompts[:10] * 4]
    with ThreadPoolExecutor(len(crowd)) as pool:
        asked = [pool.submit(served.engine.generate, **request) for request in crowd]
        served.wait_for(lambda load: load["num_waiting_reqs"] > 0)
        served.engine.post("/abort_request", {"abort_all": True})
        ends = [future.result(timeout=120)["meta_info"] for future in asked]
    waited = [end for end in ends if end["finish_reason"].get("message") == "Abort in waiting queue"]
    assert waited and all(end["completion_tokens"] == 0 for end in waited)
    assert served.idle()["num_used_tokens"] == 0
