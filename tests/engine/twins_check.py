# SPDX-License-Identifier: Apache-2.0
"""Compare the cpu profile's torch twins with the engine's own Triton kernels under Triton's interpreter.

Run with the engine's Python and the environment of the cpu profile. Writes `{case: largest difference}` as JSON. Outputs
start as NaN, so that a row that a twin forgot is a difference and not an accident of old memory.
"""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import torch
from sglang.srt.layers.attention.triton_ops import decode_attention, extend_attention
from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool
from sglang_fleet_cpu import attention, indices

SLOTS, DIM = 600, 32


def _tree_mask(nodes: int, prefix: int, hide_prefix: bool) -> torch.Tensor:
    """A random tree's ancestors as `[nodes, prefix + nodes]`; with `hide_prefix` some prefix tokens are hidden too."""
    mask = torch.zeros(nodes, prefix + nodes, dtype=torch.bool)
    mask[:, :prefix] = True
    for node in range(nodes):
        if node:
            parent = random.randrange(node)
            mask[node, prefix:] = mask[parent, prefix:]
        mask[node, prefix + node] = True
    if hide_prefix:
        mask[:, :prefix] &= torch.rand(nodes, prefix) > 0.4
    return mask


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; infinity where either is NaN."""
    worst = float((a.float() - b.float()).abs().max())
    return 1e30 if math.isnan(worst) else worst


def extend(
    new: list[int], old: list[int], *, heads: int = 4, kv_heads: int = 2, mask: str = "causal", skip_prefix: bool = True,
    cap: float = 0.0, dtype: torch.dtype = torch.float32, out: bool = True,
) -> float:  # fmt: skip
    """One call of both extend functions on the same packed batch with scattered KV slots."""
    total = sum(new)
    q = torch.randn(total, heads, DIM, dtype=dtype)
    k, v = torch.randn(2, total, kv_heads, DIM, dtype=dtype)
    k_pool, v_pool = torch.randn(2, SLOTS, kv_heads, DIM, dtype=dtype)
    slots = torch.randperm(SLOTS)[: sum(old)]
    qo = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    kv = torch.tensor([0, *old]).cumsum(0).to(torch.int32)
    custom, starts = None, None
    if mask in ("tree", "holes"):
        parts = [_tree_mask(n, p, mask == "holes") for n, p in zip(new, old, strict=True)]
        custom = torch.cat([part.flatten() for part in parts])
        starts = torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0)
    results = []
    for function in (extend_attention.extend_attention_fwd, attention.extend_attention_fwd):
        o = torch.full_like(q, float("nan"))
        function(
            q, k, v, o, k_pool, v_pool, qo, kv, slots, custom, mask != "full", starts, max(new), 1.0, 1.0, DIM**-0.5,
            logit_cap=cap, skip_prefix_custom_mask=skip_prefix,
        )  # fmt: skip
        results.append(o)
    return _difference(*results)


def decode(old: list[int], *, heads: int = 4, kv_heads: int = 2, cap: float = 0.0) -> float:
    """One call of both decode functions."""
    requests, splits = len(old), 8
    q = torch.randn(requests, heads, DIM)
    k_pool, v_pool = torch.randn(2, SLOTS, kv_heads, DIM)
    slots = torch.randperm(SLOTS)[: sum(old)]
    kv = torch.tensor([0, *old]).cumsum(0).to(torch.int32)
    results = []
    for function in (decode_attention.decode_attention_fwd, attention.decode_attention_fwd):
        o = torch.full_like(q, float("nan"))
        function(
            q, k_pool, v_pool, o, kv, slots, torch.empty(requests, heads, splits, DIM), torch.empty(requests, heads, splits),
            torch.full((requests,), splits, dtype=torch.int32), splits, DIM**-0.5, 1.0, 1.0, logit_cap=cap,
        )  # fmt: skip
        results.append(o)
    return _difference(*results)


def kv_indices(starts: list[int] | None) -> float:
    """Both index gathers, with and without a start per request."""
    table = torch.randperm(8 * 100).view(8, 100).to(torch.int32)
    rows, lengths = torch.tensor([5, 0, 7]), torch.tensor([40, 1, 59])
    indptr = torch.tensor([0, *lengths.tolist()]).cumsum(0).to(torch.int32)
    start = torch.tensor(starts, dtype=torch.int32) if starts else None
    results = []
    for kernel in (create_flashinfer_kv_indices_triton, indices.TWINS_BY_NAME["create_flashinfer_kv_indices_triton"]):
        out = torch.full((int(lengths.sum()) + 5,), -1, dtype=torch.int64)
        kernel[(3,)](table, rows, lengths, indptr, start, out, table.stride(0))
        results.append(out)
    return _difference(*results)


def assign_slots() -> float:
    """Both bookkeeping kernels, requests that get 1, 0, 33 and 70 new slots."""
    starts = torch.tensor([3, 10, 0, 25])
    ends = starts + torch.tensor([1, 0, 33, 70])
    new = torch.randperm(500)[:104]
    results = []
    for kernel in (assign_req_to_token_pool, indices.TWINS_BY_NAME["assign_req_to_token_pool"]):
        table = torch.full((6, 100), -1, dtype=torch.int32)
        kernel[(4,)](torch.tensor([2, 0, 5, 3]), table, starts, ends, new, table.shape[1], 4)
        results.append(table)
    return _difference(*results)


def main() -> int:
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "prefill": extend([7, 1, 70], [0, 0, 0]),
        "prefill after a cached prefix": extend([5, 66, 1], [13, 0, 90]),
        "drafter block, all see all": extend([16, 16], [40, 3], mask="full"),
        "chain verify": extend([16], [37], mask="causal"),
        "tree verify, budget 7": extend([8, 8, 8], [20, 1, 75], mask="tree"),
        "tree verify, budget 15": extend([16, 16], [70, 33], mask="tree"),
        "tree verify, budget 31": extend([32], [50], mask="tree"),
        "tree verify, budget 63, past one block": extend([64, 64], [65, 0], mask="tree"),
        "tree mask whose prefix part is skipped": extend([16, 16], [30, 9], mask="holes", skip_prefix=True),
        "tree mask whose prefix part counts": extend([16, 16], [30, 9], mask="holes", skip_prefix=False),
        "one head per KV head": extend([8, 3], [10, 4], heads=4, kv_heads=4, mask="tree"),
        "soft cap": extend([8], [10], cap=3.0, mask="tree"),
        # not bfloat16: Triton 3.6's interpreter multiplies its bits as if they were integers
        "float16": extend([8, 9], [10, 0], dtype=torch.float16, mask="tree"),
        "decode": decode([1, 90, 33]),
        "decode, equal lengths": decode([17, 17]),
        "decode, one head per KV head": decode([12, 70], heads=4, kv_heads=4),
        "decode, soft cap": decode([12, 70], cap=3.0),
        "index lists": kv_indices(None),
        "index lists with starts": kv_indices([9, 99, 41]),
        "slot bookkeeping": assign_slots(),
    }
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
