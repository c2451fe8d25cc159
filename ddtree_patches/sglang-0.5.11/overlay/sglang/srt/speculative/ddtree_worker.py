# SPDX-License-Identifier: Apache-2.0
"""DDTREE worker: DFLASH's drafter, a best-first tree of its proposals, one verify pass over the tree.

Extends `DFlashWorker`, which builds the drafter and handles prompts. A decode
step is this module's own: `ddtree_step` says what happens on the device,
`ddtree_graph` replays that from CUDA graphs, and here is the host's part.
"""

from __future__ import annotations

import logging
import os
import time
from copy import deepcopy
from typing import Any, Dict, List, Optional, Tuple

import torch

from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.common import alloc_token_slots
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.ddtree_args import TREE_ATTENTION_BACKENDS
from sglang.srt.speculative.ddtree_graph import GraphedStep
from sglang.srt.speculative.ddtree_hybrid import LEAK_MARK, check_target, states_fork, track_indices, track_slots
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput, flat_mask
from sglang.srt.speculative.ddtree_logits import adjust_logits
from sglang.srt.speculative.ddtree_metrics import DDTreeMetrics, StepClock, metrics_interval
from sglang.srt.speculative.ddtree_policy import LINEAR, VerifyPolicy
from sglang.srt.speculative.ddtree_sampling import target_tokens
from sglang.srt.speculative.ddtree_shapes import Shape, as_wide_as, attention_backend, make_shapes
from sglang.srt.speculative.ddtree_step import DeviceStep, Planted, check_same_trees
from sglang.srt.speculative.dflash_info import DFlashDraftInput
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from sglang.srt.speculative.dflash_worker import DFlashWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func

logger = logging.getLogger(__name__)

_TREE_BACKEND_CLASSES = {"triton": "TritonAttnBackend"}

_MEASURED_ROWS = (1, 2, 4, 8, 16, 32)

_GRAPHED_ROWS = 32
"""Batches up to this size run from the stages' graphs; launches matter less in larger ones."""


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
        leaks = self.hybrid and not self.forks and not self.shadow_linear
        self.metrics = DDTreeMetrics(mark=LEAK_MARK if leaks else "")
        self._metrics_interval = metrics_interval()
        self._logged_first_verify = False
        self._check_ranks = get_tp_group().world_size > 1 and os.environ.get("SGLANG_DDTREE_CHECK_RANKS") == "1"
        self._clock = StepClock(self.device, logger) if self.tp_rank == 0 else None
        if not self.shadow_linear:
            self._refuse_what_cannot_verify_trees()
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
                    "DDTREE shadow-linear mode is enabled. Trees are built and measured, verification is linear."
                )
        self.step = DeviceStep(self)
        self.shapes = make_shapes(self.model_runner, server_args)
        self.graphs = self._make_graphs()
        self.policy = self._make_policy()
        self._ahead: Optional[Tuple[List[Any], Shape]] = None
        self._read_at = 0.0

    # -- start

    def _refuse_what_cannot_verify_trees(self) -> None:
        backend = attention_backend(self.server_args, self.model_runner.attn_backend)
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

    def _make_policy(self) -> VerifyPolicy:
        """Measured where trees compete with something; on all ranks the same numbers."""
        args = self.server_args
        above = args.speculative_ddtree_linear_above if args.speculative_ddtree_linear == "on" else None
        costs: Dict[str, Dict[int, float]] = {}
        competing = [name for name in self.shapes if name != LINEAR or above is None]
        if self.graphs is not None and len(competing) > 1:
            sizes = [bs for bs in _MEASURED_ROWS if bs <= self.graphs.max_rows]
            table = torch.tensor(
                [[self.graphs.measure(self.shapes[name], bs) for bs in sizes] for name in competing],
                dtype=torch.float64,
                device=self.device,
            )
            if get_tp_group().world_size > 1:
                table = get_tp_group().broadcast(table, src=0)
            costs = {name: dict(zip(sizes, row)) for name, row in zip(competing, table.tolist(), strict=True)}
        policy = VerifyPolicy(
            {name: shape.budget for name, shape in self.shapes.items() if shape.budget},
            linear=LINEAR in self.shapes,
            above=above,
            costs=costs,
            log=lambda line: logger.info("DDTREE policy %s", line) if self.tp_rank == 0 else None,
        )
        if self.tp_rank == 0:
            if len(competing) > 1 and not costs:
                logger.info("DDTREE policy nothing measured without graphs, verify=%s", policy.choose(1))
            for name, points in costs.items():
                line = " ".join(f"{bs}:{cost:.3f}" for bs, cost in points.items())
                logger.info("DDTREE step cost in ms by batch size, shape %s: %s", name, line)
        return policy

    def _make_graphs(self) -> Optional[GraphedStep]:
        """Graphs of the stages, where both models run from graphs and prepare them on the device alone."""
        args, draft = self.server_args, self.draft_model_runner
        runners = [draft, *(shape.runner for shape in self.shapes.values())]
        if torch.device(self.device).type != "cuda" or any(runner.graph_runner is None for runner in runners):
            return None
        backends = [attention_backend(args, runner.attn_backend) for runner in runners]
        reasons = [
            *(type(backend).__name__ for backend in backends if type(backend).__name__ != "TritonAttnBackend"),
            *(["a draft window"] if self.use_compact_draft_cache else []),
            *(["LoRA"] if args.enable_lora else []),
            *(["two-batch overlap"] if args.enable_two_batch_overlap else []),
            *(["PD multiplexing"] if args.enable_pdmux else []),
            *([f"--moe-a2a-backend {args.moe_a2a_backend}"] if args.moe_a2a_backend != "none" else []),
            *(["an encoder"] if self.model_runner.model_config.is_encoder_decoder else []),
            *([] if max(shape.q for shape in self.shapes.values()) <= 64 else ["more than 64 slots"]),
            *(["gathered buffers"] if draft.graph_runner.require_gathered_buffer else []),
        ]
        if reasons:
            if self.tp_rank == 0:
                logger.info("DDTREE steps run without graphs of their own because of %s.", ", ".join(reasons))
            return None
        rows = min(_GRAPHED_ROWS, *(runner.graph_runner.max_bs for runner in runners))
        graphs = GraphedStep(self.step, draft, list(self.shapes.values()), rows)
        if self.tp_rank == 0:
            logger.info("DDTREE steps run from CUDA graphs for batches of up to %d.", rows)
        return graphs

    # -- a decode step

    def forward_batch_generation(self, batch: ScheduleBatch, **kwargs: Any) -> GenerationBatchResult:
        """As `DFlashWorker.forward_batch_generation`: prompts are its own work, decode steps are ours."""
        if not isinstance(batch, ScheduleBatch) or batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._ahead = None
            return super().forward_batch_generation(batch, **kwargs)
        draft_input = batch.spec_info
        if not isinstance(draft_input, DFlashDraftInput):
            raise RuntimeError(
                "DDTREE decode requires DFlashDraftInput state on the running batch. "
                "This usually means the request did not complete the prefill stage."
            )
        shape = self.shapes[self.policy.choose(batch.batch_size())]
        if self.graphs is not None and batch.batch_size() <= self.graphs.max_rows and _plain(batch):
            return self._decode_from_graphs(batch, draft_input, shape)
        self._ahead = None
        return self._decode(batch, draft_input, shape)

    def _decode_from_graphs(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInput, shape: Shape
    ) -> GenerationBatchResult:
        graphs, bs = self.graphs, batch.batch_size()
        ahead, self._ahead = self._ahead, None
        drafted = ahead is not None and ahead[1] is shape and _same(ahead[0], batch.reqs)
        if not drafted:
            graphs.load(batch.seq_lens, draft_input.verified_id, batch.req_pool_indices)
            slots, before = alloc_token_slots(batch.tree_cache, bs * self.block_size, backup_state=True)
            batch.token_to_kv_pool_allocator.restore_state(before)
            graphs.draft(shape, bs, slots, self._mark)
        if self._check_ranks:
            check_same_trees(graphs.planted(shape, bs))
        slots = alloc_token_slots(batch.tree_cache, bs * shape.q)

        def choose(logits: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
            info = batch.sampling_info
            adjust_logits(logits, batch.reqs, info, graphs.planted(shape, bs).tree, self.max_depth)
            if info is None or info.is_all_greedy:
                torch.argmax(logits, dim=-1, out=out)
            else:
                out.copy_(target_tokens(logits, positions, info, shape.q, self.model_runner.sampler).flatten())

        ordered, order = graphs.verify(shape, bs, slots, choose, self._mark)
        self._draft_ahead(batch, shape)
        rows = graphs.accepted()
        before, self._read_at = self._read_at, time.perf_counter()
        if drafted and get_tp_group().world_size == 1:  # ranks have to agree: theirs stay with what was measured at start
            self.policy.took(shape.name, bs, (self._read_at - before) * 1000)
        new_lengths, verified_ids = graphs.state[:, :bs].clone()
        return self._close(batch, draft_input, shape, rows, ordered, order, new_lengths, verified_ids, True)

    def _draft_ahead(self, batch: ScheduleBatch, shape: Shape) -> None:
        """Launch the next draft pass before the host has seen this step's tokens: most often the batch stays as it is.

        A draft that is not wanted after all has written to free KV slots only.
        """
        allocator, wanted = batch.token_to_kv_pool_allocator, batch.batch_size() * self.block_size
        before = allocator.backup_state()
        slots = allocator.alloc(wanted)
        allocator.restore_state(before)
        if slots is not None:
            self.graphs.draft(shape, batch.batch_size(), slots, self._mark)
            self._ahead = list(batch.reqs), shape

    def _decode(self, batch: ScheduleBatch, draft_input: DFlashDraftInput, shape: Shape) -> GenerationBatchResult:
        """A step without graphs of its own; the models may still run from the engine's."""
        step, bs = self.step, batch.batch_size()
        roots, lengths = draft_input.verified_id.to(torch.int64), batch.seq_lens.to(torch.int64)
        hidden = self._draft(batch, draft_input, roots, lengths)[:, 1:]
        log_probs, token_ids, chain = step.propose(hidden, tree=bool(shape.budget or self.shadow_linear))
        if shape.budget:
            planted = step.plant_trees(log_probs, token_ids, chain, roots, lengths, shape.budget)
        else:
            planted = step.plant_chains(chain, roots, lengths)
        if self.shadow_linear:
            step.shadow_trees(planted, log_probs, token_ids, self.budget)

        if self._check_ranks:
            check_same_trees(planted)
        slots = alloc_token_slots(batch.tree_cache, bs * shape.q)
        output, can_run_cuda_graph = self._verify(batch, shape, planted, slots)
        info = batch.sampling_info
        adjust_logits(output.next_token_logits, batch.reqs, info, planted.tree, self.max_depth)
        targets = target_tokens(
            output.next_token_logits, planted.positions.flatten(), info, shape.q, self.model_runner.sampler
        )
        order, _, packed = step.walk(planted, targets, shape.budgets)
        compact = self.use_compact_draft_cache
        ordered, new_lengths = step.settle(
            planted,
            order,
            packed,
            slots.view(bs, shape.q),
            output.hidden_states,
            batch.req_pool_indices.to(torch.int64),
            lengths,
            draft_kv=not compact,
        )
        rows = packed.tolist()  # the one device-to-host copy of the step
        verified_ids = packed[:, self.max_depth + 1].clone()
        result = self._close(
            batch, draft_input, shape, rows, ordered, order, new_lengths, verified_ids, can_run_cuda_graph
        )
        if compact:
            committed = [slot_row[: n + 1] for slot_row, n in zip(order, result.num_accepted_drafts_per_req_cpu)]
            features = output.hidden_states.view(bs, shape.q, -1)
            draft_input.target_hidden = torch.cat([features[i, path] for i, path in enumerate(committed)])
            draft_input.ctx_lens = torch.tensor([len(path) for path in committed], dtype=torch.int32, device=self.device)
            self._append_target_hidden_to_draft_kv(batch, draft_input)
        return result

    def _draft(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInput, roots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """The drafter's states ``[bs, block_size, hidden]``; as DFLASH's, without its copies to the host."""
        bs, runner = batch.batch_size(), self.draft_model_runner
        starts = draft_input.draft_seq_lens.to(torch.int32)
        on_host = batch.seq_lens_cpu.to(torch.int32)
        if self.use_compact_draft_cache:
            on_host = on_host.clamp(max=int(self.draft_window_size))
        ids, positions, embeddings = self.step.draft_block(roots, lengths)
        # The draft block takes free KV slots for a moment: they are not allocated for good.
        slots, before = alloc_token_slots(batch.tree_cache, bs * self.block_size, backup_state=True)
        batch.token_to_kv_pool_allocator.restore_state(before)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            runner.req_to_token_pool.req_to_token,
            starts,
            starts + self.block_size,
            slots,
            bs,
        )
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=ids,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=starts,
            out_cache_loc=slots,
            seq_lens_sum=int(on_host.sum()),
            seq_lens_cpu=on_host,
            positions=positions,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            attn_backend=runner.attn_backend,
            input_embeds=embeddings,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            hidden = runner.forward(forward_batch).logits_output.hidden_states
        return hidden.view(bs, self.block_size, -1)

    def _verify(
        self, batch: ScheduleBatch, shape: Shape, planted: Planted, slots: torch.Tensor
    ) -> Tuple[LogitsProcessorOutput, bool]:
        """The target's pass over the trees, by the engine's usual way."""
        bs, q, runner = batch.batch_size(), shape.q, self.model_runner
        ancestors = planted.ancestors
        if ancestors.ndim == 2:
            ancestors = (ancestors[:, :, None] >> torch.arange(q, device=ancestors.device)) & 1 > 0
        total = q * (int(batch.seq_lens_cpu.sum()) + bs * q)
        links = planted.links or (None, None)
        batch.input_ids = planted.tokens.flatten()
        batch.out_cache_loc = slots
        batch.spec_info = DDTreeVerifyInput(
            draft_token=batch.input_ids,
            positions=planted.positions.flatten(),
            draft_token_num=q,
            custom_mask=flat_mask(ancestors, batch.seq_lens, total) if self._wants_mask(shape) else None,
            retrieve_next_token=links[0],
            retrieve_next_sibling=links[1],
        )
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.return_hidden_states = False
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            batch.seq_lens + q,
            slots,
            bs,
        )
        usual = runner.attn_backend, runner.graph_runner
        runner.attn_backend, runner.graph_runner = shape.runner.attn_backend, shape.runner.graph_runner
        try:
            with as_wide_as(runner.server_args, q):
                result = self.target_worker.forward_batch_generation(batch.get_model_worker_batch(), is_verify=True)
        finally:
            runner.attn_backend, runner.graph_runner = usual
        if result.logits_output.hidden_states is None:
            raise RuntimeError("DDTREE verify requires target hidden states, but got None.")
        return result.logits_output, result.can_run_cuda_graph

    def _wants_mask(self, shape: Shape) -> bool:
        """A chain needs no mask where the backend's verify pass is causal by itself."""
        return bool(shape.budget) or resolve_dflash_verify_mask_policy(shape.runner.attn_backend)[1]

    # -- the host's part of a step

    def _close(
        self,
        batch: ScheduleBatch,
        draft_input: DFlashDraftInput,
        shape: Shape,
        rows: List[List[int]],
        ordered: torch.Tensor,
        order: torch.Tensor,
        new_lengths: torch.Tensor,
        verified_ids: torch.Tensor,
        can_run_cuda_graph: bool,
    ) -> GenerationBatchResult:
        """Hand out the tokens, give the other KV slots back, and leave the batch as the scheduler expects it.

        Args:
            rows: packed of `walk_report`, on the host.
            ordered, order: KV slots and tree slots ``[bs, q]``, accepted paths first.
            new_lengths, verified_ids: int64 ``[bs]``, as if every accepted token were kept.
        """
        depth = self.max_depth
        commit_lens = self._emit(batch, rows)
        cut = [row[depth] + 1 - length for row, length in zip(rows, commit_lens, strict=True)]
        if any(req.finished() for req in batch.reqs):
            self._ahead = None  # the batch will not stay as it is
        if any(cut):  # a request has finished inside its path
            new_lengths = new_lengths - torch.tensor(cut, device=new_lengths.device)
        if self.hybrid:
            self._commit_states(batch, shape, order, commit_lens)
        batch.token_to_kv_pool_allocator.free(torch.cat([kv[n:] for kv, n in zip(ordered, commit_lens)]))
        batch.out_cache_loc = torch.cat([kv[:n] for kv, n in zip(ordered, commit_lens)])
        for req, length in zip(batch.reqs, commit_lens, strict=True):
            req.kv_committed_len += length
            req.kv_allocated_len = req.kv_committed_len
        batch.seq_lens.copy_(new_lengths)
        batch.seq_lens_cpu.add_(torch.tensor(commit_lens, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(commit_lens)

        draft_input.verified_id = verified_ids
        draft_input.draft_seq_lens = new_lengths.to(torch.int32)
        draft_input.ctx_lens = torch.zeros_like(draft_input.draft_seq_lens)
        batch.spec_info = draft_input
        batch.forward_mode = ForwardMode.DECODE
        accepted = [length - 1 for length in commit_lens]
        self._record(shape, rows, accepted)
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=verified_ids,
            num_accepted_drafts=sum(accepted),
            num_accepted_drafts_per_req_cpu=accepted,
            can_run_cuda_graph=can_run_cuda_graph,
        )

    def _emit(self, batch: ScheduleBatch, rows: List[List[int]]) -> List[int]:
        """Append the walked tokens to their requests until each one finishes.

        Returns:
            committed tokens per request (the root counted; as many as were appended).
        """
        depth = self.max_depth
        commit_lens = []
        think_end = batch.model_config.think_end_id
        for req, row in zip(batch.reqs, rows, strict=True):
            accepted = row[depth]
            appended = 0
            for token in [*row[:accepted], row[depth + 1]]:
                req.output_ids.append(token)
                appended += 1
                if req.require_reasoning and think_end is not None:
                    req.update_reasoning_tokens(token, think_end)
                req.check_finished()
                if req.finished():
                    break
            commit_lens.append(appended)
            req.spec_verify_ct += 1
            req.spec_accepted_drafts += appended - 1
            req.update_spec_acceptance_histogram(appended - 1)
        return commit_lens

    def _commit_states(
        self, batch: ScheduleBatch, shape: Shape, order: torch.Tensor, commit_lens: List[int]
    ) -> None:
        """The recurrent state at each request's last committed slot becomes the request's state."""
        backend = shape.runner.attn_backend
        committed = torch.tensor(commit_lens, dtype=torch.int64).to(self.device, non_blocking=True)
        last = order.gather(1, (committed - 1)[:, None]).squeeze(1)
        kept, slots = track_indices(batch, self.server_args), None
        if kept is not None:
            interval = int(self.server_args.mamba_track_interval)
            slots = track_slots(order, batch.seq_lens, committed, interval)
        # The batch's own states, whatever ran on this backend last.
        indices = self.model_runner.req_to_token_pool.get_mamba_indices(batch.req_pool_indices)
        backend.linear_attn_backend.forward_metadata = ForwardMetadata(
            query_start_loc=None, mamba_cache_indices=indices
        )
        backend.update_mamba_state_after_mtp_verify(
            accepted_steps=last, mamba_track_indices=kept, mamba_steps_to_track=slots, model=self.model_runner.model
        )

    # -- what is logged

    def _mark(self, stage: str) -> None:
        if self._clock is not None:
            self._clock.mark(stage)

    def _record(self, shape: Shape, rows: List[List[int]], accepted: List[int]) -> None:
        depth, metrics = self.max_depth, self.metrics
        metrics.steps += 1
        metrics.requests += len(accepted)
        metrics.accepted += sum(accepted)
        along_chain = [min(row[depth + 3], n + 1) for row, n in zip(rows, accepted)]
        metrics.along_chain += sum(along_chain)
        self.policy.saw(
            shape.name,
            accepted,
            along_chain,
            [[min(w, n) for w in row[depth + 4 :]] or [n] for row, n in zip(rows, accepted)] if shape.budget else [],
        )
        if self.shadow_linear:
            metrics.nodes += sum(row[depth + 2] - 1 for row in rows)
            metrics.in_tree += sum(min(row[depth + 4], n + 1) for row, n in zip(rows, accepted))
        elif shape.budget:
            metrics.nodes += sum(row[depth + 2] - 1 for row in rows)
            metrics.in_tree += sum(accepted)
        else:
            metrics.linear += len(accepted)
        if self.tp_rank != 0:
            return
        if self._clock is not None:
            self._clock.step_done(len(accepted))
        first = not self._logged_first_verify
        if first:
            self._logged_first_verify = True
            name = "DFLASH" if self.shadow_linear else "DDTREE"
            logger.info("%s verify completed. num_accepted_drafts_per_req=%s", name, accepted)
        if first or metrics.steps % self._metrics_interval == 0:
            logger.info("DDTREE metrics %s", metrics.line())


def _same(ahead: List[Any], reqs: List[Any]) -> bool:
    return len(ahead) == len(reqs) and all(a is b for a, b in zip(ahead, reqs))


def _plain(batch: ScheduleBatch) -> bool:
    """No request whose positions are more than a count of tokens."""
    return all(req.multimodal_inputs is None for req in batch.reqs)
