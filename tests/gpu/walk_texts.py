# SPDX-License-Identifier: Apache-2.0
"""What chains and trees must reach along given texts, computed without any engine: the walk of tests/engine/offline_walk.py.

All blocks of a text go through the drafter at once, so a GPU does 64 texts of 256 tokens in seconds; a CPU will do too.
An inflated pair is walked with the pair that it was made of: the same function, a thousandth of the work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from check_pair import Pair
from offline_walk import grow

BLOCKS = 64  # that go through the drafter at once

Arm = tuple[int, int]  # nodes without the root, candidates per position: (15, 1) is DFLASH's chain


def source(pair: Path) -> Path:
    """The pair that an inflated pair was made of, where it is still there; else the pair itself."""
    note = pair / "inflated.json"
    origin = Path(json.loads(note.read_text())["source"]) if note.is_file() else pair
    return origin if (origin / "target").is_dir() else pair


@torch.no_grad()
def tokens_per_step(
    pair: Path, prompts: Sequence[Sequence[int]], outputs: Mapping[str, Sequence[Sequence[int]]], arms: Mapping[str, Arm],
    device: str,
) -> dict[str, float]:  # fmt: skip
    """Tokens per verify step that each arm reaches along its own outputs, in float32.

    `outputs[arm]` are answers to `prompts`, as token ids. Prefill gives the first token of an answer; a step that runs past
    the end is cut there, as the engine counts.
    """
    models = Pair(source(pair), torch.float32, device)
    found: dict[str, float] = {}
    widest = max(topk for _, topk in arms.values())
    known: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}  # arms mostly answer the same
    for arm, (budget, topk) in arms.items():
        tokens = steps = 0
        for prompt, output in zip(prompts, outputs[arm], strict=True):
            text, first = [*prompt, *output], len(prompt)
            last = len(text) - 1
            key = tuple(text)
            if key not in known:
                features = models.read(torch.tensor([text], device=device))[1]
                known[key] = []
                for at in range(first, last, BLOCKS):
                    roots = list(range(at, min(at + BLOCKS, last)))
                    logits = models.drafts(features, roots, [text[root] for root in roots])
                    values, ranked = torch.log_softmax(logits, -1).topk(min(widest, logits.shape[-1]), -1)
                    known[key] += zip(values.tolist(), ranked.tolist(), strict=True)
            root = first
            while root < last:
                values, ranked = known[key][root - first]
                tree = grow([row[:topk] for row in values], [row[:topk] for row in ranked], budget)
                length = 0
                while root + 1 + length <= last and tuple(text[root + 1 : root + 2 + length]) in tree:
                    length += 1
                took = min(length + 1, last - root)
                tokens, steps, root = tokens + took, steps + 1, root + took
        found[arm] = tokens / steps
    return found
