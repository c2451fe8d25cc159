# SPDX-License-Identifier: Apache-2.0
"""DDTREE worker: DFLASH's drafter, a best-first tree of its proposals, one verify pass over the tree.

Extends `DFlashWorker`, which keeps the draft KV cache, the draft block and the
feature hand-over. This module replaces what happens between the drafter's
hidden states and the target's verify pass.
"""

from __future__ import annotations

import logging
import os
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch

from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.ddtree_args import TREE_ATTENTION_BACKENDS
from sglang.srt.speculative.ddtree_graph import ShapeGraphs
from sglang.srt.speculative.ddtree_hybrid import LEAK_MARK, check_target, commit_states, states_fork, track_indices
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree_utils import DDTree, ancestor_mask, build_ddtree, merge_top_k, tree_links, walk_tree
from sglang.srt.speculative.dflash_worker import DFlashWorker

logger = logging.getLogger(__name__)

_HEAD_ROWS = 256
"""Rows that go through the vocabulary head at once, as in DFLASH's own sampling."""

_TREE_BACKEND_CLASSES = {"triton": "TritonAttnBackend"}


def metrics_interval() -> int:
    """Verify steps between two `DDTREE metrics` lines."""
    text = os.environ.get("SGLANG_DDTREE_METRICS_INTERVAL", "100")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"SGLANG_DDTREE_METRICS_INTERVAL must be a whole number from 1 on, got {text!r}.")
    return int(text)


@dataclass
class DDTreeMetrics:
    """Sums over verified requests since start.

    `in_tree` counts emitted tokens that the tree held: in tree mode these are
    the accepted drafts, in shadow mode what the tree would have accepted of the
    text that linear verification emitted (a lower bound, since a longer accepted
    path would have gone on).
    """

    steps: int = 0
    requests: int = 0
    accepted: int = 0
    nodes: int = 0
    in_tree: int = 0
    mark: str = ""

    def line(self) -> str:
        """The body of the `DDTREE metrics` log line."""
        n = max(self.requests, 1)
        return (
            f"steps={self.steps} requests={self.requests} mean_accepted={self.accepted / n:.3f} "
            f"tokens_per_step={self.accepted / n + 1:.3f} tree_nodes={self.nodes / n:.1f} "
            f"mean_in_tree={self.in_tree / n:.3f}{self.mark}"
        )


class DDTreeWorker(DFlashWorker):
    """DDTREE speculative decoding worker (spec-v1, page size 1)."""

    def __init__(self, server_args: ServerArgs, *args: Any, **kwargs: Any):
        # The drafter works on blocks whatever the tree's size: it gets its own copy of the arguments.
        draft_args = deepcopy(server_args)
        draft_args.speculative_num_draft_tokens = server_args.speculative_dflash_block_size
        super().__init__(draft_args, *args, **kwargs)
        self.server_args = server_args
        self.budget = int(server_args.speculative_ddtree_budget)
        self.topk = int(server_args.speculative_ddtree_topk)
        self.spine = int(server_args.speculative_ddtree_spine)
        self.shadow_linear = bool(server_args.speculative_ddtree_shadow_linear)
        self.max_depth = self.block_size - 1
        self.hybrid = self.model_runner.mambaish_config is not None
        self.forks = self.hybrid and states_fork(server_args)
        # Numbers of a run whose states leak say nothing about exact verification.
        self.metrics = DDTreeMetrics(mark="" if self.forks or self.shadow_linear or not self.hybrid else LEAK_MARK)
        self._metrics_interval = metrics_interval()
        self._tree: Optional[DDTree] = None
        self._lm_head: Optional[torch.nn.Module] = None
        graphed = (
            torch.device(self.device).type == "cuda"
            and not server_args.disable_cuda_graph
            and get_tp_group().world_size == 1
        )
        max_rows = int(server_args.cuda_graph_max_bs) if graphed else 0
        self._grow = ShapeGraphs(self._grow_trees, max_rows=max_rows)
        self._walk = ShapeGraphs(self._walk_trees, max_rows=max_rows)
        self._verify_input: Optional[DDTreeVerifyInput] = None
        if not self.shadow_linear:
            self._refuse_what_cannot_verify_trees()
            # Trees are sampled here, on every device; DFLASH's line about its own fallback would mislead.
            self._warned_sampling_fallback = True
            self._logged_first_verify = True
        self._logged_first_tree = False
        if self.tp_rank == 0:
            logger.info(
                "Initialized DDTREE draft runner. budget=%d, topk=%d, spine=%d, block_size=%d, draft_window_size=%s",
                self.budget,
                self.topk,
                self.spine,
                self.block_size,
                self.draft_window_size,
            )
            if self.shadow_linear:
                logger.info(
                    "DDTREE shadow-linear mode is enabled. Trees are built and measured, verification is DFLASH's."
                )

    def _refuse_what_cannot_verify_trees(self) -> None:
        # HybridAttnBackend verifies with one of its halves; a hybrid model's backend holds the attention one inside.
        mode = self.server_args.speculative_attention_mode
        half = "decode_backend" if mode == "decode" else "prefill_backend"
        backend = self.model_runner.attn_backend
        while inner := getattr(backend, "full_attn_backend", None) or getattr(backend, half, None):
            backend = inner
        allowed = [_TREE_BACKEND_CLASSES[name] for name in TREE_ATTENTION_BACKENDS]
        if type(backend).__name__ not in allowed:
            raise ValueError(
                f"DDTREE cannot verify trees with the attention backend {type(backend).__name__}. "
                f"Use --attention-backend {' or '.join(TREE_ATTENTION_BACKENDS)}."
            )
        window = self.model_runner.sliding_window_size
        if window is not None and window > 0:
            raise ValueError(
                f"DDTREE cannot verify trees on {self.server_args.model_path}: its sliding window ({window}) "
                "is counted in slots, and tree slots are not positions. Use --speculative-algorithm DFLASH."
            )
        check_target(self.model_runner, self.server_args)

    def make_tree_verify_input(
        self,
        batch: ScheduleBatch,
        *,
        draft_hidden: torch.Tensor,
        verified_ids: torch.Tensor,
        lm_head: torch.nn.Module,
    ) -> Optional[DDTreeVerifyInput]:
        """Grow a tree per request from the drafter's hidden states.

        Args:
            draft_hidden: ``[bs, block_size, hidden]``; row 0 belongs to the known token.
            verified_ids: int64 ``[bs]``, the known tokens: the roots.
            lm_head: the target's vocabulary-parallel head.

        Returns:
            the verify input, or None in shadow mode: DFLASH's own linear input is used then.
        """
        self._lm_head = lm_head
        *columns, ancestors = self._grow(draft_hidden[:, 1:])
        self._tree = DDTree(*columns)
        if self.shadow_linear:
            return None
        self._verify_input = DDTreeVerifyInput.from_tree(
            self._tree, ancestors, verified_ids, batch.seq_lens, self.max_depth, self._walk, self.model_runner.sampler
        )
        if self.forks:
            links = tree_links(self._tree.parents)
            self._verify_input.retrieve_next_token, self._verify_input.retrieve_next_sibling = links
        return self._verify_input

    def _grow_trees(self, hidden: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Drafter states ``[bs, max_depth, hidden]`` to a tree's four columns and its ancestor mask."""
        # In parts: the logits of a full batch over a large vocabulary would take GiB.
        parts = [self._top_k_log_probs(rows, self._lm_head) for rows in hidden.flatten(0, 1).split(_HEAD_ROWS)]
        log_probs, token_ids = (torch.cat(column) for column in zip(*parts, strict=True))
        shape = (hidden.shape[0], self.max_depth, -1)
        tree = build_ddtree(log_probs.view(shape), token_ids.view(shape), self.budget, spine=self.spine)
        return tree.parents, tree.token_ids, tree.depths, tree.num_nodes, ancestor_mask(tree, self.max_depth)

    def _walk_trees(
        self,
        parents: torch.Tensor,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        num_nodes: torch.Tensor,
        ancestors: torch.Tensor,
        draft_tokens: torch.Tensor,
        target_tokens: torch.Tensor,
    ) -> Tuple[torch.Tensor, ...]:
        """Walk, and pack what the host needs into one tensor: path tokens, accept length, bonus, nodes."""
        walk = walk_tree(DDTree(parents, token_ids, depths, num_nodes), ancestors, target_tokens, self.max_depth)
        tokens = draft_tokens.gather(1, walk.path)
        columns = (walk.accept_lens, walk.bonus, num_nodes)
        return walk.path, torch.cat([tokens[:, 1:], *(column[:, None] for column in columns)], dim=1)

    def _top_k_log_probs(self, hidden: torch.Tensor, lm_head: torch.nn.Module) -> Tuple[torch.Tensor, torch.Tensor]:
        """The drafter's top-k over the whole vocabulary.

        Each rank scores its shard and gives away k logits and one log-sum-exp per
        row instead of its logits.

        Args:
            hidden: ``[n, hidden]``.

        Returns:
            log-probabilities float32 ``[n, k]`` and token ids int64 ``[n, k]``.
        """
        shard = lm_head.shard_indices
        weight = lm_head.weight
        hidden = hidden.to(weight.dtype)
        # Rows of the local weight: base vocabulary, padding, added tokens, padding.
        parts = [(0, int(shard.num_org_elements), int(shard.org_vocab_start_index))]
        if int(shard.num_added_elements):
            parts.append(
                (int(shard.num_org_elements_padded), int(shard.num_added_elements), int(shard.added_vocab_start_index))
            )
        sums, tops, ids = [], [], []
        for row, count, first_id in parts:
            if count == 0:
                continue
            raw = torch.matmul(hidden, weight[row : row + count].T)
            logits = raw.float()
            if self.topk == 1:
                # argmax, as DFLASH: on equal logits topk may name another token.
                index = torch.argmax(raw, dim=-1, keepdim=True)
                top = logits.gather(1, index)
            else:
                top, index = torch.topk(logits, min(self.topk, count), dim=-1)
            sums.append(torch.logsumexp(logits, dim=-1))
            tops.append(_pad_columns(top, self.topk, float("-inf")))
            ids.append(_pad_columns(index + first_id, self.topk, 0))
        n = hidden.shape[0]
        if not sums:  # a rank whose shard is all padding
            sums = [hidden.new_full((n,), float("-inf"), dtype=torch.float32)]
            tops = [hidden.new_full((n, self.topk), float("-inf"), dtype=torch.float32)]
            ids = [torch.zeros(n, self.topk, dtype=torch.int64, device=hidden.device)]
        merged_top, merged_ids = torch.stack(tops), torch.stack(ids)
        merged_sum = torch.stack(sums)
        tp_group = get_tp_group()
        if tp_group.world_size > 1:
            if merged_sum.shape[0] > 1:  # base and added tokens of this rank first: ranks gather equal shapes
                log_probs, local_ids = merge_top_k(merged_sum, merged_top, merged_ids, self.topk)
                merged_sum = torch.logsumexp(merged_sum, dim=0, keepdim=True)
                merged_top, merged_ids = (log_probs + merged_sum[0][:, None])[None], local_ids[None]
            merged_sum = tp_group.all_gather(merged_sum.contiguous(), dim=0)
            merged_top = tp_group.all_gather(merged_top.contiguous(), dim=0)
            merged_ids = tp_group.all_gather(merged_ids.contiguous(), dim=0)
        return merge_top_k(merged_sum, merged_top, merged_ids, self.topk)

    def forward_batch_generation(self, batch: ScheduleBatch, **kwargs: Any) -> GenerationBatchResult:
        """As `DFlashWorker.forward_batch_generation`, plus metrics and the first verify's log line."""
        self._tree = None
        result = super().forward_batch_generation(batch, **kwargs)
        if self._tree is not None:
            self._record(batch, result.num_accepted_drafts_per_req_cpu)
        return result

    def _record(self, batch: ScheduleBatch, accepted: List[int]) -> None:
        metrics = self.metrics
        metrics.steps += 1
        metrics.requests += len(accepted)
        metrics.accepted += sum(accepted)
        if self.shadow_linear:
            metrics.nodes += int(self._tree.num_nodes.sum()) - len(accepted)
            metrics.in_tree += sum(self._emitted_in_tree(batch, accepted))
        else:
            metrics.nodes += sum(self._verify_input.nodes)
            metrics.in_tree += sum(accepted)
        if self.tp_rank != 0:
            return
        if not self._logged_first_tree:
            if not self.shadow_linear:
                logger.info("DDTREE verify completed. num_accepted_drafts_per_req=%s", accepted)
            self._logged_first_tree = True
            logger.info("DDTREE metrics %s", metrics.line())
        elif metrics.steps % self._metrics_interval == 0:
            logger.info("DDTREE metrics %s", metrics.line())

    def _emitted_in_tree(self, batch: ScheduleBatch, accepted: List[int]) -> List[int]:
        """How many of the tokens just emitted, bonus included, lie on one path of each request's tree."""
        parents, tokens = self._tree.parents.tolist(), self._tree.token_ids.tolist()
        depths = []
        for req, drafts, request_parents, request_tokens in zip(batch.reqs, accepted, parents, tokens, strict=True):
            child: Dict[Tuple[int, int], int] = {
                (parent, token): slot for slot, (parent, token) in enumerate(zip(request_parents, request_tokens))
            }
            slot, depth = 0, 0
            for token in req.output_ids[-(drafts + 1) :]:
                if (slot := child.get((slot, token), -1)) < 0:
                    break
                depth += 1
            depths.append(depth)
        return depths

    def _update_target_mamba_state_after_verify(
        self, *, batch: ScheduleBatch, seq_lens_pre_verify: torch.Tensor, commit_lens: torch.Tensor
    ) -> None:
        """The state of each request's last committed slot becomes its state."""
        if not self.hybrid:
            return
        kept = track_indices(batch, self.server_args)
        if self.shadow_linear:
            super()._update_target_mamba_state_after_verify(
                batch=batch, seq_lens_pre_verify=seq_lens_pre_verify, commit_lens=commit_lens
            )
            return
        commit_states(
            self.model_runner,
            last_slots=batch.spec_info.last_slots,
            path=batch.spec_info.path,
            seq_lens_before=seq_lens_pre_verify,
            commit_lens=commit_lens,
            track_indices=kept,
        )


def _pad_columns(values: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    """``[n, m]`` to ``[n, width]``: a small vocabulary shard has fewer candidates than k."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
