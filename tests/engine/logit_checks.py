# SPDX-License-Identifier: Apache-2.0
"""Penalties on random trees, bit for bit what the engine's own penalizers give on every path; engine's Python, no server.

Prints how many slots were compared, and on how many of them a penalty showed.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.speculative.ddtree_logits import adjust_logits
from sglang.srt.speculative.ddtree_utils import DDTree

VOCAB, STOPS, EOS = 48, {5, 6}, 0
PENALIZERS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}


class Batch:
    """What a penalizer reads of a batch; it keeps a weak reference, which a SimpleNamespace does not take."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs, self.device = reqs, "cpu"


def a_tree(pick: random.Random, q: int, depth: int) -> tuple[DDTree, list[list[int]]]:
    """A tree of up to q slots, and the tokens from below the root to each used slot."""
    paths: list[list[int]] = [[]]
    parents, tokens, depths = [-1], [-1], [0]
    for _ in range(pick.randrange(q)):
        parent = pick.choice([slot for slot, path in enumerate(paths) if len(path) < depth])
        token = pick.randrange(VOCAB)
        parents.append(parent)
        tokens.append(token)
        depths.append(depths[parent] + 1)
        paths.append([*paths[parent], token])
    unused = [-1] * (q - len(paths))
    columns = [torch.tensor([column + unused]) for column in (parents, tokens, depths)]
    return DDTree(*columns, num_nodes=torch.tensor([len(paths)])), paths


def a_request(pick: random.Random) -> Any:
    params = SimpleNamespace(
        frequency_penalty=pick.choice([0.0, 0.3, -0.7]),
        presence_penalty=pick.choice([0.0, 0.1, 1.5]),
        repetition_penalty=pick.choice([1.0, 1.3, 0.8]),
        min_new_tokens=pick.choice([0, 3, 9]),
        stop_token_ids=pick.choice([None, STOPS]),
    )
    output = [pick.randrange(VOCAB) for _ in range(pick.randrange(1, 9))]
    tokenizer = SimpleNamespace(additional_stop_token_ids=pick.choice([None, {7}]), eos_token_id=EOS)
    return SimpleNamespace(sampling_params=params, output_ids=output, tokenizer=tokenizer)


def by_the_engine(row: torch.Tensor, req: Any, path: list[int]) -> torch.Tensor:
    """Logits of one position, as the engine has them when these tokens came one step after the other."""
    batch = Batch([req])
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, PENALIZERS)
    for token in [*req.output_ids, *path]:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    added = torch.zeros(1, VOCAB)
    orchestrator.accumulate_additive_penalties(added)
    row = row[None] + added
    if (scaling := orchestrator.accumulate_scaling_penalties()) is not None:
        apply_scaling_penalties(row, scaling)
    return row[0]


def main() -> None:
    compared = changed = 0
    for seed in range(150):
        pick = random.Random(seed)
        torch.manual_seed(seed)
        q, depth, bs = pick.randrange(2, 17), pick.randrange(1, 7), pick.randrange(1, 5)
        grown = [a_tree(pick, q, depth) for _ in range(bs)]
        tree = DDTree(*(torch.cat(column) for column in zip(*(vars(tree).values() for tree, _ in grown), strict=True)))
        reqs = [a_request(pick) for _ in range(bs)]
        before = torch.randn(bs * q, VOCAB)
        logits = before.clone()
        bias = torch.randn(bs, VOCAB) if pick.random() < 0.5 else None
        info = SimpleNamespace(
            logit_bias=bias,
            has_custom_logit_processor=False,
            penalizer_orchestrator=SimpleNamespace(is_required=True),
        )
        adjust_logits(logits, reqs, info, tree, depth)
        for index, (req, (_, paths)) in enumerate(zip(reqs, grown, strict=True)):
            for slot, path in enumerate(paths):
                row = index * q + slot
                want = by_the_engine(before[row], req, path)
                if bias is not None:
                    want = want + bias[index]
                assert torch.equal(logits[row], want), (seed, index, slot, (logits[row] - want).abs().max())
                compared += 1
                changed += not torch.equal(want, before[row] if bias is None else before[row] + bias[index])
    print(json.dumps({"compared": compared, "changed": changed}))


if __name__ == "__main__":
    main()
