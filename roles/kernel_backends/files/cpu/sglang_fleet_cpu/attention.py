# SPDX-License-Identifier: Apache-2.0
"""Torch twins of the two Triton attention kernels that SGLang's `triton` backend calls (engine sglang-0.5.11).

Same signatures, same memory layout, same masks as `extend_attention_fwd` and `decode_attention_fwd`; only the arithmetic
is torch. Source of the contract: `sglang/srt/layers/attention/triton_ops/{extend,decode}_attention.py` of that release.

Shapes: tokens are packed, `q` is `[tokens, q_heads, dim]`, the KV pool is `[slots, kv_heads, dim]`, request i owns rows
`qo_indptr[i]:qo_indptr[i+1]` of the packed tensors and pool slots `kv_indices[kv_indptr[i]:kv_indptr[i+1]]`.
All requests of a call are computed in one padded batch: the padding is masked out, so it changes no result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Unsupported(NotImplementedError):
    """An attention feature that the CPU profile has no twin for, by design: the engine stops instead of answering wrongly."""


def _refuse(**features: object) -> None:
    """Raise Unsupported when a feature outside dense float attention is asked for."""
    asked = [name for name, on in features.items() if on]
    if asked:
        raise Unsupported(f"the cpu profile has no attention for {', '.join(asked)}; serve this model on a GPU profile")


def _attend(q: Tensor, k: Tensor, v: Tensor, allow: Tensor | None, scale: float, cap: float) -> Tensor:
    """Softmax attention with grouped heads.

    q `[b, n, q_heads, d]`, k and v `[b, m, kv_heads, d]`, allow `[b, n, m]` bool (True = may look) or None.
    Returns float32 `[b, n, q_heads, d_v]`. A query that may look at nothing gives NaN, as the kernels do.
    """
    b, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # queries that share a KV head become rows of one matrix: no copy of k or v per query head
    rows = q.float().view(b, n, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, group * n, dim)
    score = torch.matmul(rows, k.float().permute(0, 2, 3, 1)).mul_(scale)
    if cap > 0:
        score = torch.tanh(score.div_(cap)).mul_(cap)
    if allow is not None:
        score.view(b, kv_heads, group, n, -1).masked_fill_(~allow[:, None, None], float("-inf"))
    out = torch.matmul(torch.softmax(score, -1), v.float().permute(0, 2, 1, 3))
    return out.view(b, kv_heads, group, n, -1).permute(0, 3, 1, 2, 4).reshape(b, n, heads, -1)


def _rows(starts: list[int], lengths: list[int], limit: int) -> tuple[Tensor, Tensor]:
    """Padded index matrix of packed segments.

    Returns index `[len(starts), max(lengths)]` and which entries are real. Padding points at an existing row (index below
    `limit`), so that whatever is gathered there is finite.
    """
    offset = torch.arange(max(lengths))
    real = offset[None] < torch.tensor(lengths)[:, None]
    return (torch.tensor(starts)[:, None] + offset[None]).clamp_(max=limit - 1), real


def extend_attention_fwd(
    q_extend: Tensor,
    k_extend: Tensor,
    v_extend: Tensor,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    is_causal: bool,
    mask_indptr: Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int = -1,
    sinks: Tensor | None = None,
    window_kv_offsets: Tensor | None = None,
    xai_temperature_len: int = -1,
) -> None:
    """Prefill, drafter block and verify: new tokens look at their prefix in the pool and at each other.

    `custom_mask` (bool or uint8, flat) holds for request i, from `mask_indptr[i]`, a matrix `[n, prefix + n]` of allowed
    pairs; with `skip_prefix_custom_mask` its prefix part is ignored and the whole prefix is visible. Without it the new
    tokens see each other causally (`is_causal`) or fully. Writes `o_extend`.

    Raises Unsupported for sliding windows, sinks, temperature scaling and scaled KV.
    """
    _refuse(
        sliding_window=sliding_window_size > 0,
        sinks=sinks is not None,
        xai_temperature=xai_temperature_len > 0,
        scaled_kv=k_scale != 1.0 or v_scale != 1.0,
    )
    scale = sm_scale or q_extend.shape[-1] ** -0.5
    qo, kv = qo_indptr.tolist(), kv_indptr.tolist()
    masks = mask_indptr.tolist() if custom_mask is not None and mask_indptr is not None else []
    live = [i for i in range(len(qo) - 1) if qo[i + 1] > qo[i]]
    if not live:
        return
    new = [qo[i + 1] - qo[i] for i in live]
    old = [kv[i + 1] - kv[i] for i in live]
    n, p = max(new), max(old)

    tokens, token_real = _rows([qo[i] for i in live], new, q_extend.shape[0])
    allow = torch.zeros(len(live), n, p + n, dtype=torch.bool)
    for row, i in enumerate(live):
        a, b = new[row], old[row]
        allow[row, :a, :b] = True
        part = allow[row, :a, p : p + a]
        if custom_mask is not None:
            mask = custom_mask[masks[i] : masks[i] + a * (a + b)].view(a, a + b).bool()
            part.copy_(mask[:, b:])
            if not skip_prefix_custom_mask:
                allow[row, :a, :b] = mask[:, :b]
        else:
            part.fill_(True)
            if is_causal:
                part.tril_()
    k, v = k_extend[tokens], v_extend[tokens]
    if p:
        slots, _ = _rows([kv[i] for i in live], old, kv_indices.shape[0])
        loc = kv_indices[slots].long()
        k, v = torch.cat([k_buffer[loc], k], 1), torch.cat([v_buffer[loc], v], 1)
    out = _attend(q_extend[tokens], k, v, allow, scale, logit_cap)
    o_extend[tokens[token_real]] = out[token_real].to(o_extend.dtype)


def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Tensor,
    attn_lse: Tensor,
    num_kv_splits: Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    xai_temperature_len: int = -1,
) -> None:
    """One new token per request, already in the pool, looks at all its slots. Writes `o`.

    The split buffers (`attn_logits`, `attn_lse`, `num_kv_splits`) are scratch space of the kernel and are not touched.
    Raises Unsupported for sinks, temperature scaling and scaled KV.
    """
    _refuse(
        sinks=sinks is not None,
        xai_temperature=xai_temperature_len > 0,
        scaled_kv=k_scale != 1.0 or v_scale != 1.0,
    )
    kv = kv_indptr.tolist()
    requests = q.shape[0]
    if not requests:
        return
    lengths = [kv[i + 1] - kv[i] for i in range(requests)]
    slots, real = _rows(kv[:requests], lengths, kv_indices.shape[0])
    loc = kv_indices[slots].long()
    allow = None if min(lengths) == max(lengths) else real[:, None]
    o.copy_(_attend(q[:, None], k_buffer[loc], v_buffer[loc], allow, sm_scale, logit_cap)[:, 0])


TWINS: dict[str, Any] = {
    "sglang.srt.layers.attention.triton_ops.extend_attention.extend_attention_fwd": extend_attention_fwd,
    "sglang.srt.layers.attention.triton_ops.decode_attention.decode_attention_fwd": decode_attention_fwd,
}
