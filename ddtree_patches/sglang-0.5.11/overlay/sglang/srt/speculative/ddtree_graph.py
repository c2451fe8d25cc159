# SPDX-License-Identifier: Apache-2.0
"""A step as CUDA graphs: a handful of launches of the host, and one read at the end."""

from __future__ import annotations

import bisect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_runner import freeze_gc
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ddtree_kernels import write_mask
from sglang.srt.speculative.ddtree_shapes import Shape, VerifyRunner, attention_backend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.ddtree_step import DeviceStep, Planted

Tensors = Tuple[torch.Tensor, ...]


class GraphPool:
    """Captures functions into CUDA graphs that share one pool of memory.

    The graphs of a pool run one after the other and never at the same time.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Any]) -> Tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of what `function` launches, and its results, which each replay overwrites.

        Collectives of tensor parallel ranks are captured with it; all ranks capture in the same order.

        Args:
            function: fixed launches on fixed tensors, no host reads.
        """
        graph = torch.cuda.CUDAGraph()
        with graph_capture() as context, torch.no_grad():
            # Before, outside of the graph: lazily made constants and library handles must not be made in a capture.
            for _ in range(2):
                function()
            # Thread-local: other threads of the scheduler may allocate pinned memory meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=context.stream, capture_error_mode="thread_local"
            ):
                results = function()
        return graph, results


class GraphedStep:
    """A step as CUDA graphs: the engine's own for the two models, and one per stage between them.

    Everything that a step needs from the one before stays on the device, in
    `state`: sequence lengths and current tokens. So the next draft pass can be
    launched before the host has read what this step accepted.

    Args:
        step: the stages.
        draft: the drafter's model runner.
        shapes: all ways to verify.
        max_rows: batch sizes from 1 to this are captured, for every shape.
    """

    def __init__(self, step: DeviceStep, draft: ModelRunner, shapes: Sequence[Shape], max_rows: int):
        self.step = step
        self.draft_runner = VerifyRunner(step.block_size, draft.attn_backend, draft.graph_runner)
        self.max_rows = max_rows
        device = step.device
        widest = max(shape.q for shape in shapes)
        self.state = torch.ones((2, max_rows), dtype=torch.int64, device=device)  # sequence lengths, roots
        self.req_pool_indices = torch.zeros((max_rows,), dtype=torch.int64, device=device)
        self.slots = torch.zeros((max_rows * widest,), dtype=torch.int64, device=device)
        self.targets = torch.zeros((max_rows * widest,), dtype=torch.int64, device=device)
        # Not in the graphs' pool: the host still uses them when the next draft pass is under way.
        self.ordered = torch.zeros((2, max_rows * widest), dtype=torch.int64, device=device)
        self.host = torch.empty((max_rows * (step.depth + 16),), dtype=torch.int64, pin_memory=True)
        self.read = torch.cuda.Event()
        self._pool = GraphPool()
        self._graphs: Dict[Tuple[str, str, int], Tuple[torch.cuda.CUDAGraph, Any]] = {}
        with freeze_gc(False):
            # Large ones first, so that smaller ones find their memory in the pool.
            for bs in range(max_rows, 0, -1):
                self._capture("draft", "", bs, lambda bs=bs: self._draft_inputs(bs))
                for shape in shapes:
                    self._capture_shape(shape, bs)
        self.state.fill_(1)

    def _capture(self, stage: str, shape: str, bs: int, function: Callable[[], Any]) -> Any:
        self.state.fill_(1)  # a step advances it
        self._graphs[stage, shape, bs] = self._pool.capture(function)
        return self._graphs[stage, shape, bs][1]

    def _capture_shape(self, shape: Shape, bs: int) -> None:
        planted = self._capture("plant", shape.name, bs, lambda: self._plant(shape, bs))
        targets = self.targets[: bs * shape.q].view(bs, shape.q)
        walked = self._capture("walk", shape.name, bs, lambda: self.step.walk(planted, targets, shape.budgets))
        self._capture("settle", shape.name, bs, lambda: self._settle(shape, bs, planted, walked))

    def _draft_inputs(self, bs: int) -> Tuple[torch.Tensor, ...]:
        lengths, roots = self.state[:, :bs]
        ids, positions, embeddings = self.step.draft_block(roots, lengths)
        self.draft_runner.graph_runner.buffers.input_embeds[: ids.shape[0]].copy_(embeddings)
        self._fill(self.draft_runner, bs, ids, positions)
        return (ids,)

    def _plant(self, shape: Shape, bs: int) -> Planted:
        step, (lengths, roots) = self.step, self.state[:, :bs]
        hidden = self._model_output(self.draft_runner, bs).hidden_states[: bs * step.block_size]
        hidden = hidden.view(bs, step.block_size, -1)[:, 1:]
        shadow = step.worker.budget if step.worker.shadow_linear else 0
        log_probs, token_ids, chain = step.propose(hidden, tree=bool(shape.budget or shadow))
        if shape.budget:
            planted = step.plant_trees(log_probs, token_ids, chain, roots, lengths, shape.budget)
        else:
            planted = step.plant_chains(chain, roots, lengths)
        if shadow:
            step.shadow_trees(planted, log_probs, token_ids, shadow)
        self._fill(shape.runner, bs, planted.tokens.flatten(), planted.positions.flatten(), planted)
        return planted

    def _settle(self, shape: Shape, bs: int, planted: Planted, walked: Tensors) -> Tensors:
        order, _, packed = walked
        slots = self.slots[: bs * shape.q].view(bs, shape.q)
        hidden = self._model_output(shape.runner, bs).hidden_states[: bs * shape.q]
        lengths = self.state[0, :bs]
        ordered, new_lengths = self.step.settle(
            planted, order, packed, slots, hidden, self.req_pool_indices[:bs], lengths
        )
        lengths.copy_(new_lengths)
        self.state[1, :bs].copy_(packed[:, self.step.depth + 1])
        n = bs * shape.q
        self.ordered[0, :n].copy_(ordered.flatten())
        self.ordered[1, :n].copy_(order.flatten())
        return ()

    def _fill(
        self, runner: VerifyRunner, bs: int, ids: torch.Tensor, positions: torch.Tensor, planted: Optional[Planted] = None
    ) -> None:
        """`CudaGraphRunner.replay_prepare`, on the device alone."""
        graphs, n = runner.graph_runner, bs * runner.q
        padded = _padded(graphs, bs)
        buffers = graphs.buffers
        buffers.input_ids[:n].copy_(ids)
        buffers.positions[:n].copy_(positions)
        buffers.mrope_positions[:, :n].copy_(positions.expand(3, -1))
        buffers.req_pool_indices[:bs].copy_(self.req_pool_indices[:bs])
        buffers.seq_lens[:bs].copy_(self.state[0, :bs])
        buffers.num_token_non_padded.fill_(n)
        if padded > bs:
            buffers.req_pool_indices[bs:padded].zero_()
            buffers.seq_lens[bs:padded].fill_(graphs.seq_len_fill_value)
            buffers.out_cache_loc[n : padded * runner.q].zero_()
        # The host's lengths tell a recurrent backend only which rows are padding.
        on_host = torch.full((padded,), graphs.seq_len_fill_value, dtype=torch.int32, device="cpu")
        on_host[:bs] += 1
        links = planted.links if planted is not None and planted.links is not None else (None, None)
        spec_info = SimpleNamespace(
            custom_mask=None,
            draft_token_num=runner.q,
            retrieve_next_token=links[0],
            retrieve_next_sibling=links[1],
        )
        runner.attn_backend.init_forward_metadata_replay_cuda_graph(
            padded,
            buffers.req_pool_indices[:padded],
            buffers.seq_lens[:padded],
            0,
            None,
            ForwardMode.TARGET_VERIFY,
            spec_info,
            seq_lens_cpu=on_host,
        )
        if planted is not None:
            backend = attention_backend(self.step.worker.server_args, runner.attn_backend)
            write_mask(planted.ancestors, self.state[0, :bs], backend.cuda_graph_custom_mask)

    def _model_output(self, runner: VerifyRunner, bs: int) -> Any:
        graphs = runner.graph_runner
        return graphs.output_buffers[graphs._make_graph_key(_padded(graphs, bs), None, None)]

    def _run_model(self, runner: VerifyRunner, bs: int, slots: torch.Tensor) -> Any:
        graphs = runner.graph_runner
        graphs.buffers.out_cache_loc[: bs * runner.q].copy_(slots)
        graphs.graphs[graphs._make_graph_key(_padded(graphs, bs), None, None)].replay()
        return self._model_output(runner, bs)

    def _replay(self, stage: str, shape: str, bs: int) -> Any:
        graph, results = self._graphs[stage, shape, bs]
        graph.replay()
        return results

    def measure(self, shape: Shape, bs: int, rounds: int = 8) -> float:
        """Milliseconds that the device takes for a step, host left out; before anything is served.

        The fastest of some: whatever else runs on the device only adds.
        """
        slots = torch.zeros((bs * max(shape.q, self.step.block_size),), dtype=torch.int64, device=self.step.device)

        def choose(logits: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
            torch.argmax(logits, dim=-1, out=out)

        times = []
        for _ in range(rounds):
            self.state.fill_(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.draft(shape, bs, slots[: bs * self.step.block_size], lambda stage: None)
            self.verify(shape, bs, slots[: bs * shape.q], choose, lambda stage: None)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        self.state.fill_(1)
        return min(times)

    def planted(self, shape: Shape, bs: int) -> Planted:
        """The trees that `draft` has grown last."""
        return self._graphs["plant", shape.name, bs][1]

    # -- a step, in order

    def load(self, lengths: torch.Tensor, roots: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
        """Take a batch's state over, when it is not the one that the last step left."""
        bs = roots.shape[0]
        self.state[0, :bs].copy_(lengths)
        self.state[1, :bs].copy_(roots)
        self.req_pool_indices[:bs].copy_(req_pool_indices)

    def draft(self, shape: Shape, bs: int, slots: torch.Tensor, mark: Callable[[str], None]) -> None:
        """Draft pass and trees. slots: ``[bs * block_size]``, free KV slots that the draft block may use for a moment."""
        mark("draft")
        self._replay("draft", "", bs)
        self._run_model(self.draft_runner, bs, slots)
        mark("build")
        self._replay("plant", shape.name, bs)
        mark("built")

    def verify(
        self,
        shape: Shape,
        bs: int,
        slots: torch.Tensor,
        choose: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        mark: Callable[[str], None],
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Verify pass, walk, commit.

        Args:
            slots: ``[bs * q]``, KV slots of the trees.
            choose: writes the target's tokens ``[bs * q]`` for logits ``[bs * q, vocab]`` at positions ``[bs * q]``.

        Returns:
            KV slots ``[bs, q]`` and tree slots ``[bs, q]``, accepted path first. What the host reads is on its
            way: see `accepted`.
        """
        n = bs * shape.q
        mark("verify")
        output = self._run_model(shape.runner, bs, slots)
        mark("commit")
        self.slots[:n].copy_(slots)
        choose(output.next_token_logits[:n], self.planted(shape, bs).positions.flatten(), self.targets[:n])
        packed = self._replay("walk", shape.name, bs)[2]
        self._host_shape = packed.shape
        self.host[: packed.numel()].view(packed.shape).copy_(packed, non_blocking=True)
        self.read.record()
        self._replay("settle", shape.name, bs)
        mark("committed")
        return self.ordered[0, :n].view(bs, shape.q), self.ordered[1, :n].view(bs, shape.q)

    def accepted(self) -> List[List[int]]:
        """Wait for the walk, not for what was launched behind it: rows of `walk_report`'s packed."""
        self.read.synchronize()
        return self.host[: self._host_shape.numel()].view(self._host_shape).tolist()


def _padded(graphs: Any, bs: int) -> int:
    """The engine's captured batch size that a batch of `bs` runs in."""
    return graphs.capture_bs[bisect.bisect_left(graphs.capture_bs, bs)]
