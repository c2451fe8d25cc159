# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for draft trees: top-k with log-sum-exp, best-first growth, masks, walk.

Each kernel gives what the functions of `ddtree_utils` give, which stay the
reference; a step on a GPU launches a handful of these instead of some two
hundred small ones. Shapes are fixed by the arguments, nothing is read back to
the host, so everything here can be captured in a CUDA graph.

Shapes use ``bs`` (requests), ``depth`` (drafted positions), ``k`` (candidates
per position), ``q = budget + 1`` (tree slots).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SLOTS = 64
"""Ancestors of a slot are one bit each of an int64."""

_CHUNK = 4096
"""Vocabulary entries that one program of the top-k reads."""


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@triton.jit
def _top_k_chunk_kernel(
    logits, stride, vocab, first_id, top, ids, maxima, sums, chunks, K: tl.constexpr, CHUNK: tl.constexpr
):
    """Of one chunk of one row: its k best, its maximum and its sum of exponentials."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(values, 0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    out = row * chunks + chunk
    tl.store(maxima + out, best)
    tl.store(sums + out, tl.sum(tl.exp(values - safe), 0))
    for rank in tl.static_range(K):
        best = tl.max(values, 0)
        index = tl.min(tl.where(values == best, at, vocab - 1), 0)
        tl.store(top + out * K + rank, best)
        tl.store(ids + out * K + rank, (index + first_id).to(tl.int64))
        values = tl.where(at == index, float("-inf"), values)


@triton.jit
def _top_k_merge_kernel(
    top, ids, maxima, sums, chunks, out_top, out_ids, out_lse, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr
):
    """Join the chunks of one row: k best, lower token id first among equals, and the log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, C)
    peak = tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    part = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    best = tl.max(peak, 0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    tl.store(out_lse + row, safe + tl.log(tl.sum(part * tl.exp(peak - safe), 0)))
    at = tl.arange(0, N)
    inside = at < chunks * K
    values = tl.load(top + row * chunks * K + at, mask=inside, other=float("-inf"))
    tokens = tl.load(ids + row * chunks * K + at, mask=inside, other=1 << 62)
    for rank in tl.static_range(K):
        best = tl.max(values, 0)
        token = tl.min(tl.where(values == best, tokens, 1 << 62), 0)
        tl.store(out_top + row * K + rank, best)
        tl.store(out_ids + row * K + rank, token)
        values = tl.where(tokens == token, float("-inf"), values)


def top_k_logits(logits: torch.Tensor, k: int, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k best logits of each row and the row's log-sum-exp, in two launches.

    Args:
        logits: ``[n, vocab]`` of any float type, rows contiguous, ``vocab >= k``.
        first_id: token id of column 0.

    Returns:
        ``(log_sum_exp, top_logits, token_ids)``: float32 ``[n]``, float32 and
        int64 ``[n, k]`` in falling order, lower token id first among equals.
    """
    n, vocab = logits.shape
    chunks = -(-vocab // _CHUNK)
    new = logits.new_empty
    top, ids = new((n, chunks, k), dtype=torch.float32), new((n, chunks, k), dtype=torch.int64)
    maxima, sums = new((n, chunks), dtype=torch.float32), new((n, chunks), dtype=torch.float32)
    chunk = min(_CHUNK, _power_of_two(vocab))
    _top_k_chunk_kernel[(n, chunks)](
        logits, logits.stride(0), vocab, first_id, top, ids, maxima, sums, chunks, K=k, CHUNK=chunk, num_warps=4
    )
    lse = new((n,), dtype=torch.float32)
    out_top, out_ids = new((n, k), dtype=torch.float32), new((n, k), dtype=torch.int64)
    _top_k_merge_kernel[(n,)](
        top, ids, maxima, sums, chunks, out_top, out_ids, lse,
        K=k, C=_power_of_two(chunks), N=_power_of_two(chunks * k), num_warps=4,
    )  # fmt: skip
    return lse, out_top, out_ids


@triton.jit
def _grow_kernel(
    log_probs, token_ids, parents, tokens, depths, num_nodes, ancestors, first_child, next_sibling,
    DEPTH: tl.constexpr, K: tl.constexpr, BUDGET: tl.constexpr, SPINE: tl.constexpr, SLOTS: tl.constexpr,
    LINKS: tl.constexpr,
):  # fmt: skip
    """One request's tree, best first.

    Entry ``e`` of the frontier holds the next child of slot ``e`` that is not in
    the tree yet: taking it puts its next sibling in its place and the new slot's
    first child in the new slot's entry.
    """
    row = tl.program_id(0).to(tl.int64)
    log_probs += row * DEPTH * K
    token_ids += row * DEPTH * K
    far: tl.constexpr = 1 << 62
    slot = tl.arange(0, SLOTS)
    # Frontier: score of the candidate and of its parent, level (0-based), rank among siblings, token.
    score = tl.where(slot == 0, tl.minimum(tl.load(log_probs), 0.0), float("-inf"))
    above = tl.zeros([SLOTS], tl.float32)
    level = tl.zeros([SLOTS], tl.int32)
    rank = tl.zeros([SLOTS], tl.int32)
    token = tl.zeros([SLOTS], tl.int64) + tl.load(token_ids)
    # The tree so far.
    parent_of = tl.full([SLOTS], -1, tl.int64)
    token_of = tl.full([SLOTS], -1, tl.int64)
    depth_of = tl.where(slot == 0, 0, -1).to(tl.int64)
    one = tl.full([SLOTS], 1, tl.int64)
    seen = one << slot.to(tl.int64)
    child_of = tl.full([SLOTS], -1, tl.int64)
    sibling_of = tl.full([SLOTS], -1, tl.int64)
    latest = tl.full([SLOTS], -1, tl.int64)
    count = 1
    for n in range(1, BUDGET + 1):
        best = tl.max(score, 0)
        among = score == best
        near = tl.min(tl.where(among, level, DEPTH), 0)
        among = among & (level == near)
        low = tl.min(tl.where(among, token, far), 0)
        among = among & (token == low)
        entry = tl.min(tl.where(among, slot, SLOTS), 0)
        forced = n <= SPINE
        entry = tl.where(forced, n - 1, entry)
        taken = slot == entry
        best = tl.sum(tl.where(taken, score, 0.0), 0)
        if forced | (best > float("-inf")):
            at_level = tl.sum(tl.where(taken, level, 0), 0)
            at_rank = tl.sum(tl.where(taken, rank, 0), 0)
            from_score = tl.sum(tl.where(taken, above, 0.0), 0)
            new_token = tl.sum(tl.where(taken, token, 0), 0)
            new = slot == n
            count += 1
            parent_of = tl.where(new, entry.to(tl.int64), parent_of)
            token_of = tl.where(new, new_token, token_of)
            depth_of = tl.where(new, (at_level + 1).to(tl.int64), depth_of)
            seen = tl.where(new, seen | tl.sum(tl.where(taken, seen, 0), 0), seen)
            if LINKS:
                before = tl.sum(tl.where(taken, latest, 0), 0)
                number = tl.zeros([SLOTS], tl.int64) + n
                child_of = tl.where(taken & (before < 0), number, child_of)
                sibling_of = tl.where(slot == before, number, sibling_of)
                latest = tl.where(taken, number, latest)
            # Its next sibling takes its place.
            more = at_rank + 1 < K
            at = at_level * K + tl.minimum(at_rank + 1, K - 1)
            step = tl.where(more, tl.minimum(tl.load(log_probs + at), 0.0), float("-inf"))
            score = tl.where(taken, from_score + step, score)
            token = tl.where(taken, tl.load(token_ids + at), token)
            rank = tl.where(taken, at_rank + 1, rank)
            # Its first child joins.
            deeper = at_level + 1 < DEPTH
            at = tl.minimum(at_level + 1, DEPTH - 1) * K
            step = tl.where(deeper, tl.minimum(tl.load(log_probs + at), 0.0), float("-inf"))
            score = tl.where(new, best + step, score)
            token = tl.where(new, tl.load(token_ids + at), token)
            level = tl.where(new, at_level + 1, level)
            rank = tl.where(new, 0, rank)
            above = tl.where(new, best, above)
    out = row * (BUDGET + 1) + slot
    inside = slot <= BUDGET
    tl.store(parents + out, parent_of, mask=inside)
    tl.store(tokens + out, token_of, mask=inside)
    tl.store(depths + out, depth_of, mask=inside)
    tl.store(ancestors + out, seen, mask=inside)
    if LINKS:
        tl.store(first_child + out, child_of, mask=inside)
        tl.store(next_sibling + out, sibling_of, mask=inside)
    tl.store(num_nodes + row, count)


def grow_tree(
    log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int, *, spine: int = 0, links: bool = False
) -> tuple[torch.Tensor, ...]:
    """`build_ddtree` in one launch.

    Args:
        log_probs: float32 ``[bs, depth, k]``, contiguous, falling along k.
        token_ids: int64 ``[bs, depth, k]``, lower first among equal log-probabilities.
        budget: nodes without the root, under `MAX_SLOTS`.
        spine: as in `build_ddtree`.
        links: also give each slot's first child and next sibling.

    Returns:
        parents, token_ids, depths int64 ``[bs, q]`` and num_nodes int64 ``[bs]`` as
        in `DDTree`; ancestors int64 ``[bs, q]``, bit j set where the slot may see
        slot j; and with links first child and next sibling as in `tree_links`.
    """
    bs, depth, k = log_probs.shape
    if not 1 <= budget < MAX_SLOTS:
        raise ValueError(f"budget must be from 1 to {MAX_SLOTS - 1}, got {budget}")
    q = budget + 1
    new = log_probs.new_empty
    parents, tokens, depths, ancestors = (new((bs, q), dtype=torch.int64) for _ in range(4))
    leads = [new((bs, q), dtype=torch.int32) for _ in range(2 if links else 0)]
    num_nodes = new((bs,), dtype=torch.int64)
    _grow_kernel[(bs,)](
        log_probs, token_ids, parents, tokens, depths, num_nodes, ancestors, *(leads or (parents, parents)),
        DEPTH=depth, K=k, BUDGET=budget, SPINE=min(spine, budget, depth), SLOTS=max(2, _power_of_two(q)),
        LINKS=links, num_warps=1,
    )  # fmt: skip
    return parents, tokens, depths, num_nodes, ancestors, *leads


@triton.jit
def _mask_kernel(ancestors, seq_lens, mask, Q: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """One slot's row of its request's mask ``[q, seq_len + q]``: the part behind the prefix."""
    row, slot = tl.program_id(0), tl.program_id(1)
    before = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + before, mask=before < row, other=0).to(tl.int64)
    start = Q * (tl.sum(lengths, 0) + row * Q)
    prefix = tl.load(seq_lens + row).to(tl.int64)
    column = tl.arange(0, SLOTS)
    bits = (tl.load(ancestors + row * Q + slot) >> column.to(tl.int64)) & 1
    tl.store(mask + start + slot * (prefix + Q) + prefix + column, bits.to(tl.int8), mask=column < Q)


def write_mask(ancestors: torch.Tensor, seq_lens: torch.Tensor, mask: torch.Tensor) -> None:
    """Write each tree's square into a flat mask of ``[q, seq_len + q]`` per request; the rest is left as it is.

    Args:
        ancestors: int64 ``[bs, q]``, bits as `grow_tree` gives them.
        seq_lens: ``[bs]``, lengths of the prefixes.
        mask: flat, one byte an entry.
    """
    bs, q = ancestors.shape
    _mask_kernel[(bs, q)](
        ancestors, seq_lens, mask.view(torch.int8), Q=q, SLOTS=max(2, _power_of_two(q)), ROWS=_power_of_two(bs),
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _walk_kernel(
    parents, tokens, depths, num_nodes, targets, chain, order, last, packed,
    Q: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """Follow the target's tokens from the root, then order the slots: accepted ones by depth, the others behind."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside = slot < Q
    base = row * Q
    parent_of = tl.load(parents + base + slot, mask=inside, other=-1)
    token_of = tl.load(tokens + base + slot, mask=inside, other=-1)
    depth_of = tl.load(depths + base + slot, mask=inside, other=-1)
    width: tl.constexpr = DEPTH + 4
    at = tl.arange(0, DEPTHS)
    emitted = tl.zeros([DEPTHS], tl.int64)
    current = tl.zeros([], tl.int64)
    accepted = slot == 0
    length = tl.zeros([], tl.int64)
    going = tl.zeros([], tl.int32) + 1
    for depth in range(DEPTH):
        if going > 0:
            wanted = tl.load(targets + base + current)
            hit = (parent_of == current) & (token_of == wanted) & inside
            going = tl.sum(hit.to(tl.int32), 0)
            if going > 0:
                current = tl.sum(tl.where(hit, slot, 0), 0).to(tl.int64)
                accepted = accepted | (slot == current)
                emitted = tl.where(at == depth, wanted, emitted)
                length += 1
    bonus = tl.load(targets + base + current)
    emitted = tl.where(at == length, bonus, emitted)
    rejected = inside & (accepted == 0)
    rank = length + tl.cumsum(rejected.to(tl.int64), 0)
    rank = tl.where(accepted, depth_of, rank)
    tl.store(order + base + rank, slot.to(tl.int64), mask=inside)
    tl.store(last + row, current)
    greedy = tl.load(chain + row * DEPTH + at, mask=at < DEPTH, other=-1)
    along = tl.min(tl.where((emitted == greedy) & (at <= length), DEPTHS, at), 0)
    out = packed + row * width
    tl.store(out + at, emitted, mask=at < DEPTH)
    tl.store(out + DEPTH, length)
    tl.store(out + DEPTH + 1, bonus)
    tl.store(out + DEPTH + 2, tl.load(num_nodes + row))
    tl.store(out + DEPTH + 3, tl.minimum(along, DEPTH).to(tl.int64))


def walk_trees(
    parents: torch.Tensor,
    token_ids: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    targets: torch.Tensor,
    chain: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`walk_report` in one launch.

    Args:
        parents, token_ids, depths, num_nodes: as in `DDTree`, at most `MAX_SLOTS` slots.
        targets: int64 ``[bs, q]``, the target's token at each slot.
        chain: int64 ``[bs, depth]``, the drafter's greedy token at each position.

    Returns:
        order, last and packed as `walk_report`.
    """
    bs, q = parents.shape
    depth = chain.shape[1]
    order, last = torch.empty_like(targets), targets.new_empty((bs,))
    packed = targets.new_empty((bs, depth + 4))
    _walk_kernel[(bs,)](
        parents, token_ids, depths, num_nodes, targets, chain, order, last, packed,
        Q=q, DEPTH=depth, SLOTS=max(2, _power_of_two(q)), DEPTHS=_power_of_two(depth + 1), num_warps=1,
    )  # fmt: skip
    return order, last, packed
