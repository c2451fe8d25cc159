# SPDX-License-Identifier: Apache-2.0
"""The ways in which one server verifies: trees of one or several budgets, and the greedy chain."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Iterator, Tuple

from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.speculative.ddtree_args import PRESETS
from sglang.srt.speculative.ddtree_policy import LINEAR

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


@dataclass
class VerifyRunner:
    """What runs the target over ``q`` slots per request: its attention backend and CUDA graphs are sized by q."""

    q: int
    attn_backend: Any
    graph_runner: Any = None


@dataclass(frozen=True)
class Shape:
    """One way to verify: trees of `budget` nodes, or the greedy chain (budget 0)."""

    name: str
    budget: int
    runner: VerifyRunner
    budgets: Tuple[int, ...] = ()
    """Smaller trees whose accepted paths are counted too."""

    @property
    def q(self) -> int:
        return self.runner.q


def make_shapes(runner: ModelRunner, args: ServerArgs) -> Dict[str, Shape]:
    """All ways to verify, by name. A tree and a chain of one width share what runs them.

    Args:
        runner: the target's, whose backend and graphs are as wide as `speculative_num_draft_tokens`.
    """
    first, block = int(args.speculative_num_draft_tokens), int(args.speculative_dflash_block_size)
    runners = {first: VerifyRunner(first, runner.attn_backend, runner.graph_runner)}

    def shape(name: str, budget: int, q: int, budgets: Tuple[int, ...] = ()) -> Shape:
        if q not in runners:
            runners[q] = _make_runner(runner, q)
        return Shape(name, budget, runners[q], budgets)

    if args.speculative_ddtree_shadow_linear:
        return {LINEAR: shape(LINEAR, 0, block)}
    budgets = PRESETS if args.speculative_ddtree_auto_budget else (int(args.speculative_ddtree_budget),)
    shapes = {}
    for i, budget in enumerate(budgets):
        name = f"tree-{budget}"
        shapes[name] = shape(name, budget, budget + 1, budgets[: i + 1] if len(budgets) > 1 else ())
    if args.speculative_ddtree_linear != "off":
        shapes[LINEAR] = shape(LINEAR, 0, block)
    return shapes


def _make_runner(runner: ModelRunner, q: int) -> VerifyRunner:
    """Another attention backend and set of graphs for the target, as EAGLE's adaptive steps make them."""
    with as_wide_as(runner.server_args, q):
        workspace = runner.init_new_workspace
        try:
            backend = runner._get_attention_backend(init_new_workspace=True)
        finally:
            runner.init_new_workspace = workspace
        graphs = None
        if runner.graph_runner is not None:
            graphs = CudaGraphRunner(runner, attn_backend=backend, speculative_num_draft_tokens=q)
    return VerifyRunner(q, backend, graphs)


@contextmanager
def as_wide_as(args: ServerArgs, q: int) -> Iterator[None]:
    """For what asks the arguments how many slots a request verifies."""
    usual = args.speculative_num_draft_tokens
    args.speculative_num_draft_tokens = q
    try:
        yield
    finally:
        args.speculative_num_draft_tokens = usual


def attention_backend(args: ServerArgs, backend: Any) -> Any:
    """The backend of the attention layers: HybridAttnBackend verifies with one of its halves, a hybrid model's backend holds
    the attention one inside."""
    half = "decode_backend" if args.speculative_attention_mode == "decode" else "prefill_backend"
    while inner := getattr(backend, "full_attn_backend", None) or getattr(backend, half, None):
        backend = inner
    return backend
