# SPDX-License-Identifier: Apache-2.0
"""What a DDTREE step does on the device, stage by stage: fixed shapes, no host reads.

Each stage is a function of tensors. `ddtree_graph` captures the stages into
CUDA graphs; without graphs they run as they are, on any device. On CUDA the
stages use the kernels of `ddtree_kernels`, elsewhere the reference
implementation of `ddtree_utils`.

Shapes use ``bs`` (requests), ``depth`` (drafted positions, ``block_size - 1``),
``k`` (candidates per position) and ``q`` (slots that the target verifies per
request: ``budget + 1`` for a tree, ``block_size`` for a chain).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional, Sequence, Tuple

import torch

from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative import ddtree_kernels
from sglang.srt.speculative.ddtree_utils import (
    DDTree,
    ancestor_mask,
    build_ddtree,
    merge_top_k,
    tree_links,
    walk_report,
)

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker

_HEAD_ROWS = 256
"""Rows that go through the vocabulary head at once, as in DFLASH's own sampling."""


@dataclass
class Planted:
    """Draft trees of a batch, laid out for one verify pass.

    Attributes:
        tree: the trees, ``q`` slots each.
        ancestors: int64 ``[bs, q]`` bits (kernels) or bool ``[bs, q, q]`` (reference).
        chain: int64 ``[bs, depth]``, the drafter's greedy tokens.
        tokens: int64 ``[bs, q]``, what the target reads: the root, then the nodes.
        positions: int64 ``[bs, q]``, ``seq_len + depth``.
        links: first child and next sibling int32 ``[bs, q]``, for recurrent layers.
        shadow: trees that are measured and not verified, with their ancestors.
    """

    tree: DDTree
    ancestors: torch.Tensor
    chain: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    links: Optional[Tuple[torch.Tensor, torch.Tensor]] = None
    shadow: Optional[Tuple[DDTree, torch.Tensor]] = None


class DeviceStep:
    """The stages of a step for one worker's models, pools and arguments."""

    def __init__(self, worker: DDTreeWorker):
        self.worker = worker
        self.device = torch.device(worker.device)
        self.block_size = int(worker.block_size)
        self.depth = self.block_size - 1
        self.topk = worker.topk
        self.spine = worker.spine
        self.forks = worker.forks
        target = worker.model_runner.model
        self.embed = target.get_input_embeddings()
        self.lm_head = getattr(target, "lm_head", None)
        if not hasattr(self.lm_head, "weight") or not hasattr(self.lm_head, "shard_indices"):
            raise RuntimeError("DDTREE requires a target with a vocabulary-parallel `lm_head`.")
        self.on_cuda = self.device.type == "cuda"
        self._offsets = torch.arange(self.block_size, dtype=torch.int64, device=self.device)
        helper = worker._fused_kv_helper if worker._use_fused_kv_materialize else None
        self._kv_helper = helper
        grow_rope = getattr(getattr(helper, "rotary_emb", None), "_ensure_cos_sin_cache_length", None)
        if callable(grow_rope):
            grow_rope(int(worker.model_runner.model_config.context_len) + self.block_size)

    def with_kernels(self, q: int) -> bool:
        """Whether trees of `q` slots go through the Triton kernels."""
        return self.on_cuda and q <= ddtree_kernels.MAX_SLOTS and self.block_size <= ddtree_kernels.MAX_SLOTS

    # -- before the draft pass

    def draft_block(self, roots: torch.Tensor, seq_lens: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """The drafter's input: the known token and mask tokens behind it.

        Args:
            roots: int64 ``[bs]``. seq_lens: int64 ``[bs]``.

        Returns:
            ids and positions int64 ``[bs * block_size]``, embeddings ``[bs * block_size, hidden]``.
        """
        ids = torch.full((roots.shape[0], self.block_size), self.worker._mask_token_id, device=self.device)
        ids[:, 0] = roots
        positions = seq_lens[:, None] + self._offsets
        return ids.flatten(), positions.flatten(), self.embed(ids).flatten(0, 1)

    # -- between draft and verify

    def propose(self, hidden: torch.Tensor, *, tree: bool) -> Tuple[Optional[torch.Tensor], ...]:
        """Score the drafter's states.

        Args:
            hidden: ``[bs, depth, hidden]``.
            tree: whether candidates are wanted beside the greedy chain.

        Returns:
            log-probabilities float32 ``[bs, depth, k]`` and token ids int64 ``[bs, depth, k]`` (None without
            `tree`), greedy chain int64 ``[bs, depth]``.
        """
        bs = hidden.shape[0]
        # In parts: the logits of a full batch over a large vocabulary would take GiB.
        parts = [self._score(rows, self.topk if tree else 1) for rows in hidden.flatten(0, 1).split(_HEAD_ROWS)]
        log_probs, token_ids, chain = (torch.cat(column) for column in zip(*parts, strict=True))
        chain = chain.view(bs, self.depth)
        if not tree:
            return None, None, chain
        return log_probs.view(bs, self.depth, -1), token_ids.view(bs, self.depth, -1), chain

    def _score(self, hidden: torch.Tensor, k: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Top-k over the whole vocabulary and the greedy token.

        Each rank scores its shard and gives away k logits and one log-sum-exp per
        row instead of its logits.

        Args:
            hidden: ``[n, hidden]``.

        Returns:
            log-probabilities float32 ``[n, k]``, token ids int64 ``[n, k]``, greedy tokens int64 ``[n]``.
        """
        shard, weight = self.lm_head.shard_indices, self.lm_head.weight
        hidden = hidden.to(weight.dtype)
        # Rows of the local weight: base vocabulary, padding, added tokens, padding.
        ranges = [(0, int(shard.num_org_elements), int(shard.org_vocab_start_index))]
        added = int(shard.num_added_elements)
        if added:
            ranges.append((int(shard.num_org_elements_padded), added, int(shard.added_vocab_start_index)))
        tp_group = get_tp_group()
        whole = tp_group.world_size == 1 and not added
        sums, tops, ids, greedy = [], [], [], None
        for row, count, first_id in ranges:
            if count == 0:
                continue
            logits = torch.matmul(hidden, weight[row : row + count].T)
            if whole:
                # argmax as DFLASH takes it: on equal logits a top-k may name another token.
                greedy = torch.argmax(logits, dim=-1) + first_id
            log_sum, top, index = self._top_k(logits, min(k, count), first_id)
            sums.append(log_sum)
            tops.append(_pad_columns(top, k, float("-inf")))
            ids.append(_pad_columns(index, k, 0))
        n = hidden.shape[0]
        if not sums:  # a rank whose shard is all padding
            sums = [hidden.new_full((n,), float("-inf"), dtype=torch.float32)]
            tops = [hidden.new_full((n, k), float("-inf"), dtype=torch.float32)]
            ids = [torch.zeros(n, k, dtype=torch.int64, device=hidden.device)]
        if whole:
            if k == 1:
                ids[0] = greedy[:, None]
            return tops[0] - sums[0][:, None], ids[0], greedy
        top, token_ids, log_sum = torch.stack(tops), torch.stack(ids), torch.stack(sums)
        if tp_group.world_size > 1:
            if log_sum.shape[0] > 1:  # base and added tokens of this rank first: ranks gather equal shapes
                log_probs, local_ids = merge_top_k(log_sum, top, token_ids, k)
                log_sum = torch.logsumexp(log_sum, dim=0, keepdim=True)
                top, token_ids = (log_probs + log_sum[0][:, None])[None], local_ids[None]
            log_sum = tp_group.all_gather(log_sum.contiguous(), dim=0)
            top = tp_group.all_gather(top.contiguous(), dim=0)
            token_ids = tp_group.all_gather(token_ids.contiguous(), dim=0)
        log_probs, token_ids = merge_top_k(log_sum, top, token_ids, k)
        return log_probs, token_ids, token_ids[:, 0].contiguous()

    def _top_k(self, logits: torch.Tensor, k: int, first_id: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.on_cuda:
            return ddtree_kernels.top_k_logits(logits, k, first_id)
        logits = logits.float()
        top, index = torch.topk(logits, k, dim=-1)
        return torch.logsumexp(logits, dim=-1), top, index + first_id

    def plant_trees(
        self,
        log_probs: torch.Tensor,
        token_ids: torch.Tensor,
        chain: torch.Tensor,
        roots: torch.Tensor,
        seq_lens: torch.Tensor,
        budget: int,
    ) -> Planted:
        """Grow a tree per request and lay it out. Arguments as `propose` gives them; roots and seq_lens int64 ``[bs]``."""
        tree, ancestors, links = self._grow(log_probs, token_ids, budget)
        return self._lay_out(tree, ancestors, chain, roots, seq_lens, links)

    def plant_chains(self, chain: torch.Tensor, roots: torch.Tensor, seq_lens: torch.Tensor) -> Planted:
        """The drafter's greedy chain as a tree without branches: linear verification."""
        bs = chain.shape[0]
        slots = self._offsets.expand(bs, self.block_size)
        token_ids = torch.cat([torch.full_like(roots, -1)[:, None], chain], dim=1)
        tree = DDTree(
            parents=(slots - 1).contiguous(),
            token_ids=token_ids,
            depths=slots.contiguous(),
            num_nodes=torch.full_like(roots, self.block_size),
        )
        if self.with_kernels(self.block_size):
            # Bits 0..i: slots up to its own.
            ancestors = ~(torch.full_like(slots, -2) << slots)
        else:
            ancestors = (self._offsets[:, None] >= self._offsets).expand(bs, -1, -1)
        return self._lay_out(tree, ancestors, chain, roots, seq_lens, tree_links(tree.parents) if self.forks else None)

    def _grow(
        self, log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int
    ) -> Tuple[DDTree, torch.Tensor, Optional[Tuple[torch.Tensor, torch.Tensor]]]:
        if self.with_kernels(budget + 1):
            grown = ddtree_kernels.grow_tree(
                log_probs.contiguous(), token_ids.contiguous(), budget, spine=self.spine, links=self.forks
            )
            return DDTree(*grown[:4]), grown[4], grown[5:] or None
        tree = build_ddtree(log_probs, token_ids, budget, spine=self.spine)
        return tree, ancestor_mask(tree, self.depth), tree_links(tree.parents) if self.forks else None

    def _lay_out(
        self,
        tree: DDTree,
        ancestors: torch.Tensor,
        chain: torch.Tensor,
        roots: torch.Tensor,
        seq_lens: torch.Tensor,
        links: Optional[Tuple[torch.Tensor, torch.Tensor]],
    ) -> Planted:
        tokens = tree.token_ids.clamp(min=0)
        tokens[:, 0] = roots
        # An unused slot repeats the root's position: it is masked to itself and freed unread.
        positions = seq_lens[:, None] + tree.depths.clamp(min=0)
        return Planted(tree, ancestors, chain, tokens, positions, links)

    def shadow_trees(self, planted: Planted, log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int) -> None:
        """Grow trees beside what is verified; `walk` then measures them."""
        tree, ancestors, _ = self._grow(log_probs, token_ids, budget)
        planted.shadow = tree, ancestors

    # -- after the verify pass

    def walk(
        self, planted: Planted, targets: torch.Tensor, budgets: Sequence[int] = ()
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The accepted path of each tree, and what the host has to know of it.

        Args:
            targets: int64 ``[bs, q]``, the target's token at each slot.
            budgets: of smaller trees. The best nodes of a tree are the smaller tree, so its accepted path is known.

        Returns:
            as `walk_report`, with a column more for each of the budgets: accepted nodes within it. With a
            shadow, packed has the shadow's slots for its nodes and a last column more: how many of the emitted
            tokens lie on one path of the shadow.
        """
        order, last, packed = self._walk(planted.tree, planted.ancestors, targets, planted.chain)
        if planted.shadow is None:
            if budgets:
                node = (self._slots(order.shape[1]) > 0) & (self._slots(order.shape[1]) <= packed[:, self.depth, None])
                within = [(node & (order <= budget)).sum(dim=1, keepdim=True) for budget in budgets]
                packed = torch.cat([packed, *within], dim=1)
            return order, last, packed
        tree, ancestors = planted.shadow
        at = tree.depths.clamp(min=0, max=self.depth - 1)
        emitted = packed[:, : self.depth].gather(1, at)
        emitted = torch.where((tree.depths >= 0) & (tree.depths <= packed[:, self.depth, None]), emitted, -1)
        _, _, shadow = self._walk(tree, ancestors, emitted, planted.chain)
        packed[:, self.depth + 2] = tree.num_nodes
        return order, last, torch.cat([packed, shadow[:, self.depth, None]], dim=1)

    def _slots(self, q: int) -> torch.Tensor:
        return torch.arange(q, device=self.device)

    def _walk(
        self, tree: DDTree, ancestors: torch.Tensor, targets: torch.Tensor, chain: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if ancestors.ndim == 2:
            return ddtree_kernels.walk_trees(
                tree.parents, tree.token_ids, tree.depths, tree.num_nodes, targets, chain
            )
        return walk_report(tree, ancestors, targets, chain)

    def settle(
        self,
        planted: Planted,
        order: torch.Tensor,
        packed: torch.Tensor,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        draft_kv: bool = True,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Commit the accepted paths: map their KV slots in order, give the drafter their features. No KV moves.

        What lies behind an accepted path is written too and never read: its slots are given back, and the
        request's row keeps what it had there.

        Args:
            order, packed: of `walk`.
            slots: int64 ``[bs, q]``, KV slots of the verify pass.
            hidden: ``[bs * q, features]``, the target's features.
            req_pool_indices, seq_lens: int64 ``[bs]``, as before the step.

        Returns:
            KV slots int64 ``[bs, q]``, those of the accepted path first and in order;
            new sequence lengths int64 ``[bs]``.
        """
        bs, q = order.shape
        committed = packed[:, self.depth] + 1
        ordered = slots.gather(1, order)
        width = min(q, self.block_size)
        at = self._offsets[:width]
        row_ids, columns = req_pool_indices[:, None], seq_lens[:, None] + at
        table = self.worker.model_runner.req_to_token_pool.req_to_token
        kept = torch.where(at < committed[:, None], ordered[:, :width].to(table.dtype), table[row_ids, columns])
        table[row_ids, columns] = kept
        if draft_kv:
            path = order[:, :width]
            first = torch.arange(0, bs * q, q, device=self.device)[:, None]
            self.append_draft_kv(
                hidden.index_select(0, (path + first).flatten()),
                planted.positions.gather(1, path).flatten(),
                ordered[:, :width].flatten(),
            )
        return ordered, seq_lens + committed

    def append_draft_kv(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Project the target's features into the drafter's KV cache; `DFlashWorker`'s, without its host reads.

        Args:
            features: ``[n, features]``. positions, slots: int64 ``[n]``.
        """
        hidden = self.worker.draft_model.project_target_hidden(features)
        helper = self._kv_helper
        if helper is None:
            self.worker._append_target_hidden_sequential(hidden, positions, slots)
            return
        from sglang.srt.speculative.triton_ops.fused_kv_materialize import _fused_norm_rope

        pool = self.worker.draft_model_runner.token_to_kv_pool
        projected = torch.einsum("th,loh->lto", hidden, helper.batched_kv_weight)
        for index, layer in enumerate(self.worker.draft_model.layers):
            attn = layer.self_attn.attn
            keys, values = _fused_norm_rope(
                projected[index],
                helper.k_norm_weights[index],
                helper.rotary_emb.cos_sin_cache,
                positions,
                helper.num_kv_heads,
                helper.head_dim,
                helper.rotary_dim,
                helper.eps_values[index],
            )
            pool.set_kv_buffer(attn, slots, keys, values, attn.k_scale, attn.v_scale)


def check_same_trees(planted: Planted) -> None:
    """For debugging: every rank has to verify the same trees.

    Raises:
        RuntimeError: naming the ranks whose trees differ from rank 0's.
    """
    columns = torch.cat([planted.tree.parents.flatten(), planted.tokens.flatten(), planted.positions.flatten()])
    # A sum of products with odd weights, modulo 2^64: an exchange of two entries shows too.
    weights = torch.arange(1, 2 * columns.numel(), 2, device=columns.device) * 0x9E3779B97F4A7C1
    digest = ((columns + 1) * weights).sum().view(1)
    digests = get_tp_group().all_gather(digest, dim=0).tolist()
    differing = [rank for rank, value in enumerate(digests) if value != digests[0]]
    if differing:
        raise RuntimeError(f"DDTREE: the draft trees of tensor parallel ranks {differing} differ from rank 0's.")


def _pad_columns(values: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    """``[n, m]`` to ``[n, width]``: a small vocabulary shard has fewer candidates than k."""
    if values.shape[1] == width:
        return values
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
