# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets (Qwen3-Next and its kin) on a CPU engine: the GPU's branches, with its Triton kernels interpreted.

The engine's own CPU branch needs AMX, keeps its states in another layout and knows no trees. What the modules below
decide at import is decided as on a GPU; everything else in the engine still sees a CPU. Replaced by torch are prefill
(its kernel refuses float32), the copy of accepted states (it asks for a device) and, unless
`SGLANG_FLEET_CPU_KERNELS=interpreter`, the kernels of a step: interpreted, a verify step took seconds.

The modules are changed when the engine imports them, since most processes never do (engine sglang-0.5.11).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_fleet_cpu.attention import Unsupported

_ATTENTION = "sglang.srt.layers.attention."
GPU_BRANCHES = (
    _ATTENTION + "hybrid_linear_attn_backend",
    _ATTENTION + "linear.gdn_backend",
    _ATTENTION + "linear.kernels.gdn_triton",
    "sglang.srt.models.qwen3_next",
)
"""Modules that ask `is_cpu()`; their source is compiled with the answer False."""
CHUNK = 64
"""Tokens of a chunk of prefill, as the engine's kernel and its radix cache count them."""


def _unserved(what: str) -> Unsupported:
    """A call that the engine does not make for the models of this profile: it stops instead of answering wrongly."""
    return Unsupported(f"the cpu profile's {what}; serve this model on a GPU profile")


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None, Tensor]:
    """Prefill, token after token.

    Args:
        q, k: `[1, tokens, heads, dim]`; v: `[1, tokens, value heads, value dim]`.
        g, beta: `[1, tokens, value heads]`, log decay and write strength.
        initial_state: pool `[slots, value heads, value dim, dim]`; each sequence's row is read and written.
        initial_state_indices: row of each sequence; below 0 for none.
        cu_seqlens: starts and end of the packed sequences.

    Returns:
        output like `v`; no last states (they are in the pool); `[1, chunks, value heads, value dim, dim]`, the state before
        every chunk of 64 tokens of each sequence, from which the radix cache takes its own.
    """
    if head_first or q.shape[0] != 1 or initial_state is None or initial_state_indices is None or cu_seqlens is None:
        raise _unserved("chunk_gated_delta_rule takes packed sequences with a pool of states")
    queries, keys, values = q[0].float(), k[0].float(), v[0].float()
    if use_qk_l2norm_in_kernel:
        queries, keys = _unit(queries), _unit(keys)
    groups = v.shape[2] // q.shape[2]
    queries = (queries * (q.shape[-1] ** -0.5 if scale is None else scale)).repeat_interleave(groups, 1)
    keys = keys.repeat_interleave(groups, 1)
    decay, strength = g[0].float().exp(), beta[0].float()
    out = torch.empty_like(v)
    before = []
    for row, (first, end) in zip(initial_state_indices.tolist(), pairwise(cu_seqlens.tolist()), strict=True):
        state = initial_state[row].float() if row >= 0 else torch.zeros(initial_state.shape[1:])
        for at in range(first, end):
            if (at - first) % CHUNK == 0:
                before.append(state)
            state, o = _step(state, queries[at], keys[at], values[at], decay[at], strength[at])
            out[0, at] = o.to(out.dtype)
        if row >= 0:
            initial_state[row] = state.to(initial_state.dtype)
    return out, None, torch.stack(before)[None]


def _parents(next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Parents from first children and next siblings; 0 for the root and for slots that nothing leads to."""
    parents = [0] * len(next_token)
    for slot, (child, sibling) in enumerate(zip(next_token, next_sibling, strict=True)):
        if child != -1:
            parents[child] = slot
        if sibling != -1:
            parents[sibling] = parents[slot]
    return parents


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """One step of the causal convolution, for one token or for the slots of a chain or tree.

    Args:
        x: `[requests, channels]` or `[requests, channels, slots]`.
        conv_state: pool `[rows, channels, width - 1]`; takes the last inputs in slot order.
        weight: `[channels, width]`.
        conv_state_indices: row of each request; `pad_slot_id` for none.
        intermediate_conv_window: `[rows, slots, channels, width - 1]`, takes the window after each slot.
        retrieve_next_token, retrieve_next_sibling: a tree's links `[requests, slots]`: slots see their ancestors only.
        retrieve_parent_token: takes the parents that follow from the links.

    Returns:
        like `x`.
    """
    if cache_seqlens is not None or num_accepted_tokens is not None or conv_state_indices is None:
        raise _unserved("causal_conv1d_update takes a pool of states without offsets")
    flat = x.dim() == 2
    inputs = x[:, :, None] if flat else x
    slots, width = inputs.shape[2], weight.shape[1]
    out = torch.zeros_like(inputs)
    for request, row in enumerate(conv_state_indices.tolist()):
        if row == pad_slot_id:
            continue
        # The window before the slots, then the slots; what a column's parent is says `before`.
        line = torch.cat([conv_state[row, :, : width - 1].to(inputs.dtype), inputs[request]], 1)
        before = list(range(-1, line.shape[1] - 1))
        if retrieve_next_token is not None and retrieve_next_sibling is not None:
            parents = _parents(retrieve_next_token[request].tolist(), retrieve_next_sibling[request].tolist())
            if retrieve_parent_token is not None:
                retrieve_parent_token[request] = torch.tensor(parents, dtype=retrieve_parent_token.dtype)
            before[width:] = [width - 1 + parent for parent in parents[1:]]
        columns = []
        for slot in range(slots):
            seen = [width - 1 + slot]
            while len(seen) < width:
                seen.append(before[seen[-1]])
            columns.append(seen[::-1])
        windows = line[:, torch.tensor(columns)]  # [channels, slots, width], oldest first
        total = (windows.float() * weight.float()[:, None, :]).sum(-1)
        if bias is not None:
            total += bias.float()[:, None]
        out[request] = total * total.sigmoid() if activation not in (None, False) else total
        conv_state[row, :, : width - 1] = line[:, -(width - 1) :].to(conv_state.dtype)
        if intermediate_conv_window is not None and intermediate_state_indices is not None:
            place = int(intermediate_state_indices[request])
            intermediate_conv_window[place, :slots] = (
                windows[:, :, 1:].transpose(0, 1).to(intermediate_conv_window.dtype)
            )
    return out[:, :, 0] if flat else out


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule for one token of all heads: state `[heads, value dim, dim]` to its successor and the output."""
    state = state * decay[:, None, None]
    new = (v - (state @ k[:, :, None]).squeeze(-1)) * strength[:, None]
    state = state + new[:, :, None] * k[:, None, :]
    return state, (state @ q[:, :, None]).squeeze(-1)


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,  # noqa: N803 - the engine's name
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """The gated delta rule over the slots of packed requests; with parents, each slot goes on from its parent's state.

    Args:
        q, k: `[1, tokens, heads, dim]`; v: `[1, tokens, value heads, value dim]`; a, b: `[tokens, value heads]`.
        initial_state_source: pool `[rows, value heads, value dim, dim]`; initial_state_indices: row of each request.
        intermediate_states_buffer: `[rows, slots, value heads, value dim, dim]`, takes the state after each slot.
        retrieve_parent_token: `[requests, slots]`.

    Returns:
        output like `v`.
    """
    if is_kda or cu_seqlens is None or q.shape[0] != 1:
        raise _unserved("fused_sigmoid_gating_delta_rule_update takes packed gated delta nets")
    queries, keys, values = q[0].float(), k[0].float(), v[0].float()
    if use_qk_l2norm_in_kernel:
        queries, keys = _unit(queries), _unit(keys)
    groups = v.shape[2] // q.shape[2]
    queries = (queries * (q.shape[-1] ** -0.5 if scale is None else scale)).repeat_interleave(groups, 1)
    keys = keys.repeat_interleave(groups, 1)
    gate = F.softplus(a.float() + dt_bias.float(), softplus_beta, softplus_threshold)
    decay, strength = (-A_log.float().exp() * gate).exp(), b.float().sigmoid()
    out = torch.empty_like(v)
    ends = cu_seqlens.tolist()
    for request, (first, end) in enumerate(pairwise(ends)):
        row = int(initial_state_indices[request])
        state = initial_state_source[row].float() if row >= 0 else torch.zeros(initial_state_source.shape[1:])
        kept, parents = None, None
        if intermediate_states_buffer is not None and intermediate_state_indices is not None:
            # The kernel goes by cache_steps, whatever the buffer's shape.
            rows = intermediate_states_buffer.view(-1, *initial_state_source.shape[1:])
            start = int(intermediate_state_indices[request]) * (cache_steps or 0)
            kept = rows[start : start + end - first]
            parents = retrieve_parent_token[request].tolist() if retrieve_parent_token is not None else None
        for slot, at in enumerate(range(first, end)):
            if parents is not None and kept is not None and slot:
                state = kept[parents[slot]].float()
            state, o = _step(state, queries[at], keys[at], values[at], decay[at], strength[at])
            out[0, at] = o.to(out.dtype)
            if kept is not None:
                kept[slot] = state.to(kept.dtype)
        if not disable_state_update and row >= 0:
            initial_state_source[row] = state.to(initial_state_source.dtype)
    return out


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,  # noqa: N803 - the engine's name
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of each request: `mixed_qkv` `[requests, q | k | v]` to `out` `[requests, 1, value heads, value dim]`."""
    heads, value_dim, dim = initial_state.shape[1:]
    width = (mixed_qkv.shape[1] - heads * value_dim) // 2
    mixed = mixed_qkv.float()
    q, k = mixed[:, :width].unflatten(1, (-1, dim)), mixed[:, width : 2 * width].unflatten(1, (-1, dim))
    v = mixed[:, 2 * width :].unflatten(1, (heads, value_dim))
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    q, k = (x.repeat_interleave(heads // q.shape[1], 1) for x in (q * scale, k))
    decay = (-A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), 1.0, 20.0)).exp()
    strength = b.float().sigmoid().to(b.dtype).float()
    for request, row in enumerate(ssm_state_indices.tolist()):
        if row < 0:
            out[request] = 0
            continue
        state, o = _step(
            initial_state[row].float(), q[request], k[request], v[request], decay[request], strength[request]
        )
        out[request, 0] = o.to(out.dtype)
        initial_state[row] = state.to(initial_state.dtype)
    return out, initial_state


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per key head `q | k | values | gates` and `b | a` to `[tokens, all q | all k | all v]`, z, b, a by value head."""
    tokens, group = mixed_qkvz.shape[0], num_heads_v // num_heads_qk
    q, k, v, z = mixed_qkvz.view(tokens, num_heads_qk, -1).split([head_qk, head_qk, group * head_v, group * head_v], -1)
    b, a = mixed_ba.view(tokens, num_heads_qk, 2 * group).split(group, -1)
    mixed = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], 1)
    return mixed, z.reshape(tokens, num_heads_v, head_v), b.reshape(tokens, -1), a.reshape(tokens, -1)


def fused_gdn_gating(
    A_log: Tensor,  # noqa: N803 - the engine's name
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength float32 `[1, tokens, value heads]` of prefill's tokens."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return decay[None], b.float().sigmoid().to(b.dtype).float()[None]


def layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[Tensor, None, Tensor, Tensor]:
    """RMS norm of rows `[n, d]` times their gate; as the kernel, into `x` itself unless another dtype is asked for."""
    if residual is not None or residual_dtype not in (None, x.dtype) or not is_rms_norm or bias is not None:
        raise _unserved("layer_norm_gated_fwd takes an RMS norm without residual and bias")
    rows, gate = x.float(), g.float()
    scale = (rows.square().mean(-1) + eps).rsqrt()
    out = rows * scale[:, None]
    if weight is not None:
        out = out * weight.float()
    if activation in ("swish", "silu"):
        out = out * gate * gate.sigmoid()
    elif activation == "sigmoid":
        out = out * gate.sigmoid()
    y = x if out_dtype is None else torch.empty_like(x, dtype=out_dtype)
    y.copy_(out)
    return y, None, scale, x


def fused_mamba_state_scatter_with_mask(
    dst: Tensor, src: Tensor, dst_indices_raw: Tensor, step_indices_raw: Tensor
) -> None:
    """`dst[:, dst_indices_raw[i]] = src[:, i, step_indices_raw[i]]` for every i whose step is not negative."""
    rows = (step_indices_raw >= 0).nonzero().flatten()
    steps, targets = step_indices_raw[rows].long(), dst_indices_raw[rows].long()
    dst[:, targets] = src[:, rows, steps].to(dst.dtype)


def _late_names(op: ModuleType) -> None:
    """The interpreter exchanges `tl.exp` and the like for each launch, so a name bound to it at import goes stale."""
    import triton.language as tl

    for name in ("exp", "exp2", "log", "log2", "gather"):
        setattr(op, name, lambda *args, _name=name, **kwargs: getattr(tl, _name)(*args, **kwargs))


def _no_device(utils: ModuleType) -> None:
    utils.custom_device_ctx = lambda index: nullcontext()  # type: ignore[attr-defined]


def _one_core(norm: ModuleType) -> None:
    norm._get_sm_count = lambda device: 1  # type: ignore[attr-defined]


TWINS: dict[str, list[Callable[..., Any]]] = {
    _ATTENTION + "linear.kernels.gdn_triton": [chunk_gated_delta_rule],
    _ATTENTION + "mamba.mamba_state_scatter_triton": [fused_mamba_state_scatter_with_mask],
}
STEP_TWINS: dict[str, list[Callable[..., Any]]] = {
    _ATTENTION + "mamba.causal_conv1d_triton": [causal_conv1d_update],
    _ATTENTION + "fla.fused_sigmoid_gating_recurrent": [fused_sigmoid_gating_delta_rule_update],
    _ATTENTION + "fla.fused_recurrent": [fused_recurrent_gated_delta_rule_packed_decode],
    _ATTENTION + "fla.fused_gdn_gating": [fused_gdn_gating],
    _ATTENTION + "fla.fused_norm_gate": [layer_norm_gated_fwd],
    "sglang.jit_kernel.triton.gdn_fused_proj": [fused_qkvzba_split_reshape_cat],
}
"""Twins of the functions of these names in these modules: always, and unless kernels are interpreted."""

AFTER: dict[str, Callable[[ModuleType], None]] = {
    _ATTENTION + "fla.op": _late_names,
    _ATTENTION + "fla.utils": _no_device,
    _ATTENTION + "fla.layernorm_gated": _one_core,
}
"""What else is done to a module when it has been imported."""


def _put_twins(module: ModuleType, twins: list[Callable[..., Any]]) -> None:
    from sglang_fleet_cpu import parameters, stop

    for twin in twins:
        name = twin.__name__
        theirs, ours = parameters(getattr(module, name)), parameters(twin)
        if theirs != ours:
            raise stop(f"{module.__name__}.{name} takes {theirs}, its twin {ours}; this engine needs its own twin")
        setattr(module, name, twin)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of the engine as the lists above say; not from cached byte code where the source differs."""

    def get_code(self, fullname: str) -> CodeType | None:
        if fullname not in GPU_BRANCHES:
            return super().get_code(fullname)
        source = self.get_source(fullname) or ""
        if "is_cpu()" not in source:
            from sglang_fleet_cpu import stop

            raise stop(f"{fullname} does not ask is_cpu() any more; this engine needs its own list of modules")
        return compile(source.replace("is_cpu()", "False"), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _changes(module)


_twins: dict[str, list[Callable[..., Any]]] = {}
"""Those in force."""


def _changes(module: ModuleType) -> None:
    if (after := AFTER.get(module.__name__)) is not None:
        after(module)
    _put_twins(module, _twins.get(module.__name__, []))


class _Finder(importlib.abc.MetaPathFinder):
    """Gives `_Loader` to the modules that need it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in {*GPU_BRANCHES, *AFTER, *_twins}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def _pool_on_cpu() -> None:
    """The pool names "cuda" for the states of verify steps whatever its device, and has another layout with AMX."""
    from sglang.srt.mem_cache import memory_pool
    from torch.overrides import TorchFunctionMode

    class Here(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    upstream: Callable[..., None] = memory_pool.MambaPool.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with Here():
            upstream(self, *args, **kwargs)

    memory_pool.MambaPool.__init__ = init
    memory_pool._cpu_has_amx_support = False


def _radix_cache() -> None:
    """States in the radix cache are refused off the GPU, because of the kernels that are replaced here.

    Without speculation it stays so: decoding pins memory for them, which takes a device.
    """
    from sglang.srt import server_args

    upstream: Callable[..., None] = server_args.ServerArgs._handle_mamba_radix_cache

    def handle(self: Any, *args: Any, **kwargs: Any) -> None:
        real = server_args.is_musa
        server_args.is_musa = lambda: self.speculative_algorithm is not None
        try:
            upstream(self, *args, **kwargs)
        finally:
            server_args.is_musa = real

    server_args.ServerArgs._handle_mamba_radix_cache = handle


def _change_early(module: ModuleType) -> None:
    """For a module that the parser of the arguments has imported: its new names also where others took the old ones."""
    before = dict(vars(module))
    _changes(module)
    changed = {name: old for name, old in before.items() if vars(module)[name] is not old}
    for other in [found for name, found in sys.modules.items() if name.startswith("sglang.")]:
        for name, old in changed.items():
            if vars(other).get(name) is old:
                setattr(other, name, vars(module)[name])


def install(*, interpreted: bool) -> None:
    """Change the modules, those to come when they are imported.

    Args:
        interpreted: leave the kernels of a step to Triton's interpreter.

    Raises:
        RuntimeError: one that decides by `is_cpu()` was imported before.
    """
    early = sorted(set(GPU_BRANCHES) & set(sys.modules))
    if early:
        raise RuntimeError(f"imported before the plugin: {', '.join(early)}")
    _twins.update(TWINS if interpreted else TWINS | STEP_TWINS)
    for name in sorted({*AFTER, *_twins} & set(sys.modules)):
        _change_early(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
    _pool_on_cpu()
    _radix_cache()
