# SPDX-License-Identifier: Apache-2.0
"""Verify input of the DDTREE algorithm: one target pass over a tree of draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A batch of trees of ``q`` slots, flattened to ``bs * q`` tokens.

    Takes the place of `DFlashVerifyInput`: same forward mode, same KV
    accounting, but slots attend along ancestors and sit at ``seq_len + depth``.

    Attributes:
        retrieve_next_token: int32 ``[bs, q]``, first child of each slot, -1 for
            none; set for targets with recurrent layers, whose states then fork
            from their parents' (`ddtree_hybrid`).
        retrieve_next_sibling: int32 ``[bs, q]``, next child of the same parent.
    """

    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None


def flat_mask(ancestors: torch.Tensor, seq_lens: torch.Tensor, total: int) -> torch.Tensor:
    """The engine's mask for a forward pass without a CUDA graph.

    Args:
        ancestors: bool ``[bs, q, q]``, which slots each slot may see in its tree.
        seq_lens: ``[bs]``, lengths of the prefixes.
        total: sum of ``q * (seq_len + q)``, which the host knows.

    Returns:
        flat bool, per request ``[q, seq_len + q]``, True where a query may look:
        all of the prefix, and its own ancestors in the tree.
    """
    q, device = ancestors.shape[1], ancestors.device
    prefix = seq_lens.to(torch.int64)
    width = prefix + q
    start = (q * width).cumsum(0) - q * width
    slot = torch.arange(q, device=device)
    entry = start[:, None, None] + slot[None, :, None] * width[:, None, None] + prefix[:, None, None] + slot
    mask = torch.ones(total, dtype=torch.bool, device=device)
    mask[entry.flatten()] = ancestors.flatten()
    return mask
