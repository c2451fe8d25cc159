# SPDX-License-Identifier: Apache-2.0
"""Tree building, masks and walks on the GPU give what the reference gives on the CPU, launched and from a CUDA graph.

`TRITON_INTERPRET=1 GPU_TESTS_DEVICE=cpu python3 -m pytest tests/gpu/test_tree_kernels.py` runs them in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="no torch on this machine")
pytest.importorskip("triton", reason="no Triton on this machine")

import ddtree_kernels as kernels  # noqa: E402
import ddtree_utils as reference  # noqa: E402
from random_trees import STYLES, candidates, targets, tree  # noqa: E402

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
DEPTH = 15
# (requests, budget, candidates, spine): the presets, odd sizes, the largest tree.
SHAPES = [
    (1, 7, 8, 0), (1, 15, 8, 0), (3, 22, 8, 0), (8, 31, 8, 0), (16, 63, 8, 0), (5, 15, 1, 0),
    (2, 13, 3, 0), (4, 30, 5, 7), (7, 1, 8, 0), (16, 15, 8, 15), (2, 62, 4, 3),
]  # fmt: skip


@contextmanager
def no_sync() -> Iterator[None]:
    """Any wait of the host for the GPU in here raises."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def bits(mask: torch.Tensor) -> torch.Tensor:
    """bool `[.., q]` as int64, slot j in bit j."""
    return (mask.long() << torch.arange(mask.shape[-1])).sum(-1)


def same_tree(found: tuple[torch.Tensor, ...], want: reference.DDTree) -> None:
    parents, tokens, depths, num_nodes, ancestors, *links = (part.cpu() for part in found)
    assert torch.equal(num_nodes, want.num_nodes)
    assert torch.equal(parents, want.parents)
    assert torch.equal(tokens, want.token_ids)
    assert torch.equal(depths, want.depths)
    assert torch.equal(ancestors, bits(reference.ancestor_mask(want, DEPTH)))
    if links:
        first, sibling = reference.tree_links(want.parents)
        assert torch.equal(links[0], first)
        assert torch.equal(links[1], sibling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "vocab", "k"), [(1, 9, 8), (15, 1000, 8), (3, 4096, 1), (30, 4097, 8), (240, 65536, 8)]
)
def test_top_k_and_log_sum_exp(rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    """bfloat16 has many equal logits: the lower token comes first, on every rank and in every chunk."""
    rows = rows if DEVICE == "cuda" else min(rows, 3)
    source = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=source) * 3).to(dtype)
    logits[0, 1::2] = -torch.inf
    on_device = logits.to(DEVICE)
    with no_sync():
        lse, top, ids = kernels.top_k_logits(on_device, k, first_id=7)
    values, order = torch.sort(logits.float(), dim=1, descending=True, stable=True)
    finite = values[:, :k].isfinite()
    assert torch.equal(top.cpu(), values[:, :k])
    assert torch.equal(ids.cpu()[finite], order[:, :k][finite] + 7)
    assert torch.allclose(lse.cpu().double(), torch.logsumexp(logits.double(), 1), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("bs", "budget", "k", "spine"), SHAPES)
def test_tree_is_the_reference_tree(bs: int, budget: int, k: int, spine: int, style: str) -> None:
    for seed in range(4 if DEVICE == "cuda" else 1):
        log_probs, ids = candidates(style, bs, DEPTH, k, 64, seed)
        spine_here = spine if style != "holes" else 0
        want = reference.build_ddtree(log_probs, ids, budget, spine=spine_here)
        inputs = log_probs.to(DEVICE), ids.to(DEVICE)
        with no_sync():
            found = kernels.grow_tree(*inputs, budget, spine=spine_here, links=bool(bs % 2))
        same_tree(found, want)
        if DEVICE == "cuda":  # the reference itself, on the GPU
            there = reference.build_ddtree(*inputs, budget, spine=spine_here)
            for name in ("parents", "token_ids", "depths", "num_nodes"):
                assert torch.equal(getattr(there, name).cpu(), getattr(want, name)), name


@pytest.mark.parametrize(("bs", "budget"), [(1, 15), (5, 7), (16, 22), (8, 63)])
def test_mask_is_written_behind_every_prefix_and_nowhere_else(bs: int, budget: int) -> None:
    q = budget + 1
    built = tree("ties", bs, DEPTH, 8, budget, seed=budget)
    allowed = reference.ancestor_mask(built, DEPTH)
    lengths = torch.randint(0, 300, (bs,), generator=torch.Generator().manual_seed(bs))
    pieces = [
        torch.cat([torch.ones(q, int(n), dtype=torch.bool), allowed[i]], 1).flatten() for i, n in enumerate(lengths)
    ]
    want = torch.cat([*pieces, torch.ones(1000, dtype=torch.bool)])
    mask = torch.ones(len(want), dtype=torch.bool, device=DEVICE)
    ancestors, there = bits(allowed).to(DEVICE), lengths.to(DEVICE)
    with no_sync():
        kernels.write_mask(ancestors, there, mask)
    assert torch.equal(mask.cpu(), want)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("bs", "budget", "k", "spine"), SHAPES)
def test_walk_is_the_reference_walk(bs: int, budget: int, k: int, spine: int, style: str) -> None:
    del spine
    accepted = 0
    for seed in range(4 if DEVICE == "cuda" else 2):
        log_probs, ids = candidates(style, bs, DEPTH, k, 64, seed)
        built = reference.build_ddtree(log_probs, ids, budget)
        said, chain = targets(built, 64, seed), ids[:, :, 0].contiguous()
        want = reference.walk_report(built, reference.ancestor_mask(built, DEPTH), said, chain)
        parts = built.parents, built.token_ids, built.depths, built.num_nodes, said, chain
        there = [part.to(DEVICE) for part in parts]
        with no_sync():
            found = kernels.walk_trees(*there)
        for name, got, expected in zip(("order", "last", "packed"), found, want, strict=True):
            assert torch.equal(got.cpu(), expected), name
        accepted += int(want[2][:, DEPTH].sum())
    assert accepted, "nothing was ever accepted: the targets test nothing"


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(("bs", "budget"), [(1, 15), (4, 7), (8, 31), (16, 63)])
def test_a_captured_step_follows_new_content(bs: int, budget: int) -> None:
    """Top-k to walk in one graph: replayed on other logits, prefixes and targets it gives the reference's answers."""
    q, vocab, k = budget + 1, 4096, 8
    logits = torch.zeros(bs * DEPTH, vocab, device=DEVICE)
    lengths = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    said = torch.zeros(bs, q, dtype=torch.int64, device=DEVICE)
    mask = torch.zeros(bs * q * (200 + q), dtype=torch.bool, device=DEVICE)

    def step() -> tuple[torch.Tensor, ...]:
        lse, top, ids = kernels.top_k_logits(logits, k)
        log_probs, ids = (top - lse[:, None]).view(bs, DEPTH, k), ids.view(bs, DEPTH, k)
        parents, tokens, depths, nodes, ancestors = kernels.grow_tree(log_probs, ids, budget)
        kernels.write_mask(ancestors, lengths, mask)
        chain = ids[:, :, 0].contiguous()
        return (
            log_probs,
            ids,
            parents,
            tokens,
            depths,
            nodes,
            ancestors,
            *kernels.walk_trees(parents, tokens, depths, nodes, said, chain),
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(4):
        source = torch.Generator().manual_seed(seed)
        logits.copy_((torch.randn(logits.shape, generator=source) * 4).bfloat16().float())
        lengths.copy_(torch.randint(1, 200, (bs,), generator=source))
        graph.replay()
        log_probs, ids = out[0].cpu(), out[1].cpu()
        want = reference.build_ddtree(log_probs, ids, budget)
        said.copy_(targets(want, vocab, seed))
        mask.fill_(True)
        graph.replay()
        same_tree(out[2:7], want)
        allowed = reference.ancestor_mask(want, DEPTH)
        walked = reference.walk_report(want, allowed, said.cpu(), ids[:, :, 0].contiguous())
        for got, expected in zip(out[7:], walked, strict=True):
            assert torch.equal(got.cpu(), expected)
        start = 0
        for row, length in enumerate(lengths.tolist()):
            square = mask[start : start + q * (length + q)].view(q, -1)[:, length:].cpu()
            assert torch.equal(square, allowed[row])
            start += q * (length + q)
