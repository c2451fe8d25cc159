# SPDX-License-Identifier: Apache-2.0
"""Verify input of the DDTREE algorithm: one target pass over a tree of draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Callable, List, Tuple

import torch

from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.common import alloc_token_slots
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree_utils import DDTree
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func

_SAMPLED_ROWS = 64
"""Rows of logits that are sampled at once."""


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A batch of trees of ``q = budget + 1`` slots, flattened to ``bs * q`` tokens.

    Takes the place of `DFlashVerifyInput`: same forward mode, same KV
    accounting, but slots attend along ancestors and sit at ``seq_len + depth``.

    Attributes:
        tree: the trees, on the device.
        ancestors: bool ``[bs, q, q]``, which slots each slot may see in the tree.
        walk: tree columns, ancestors, draft tokens and target tokens to the
            accepted path and the one tensor that the host reads.
        sampler: the target's sampler, whose backend draws at each slot.
        max_depth: drafted positions, ``block_size - 1``.
        last_slots: int64 ``[bs]`` after `verify`, slot of each request's last
            committed token in the tree.
        path: int64 ``[bs, max_depth + 1]`` after `verify`, slots of the accepted path.
        nodes: after `verify`, each tree's nodes without the root.
        retrieve_next_token: int32 ``[bs, q]``, first child of each slot, -1 for
            none; set for targets with recurrent layers, whose states then fork
            from their parents' (`tree_links`).
        retrieve_next_sibling: int32 ``[bs, q]``, next child of the same parent.
    """

    tree: DDTree | None = None
    ancestors: torch.Tensor | None = None
    walk: Callable[..., Tuple[torch.Tensor, ...]] | None = None
    sampler: Sampler | None = None
    max_depth: int = 0
    last_slots: torch.Tensor | None = None
    path: torch.Tensor | None = None
    nodes: List[int] | None = None
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None

    @classmethod
    def from_tree(
        cls,
        tree: DDTree,
        ancestors: torch.Tensor,
        roots: torch.Tensor,
        seq_lens: torch.Tensor,
        max_depth: int,
        walk: Callable[..., Tuple[torch.Tensor, ...]],
        sampler: Sampler,
    ) -> DDTreeVerifyInput:
        """Lay the trees out for one forward pass.

        Args:
            tree: trees of ``q`` slots.
            roots: int64 ``[bs]``, each request's current token.
            seq_lens: ``[bs]``, tokens already in the KV cache: the root's position.
            max_depth: no node is deeper than this.
        """
        tokens = tree.token_ids.clamp(min=0)
        tokens[:, 0] = roots
        # An unused slot repeats the root's position: it is masked to itself and freed unread.
        positions = seq_lens[:, None].to(torch.int64) + tree.depths.clamp(min=0)
        return cls(
            draft_token=tokens.flatten(),
            positions=positions.flatten(),
            draft_token_num=tree.parents.shape[1],
            tree=tree,
            ancestors=ancestors,
            walk=walk,
            sampler=sampler,
            max_depth=max_depth,
        )

    def prepare_for_verify(self, batch: ScheduleBatch, page_size: int, *, build_custom_mask: bool = True) -> None:
        """Take KV slots for every tree slot and build the ancestor mask.

        The mask is flat bool, per request ``[q, seq_len + q]``, True where a
        query may look: all of the prefix, and its own ancestors in the tree.
        """
        if batch.forward_mode.is_idle():
            return
        if page_size != 1:
            raise ValueError(f"DDTREE needs page_size 1, got {page_size}.")
        bs, q = batch.batch_size(), self.draft_token_num
        batch.input_ids = self.draft_token
        batch.out_cache_loc = alloc_token_slots(batch.tree_cache, bs * q)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            batch.seq_lens + q,
            batch.out_cache_loc,
            bs,
        )
        device = self.ancestors.device
        prefix = batch.seq_lens.to(torch.int64)
        width = prefix + q
        start = (q * width).cumsum(0) - q * width
        slot = torch.arange(q, device=device)
        entry = start[:, None, None] + slot[None, :, None] * width[:, None, None] + prefix[:, None, None] + slot
        # seq_lens_cpu is the host's copy: sizing the mask needs no look at the device.
        total = q * (int(batch.seq_lens_cpu.sum()) + bs * q)
        self.custom_mask = torch.ones(total, dtype=torch.bool, device=device)
        self.custom_mask[entry.flatten()] = self.ancestors.flatten()

    def _target_tokens(self, logits: torch.Tensor, sampling_info: SamplingBatchInfo | None) -> torch.Tensor:
        """The target's token at each slot: argmax, or one draw as the sampler would make it.

        Args:
            logits: ``[bs * q, vocab]``.

        Returns:
            int64 ``[bs, q]``.
        """
        q = self.draft_token_num
        if sampling_info is None or sampling_info.is_all_greedy:
            return torch.argmax(logits, dim=-1).view(-1, q)

        def per_slot(values: torch.Tensor) -> torch.Tensor:
            return torch.repeat_interleave(values, q, dim=0)

        filtered = (
            sampling_info.need_top_p_sampling
            or sampling_info.need_top_k_sampling
            or sampling_info.need_min_p_sampling
        )
        temperatures, top_ks, top_ps, min_ps = (
            per_slot(values)
            for values in (sampling_info.temperatures, sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
        )
        drawn = []
        # In parts: a filter sorts the vocabulary of every row.
        for start in range(0, logits.shape[0], _SAMPLED_ROWS):
            rows = slice(start, start + _SAMPLED_ROWS)
            part = SimpleNamespace(
                top_ks=top_ks[rows],
                top_ps=top_ps[rows],
                min_ps=min_ps[rows],
                need_min_p_sampling=sampling_info.need_min_p_sampling,
                sampling_seed=None,
            )
            probs = torch.softmax(logits[rows].float() / temperatures[rows], dim=-1)
            drawn.append(self.sampler._sample_from_probs(probs, part, self.positions[rows], not filtered))
        # A greedy request in a sampled batch has top-k 1: argmax, so that equal logits are settled as ever.
        drawn = torch.where(top_ks <= 1, torch.argmax(logits, dim=-1), torch.cat(drawn).to(torch.int64))
        drawn = drawn.view(-1, q)
        tp_group = get_tp_group()
        if tp_group.world_size > 1:
            drawn = tp_group.broadcast(drawn.contiguous(), src=0)
        return drawn

    def verify(
        self, *, batch: ScheduleBatch, logits_output: LogitsProcessorOutput, page_size: int
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, List[int]]:
        """Walk each tree, commit the accepted path, give every other slot back.

        Returns:
            as `DFlashVerifyInput.verify`: new current tokens int64 ``[bs]``, commit
            lengths int32 ``[bs]``, target features ``[sum(commit_lens), features]``
            of the committed tokens in order, accepted drafts per request.
        """
        if batch.forward_mode.is_idle():
            empty = torch.empty((0,), dtype=torch.int64, device=batch.device)
            return empty, empty.to(torch.int32), empty, []
        if logits_output.hidden_states is None:
            raise RuntimeError("DDTREE verify requires target hidden states, but got None.")
        bs, q = batch.batch_size(), self.draft_token_num
        sampling_info = batch.sampling_info
        if sampling_info is not None and sampling_info.logit_bias is not None:
            logits_output.next_token_logits.add_(torch.repeat_interleave(sampling_info.logit_bias, q, dim=0))
        tree = self.tree
        path, packed = self.walk(
            tree.parents,
            tree.token_ids,
            tree.depths,
            tree.num_nodes,
            self.ancestors,
            self.draft_token.view(bs, q),
            self._target_tokens(logits_output.next_token_logits, sampling_info),
        )
        commit_lens_cpu, new_tokens = self._emit(batch, packed)

        device = self.tree.parents.device
        commit_lens = torch.tensor(commit_lens_cpu, dtype=torch.int32, device=device)
        kept = torch.arange(path.shape[1], device=device) < commit_lens[:, None]
        rows = (torch.arange(bs, device=device) * q)[:, None] + path
        kept_rows = rows[kept]
        self.path = path
        self.last_slots = path.gather(1, (commit_lens.to(torch.int64) - 1)[:, None]).squeeze(1)
        self._commit_kv(batch, kept_rows, commit_lens, commit_lens_cpu)

        hidden = logits_output.hidden_states.view(bs * q, -1)
        # Spec-v1 decode has no further use for them.
        logits_output.hidden_states = None
        return (
            torch.tensor(new_tokens, dtype=torch.int64, device=device),
            commit_lens,
            hidden.index_select(0, kept_rows),
            [length - 1 for length in commit_lens_cpu],
        )

    def _emit(self, batch: ScheduleBatch, packed: torch.Tensor) -> Tuple[List[int], List[int]]:
        """Append the walked tokens to their requests until each one finishes.

        Args:
            packed: int64 ``[bs, max_depth + 3]``: path tokens, accept length, bonus, slots used.

        Returns:
            committed tree tokens per request (the root counted; as many as were
            appended) and the last appended token per request.
        """
        rows = packed.tolist()  # the one device-to-host copy of the step
        self.nodes = [row[-1] - 1 for row in rows]
        commit_lens, new_tokens = [], []
        think_end = batch.model_config.think_end_id
        for req, (*path, accept_len, bonus, _) in zip(batch.reqs, rows, strict=True):
            appended = 0
            for token in [*path[:accept_len], bonus]:
                req.output_ids.append(token)
                appended += 1
                if req.require_reasoning and think_end is not None:
                    req.update_reasoning_tokens(token, think_end)
                req.check_finished()
                if req.finished():
                    break
            commit_lens.append(appended)
            new_tokens.append(req.output_ids[-1])
            req.spec_verify_ct += 1
            req.spec_accepted_drafts += appended - 1
            req.update_spec_acceptance_histogram(appended - 1)
        return commit_lens, new_tokens

    def _commit_kv(
        self, batch: ScheduleBatch, kept_rows: torch.Tensor, commit_lens: torch.Tensor, commit_lens_cpu: List[int]
    ) -> None:
        """Map the accepted path's slots to its positions in order and free the rest; no KV moves."""
        slots = batch.out_cache_loc
        rejected = torch.ones(slots.shape[0], dtype=torch.bool, device=slots.device)
        rejected[kept_rows] = False
        batch.token_to_kv_pool_allocator.free(slots[rejected])
        batch.out_cache_loc = slots[kept_rows]
        for req, length in zip(batch.reqs, commit_lens_cpu, strict=True):
            req.kv_committed_len += length
            req.kv_allocated_len = req.kv_committed_len
        lengths = commit_lens.to(batch.seq_lens.dtype)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            batch.seq_lens + lengths,
            batch.out_cache_loc,
            batch.batch_size(),
        )
        batch.seq_lens.add_(lengths)
        batch.seq_lens_cpu.add_(torch.tensor(commit_lens_cpu, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(commit_lens_cpu)
