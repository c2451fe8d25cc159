# SPDX-License-Identifier: Apache-2.0
"""Many requests at once for a while on one arm: its answers stay what they are, and its KV pool is whole afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fleet.bench import client, texts
from fleet.bench.equality import Likely
from fleet.bench.rounds import Ids
from fleet.bench.servers import Server


def pool(server: Server, limit: float = 60) -> dict[str, int]:
    """{used, size} of the KV pool in tokens once nothing runs. Raises client.Refused if that does not come, or OSError."""
    deadline = time.monotonic() + limit
    while True:
        load = client.get(server.port, "/v1/loads?include=core")["loads"][0]
        if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
            return {"used": int(load["num_used_tokens"]), "size": int(load["max_total_num_tokens"])}
        if time.monotonic() > deadline:
            raise client.Refused(f"still busy after {limit:.0f} s: {load}")
        time.sleep(0.1)


def run(
    server: Server,
    prompts: Sequence[Ids],
    alone: dict[int, list[Ids]],
    likely: Likely,
    *,
    new: int,
    together: int,
    seconds: float,
    bound: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Soak one server; `alone` are its answers given alone, which every answer has to equal up to a near tie."""
    name = server.arm.name
    say(f"soak: {together} requests at once on {name} for {seconds:.0f} s")
    before = pool(server)
    chosen = [(number, prompts[number]) for number in sorted(alone)]
    load = client.load(server.port, chosen, new, together, until=time.monotonic() + seconds)
    after = pool(server)
    rows, errors = [], []
    for answer in load.answers:
        if answer.error is not None:
            errors.append(answer.error)
            continue
        want = next((ids for ids in alone[answer.prompt] if ids == answer.ids), alone[answer.prompt][0])
        told = None if want == answer.ids else likely.along(answer.prompt, want)
        rows.append({"prompt": answer.prompt, **texts.judge(want, answer.ids, told, bound)})
    return {
        "arm": name,
        "seconds": load.seconds,
        "together": together,
        "requests": len(load.answers),
        "tokens": load.tokens,
        "tok_s": load.tokens / load.seconds,
        "errors": errors,
        "output": texts.count(rows),
        "pool_before": before,
        "pool_after": after,
    }
