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
from sglang_fleet_cpu import attention, indices, recurrent

recurrent.install(interpreted=True)  # the kernels of gated delta nets as they are, fit for the interpreter
from sglang.jit_kernel.triton import gdn_fused_proj  # noqa: E402
from sglang.srt.layers.attention.fla import (  # noqa: E402
    fused_gdn_gating,
    fused_norm_gate,
    fused_recurrent,
    fused_sigmoid_gating_recurrent,
)
from sglang.srt.layers.attention.mamba import causal_conv1d_triton  # noqa: E402

SLOTS, DIM = 600, 32
HEADS, KEY_HEADS, STATES = 4, 2, 9  # of a recurrent layer; rows of its pool


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


def _links(requests: int, slots: int, used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random trees of `used` slots as first children and next siblings."""
    child = torch.full((requests, slots), -1, dtype=torch.int32)
    sibling = child.clone()
    for request in range(requests):
        last: dict[int, int] = {}
        for slot in range(1, used):
            parent = random.randrange(slot)
            (sibling[request] if parent in last else child[request])[last.get(parent, parent)] = slot
            last[parent] = slot
    return child, sibling


def _worst(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(_difference(a, b) for a, b in zip(one, other, strict=True))


def convolution(requests: int, slots: int, *, tree: int = 0, width: int = 4, bias: bool = False) -> float:
    """One step of the causal convolution: outputs, states, kept windows and parents; `tree` slots are used."""
    channels, spare = 48, 2
    x = torch.randn(requests, channels, slots)
    pool = torch.randn(STATES, channels, width - 1)
    weight = torch.randn(channels, width)
    rows = torch.randperm(STATES)[:requests].to(torch.int32)
    links = _links(requests, slots, tree) if tree else (None, None)
    results = []
    for function in (causal_conv1d_triton.causal_conv1d_update, recurrent.causal_conv1d_update):
        state = pool.clone()
        kept = torch.full((STATES, slots + spare, channels, width - 1), 7.0)
        parents = torch.full((requests, slots), -9, dtype=torch.int32) if tree else None
        out = function(
            x if slots > 1 else x[:, :, 0], state, weight, torch.randn(channels, generator=_seeded()) if bias else None,
            "silu", conv_state_indices=rows, intermediate_conv_window=kept if slots > 1 else None,
            intermediate_state_indices=torch.arange(requests, dtype=torch.int32) if slots > 1 else None,
            retrieve_next_token=links[0], retrieve_next_sibling=links[1], retrieve_parent_token=parents,
        )  # fmt: skip
        results.append([out, state, kept, *([parents] if parents is not None else [])])
    return _worst(*results)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def delta_rule(requests: int, slots: int, *, tree: int = 0, width: int | None = None) -> float:
    """A verify pass of the gated delta rule: outputs and the state after each slot, in a buffer of `width` slots a row."""
    tokens, width = requests * slots, width or slots
    q, k = torch.randn(2, 1, tokens, KEY_HEADS, DIM)
    v = torch.randn(1, tokens, HEADS, DIM)
    a, b = torch.randn(2, tokens, HEADS)
    decay, shift = torch.randn(2, HEADS)
    pool = torch.randn(STATES, HEADS, DIM, DIM)
    rows = torch.randperm(STATES)[:requests].to(torch.int32)
    parents = None
    if tree:
        child, sibling = _links(requests, slots, tree)
        found = [recurrent._parents(c.tolist(), s.tolist()) for c, s in zip(child, sibling, strict=True)]
        parents = torch.tensor(found, dtype=torch.int32)
    results = []
    for function in (
        fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update,
        recurrent.fused_sigmoid_gating_delta_rule_update,
    ):
        state, kept = pool.clone(), torch.full((STATES, width, HEADS, DIM, DIM), 7.0)
        out = function(
            A_log=decay, a=a, dt_bias=shift, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v, b=b,
            initial_state_source=state, initial_state_indices=rows, use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.arange(0, tokens + 1, slots, dtype=torch.int32), disable_state_update=True,
            intermediate_states_buffer=kept, intermediate_state_indices=torch.arange(requests, dtype=torch.int32),
            cache_steps=width, retrieve_parent_token=parents,
        )  # fmt: skip
        results.append([out, state, kept])
    return _worst(*results)


def packed_decode(requests: int, tokens: int = 1) -> float:
    """Tokens one after the other through the decode kernel, against its twin and against prefill's twin."""
    channels = 2 * KEY_HEADS * DIM + HEADS * DIM
    mixed = torch.randn(tokens, requests, channels)
    a, b = torch.randn(2, tokens, requests, HEADS)
    decay, shift = torch.randn(2, HEADS)
    pool = torch.randn(STATES, HEADS, DIM, DIM)
    rows = torch.randperm(STATES)[:requests].to(torch.int32)
    results = []
    for function in (
        fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode,
        recurrent.fused_recurrent_gated_delta_rule_packed_decode,
    ):
        state, outs = pool.clone(), []
        for token in range(tokens):
            out = torch.full((requests, 1, HEADS, DIM), float("nan"))
            function(mixed[token], a[token], b[token], decay, shift, DIM**-0.5, state, out, rows, True)
            outs.append(out)
        results.append([torch.stack(outs, 1).view(1, requests * tokens, HEADS, DIM), state])
    state = pool.clone()
    packed = mixed.transpose(0, 1).reshape(1, requests * tokens, channels)
    q, k, v = packed.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], -1)
    g, beta = recurrent.fused_gdn_gating(
        decay, a.transpose(0, 1).reshape(-1, HEADS), b.transpose(0, 1).reshape(-1, HEADS), shift
    )
    out, _, _ = recurrent.chunk_gated_delta_rule(
        q.unflatten(2, (-1, DIM)), k.unflatten(2, (-1, DIM)), v.unflatten(2, (-1, DIM)), g, beta, initial_state=state,
        initial_state_indices=rows, cu_seqlens=torch.arange(0, requests * tokens + 1, tokens), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return max(_worst(*results), _worst(results[0], [out, state]))


def gates() -> float:
    """Decay and write strength of prefill, the gated norm, and the split of the projections."""
    a, b = torch.randn(2, 21, HEADS)
    decay, shift = torch.randn(2, HEADS)
    worst = _worst(*[
        list(function(decay, a, b, shift))
        for function in (fused_gdn_gating.fused_gdn_gating, recurrent.fused_gdn_gating)
    ])  # fmt: skip
    x, g, weight = torch.randn(50, DIM), torch.randn(50, DIM), torch.randn(DIM)
    worst = max(worst, _difference(*[
        function(x.clone(), g, weight, None, eps=1e-6, is_rms_norm=True)[0]
        for function in (fused_norm_gate.layer_norm_gated_fwd, recurrent.layer_norm_gated_fwd)
    ]))  # fmt: skip
    group = HEADS // KEY_HEADS
    qkvz = torch.randn(13, KEY_HEADS * (2 * DIM + 2 * group * DIM))
    ba = torch.randn(13, KEY_HEADS * 2 * group)
    return max(worst, _worst(*[
        list(function(qkvz, ba, KEY_HEADS, HEADS, DIM, DIM))
        for function in (gdn_fused_proj.fused_qkvzba_split_reshape_cat, recurrent.fused_qkvzba_split_reshape_cat)
    ]))  # fmt: skip


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
        "convolution, decode": convolution(3, 1),
        "convolution, chain": convolution(2, 16),
        "convolution, tree": convolution(3, 16, tree=16),
        "convolution, tree with unused slots": convolution(2, 16, tree=11, bias=True),
        "convolution, tree, width 3": convolution(2, 8, tree=8, width=3),
        "delta rule, chain": delta_rule(2, 8),
        "delta rule, tree": delta_rule(3, 16, tree=16),
        "delta rule, tree with unused slots in a wider buffer": delta_rule(2, 8, tree=6, width=12),
        "delta rule, decode": packed_decode(3),
        "delta rule, prefill": packed_decode(2, 9),
        "gates and norms of a recurrent layer": gates(),
    }
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
