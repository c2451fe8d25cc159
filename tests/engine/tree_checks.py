# SPDX-License-Identifier: Apache-2.0
"""Checks of ddtree_patches/common/ddtree_utils.py against brute force; run with a Python that has torch.

    python tests/engine/tree_checks.py        runs every check, prints {check: cases}; raises at the first that fails

The reference here enumerates every prefix in plain Python and shares no code with what it checks.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ddtree_patches/common"))
from ddtree_utils import PAD, DDTree, ancestor_mask, build_ddtree, merge_top_k, tree_links, walk_tree

Path_ = tuple[int, ...]
CASES = 200


def draw(rng: random.Random, *, ties: bool, bs: int = 3) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Random marginals `[bs, depth, k]` and a budget; with `ties`, few distinct values."""
    depth, k, budget = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 24)
    vocabulary = k + rng.randint(0, 3)
    make = (lambda: float(rng.randint(-2, 1))) if ties else (lambda: rng.gauss(0, 2))
    logits = torch.tensor([[[make() for _ in range(vocabulary)] for _ in range(depth)] for _ in range(bs)])
    log_probs = torch.log_softmax(logits, -1)
    ids = torch.tensor([[rng.sample(range(60), vocabulary) for _ in range(depth)] for _ in range(bs)])
    # falling probability, and lower token first among equals: what merge_top_k hands over
    log_probs, ids = merge_top_k(
        torch.logsumexp(log_probs, -1).flatten()[None], log_probs.flatten(0, 1)[None], ids.flatten(0, 1)[None], k
    )
    return log_probs.view(bs, depth, k), ids.view(bs, depth, k), budget


def every_prefix(log_probs: torch.Tensor, ids: torch.Tensor) -> list[tuple[float, Path_]]:
    """All prefixes of one request in the promised order: score, depth, token, parent. Scores as float32 sums."""
    ranked: list[tuple[float, int, int, int, Path_]] = []
    level: list[tuple[torch.Tensor, Path_]] = [(torch.zeros(()), ())]
    for depth, (row, tokens) in enumerate(zip(log_probs, ids, strict=True)):
        grown = [
            (score + value, parent, (*path, int(token)))
            for parent, (score, path) in enumerate(level)
            for value, token in zip(row, tokens, strict=True)
        ]
        grown.sort(key=lambda item: (-float(item[0]), item[2][-1], item[1]))
        ranked += [(-float(score), depth, rank, 0, path) for rank, (score, _, path) in enumerate(grown)]
        level = [(score, path) for score, _, path in grown]
    ranked.sort()
    return [(-cost, path) for cost, _, _, _, path in ranked]


def paths(tree: DDTree, row: int) -> list[Path_]:
    """Token path of each used slot but the root; checks the layout on the way."""
    parents, tokens = tree.parents[row].tolist(), tree.token_ids[row].tolist()
    depths, used = tree.depths[row].tolist(), int(tree.num_nodes[row])
    assert (parents[0], tokens[0], depths[0]) == (PAD, PAD, 0)
    assert all(column[slot] == PAD for column in (parents, tokens, depths) for slot in range(used, len(parents)))
    found: list[Path_] = [()]
    for slot in range(1, used):
        assert 0 <= parents[slot] < slot
        found.append((*found[parents[slot]], tokens[slot]))
        assert len(found[-1]) == depths[slot]
    return found[1:]


def best_sum() -> int:
    """The sum of prefix probabilities is the largest that any `budget` prefixes reach, and the order is the promised one."""
    rng = random.Random(1)
    for case in range(CASES):
        log_probs, ids, budget = draw(rng, ties=case % 2 == 1)
        tree = build_ddtree(log_probs, ids, budget)
        for row in range(log_probs.shape[0]):
            ranked = every_prefix(log_probs[row], ids[row])
            got = paths(tree, row)
            assert len(set(got)) == len(got) == min(budget, len(ranked))
            score = {path: value for value, path in ranked}
            best = sum(math.exp(value) for value, _ in ranked[:budget])
            assert math.isclose(sum(math.exp(score[path]) for path in got), best, rel_tol=1e-6)
            assert got == [path for _, path in ranked[:budget]]
    return CASES


def subsets() -> int:
    """No set of `budget` nodes closed under parents is better: by trying all of them on tiny trees."""
    rng = random.Random(2)
    for _ in range(CASES):
        log_probs, ids, _ = draw(rng, ties=False, bs=1)
        log_probs, ids, budget = log_probs[:, :2, :3], ids[:, :2, :3], rng.randint(1, 4)
        score = {path: math.exp(value) for value, path in every_prefix(log_probs[0], ids[0])}
        closed = (
            sum(score[path] for path in nodes)
            for nodes in itertools.combinations(score, min(budget, len(score)))
            if all(len(path) == 1 or path[:-1] in nodes for path in nodes)
        )
        got = paths(build_ddtree(log_probs, ids, budget), 0)
        assert math.isclose(sum(score[path] for path in got), max(closed), rel_tol=1e-6)
    return CASES


def batch() -> int:
    """A batch gives the trees of its requests one by one."""
    rng = random.Random(3)
    for case in range(CASES):
        log_probs, ids, budget = draw(rng, ties=case % 2 == 1, bs=5)
        whole = build_ddtree(log_probs, ids, budget)
        for row in range(5):
            single = build_ddtree(log_probs[row : row + 1], ids[row : row + 1], budget)
            for name in ("parents", "token_ids", "depths", "num_nodes"):
                assert torch.equal(getattr(whole, name)[row], getattr(single, name)[0]), name
    return CASES


def spine() -> int:
    """The greedy chain's first nodes are in; the rest is the best that is left."""
    rng = random.Random(4)
    for case in range(CASES):
        log_probs, ids, budget = draw(rng, ties=case % 2 == 1, bs=1)
        length = rng.randint(0, 5)
        got = paths(build_ddtree(log_probs, ids, budget, spine=length), 0)
        kept = min(length, budget, log_probs.shape[1])
        chain = [tuple(int(token) for token in ids[0, : depth + 1, 0]) for depth in range(kept)]
        rest = [path for _, path in every_prefix(log_probs[0], ids[0]) if path not in chain]
        assert got == chain + rest[: budget - kept]
    return CASES


def impossible() -> int:
    """Candidates of probability zero leave slots unused instead of entering a tree."""
    log_probs = torch.tensor([[[0.0, -math.inf], [-0.5, -math.inf]]])
    tree = build_ddtree(log_probs, torch.tensor([[[4, 5], [6, 7]]]), 6)
    assert paths(tree, 0) == [(4,), (4, 6)]
    return 1


def masks() -> int:
    """A slot sees itself and its ancestors; an unused slot sees itself."""
    rng = random.Random(5)
    for _ in range(CASES):
        log_probs, ids, budget = draw(rng, ties=False)
        tree = build_ddtree(log_probs, ids, budget)
        mask = ancestor_mask(tree, log_probs.shape[1])
        for row in range(mask.shape[0]):
            for slot in range(budget + 1):
                seen, at = {slot}, int(tree.parents[row, slot])
                while at >= 0:
                    seen.add(at)
                    at = int(tree.parents[row, at])
                assert set(mask[row, slot].nonzero().flatten().tolist()) == seen
    return CASES


def walks() -> int:
    """The walk takes exactly the nodes whose whole path is the target's, and the token after them."""
    rng = random.Random(6)
    longest = 0
    for _ in range(CASES):
        log_probs, ids, budget = draw(rng, ties=False)
        tree = build_ddtree(log_probs, ids, budget)
        depth = log_probs.shape[1]
        # targets from the tree's own tokens, so that paths are really taken
        target = torch.tensor([[rng.choice(row) for _ in row] for row in tree.token_ids.tolist()])
        got = walk_tree(tree, ancestor_mask(tree, depth), target, depth)
        for row in range(target.shape[0]):
            slot, taken = 0, [0]
            while True:
                children = [
                    child
                    for child in range(1, int(tree.num_nodes[row]))
                    if int(tree.parents[row, child]) == slot and tree.token_ids[row, child] == target[row, slot]
                ]
                if not children:
                    break
                [slot] = children
                taken.append(slot)
            longest = max(longest, len(taken) - 1)
            assert int(got.accept_lens[row]) == len(taken) - 1
            assert got.path[row].tolist() == taken + [0] * (depth + 1 - len(taken))
            assert got.bonus[row] == target[row, slot]
    assert longest >= 3, "no case walks deep"
    return CASES


def links() -> int:
    """First children and next siblings lead to every used slot once, always forward, and give the parents back."""
    rng = random.Random(11)
    for case in range(CASES):
        log_probs, ids, budget = draw(rng, ties=case % 2 == 1)
        tree = build_ddtree(log_probs, ids, budget)
        child, sibling = tree_links(tree.parents)
        assert child.dtype == sibling.dtype == torch.int32
        for row in range(tree.parents.shape[0]):
            found = [PAD] * (budget + 1)
            for slot, (first, after) in enumerate(zip(child[row].tolist(), sibling[row].tolist(), strict=True)):
                for to, parent in ((first, slot), (after, found[slot])):
                    if to != PAD:
                        assert to > slot
                        assert found[to] == PAD
                        found[to] = parent
            assert found == tree.parents[row].tolist()
    return CASES


def shards() -> int:
    """A vocabulary in shards gives the same candidates as the whole one, ties included."""
    rng = random.Random(7)
    for case in range(CASES):
        n, count, size, k = 3, rng.randint(1, 4), rng.randint(2, 9), rng.randint(1, 6)
        make = (lambda: float(rng.randint(-2, 2))) if case % 2 else (lambda: rng.gauss(0, 3))
        logits = torch.tensor([[make() for _ in range(count * size)] for _ in range(n)])
        k = min(k, count * size)
        parts = logits.view(n, count, size).transpose(0, 1)
        tops, ids = torch.sort(parts, dim=-1, descending=True, stable=True)
        ids = ids + torch.arange(count)[:, None, None] * size
        log_probs, tokens = merge_top_k(torch.logsumexp(parts, -1), tops[..., :k], ids[..., :k], k)
        want, order = torch.sort(torch.log_softmax(logits, -1), dim=-1, descending=True, stable=True)
        assert torch.equal(tokens, order[:, :k])
        assert torch.allclose(log_probs, want[:, :k], atol=1e-5)
    return CASES


def refusals() -> int:
    """What cannot be a tree is refused with the reason."""
    log_probs, ids = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64)
    wrong: list[tuple[Callable[[], DDTree], str]] = [
        (lambda: build_ddtree(log_probs, ids, 0), "budget must be at least 1, got 0"),
        (lambda: build_ddtree(log_probs, ids, 4, spine=-1), "spine must not be negative"),
        (lambda: build_ddtree(log_probs[0], ids[0], 4), r"must both be [bs, depth, k]"),
        (lambda: build_ddtree(log_probs, ids[:, :1], 4), r"must both be [bs, depth, k]"),
        (lambda: build_ddtree(log_probs.double(), ids, 4), "expected float32"),
        (lambda: build_ddtree(log_probs, ids.int(), 4), "int64 token ids"),
        (lambda: build_ddtree(log_probs[:, :0], ids[:, :0], 4), "at least one position"),
    ]
    for call, message in wrong:
        try:
            call()
            said = "nothing"
        except ValueError as error:
            said = str(error)
        assert message in said, f"expected {message!r}, said {said!r}"
    return len(wrong)


CHECKS = (best_sum, subsets, batch, spine, impossible, masks, walks, links, shards, refusals)

if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({check.__name__: check() for check in CHECKS}, sys.stdout)
