# SPDX-License-Identifier: Apache-2.0
"""What DDTREE counts and times, and the log lines that say it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

import torch


def metrics_interval() -> int:
    """Verify steps between two `DDTREE metrics` or `DDTREE timing` lines."""
    text = os.environ.get("SGLANG_DDTREE_METRICS_INTERVAL", "100")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"SGLANG_DDTREE_METRICS_INTERVAL must be a whole number from 1 on, got {text!r}.")
    return int(text)


@dataclass
class DDTreeMetrics:
    """Sums over verified requests since start.

    `in_tree` counts emitted tokens that the tree held: in tree mode these are
    the accepted drafts, in shadow mode what the tree would have accepted of the
    text that linear verification emitted (a lower bound, since a longer accepted
    path would have gone on). `along_chain` counts emitted tokens that the greedy
    chain began with: what linear verification would have accepted, at the least.
    `linear` counts requests that were verified linearly in tree mode.
    """

    steps: int = 0
    requests: int = 0
    accepted: int = 0
    nodes: int = 0
    in_tree: int = 0
    along_chain: int = 0
    linear: int = 0
    mark: str = ""

    def line(self) -> str:
        """The body of the `DDTREE metrics` log line."""
        n, trees = max(self.requests, 1), max(self.requests - self.linear, 1)
        return (
            f"steps={self.steps} requests={self.requests} mean_accepted={self.accepted / n:.3f} "
            f"tokens_per_step={self.accepted / n + 1:.3f} tree_nodes={self.nodes / trees:.1f} "
            f"mean_in_tree={self.in_tree / trees:.3f} mean_along_chain={self.along_chain / n:.3f} "
            f"linear={self.linear}{self.mark}"
        )


class StepClock:
    """Where a step's time goes, by CUDA events; only with SGLANG_DDTREE_TIMING=1, since events cost launches.

    The stages are draft (the drafter's pass), build (scores and trees), host (the
    device waits for the host's verify launch), verify (the target's pass) and
    commit (walk, KV, drafter's cache).
    """

    _STAGES = (("draft", "build"), ("build", "built"), ("built", "verify"), ("verify", "commit"), ("commit", "committed"))
    _NAMES = ("draft", "build", "host", "verify", "commit")

    def __init__(self, device: Any, logger: logging.Logger):
        self.on = os.environ.get("SGLANG_DDTREE_TIMING") == "1" and torch.device(device).type == "cuda"
        self._logger = logger
        self._interval = metrics_interval()
        self._open: Dict[str, torch.cuda.Event] = {}
        self._done: List[Tuple[Dict[str, torch.cuda.Event], int]] = []
        self._began = time.perf_counter()

    def mark(self, stage: str) -> None:
        """The device has come to the start of `stage`."""
        if not self.on:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if stage == "draft" and "committed" in self._open:
            self._close()
        self._open[stage] = event

    def _close(self) -> None:
        self._done.append((self._open, 0))
        self._open = {}

    def step_done(self, batch: int) -> None:
        """A step's tokens are out; every interval a line with the means since the last one."""
        if not self.on:
            return
        if "committed" in self._open:
            self._close()
        if self._done:
            self._done[-1] = (self._done[-1][0], batch)
        if len(self._done) < self._interval:
            return
        torch.cuda.synchronize()
        whole = [events for events, _ in self._done if len(events) == len(self._STAGES) + 1]
        n = max(len(whole), 1)
        wall = (time.perf_counter() - self._began) / len(self._done) * 1000
        means = [sum(events[a].elapsed_time(events[b]) for events in whole) / n for a, b in self._STAGES]
        parts = " ".join(f"{name}_ms={mean:.3f}" for name, mean in zip(self._NAMES, means))
        batch = sum(b for _, b in self._done) / len(self._done)
        self._logger.info("DDTREE timing steps=%d %s wall_ms=%.3f batch=%.2f", len(self._done), parts, wall, batch)
        self._done.clear()
        self._began = time.perf_counter()
