# SPDX-License-Identifier: Apache-2.0
"""The split of a step, as the engine prints it when SGLANG_DDTREE_TIMING=1.

A line holds means over the steps since the line before it, for one batch size:
`DDTREE timing steps=200 draft_ms=1.93 build_ms=0.11 verify_ms=3.02 commit_ms=0.08 host_ms=0.20 batch=1`
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

LINE = re.compile(r"DDTREE timing (?P<fields>.*)")
FIELD = re.compile(r"(\w+)=(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")
ENV = {"SGLANG_DDTREE_TIMING": "1"}


def parse(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Means by batch size, weighted with steps: [{batch, steps, draft_ms, ..}]; empty if the engine reports nothing."""
    sums: dict[int, dict[str, float]] = {}
    seen: dict[int, dict[str, int]] = {}
    steps_of: dict[int, int] = {}
    for line in lines:
        match = LINE.search(line)
        if match is None or "server_args=" in line:
            continue
        fields = dict(FIELD.findall(match["fields"]))
        steps = int(float(fields.get("steps", 0)))
        if steps <= 0:
            continue
        batch = int(float(fields.get("batch", 1)))
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
