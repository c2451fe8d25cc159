# SPDX-License-Identifier: Apache-2.0
"""What requests ask of the target's tokens, on a GPU and from graphs: penalties, sampling from one token, a minimum length.

One server without speculation and one with trees, side by side, on the first pair there is. sgl-kernel's norms know no
float32 on a GPU, so this is bfloat16: answers may part at a near tie, told by the log-probabilities that baseline's own
tokens were chosen by (penalties count in). Baseline runs without overlap scheduling, which counts a token into penalties one step
late (`ScheduleBatch.prepare_for_decode`, delayed_output_ids).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import modes
import pytest
from test_modes import NAMED, ROOM

from fleet.bench import client, servers
from fleet.bench.arms import arms

NEW, COUNT = 48, 8
NEAR_TIE = 0.25  # nats, as in the smoke
LIKELIEST = 20
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "frequency": {"frequency_penalty": 0.7},
    "presence and repetition": {"presence_penalty": 0.4, "repetition_penalty": 1.2},
    "at least 24 tokens": {"min_new_tokens": 24},
    "sampled from one": {"temperature": 1.0, "top_k": 1},
    "sampled from hardly more than one": {"temperature": 1.0, "top_p": 1e-6},
}

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(scope="module")
def ports(engine: None) -> Iterator[dict[str, int]]:
    """Port of each arm."""
    pairs = [*NAMED, *sorted(config.parents[1] for config in ROOM.glob("*dense*/target/config.json"))]
    if not pairs:  # they are carried to a GPU machine, and no part of the repository
        pytest.skip(f"no dense pair below {ROOM}; name one in GPU_PAIRS")
    out = Path(mkdtemp(prefix="gpu-requests-"))
    base = modes.BASE | {
        "model-path": [str((pairs[0] / "target").resolve())], "max-total-tokens": ["4096"],
    }  # fmt: skip
    with servers.resident(
        arms(["baseline-nooverlap", "ddtree:15"], (pairs[0] / "draft").resolve()), python=sys.executable, base=base, env={},
        folder=out, wave=2, say=modes.say, deadline=time.monotonic() + modes.START_LIMIT,
    ) as started:  # fmt: skip
        for server in started:
            assert server.error is None, f"{server.arm.name}: {server.error}"
        yield {server.arm.name: server.port for server in started}


def ask(port: int, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """All at the same time; greedy unless said otherwise."""
    asked = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": "min_new_tokens" not in sampling, **sampling}
    bodies = [{"input_ids": list(ids), "sampling_params": asked, **more} for ids in prompts]
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: client.post(port, "/generate", body), bodies))


def answers(port: int, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[list[int]]:
    return [row["output_ids"] for row in ask(port, prompts, sampling)]


def parting(wanted: dict[str, Any], got: list[int]) -> tuple[int, float]:
    """Tokens before the first other one; how much less likely than its own baseline held that (none: 0, not listed: inf)."""
    own = wanted["output_ids"]
    for at, (ours, theirs) in enumerate(zip(own, got, strict=False)):
        if ours != theirs:
            said = {token: log_prob for log_prob, token, _ in wanted["meta_info"]["output_top_logprobs"][at]}
            return at, said[ours] - said[theirs] if theirs in said else math.inf
    return len(got), 0.0 if len(own) == len(got) else math.inf


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[7 + 3 * n, 40 + n, 200 + 5 * n, 31, 90 + 2 * n, 12, 77 + n] for n in range(COUNT)]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_baselines(ports: dict[str, int], prompts: list[list[int]], kind: str) -> None:
    wanted = ask(ports["baseline-nooverlap"], prompts, KINDS[kind], return_logprob=True, top_logprobs_num=LIKELIEST)
    got = answers(ports["ddtree:15"], prompts, KINDS[kind])
    partings = [parting(*both) for both in zip(wanted, got, strict=True)]
    assert max(gap for _, gap in partings) <= NEAR_TIE, partings
    assert sum(same for same, _ in partings) >= COUNT * NEW // 2, partings


@pytest.mark.parametrize("kind", ["frequency", "presence and repetition"])
def test_what_is_asked_shows(ports: dict[str, int], prompts: list[list[int]], kind: str) -> None:
    """Control: these answers are not what plain greedy gives, so equality above says something."""
    assert answers(ports["ddtree:15"], prompts, KINDS[kind]) != answers(ports["ddtree:15"], prompts, {})


def test_sampling_is_random(ports: dict[str, int], prompts: list[list[int]]) -> None:
    hot = {"temperature": 1.5}
    first, second = (answers(ports["ddtree:15"], prompts, hot) for _ in range(2))
    assert all(len(ids) == NEW for ids in first + second)
    assert first != second
