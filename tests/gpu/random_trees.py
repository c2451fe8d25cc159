# SPDX-License-Identifier: Apache-2.0
"""Random input for the tree's kernels, with the cases that break ties and bounds."""

from __future__ import annotations

import torch
from ddtree_utils import DDTree, build_ddtree
from torch import Tensor

STYLES = ("plain", "ties", "holes", "certain")


def candidates(style: str, bs: int, depth: int, k: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and token ids `[bs, depth, k]` of a drafter, best first, lower token first among equals.

    plain: a softmax. ties: of few distinct values, so that scores repeat across levels. holes: some candidates are -inf, in
    the first row all but one. certain: the first candidate of most positions has probability 1.
    """
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, depth, vocab, generator=source) * 4
    if style == "ties":
        logits = (logits / 3).round()
    scores = torch.log_softmax(logits, -1)
    if style == "ties":
        scores = (scores * 2).round() / 2  # exact sums, so that equal paths have equal scores
    if style == "certain":
        sure = torch.rand(bs, depth, generator=source) < 0.7
        top = scores.argmax(-1, keepdim=True)
        spike = torch.full_like(scores, -torch.inf).scatter(-1, top, 0.0)
        scores = torch.where(sure[..., None], spike, scores)
    if style == "holes":
        scores = scores.masked_fill(torch.rand(scores.shape, generator=source) < 0.5, -torch.inf)
        scores[0] = -torch.inf
        scores[0, :, vocab // 2] = -0.5
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), ids[..., :k].contiguous()


def tree(style: str, bs: int, depth: int, k: int, budget: int, seed: int, spine: int = 0) -> DDTree:
    """A tree of the reference implementation on the CPU."""
    return build_ddtree(*candidates(style, bs, depth, k, 64, seed), budget, spine=spine)


def targets(built: DDTree, vocab: int, seed: int) -> Tensor:
    """What a target might say at each slot `[bs, q]`: mostly the token of one of the slot's children."""
    source = torch.Generator().manual_seed(seed)
    said = torch.randint(0, vocab, built.parents.shape, generator=source)
    for row, parents in enumerate(built.parents.tolist()):
        for slot in range(len(parents)):
            children = [child for child, parent in enumerate(parents) if parent == slot]
            if children and float(torch.rand((), generator=source)) < 0.8:
                pick = int(torch.randint(0, len(children), (), generator=source))
                said[row, slot] = built.token_ids[row, children[pick]]
    return said
