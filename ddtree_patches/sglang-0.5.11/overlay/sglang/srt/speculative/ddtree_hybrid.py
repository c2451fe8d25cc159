# SPDX-License-Identifier: Apache-2.0
"""DDTREE on hybrid targets: recurrent layers whose state forks from the parent at every tree slot.

A recurrent layer turns its tokens into a state, one after the other. In a tree
the state at a slot has to come from the slot's parent and not from the slot
before it, or branches leak into their siblings. The engine's Triton kernels for
gated delta nets can do that: the causal convolution takes first children and
next siblings, works out the parents and reads its window along them, and the
delta rule reads its state from the parent's entry of a buffer that holds one
state per slot. This module says when that is so, refuses what cannot do it,
plans the buffer's memory, and says which states a step keeps for the radix cache.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LEAK_MARK = " unsafe=leak"
"""Ends the metrics lines of a run whose states leak."""

_MIB = 1 << 20
_GIB = 1 << 30
_INDEX_LIMIT = 1 << 31
_GDN_CONFIGS = ("Qwen3NextConfig", "Qwen3_5Config")
"""Configs (or their bases) of the targets that DFLASH drafts for and that run on `GDNAttnBackend`."""


def states_fork(args: ServerArgs) -> bool:
    """Whether the target's recurrent states fork by parent: trees are verified, and exactly."""
    return (
        args.speculative_algorithm == "DDTREE"
        and not args.speculative_ddtree_shadow_linear
        and not args.speculative_ddtree_allow_hybrid_unsafe
    )


def linear_attn_topk(args: ServerArgs) -> int:
    """What `MambaAttnBackendBase` takes as top-k: above 1 it hands the verify input's tree links to its kernels.

    `speculative_eagle_topk` itself stays 1: it also reserves KV slots, switches
    off the scheduler's memory check and picks other attention backends.
    """
    topk = args.speculative_eagle_topk or 0
    return max(topk, 2) if states_fork(args) else topk


def recurrent_layers(hf_config: Any) -> str:
    """Say which recurrent layers a Hugging Face config declares; empty for attention only."""
    text = _text_config(hf_config)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    recurrent = sorted({str(k) for k in kinds if "attention" not in str(k) or "linear" in str(k)})
    if recurrent:
        return f"layer types {', '.join(recurrent)}"
    if kinds:
        return ""
    for name in ("linear_num_value_heads", "linear_attn_config", "hybrid_override_pattern", "mamba_d_state"):
        if getattr(text, name, None):
            return f"config key {name}"
    return ""


def check_hybrid_args(args: ServerArgs) -> None:
    """Refuse a hybrid target whose states cannot fork, from its config and the arguments alone.

    Raises:
        ValueError: naming the model, what stands in the way and what to do.
    """
    hf_config = args.get_model_config().hf_config
    layers = recurrent_layers(hf_config)
    if not layers:
        return
    if args.speculative_ddtree_allow_hybrid_unsafe:
        return
    text = _text_config(hf_config)
    names = {base.__name__ for base in type(text).__mro__}
    if not names.intersection(_GDN_CONFIGS):
        raise ValueError(_refusal(args, f"its recurrent layers ({layers}, {type(text).__name__}) are no gated delta nets"))
    for kind in ("decode", "prefill"):
        backend = getattr(args, f"linear_attn_{kind}_backend") or args.linear_attn_backend
        # Either one makes FlashInfer verify. CuTe DSL only decodes: Triton verifies then.
        if backend == "flashinfer":
            raise ValueError(
                _refusal(
                    args,
                    f"--linear-attn-{kind}-backend flashinfer verifies its recurrent layers without parents",
                    "Use --linear-attn-backend triton",
                )
            )
    if not args.disable_radix_cache and not args.enable_mamba_extra_buffer():
        raise ValueError(
            f"DDTREE on {args.model_path} ({layers}) needs --mamba-scheduler-strategy extra_buffer (CUDA) or "
            f"--disable-radix-cache, got --mamba-scheduler-strategy {args.mamba_scheduler_strategy}: without the "
            "buffer the radix cache cannot keep the state of a prefix that ends inside a verify step."
        )


def check_track_interval(args: ServerArgs, block_size: int) -> None:
    """At most one state per request and step can be kept for the radix cache: a step must not pass two of its marks."""
    if args.enable_mamba_extra_buffer() and args.mamba_track_interval < block_size:
        raise ValueError(
            f"DDTREE with --mamba-scheduler-strategy extra_buffer needs --mamba-track-interval of at least the "
            f"drafter's block ({block_size}), got {args.mamba_track_interval}."
        )


def check_target(runner: ModelRunner, args: ServerArgs) -> None:
    """The last word, on what was really built: refuse recurrent layers whose verify kernels take no parents.

    Raises:
        ValueError: naming the model and the backend or kernel.
    """
    if runner.mambaish_config is None:
        return
    if not states_fork(args):
        logger.warning(
            "DDTREE runs on a hybrid model by --speculative-ddtree-allow-hybrid-unsafe: branches leak "
            "recurrent state into their siblings, outputs are wrong. For research only; metrics are marked%s.",
            LEAK_MARK,
        )
        return
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    backend = runner.attn_backend.linear_attn_backend
    if type(backend) is not gdn_backend.GDNAttnBackend:
        raise ValueError(_refusal(args, f"{type(backend).__name__} does not fork states by parent"))
    kernel = backend.kernel_dispatcher.verify_kernel
    if type(kernel) is not gdn_triton.TritonGDNKernel:
        raise ValueError(
            _refusal(args, f"{type(kernel).__name__} verifies without parents", "Use --linear-attn-backend triton")
        )
    for function in (gdn_backend.causal_conv1d_update, gdn_triton.fused_sigmoid_gating_delta_rule_update):
        if not _takes_parents(function):
            name = getattr(function, "__name__", repr(function))
            raise ValueError(_refusal(args, f"this device's kernel {name} takes no parents"))
    if backend.topk < 2:
        raise RuntimeError(f"DDTREE: {type(backend).__name__} was built without tree links (topk {backend.topk}).")


def track_indices(batch: ScheduleBatch, args: ServerArgs) -> Optional[torch.Tensor]:
    """Where the radix cache keeps a state of each request, int64 ``[bs]``; None without such a cache.

    The scheduler sets them at prefill and drops them when the batch changes;
    without overlap it fills them again for decoding without speculation only,
    but counts the states as kept all the same.
    """
    if not args.enable_mamba_extra_buffer():
        return None
    if batch.mamba_track_indices is None:
        kept = [req.mamba_ping_pong_track_buffer[req.mamba_next_track_idx] for req in batch.reqs]
        batch.mamba_track_indices = torch.stack(kept).to(torch.int64)
    return batch.mamba_track_indices


def track_slots(
    path: torch.Tensor, seq_lens_before: torch.Tensor, commit_lens: torch.Tensor, interval: int
) -> torch.Tensor:
    """The slot whose state the radix cache is to keep: where the sequence length passes a multiple of `interval`.

    Args:
        path: int64 ``[bs, n]``, slots of the accepted path in order, the root first; anything behind its end.
        seq_lens_before: ``[bs]``, tokens in the cache before this step.
        commit_lens: ``[bs]``, tokens that this step adds, the root counted.

    Returns:
        int64 ``[bs]``; -1 where this step passes none.
    """
    before = seq_lens_before.to(torch.int64)
    # The path's entry d is the token that makes the length before + d + 1.
    depth = (before // interval + 1) * interval - before - 1
    slot = path.gather(1, depth.clamp(max=path.shape[1] - 1)[:, None]).squeeze(1)
    return torch.where(depth < commit_lens, slot, torch.full_like(slot, -1))


@dataclass(frozen=True)
class StatePlan:
    """Memory of recurrent states, per rank, in bytes.

    Attributes:
        state: one state of all recurrent layers: recurrent part and convolution window.
        kv: the KV entry of one tree slot.
        requests: running requests at most.
        request_states: states outside of trees, at least: running requests' and the radix cache's.
        elements: elements of one layer's recurrent state; the kernels index a layer's buffer with 32 bits.
        free: what weights and reserve leave for states and KV.
    """

    state: int
    kv: int
    requests: int
    request_states: int
    elements: int
    free: int

    def trees(self, budget: int) -> int:
        """Bytes of all tree slots; the engine keeps one spare row."""
        return (self.state * (self.requests + 1) + self.kv * self.requests) * (budget + 1)

    def others(self) -> int:
        """Bytes of the states outside of trees; the engine keeps one spare state."""
        return self.state * (self.request_states + 1)

    def indexable(self, budget: int) -> bool:
        return self.requests * (budget + 1) * self.elements <= _INDEX_LIMIT

    def fits(self, budget: int) -> bool:
        return self.trees(budget) + self.others() <= self.free and self.indexable(budget)

    def largest_budget(self) -> int:
        """The largest budget that fits; below 1 if none does."""
        by_memory = (self.free - self.others()) // self.trees(0) - 1
        by_index = _INDEX_LIMIT // (self.requests * self.elements) - 1
        return max(0, min(by_memory, by_index))

    def most_requests(self, budget: int) -> int:
        """The most running requests with which `budget` fits, as many states outside of trees; 0 for none."""
        states = self.request_states if self.request_states != self.requests else 0
        each = (self.state + self.kv) * (budget + 1) + (0 if states else self.state)
        by_memory = (self.free - self.state * (budget + 2 + states)) // each
        by_index = _INDEX_LIMIT // ((budget + 1) * self.elements)
        return max(0, min(by_memory, by_index))

    def line(self, budget: int) -> str:
        """The numbers, for the log."""
        return (
            f"budget={budget} requests={self.requests} state={self.state / _MIB:.2f} MiB "
            f"tree states and KV={self.trees(budget) / _GIB:.2f} GiB other states={self.others() / _GIB:.2f} GiB "
            f"free={self.free / _GIB:.2f} GiB largest budget={self.largest_budget()}"
        )

    def refusal(self, budget: int, model_path: str) -> str:
        """Why `budget` does not fit, and what would."""
        if self.indexable(budget):
            why = (
                f"every tree slot keeps a state, {budget + 1} slots x {self.requests} running requests take "
                f"{self.trees(budget) / _GIB:.2f} GiB and other states {self.others() / _GIB:.2f} GiB, but "
                f"{max(0, self.free) / _GIB:.2f} GiB are free after the weights"
            )
        else:
            why = (
                f"{budget + 1} slots x {self.requests} running requests x {self.elements} elements pass the 2^31 that "
                "the engine's kernels can index"
            )
        largest, requests = self.largest_budget(), self.most_requests(budget)
        fix = [f"--speculative-ddtree-budget {largest} is the largest that fits"] if largest else ["no budget fits"]
        if requests:
            fix.append(f"--max-running-requests {requests} is the most for budget {budget}")
        if self.indexable(budget):
            fix.append("or raise --mem-fraction-static")
        return f"DDTREE budget {budget} does not fit on {model_path}: {why}. {'; '.join(fix)}."


def plan_states(runner: ModelRunner, free_gib: float) -> float:
    """Refuse a budget whose states do not fit, before any pool is built.

    Args:
        free_gib: GiB per rank for states and KV, after the weights and the reserve of `--mem-fraction-static`.

    Returns:
        GiB less the spare rows that the engine's own count leaves out.

    Raises:
        ValueError: with what is needed, what is there and the largest budget that fits.
    """
    args = runner.server_args
    if args.speculative_algorithm != "DDTREE" or args.speculative_ddtree_shadow_linear:
        return free_gib
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    params = runner.mambaish_config.mamba2_cache_params
    requests = int(args.max_running_requests)
    if args.max_mamba_cache_size is not None:
        request_states = int(args.max_mamba_cache_size)
    elif args.disable_radix_cache:
        request_states = requests
    else:
        request_states = int(runner._calculate_mamba_ratio())  # the share that is left is for the cache to fill
    plan = StatePlan(
        state=int(params.mamba_cache_per_req),
        kv=int(DefaultPoolConfigurator(runner)._cell_size),
        requests=requests,
        request_states=request_states,
        elements=int(torch.Size(params.shape.temporal).numel()),
        free=int(free_gib * _GIB),
    )
    budget = int(args.speculative_num_draft_tokens) - 1  # the largest one where it is chosen later
    logger.info("DDTREE hybrid: %s", plan.line(budget))
    if not plan.fits(budget):
        raise ValueError(plan.refusal(budget, args.model_path))
    return free_gib - plan.state * (budget + 2) / _GIB


def _takes_parents(function: Any) -> bool:
    try:
        return "retrieve_parent_token" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in: an operator of another device
        return False


def _text_config(hf_config: Any) -> Any:
    return hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config


def _refusal(args: ServerArgs, why: str, instead: str = "") -> str:
    """The one message for a target whose states cannot fork."""
    other = "--speculative-algorithm DFLASH or --speculative-ddtree-shadow-linear"
    return (
        f"DDTREE cannot verify trees on {args.model_path}: {why}, and a branch would leak its state into its "
        f"siblings. {instead or 'Use'}{', or' if instead else ''} {other} for this model; "
        "--speculative-ddtree-allow-hybrid-unsafe is for research and gives wrong outputs."
    )
