# SPDX-License-Identifier: Apache-2.0
"""The engine's convolution and recurrent kernels, told a tree, give every node what its own path alone would give.

The reference walks each path one token after the other in float64; a state that leaks from a sibling shows at once.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no torch on this machine")

import ddtree_utils as reference  # noqa: E402
from random_trees import tree  # noqa: E402

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
DEPTH = 15
SHAPES = [(1, 7), (3, 15), (8, 22), (2, 31), (4, 63)] if DEVICE == "cuda" else [(1, 7), (2, 13)]
WIDTH = 4

pytestmark = pytest.mark.usefixtures("engine")


def built(bs: int, budget: int) -> Any:
    return tree("plain", bs, DEPTH, 8, budget, seed=budget * 100 + bs)


def path_of(parents: list[int], slot: int) -> list[int]:
    """Slots from the root to this one."""
    path = [slot]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def close(found: torch.Tensor, want: torch.Tensor, what: str, bound: float = 2e-4) -> None:
    worst = float((found.cpu().double() - want).abs().max())
    assert worst <= bound, f"{what}: differs by {worst:.2e}, bound {bound:.0e}"


@pytest.mark.parametrize(("bs", "budget"), SHAPES)
def test_convolution_sees_the_path_and_its_windows_can_be_committed(bs: int, budget: int) -> None:
    from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_update

    q, dim, source = budget + 1, 96, torch.Generator().manual_seed(budget)
    grown = built(bs, budget)
    first, sibling = reference.tree_links(grown.parents)
    x = torch.randn(bs, q, dim, generator=source)
    weight, bias = torch.randn(dim, WIDTH, generator=source), torch.randn(dim, generator=source)
    states = torch.randn(bs + 2, dim, WIDTH - 1, generator=source)
    slots = torch.randperm(bs + 1, generator=source)[:bs].to(torch.int32) + 1
    windows = torch.zeros(bs + 1, q, dim, WIDTH - 1, device=DEVICE)
    given = states.clone().to(DEVICE)
    told = torch.zeros(bs, q, dtype=torch.int32, device=DEVICE)
    out = causal_conv1d_update(
        x.to(DEVICE).transpose(1, 2), given, weight.to(DEVICE), bias.to(DEVICE), "silu",
        conv_state_indices=slots.to(DEVICE), intermediate_conv_window=windows,
        intermediate_state_indices=torch.arange(bs, dtype=torch.int32, device=DEVICE),
        retrieve_next_token=first.to(DEVICE), retrieve_next_sibling=sibling.to(DEVICE), retrieve_parent_token=told,
    )  # fmt: skip
    for row in range(bs):
        parents = grown.parents[row].tolist()
        for slot in range(int(grown.num_nodes[row])):
            inputs = torch.cat([states[int(slots[row])].T, x[row, path_of(parents, slot)]]).double()
            last = inputs[-WIDTH:]
            want = torch.nn.functional.silu((last * weight.T.double()).sum(0) + bias.double())
            close(out[row, :, slot], want, f"request {row}, slot {slot}")
            close(windows[row, slot].T, last[1:], f"window of request {row}, slot {slot}", 0.0)
            if slot:
                assert int(told[row, slot]) == parents[slot]


def recurrence(
    h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the gated delta rule: h `[HV, V, K]`, q and k `[HV, K]`, v `[HV, V]`, g and beta `[HV]`."""
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    h = h * g.exp()[:, None, None]
    v = (v - (h * k[:, None]).sum(-1)) * beta[:, None]
    h = h + v[..., None] * k[:, None]
    return h, (h * q[:, None]).sum(-1) * q.shape[-1] ** -0.5


@pytest.mark.parametrize("kernel", ["recurrent", "gated"])
@pytest.mark.parametrize(("bs", "budget"), SHAPES)
def test_recurrent_state_forks_from_the_parent(
    bs: int, budget: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gated` is what the engine's GDN layers verify with, `recurrent` the same rule with the gates computed before."""
    if DEVICE == "cpu":  # the interpreter has no device to switch to, and finds tl's functions by their own name only
        import triton.language as tl
        from sglang.srt.layers.attention.fla import fused_recurrent

        monkeypatch.setattr(torch.cpu, "device", lambda index: nullcontext(), raising=False)
        monkeypatch.setattr(fused_recurrent, "exp", lambda x: tl.exp(x))  # noqa: PLW0108  # at the call
    heads, value_heads, key_dim, value_dim = 2, 4, 64, 64
    q, source = budget + 1, torch.Generator().manual_seed(budget + 1)
    grown = built(bs, budget)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    query, key = random(bs * q, heads, key_dim), random(bs * q, heads, key_dim)
    value = random(bs * q, value_heads, value_dim)
    a, b = random(bs * q, value_heads), random(bs * q, value_heads)
    a_log, dt_bias = random(value_heads) * 0.3, random(value_heads) * 0.3
    gate = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    states = random(bs + 2, value_heads, value_dim, key_dim)
    slots = torch.randperm(bs + 1, generator=source)[:bs].to(torch.int32) + 1
    cache = torch.zeros(bs + 1, q, value_heads, value_dim, key_dim, device=DEVICE)
    given = states.clone().to(DEVICE)
    common = {
        "q": query[None].to(DEVICE), "k": key[None].to(DEVICE), "v": value[None].to(DEVICE),
        "initial_state_source": given, "initial_state_indices": slots.to(DEVICE),
        "cu_seqlens": torch.arange(0, bs * q + 1, q, dtype=torch.int32, device=DEVICE),
        "use_qk_l2norm_in_kernel": True, "disable_state_update": True, "intermediate_states_buffer": cache,
        "intermediate_state_indices": torch.arange(bs, dtype=torch.int32, device=DEVICE), "cache_steps": q,
        "retrieve_parent_token": grown.parents.clamp(min=0).to(DEVICE),
    }  # fmt: skip
    if kernel == "gated":
        from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import (
            fused_sigmoid_gating_delta_rule_update,
        )

        out = fused_sigmoid_gating_delta_rule_update(
            A_log=a_log.to(DEVICE), dt_bias=dt_bias.to(DEVICE), a=a.to(DEVICE), b=b.to(DEVICE),
            softplus_beta=1.0, softplus_threshold=20.0, **common,
        )  # fmt: skip
    else:
        from sglang.srt.layers.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update

        out = fused_recurrent_gated_delta_rule_update(
            g=gate[None].to(DEVICE), beta=b.sigmoid()[None].to(DEVICE), **common
        )
    out = out.view(bs, q, value_heads, value_dim)
    assert torch.equal(given.cpu(), states), "the committed states were touched"
    spread = value_heads // heads
    for row in range(bs):
        after: dict[int, torch.Tensor] = {-1: states[int(slots[row])].double()}
        for slot in range(int(grown.num_nodes[row])):
            at = row * q + slot
            wide = [t[at].double().repeat_interleave(spread, 0) for t in (query, key)]
            after[slot], want = recurrence(
                after[int(grown.parents[row, slot])],
                *wide,
                value[at].double(),
                gate[at].double(),
                b[at].double().sigmoid(),
            )
            close(out[row, slot], want, f"request {row}, slot {slot}")
            close(cache[row, slot], after[slot], f"state of request {row}, slot {slot}")


def test_a_chain_of_slots_would_be_caught() -> None:
    """Negative control of the reference: in a tree with siblings, paths and slot order give different inputs."""
    grown = built(1, 15)
    parents = grown.parents[0].tolist()
    assert any(path_of(parents, slot) != list(range(slot + 1)) for slot in range(1, 16))
    assert bool((reference.ancestor_mask(grown, DEPTH)[0].tril() != torch.ones(16, 16, dtype=torch.bool).tril()).any())
