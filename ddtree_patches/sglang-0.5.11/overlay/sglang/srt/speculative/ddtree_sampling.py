# SPDX-License-Identifier: Apache-2.0
"""The target's token at every slot of a tree: argmax, or one draw as the engine's sampler makes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Optional

import torch

from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_SAMPLED_ROWS = 64
"""Rows of logits that are sampled at once: a filter sorts the vocabulary of every row."""


def target_tokens(
    logits: torch.Tensor, positions: torch.Tensor, info: Optional[SamplingBatchInfo], q: int, sampler: Sampler
) -> torch.Tensor:
    """Choose at each slot.

    Args:
        logits: ``[bs * q, vocab]``, as `adjust_logits` leaves them.
        positions: int64 ``[bs * q]``.
        info: the batch's sampling parameters, or None for greedy.
        sampler: the target's, whose backend draws.

    Returns:
        int64 ``[bs, q]``.
    """
    if info is None or info.is_all_greedy:
        return torch.argmax(logits, dim=-1).view(-1, q)

    def per_slot(values: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(values, q, dim=0)

    filtered = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    temperatures, top_ks, top_ps, min_ps = (
        per_slot(values) for values in (info.temperatures, info.top_ks, info.top_ps, info.min_ps)
    )
    drawn = []
    for start in range(0, logits.shape[0], _SAMPLED_ROWS):
        rows = slice(start, start + _SAMPLED_ROWS)
        part = SimpleNamespace(
            top_ks=top_ks[rows],
            top_ps=top_ps[rows],
            min_ps=min_ps[rows],
            need_min_p_sampling=info.need_min_p_sampling,
            sampling_seed=None,
        )
        probs = torch.softmax(logits[rows].float() / temperatures[rows], dim=-1)
        drawn.append(sampler._sample_from_probs(probs, part, positions[rows], not filtered))
    # A greedy request in a sampled batch has top-k 1: argmax, so that equal logits are settled as ever.
    chosen = torch.where(top_ks <= 1, torch.argmax(logits, dim=-1), torch.cat(drawn).to(torch.int64)).view(-1, q)
    tp_group = get_tp_group()
    if tp_group.world_size > 1:
        chosen = tp_group.broadcast(chosen.contiguous(), src=0)
    return chosen
