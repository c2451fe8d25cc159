# SPDX-License-Identifier: Apache-2.0
"""The tree's Triton kernels without a GPU: interpreted against the reference, and compiled for the GPUs that are served.

    TRITON_INTERPRET=1 python tests/engine/kernel_checks.py interpret     prints {check: cases}, raises at the first that fails
    python tests/engine/kernel_checks.py compile                          prints {"sm90 kernel": bytes of machine code}

tests/gpu runs the same kernels on a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ddtree_patches/common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/gpu"))
import ddtree_kernels as kernels
import random_trees
from ddtree_utils import DDTree, ancestor_mask, build_ddtree, tree_links, walk_report

# requests, depth, candidates, budget, spine
SHAPES = [(1, 15, 8, 15, 0), (3, 4, 3, 7, 2), (2, 1, 1, 5, 0), (1, 7, 2, 63, 20), (2, 15, 8, 22, 4)]
CAPABILITIES = (90, 120)


def check_top_k() -> int:
    for dtype in (torch.float32, torch.bfloat16):
        for vocab, k in ((5000, 8), (37, 4), (8, 8)):
            logits = (torch.randn(6, vocab) * 3).round().to(dtype)  # many equal ones
            logits[0] = float("-inf")
            logits[0, vocab // 2] = 1.0
            lse, top, ids = kernels.top_k_logits(logits, k, first_id=100)
            exact = logits.float()
            assert torch.allclose(lse, torch.logsumexp(exact, -1), atol=1e-4)
            order = torch.argsort(exact, dim=-1, descending=True, stable=True)[:, :k]
            assert torch.equal(top, exact.gather(1, order))
            real = top > float("-inf")
            assert torch.equal((ids - 100)[real], order[real]), "lower token first among equals"
    return 6


def check_trees() -> int:
    cases = 0
    for style in random_trees.STYLES:
        for bs, depth, k, budget, spine in SHAPES:
            log_probs, ids = random_trees.candidates(style, bs, depth, k, 64, seed=cases)
            wanted = build_ddtree(log_probs, ids, budget, spine=spine)
            *columns, ancestors, child, sibling = kernels.grow_tree(log_probs, ids, budget, spine=spine, links=True)
            built = DDTree(*columns)
            for name in ("parents", "token_ids", "depths", "num_nodes"):
                assert torch.equal(getattr(built, name), getattr(wanted, name)), (style, name, bs, depth, k, budget)
            seen = ancestor_mask(wanted, depth)
            bits = (ancestors[:, :, None] >> torch.arange(budget + 1)) & 1 > 0
            assert torch.equal(bits, seen)
            assert all(torch.equal(a, b) for a, b in zip((child, sibling), tree_links(wanted.parents), strict=True))
            said = random_trees.targets(wanted, 64, seed=cases)
            chain = ids[:, :, 0].contiguous()
            report = walk_report(wanted, seen, said, chain)
            walked = kernels.walk_trees(*columns, said, chain)
            assert all(torch.equal(a, b) for a, b in zip(walked, report, strict=True)), (style, walked, report)
            cases += 1
    return cases


def check_masks() -> int:
    for bs, budget in ((1, 15), (4, 7), (3, 63)):
        log_probs, ids = random_trees.candidates("plain", bs, 15, 8, 64, seed=bs)
        *_, ancestors = kernels.grow_tree(log_probs, ids, budget)
        q, lengths = budget + 1, torch.arange(3, 3 + bs, dtype=torch.int32)
        mask = torch.full((int((q * (lengths + q)).sum()) + 5,), 7, dtype=torch.uint8)
        kernels.write_mask(ancestors, lengths, mask)
        start = 0
        for row, length in enumerate(lengths.tolist()):
            part = mask[start : start + q * (length + q)].view(q, length + q)
            start += part.numel()
            assert (part[:, :length] == 7).all(), "the prefix is not touched"
            assert torch.equal(part[:, length:] > 0, (ancestors[row][:, None] >> torch.arange(q)) & 1 > 0)
        assert (mask[start:] == 7).all(), "nothing behind the last mask is touched"
    return 3


def compiled() -> dict[str, int]:
    """Machine code for GPUs that are not here: what a kernel must not use is found before it is deployed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    ids, scores, number = "*i64", "*fp32", "i32"
    wide = {"BUDGET": 63, "SLOTS": 64}
    plans = [
        (
            kernels._top_k_chunk_kernel,
            ["*bf16", number, number, number, scores, ids, scores, scores, number],
            {"K": 8, "CHUNK": 4096}, 4,
        ),
        (kernels._top_k_merge_kernel, [scores, ids, scores, scores, number, scores, ids, scores], {"K": 8, "C": 64, "N": 512}, 4),
        (kernels._grow_kernel, [scores, *[ids] * 8], {"DEPTH": 15, "K": 8, "SPINE": 0, "LINKS": True, **wide}, 1),
        (kernels._mask_kernel, [ids, ids, "*i8"], {"Q": 64, "SLOTS": 64, "ROWS": 32}, 1),
        (kernels._walk_kernel, [ids] * 9, {"Q": 64, "DEPTH": 15, "SLOTS": 64, "DEPTHS": 16}, 1),
    ]  # fmt: skip
    sizes = {}
    for capability in CAPABILITIES:
        for function, types, constants, warps in plans:
            names = function.arg_names
            signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
            source = ASTSource(
                fn=function,
                signature=signature,
                constexprs={(names.index(name),): value for name, value in constants.items()},
            )
            out = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
            assert out.metadata.shared <= 99 * 1024, f"{function.__name__}: more shared memory than SM120 has"
            sizes[f"sm{capability} {function.__name__}"] = len(out.asm["cubin"])
    return sizes


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print(json.dumps(compiled()))
    else:
        torch.manual_seed(1)
        print(json.dumps({"top_k": check_top_k(), "trees": check_trees(), "masks": check_masks()}))
