# SPDX-License-Identifier: Apache-2.0
"""Replay the tree's many small kernels as one CUDA graph per batch size.

A tree takes some two hundred launches of a few microseconds each. Its shapes
depend on batch size and arguments only, so they are captured once and replayed
with one launch. On the CPU, and where graphs are off, the function runs as it is.
"""

from __future__ import annotations

from typing import Callable, Dict, Tuple

import torch

Tensors = Tuple[torch.Tensor, ...]


class ShapeGraphs:
    """A function of tensors to tensors, replayed from one CUDA graph per input shape.

    The results of a call are overwritten by the next call: all graphs share one
    pool of memory, since a step uses the results of one batch size only.

    Args:
        function: fixed launches for fixed input shapes; no host reads.
        max_rows: a larger first dimension calls the function as it is; 0 for never a graph.
    """

    def __init__(self, function: Callable[..., Tensors], *, max_rows: int):
        self.function = function
        self.max_rows = max_rows
        self._pool = torch.cuda.graph_pool_handle() if max_rows else None
        self._graphs: Dict[Tuple[torch.Size, ...], Tuple[torch.cuda.CUDAGraph, Tensors, Tensors]] = {}

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        if inputs[0].shape[0] > self.max_rows:
            return self.function(*inputs)
        key = tuple(tensor.shape for tensor in inputs)
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs)
        graph, held, results = self._graphs[key]
        for buffer, tensor in zip(held, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return results

    def _capture(self, inputs: Tensors) -> Tuple[torch.cuda.CUDAGraph, Tensors, Tensors]:
        held = tuple(tensor.clone() for tensor in inputs)
        # Once outside: lazily made constants and library handles must not be made in a capture.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.function(*held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: other threads of the scheduler may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = self.function(*held)
        return graph, held, results
