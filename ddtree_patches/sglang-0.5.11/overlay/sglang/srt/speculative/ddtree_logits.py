# SPDX-License-Identifier: Apache-2.0
"""What requests ask of the target's logits, at every slot of a tree: penalties, logit bias, custom logit processors.

A penalty depends on the tokens before it, so it differs from slot to slot: at a
slot the output so far is what the request has, then the path from the root. The
engine counts the output of a step of one token and knows no tree (DFLASH counts
nothing at all), so the counts are made here, from the requests themselves.

Only requests that ask for something pay for it; their rows alone are touched.
"""

from __future__ import annotations

import copy
from http import HTTPStatus
from typing import Any, Dict, List, Optional, Sequence

import torch

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree_utils import DDTree

_REQUEST = "__req__"
"""Where the engine puts a request for its custom logit processor, among the processor's parameters."""


def adjusts(info: Optional[SamplingBatchInfo]) -> bool:
    """Whether any request of the batch asks for something here."""
    return info is not None and (
        info.logit_bias is not None or info.has_custom_logit_processor or info.penalizer_orchestrator.is_required
    )


def adjust_logits(
    logits: torch.Tensor, reqs: Sequence[Req], info: Optional[SamplingBatchInfo], tree: DDTree, depth: int
) -> None:
    """Change logits in place as the engine does without speculation: penalties, bias, custom processors.

    Args:
        logits: ``[bs * q, vocab]``.
        reqs: the batch's requests, whose output ends with the token at the root.
        info: their sampling parameters.
        tree: ``q`` slots each; what unused slots get is never read.
        depth: of the deepest slot that there can be.
    """
    if not adjusts(info):
        return
    q = tree.parents.shape[1]
    if info.penalizer_orchestrator.is_required:
        for index, req in enumerate(reqs):
            if _penalized(req):
                _penalize(logits[index * q : (index + 1) * q], req, _paths(tree, index, depth), tree.depths[index])
    if info.logit_bias is not None:
        logits.add_(torch.repeat_interleave(info.logit_bias, q, dim=0))
    if info.has_custom_logit_processor:
        _process(logits, reqs, info, tree, depth)


def _penalized(req: Req) -> bool:
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > len(req.output_ids)
    )


def _paths(tree: DDTree, index: int, depth: int) -> torch.Tensor:
    """Tokens between root and slot, the slot's own first: int64 ``[q, depth]``, -1 where the path has ended."""
    parents, tokens = tree.parents[index], tree.token_ids[index]
    at = torch.arange(parents.shape[0], device=parents.device)
    columns = []
    for _ in range(depth):
        columns.append(torch.where(at > 0, tokens[at], -1))
        at = parents[at].clamp(min=0)
    return torch.stack(columns, dim=1)


def _penalize(rows: torch.Tensor, req: Req, paths: torch.Tensor, depths: torch.Tensor) -> None:
    """One request: rows ``[q, vocab]``. First what is added, then what is multiplied, as in the engine's overlap mode."""
    params, device = req.sampling_params, rows.device
    q, vocab = rows.shape
    # One column more takes what is no token.
    paths = torch.where(paths < 0, vocab, paths)
    spent = torch.tensor(req.output_ids, dtype=torch.int64, device=device)[None]
    seen = torch.zeros((q, vocab + 1), dtype=torch.bool, device=device)
    seen.scatter_(1, spent.expand(q, -1), True)
    seen.scatter_(1, paths, True)
    seen = seen[:, :vocab]
    added = torch.zeros((q, vocab), dtype=torch.float32, device=device)
    if params.frequency_penalty:
        # Summed up token by token: the engine's own rounding.
        counted = torch.zeros((1, vocab + 1), dtype=torch.float32, device=device)
        counted.scatter_add_(1, spent, torch.full_like(spent, params.frequency_penalty, dtype=torch.float32))
        counted = counted.repeat(q, 1)
        counted.scatter_add_(1, paths, torch.full_like(paths, params.frequency_penalty, dtype=torch.float32))
        added.sub_(counted[:, :vocab])
    if params.presence_penalty:
        added.sub_(seen * params.presence_penalty)
    rows.add_(added)
    if params.repetition_penalty != 1.0:
        scaled = torch.where(rows < 0, rows * params.repetition_penalty, rows / params.repetition_penalty)
        rows.copy_(torch.where(seen, scaled, rows))
    if params.min_new_tokens > len(req.output_ids):
        early = depths + len(req.output_ids) < params.min_new_tokens
        stops = torch.tensor(_stop_tokens(req), dtype=torch.int64, device=device)
        rows[:, stops] = rows[:, stops].masked_fill(early[:, None], float("-inf"))


def _stop_tokens(req: Req) -> List[int]:
    """What `min_new_tokens` forbids: the engine's own choice."""
    tokenizer = req.tokenizer
    more = tokenizer.additional_stop_token_ids or set()
    return sorted({*(req.sampling_params.stop_token_ids or ()), *more, tokenizer.eos_token_id})


class _AtSlot:
    """A request as it will be when a slot has been accepted: what a custom logit processor reads of it."""

    def __init__(self, req: Req, path: List[int]):
        self._req = req
        self.output_ids = [*req.output_ids, *path]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def _process(
    logits: torch.Tensor, reqs: Sequence[Req], info: SamplingBatchInfo, tree: DDTree, depth: int
) -> None:
    """Call each custom logit processor once, with a row and parameters for every slot of its requests.

    What a processor notes in a request's parameters for its next call cannot be
    right on a tree, where calls do not follow each other: such a request ends
    with the reason.
    """
    q = tree.parents.shape[1]
    used = tree.num_nodes.tolist()
    for processor, mask in info.custom_logit_processor.values():
        rows: List[int] = []
        given: List[Optional[Dict[str, Any]]] = []
        for index in mask.nonzero().flatten().tolist():
            paths = _paths(tree, index, depth)[: used[index]].tolist()
            for slot, path in enumerate(paths):
                rows.append(index * q + slot)
                given.append(_params_at(info.custom_params[index], reqs[index], path))
        at = torch.tensor(rows, device=logits.device)
        logits[at] = processor(logits[at], given)
        for row, params in zip(rows, given, strict=True):
            if params is not None and _plain(params) != _plain(info.custom_params[row // q]):
                reqs[row // q].to_finish = FINISH_ABORT(
                    "DDTREE speculative decoding does not support a custom_logit_processor that changes custom_params: "
                    "it is called for all slots of a draft tree at once. Work the state out from the request's output_ids.",
                    HTTPStatus.BAD_REQUEST,
                    "BadRequestError",
                )


def _params_at(params: Optional[Dict[str, Any]], req: Req, path: List[int]) -> Optional[Dict[str, Any]]:
    if params is None:
        return None
    return {**copy.deepcopy(_plain(params)), _REQUEST: _AtSlot(req, [token for token in reversed(path) if token >= 0])}


def _plain(params: Dict[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in params.items() if key != _REQUEST}
