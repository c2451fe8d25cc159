# SPDX-License-Identifier: Apache-2.0
"""The split of a step, as the engine prints it when SGLANG_DDTREE_TIMING=1.

A line holds means over the steps since the line before it; `batch` is a mean as well:
`DDTREE timing steps=200 draft_ms=1.93 build_ms=0.11 verify_ms=3.02 commit_ms=0.08 host_ms=0.20 batch=1.00`
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

LINE = re.compile(r"DDTREE timing (?P<fields>.*)")
FIELD = re.compile(r"(\w+)=(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")
# Short intervals, so that few lines mix one load with the next.
ENV = {"SGLANG_DDTREE_TIMING": "1", "SGLANG_DDTREE_METRICS_INTERVAL": "25"}


def lines_of(log: Iterable[str]) -> list[str]:
    """The timing lines of one load: the first also counts what came before it, so it is left out where there are more."""
    found = [line for line in log if LINE.search(line) and "server_args=" not in line]
    return found[1:] or found


def parse(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Means by (rounded) batch size, weighted with steps: [{batch, steps, draft_ms, ..}]; empty if the engine reports nothing."""
    sums: dict[int, dict[str, float]] = {}
    seen: dict[int, dict[str, int]] = {}
    steps_of: dict[int, int] = {}
    for line in lines:
        match = LINE.search(line)
        if match is None:
            continue
        fields = dict(FIELD.findall(match["fields"]))
        steps = int(float(fields.get("steps", 0)))
        if steps <= 0:
            continue
        batch = round(float(fields.get("batch", 1)))
        steps_of[batch] = steps_of.get(batch, 0) + steps
        for name, value in fields.items():
            if name.endswith("_ms"):
                sums.setdefault(batch, {})[name] = sums.get(batch, {}).get(name, 0.0) + float(value) * steps
                seen.setdefault(batch, {})[name] = seen.get(batch, {}).get(name, 0) + steps
    return [
        {"batch": batch, "steps": steps_of[batch]}
        | {name: total / seen[batch][name] for name, total in sums.get(batch, {}).items()}
        for batch in sorted(steps_of)
    ]
