# SPDX-License-Identifier: Apache-2.0
"""Draft trees from a block drafter's marginals: build, ancestor mask, walk.

Everything here is plain torch on fixed shapes: no Python loop over nodes, no
device-to-host copy, nothing that knows an engine. The tree is the one of the
DDTree paper (arXiv 2604.12989, section 3): under the product of the drafter's
per-position marginals, the ``budget`` most probable prefixes maximise the
expected number of accepted tokens.

Shapes use ``bs`` (requests), ``depth`` (drafted positions), ``k`` (candidates
per position), ``q = budget + 1`` (tree slots; slot 0 is the root, the token
that the engine has already committed to).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

PAD = -1
"""Parent, token id and depth of an unused slot."""

# A score key holds 32 bits of score above 32 bits of inverted token id.
_TOKEN_BITS = 32
_TOKEN_SPAN = 1 << _TOKEN_BITS
_SPINE_KEY = 1 << 62
_NO_KEY = -(1 << 63)


@dataclass(frozen=True)
class DDTree:
    """A batch of draft trees in breadth of slots, parents before children.

    Attributes:
        parents: int64 ``[bs, q]``, slot of the parent; -1 for the root and for
            unused slots.
        token_ids: int64 ``[bs, q]``; -1 for the root (its token is the
            caller's) and for unused slots.
        depths: int64 ``[bs, q]``, 0 for the root, -1 for unused slots.
        num_nodes: int64 ``[bs]``, used slots with the root counted: the slots
            ``[:num_nodes]`` of a row are its tree.
    """

    parents: torch.Tensor
    token_ids: torch.Tensor
    depths: torch.Tensor
    num_nodes: torch.Tensor


def _score_key(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Order (higher score, then lower token id) as one int64 key, larger first."""
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = ordered * _TOKEN_SPAN + (_TOKEN_SPAN - 1 - token_ids)
    return torch.where(torch.isneginf(scores), torch.full_like(key, _NO_KEY), key)


@lru_cache(maxsize=64)
def _levels(depth: int, k: int, budget: int, device: torch.device) -> tuple[list[int], list[int], torch.Tensor]:
    """Rows kept per level, where each level starts in the concatenation, and the level of each entry."""
    widths, rows = [], 1
    for _ in range(depth):
        rows = min(budget, rows * k)
        widths.append(rows)
    starts = [sum(widths[:level]) for level in range(depth)]
    level_of = torch.tensor([level for level, width in enumerate(widths) for _ in range(width)], device=device)
    return widths, starts, level_of


def build_ddtree(
    top_log_probs: torch.Tensor,
    top_token_ids: torch.Tensor,
    budget: int,
    *,
    spine: int = 0,
) -> DDTree:
    """Keep the ``budget`` most probable prefixes of the drafter's marginals.

    A prefix of depth ``d`` scores the sum of one log-probability per position.
    A child never scores above its parent, so the best prefixes are closed under
    taking parents, and the best ``budget`` prefixes of each depth already hold
    every prefix that can be among the best overall. That gives one short sort
    per depth instead of a heap.

    The order is total: score, then depth, then token id, then the parent's
    slot. Every rank that holds the same numbers builds the same tree.

    Args:
        top_log_probs: float32 ``[bs, depth, k]``, natural log, falling along k.
        top_token_ids: int64 ``[bs, depth, k]``, distinct within a position.
        budget: nodes without the root, at least 1.
        spine: so many nodes of the greedy chain (rank 0 at each depth) are kept
            whatever they score; clipped to ``budget`` and to ``depth``.

    Returns:
        A ``DDTree`` of ``budget + 1`` slots. Fewer prefixes than ``budget``
        (small ``depth`` and ``k``, or log-probabilities of -inf) leave slots
        unused at the end.

    Raises:
        ValueError: on shapes, dtypes or numbers outside of the above.
    """
    if top_log_probs.ndim != 3 or top_log_probs.shape != top_token_ids.shape:
        raise ValueError(
            "top_log_probs and top_token_ids must both be [bs, depth, k], got "
            f"{tuple(top_log_probs.shape)} and {tuple(top_token_ids.shape)}"
        )
    if top_log_probs.dtype != torch.float32 or top_token_ids.dtype != torch.int64:
        raise ValueError(
            "expected float32 log-probabilities and int64 token ids, got "
            f"{top_log_probs.dtype} and {top_token_ids.dtype}"
        )
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    if spine < 0:
        raise ValueError(f"spine must not be negative, got {spine}")
    bs, depth, k = top_log_probs.shape
    if depth == 0 or k == 0:
        raise ValueError(f"need at least one position and one candidate, got depth={depth}, k={k}")
    device = top_log_probs.device
    spine = min(spine, budget, depth)
    # Rounding in the log-sum-exp can leave a log-probability just above zero,
    # which would put a child before its parent.
    log_probs = top_log_probs.clamp(max=0.0)

    # Level by level: beam rows of (score, key, token, parent row of the level above).
    score = torch.zeros(bs, 1, device=device)
    on_spine = torch.ones(bs, 1, dtype=torch.bool, device=device)
    keys, tokens, parent_rows = [], [], []
    widths, starts, level_of = _levels(depth, k, budget, device)
    for level in range(depth):
        rows = score.shape[1]
        cand_score = (score[:, :, None] + log_probs[:, level, None, :]).flatten(1)
        cand_token = top_token_ids[:, level, None, :].expand(bs, rows, k).flatten(1)
        cand_key = _score_key(cand_score, cand_token)
        cand_spine = torch.zeros(bs, rows, k, dtype=torch.bool, device=device)
        if level < spine:
            cand_spine[:, :, 0] = on_spine
        cand_spine = cand_spine.flatten(1)
        if level < spine:
            cand_key = torch.where(cand_spine, torch.full_like(cand_key, _SPINE_KEY - level), cand_key)
        width = widths[level]
        # Stable: equal keys keep their parents' order.
        cand_key, order = torch.sort(cand_key, dim=1, descending=True, stable=True)
        order = order[:, :width]
        keys.append(cand_key[:, :width])
        score = cand_score.gather(1, order)
        tokens.append(cand_token.gather(1, order))
        on_spine = cand_spine.gather(1, order)
        parent_rows.append(order // k + (starts[level - 1] if level else 0))

    # Overall by score alone: levels are laid out in order, so the stable sort puts shallower first among equals.
    all_keys, order = torch.sort(torch.cat(keys, dim=1) >> _TOKEN_BITS, dim=1, descending=True, stable=True)
    used = min(budget, all_keys.shape[1])
    order = order[:, :used]
    valid = all_keys[:, :used] > _NO_KEY >> _TOKEN_BITS

    # Entries of the concatenation to slots; the root is slot 0.
    parent_entry = torch.cat(parent_rows, dim=1)
    slot_of = torch.zeros(bs, level_of.shape[0], dtype=torch.int64, device=device)
    slot_of.scatter_(1, order, torch.arange(1, used + 1, device=device).expand(bs, used))
    node_level = level_of[order]
    parents = slot_of.gather(1, parent_entry.gather(1, order))
    parents = torch.where(node_level == 0, torch.zeros_like(parents), parents)

    def slots(node_values: torch.Tensor, root: int) -> torch.Tensor:
        out = torch.full((bs, budget + 1), PAD, dtype=torch.int64, device=device)
        out[:, 0] = root
        out[:, 1 : used + 1] = torch.where(valid, node_values, torch.full_like(node_values, PAD))
        return out

    return DDTree(
        parents=slots(parents, PAD),
        token_ids=slots(torch.cat(tokens, dim=1).gather(1, order), PAD),
        depths=slots(node_level + 1, 0),
        num_nodes=valid.sum(dim=1) + 1,
    )


def ancestor_mask(tree: DDTree, max_depth: int) -> torch.Tensor:
    """Which slots each slot may attend to inside the tree.

    Args:
        tree: trees of ``q`` slots.
        max_depth: no node is deeper than this.

    Returns:
        bool ``[bs, q, q]``: entry ``[b, i, j]`` is true when slot j is slot i or
        an ancestor of it. An unused slot sees only itself, so that no softmax
        row is empty.
    """
    bs, q = tree.parents.shape
    device = tree.parents.device
    # Reach by 0..1 steps, squared until max_depth steps are covered. Counts stay exact in float32:
    # a slot has at most one path to an ancestor, and clamping keeps entries at 0 or 1.
    reach = torch.eye(q, device=device).expand(bs, q, q).clone()
    has_parent = tree.parents >= 0
    reach.scatter_add_(2, tree.parents.clamp(min=0)[:, :, None], has_parent.to(reach.dtype)[:, :, None])
    steps = 1
    while steps < max_depth:
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
        steps *= 2
    return reach > 0


def tree_links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tree as first children and next siblings, the form in which recurrent kernels take it.

    Links always lead to a larger slot, so one pass over the slots meets every
    parent before its children.

    Args:
        parents: int64 ``[bs, q]`` of ``DDTree``: below the slot itself; -1 for
            the root and for unused slots.

    Returns:
        ``(next_token, next_sibling)``, int32 ``[bs, q]``: the first child of
        each slot and the next child of the same parent, -1 for none. Nothing
        leads to an unused slot; the kernels give it the root's state.
    """
    q = parents.shape[1]
    slot = torch.arange(q, dtype=torch.int32, device=parents.device)
    parent = parents.to(torch.int32)
    none = torch.full((), q, dtype=torch.int32, device=parents.device)
    is_child = parent[:, None, :] == slot[None, :, None]
    first_child = torch.where(is_child, slot, none).amin(dim=2)
    is_later_sibling = (
        (parent[:, None, :] == parent[:, :, None]) & (slot[None, :] > slot[:, None]) & (parent >= 0)[:, :, None]
    )
    next_sibling = torch.where(is_later_sibling, slot, none).amin(dim=2)
    absent = torch.full_like(none, PAD)
    return torch.where(first_child < q, first_child, absent), torch.where(next_sibling < q, next_sibling, absent)


@dataclass(frozen=True)
class TreeWalk:
    """The accepted path of each tree.

    Attributes:
        path: int64 ``[bs, max_depth + 1]``, slot at each depth of the accepted
            path, slot 0 first; 0 after its end.
        accept_lens: int64 ``[bs]``, accepted nodes without the root.
        bonus: int64 ``[bs]``, the target's token after the last accepted node.
    """

    path: torch.Tensor
    accept_lens: torch.Tensor
    bonus: torch.Tensor


def walk_tree(tree: DDTree, ancestors: torch.Tensor, target_tokens: torch.Tensor, max_depth: int) -> TreeWalk:
    """Follow the target's token at each slot from the root as far as the tree goes.

    Exact for greedy targets and for sampled ones: the target draws one token per
    slot from its own distribution there, and only the draws on the path are
    ever used, so the emitted text has the target's distribution without any
    rejection step (DDTree paper, section 3.3).

    Args:
        tree: trees of ``q`` slots.
        ancestors: bool ``[bs, q, q]`` of ``ancestor_mask``.
        target_tokens: int64 ``[bs, q]``, the target's argmax or draw at each slot.
        max_depth: no node is deeper than this.
    """
    bs, q = tree.parents.shape
    device = tree.parents.device
    wanted = target_tokens.gather(1, tree.parents.clamp(min=0))
    matches = (tree.parents >= 0) & (tree.token_ids == wanted)
    matches[:, 0] = True
    # Accepted: the slot and all of its ancestors match. Siblings carry distinct tokens, so this is one path.
    accepted = ~(ancestors & ~matches[:, None, :]).any(dim=2)
    accept_lens = accepted.sum(dim=1) - 1
    # Column of a rejected slot is a spare one that is cut off again.
    column = torch.where(accepted, tree.depths, torch.full_like(tree.depths, max_depth + 1))
    path = torch.zeros(bs, max_depth + 2, dtype=torch.int64, device=device)
    path.scatter_(1, column, torch.arange(q, device=device).expand(bs, q))
    path = path[:, : max_depth + 1]
    last = path.gather(1, accept_lens[:, None])
    return TreeWalk(path=path, accept_lens=accept_lens, bonus=target_tokens.gather(1, last).squeeze(1))


def walk_report(
    tree: DDTree, ancestors: torch.Tensor, target_tokens: torch.Tensor, chain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk, and everything that a step needs to know of it.

    Args:
        tree: trees of ``q`` slots.
        ancestors: bool ``[bs, q, q]`` of `ancestor_mask`.
        target_tokens: int64 ``[bs, q]``, as in `walk_tree`.
        chain: int64 ``[bs, depth]``, the drafter's greedy token at each position.

    Returns:
        order int64 ``[bs, q]``: slots of the accepted path by depth, then all others;
        last int64 ``[bs]``: slot of the last accepted node; packed int64
        ``[bs, depth + 4]``: emitted tokens (zeros after the bonus), accepted nodes
        without the root, bonus, slots used, leading emitted tokens that the greedy
        chain holds: what linear verification would have accepted at the least.
    """
    bs, depth = chain.shape
    walk = walk_tree(tree, ancestors, target_tokens, depth)
    at = torch.arange(depth + 1, device=chain.device)
    on_path = at <= walk.accept_lens[:, None]
    key = torch.full_like(tree.parents, depth + 1)
    key.scatter_(1, torch.where(on_path, walk.path, 0), torch.where(on_path, at, 0))
    order = torch.argsort(key, dim=1, stable=True)
    emitted = torch.zeros(bs, depth + 1, dtype=torch.int64, device=chain.device)
    emitted[:, :depth] = tree.token_ids.gather(1, walk.path[:, 1:])
    emitted = torch.where(on_path, emitted, 0).scatter(1, walk.accept_lens[:, None], walk.bonus[:, None])
    along = ((emitted[:, :depth] == chain) & on_path[:, :depth]).cumprod(dim=1).sum(dim=1)
    last = walk.path.gather(1, walk.accept_lens[:, None]).squeeze(1)
    columns = (walk.accept_lens, walk.bonus, tree.num_nodes, along)
    return order, last, torch.cat([emitted[:, :depth], *(column[:, None] for column in columns)], dim=1)


def merge_top_k(
    log_sum_exps: torch.Tensor, top_logits: torch.Tensor, top_token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join vocabulary shards' top-k logits into the k best log-probabilities.

    Args:
        log_sum_exps: float32 ``[shards, n]``, log-sum-exp of each shard's logits.
        top_logits: float32 ``[shards, n, k_local]``; -inf where a shard has fewer.
        top_token_ids: int64 ``[shards, n, k_local]``, ids in the whole vocabulary.
        k: candidates to keep, at most ``shards * k_local``.

    Returns:
        ``(log_probs, token_ids)``: float32 and int64 ``[n, k]``, in falling order
        of probability, lower token id first among equals.
    """
    total = torch.logsumexp(log_sum_exps, dim=0)
    logits = top_logits.transpose(0, 1).flatten(1)
    ids = top_token_ids.transpose(0, 1).flatten(1)
    _, order = torch.sort(_score_key(logits, ids), dim=1, descending=True, stable=True)
    order = order[:, :k]
    return logits.gather(1, order) - total[:, None], ids.gather(1, order)
