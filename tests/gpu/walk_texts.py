# SPDX-License-Identifier: Apache-2.0
"""Offline tokens per step along given texts: the walk of tests/engine/offline_walk.py, without generating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from offline_walk import Drafter, best_prefixes
from tokenizers import Tokenizer

_cache: dict[str, Any] = {}


def _pair(pair: str) -> tuple[Any, Drafter, Tokenizer]:
    if pair not in _cache:
        from transformers import AutoModelForCausalLM

        target = AutoModelForCausalLM.from_pretrained(f"{pair}/target", dtype=torch.float32).eval()
        tokenizer = Tokenizer.from_file(f"{pair}/target/tokenizer.json")
        _cache[pair] = (target, Drafter(Path(f"{pair}/draft"), target), tokenizer)
    loaded: tuple[Any, Drafter, Tokenizer] = _cache[pair]
    return loaded


@torch.no_grad()
def tokens_per_step(pair: str, prompts: list[str], outputs: list[list[int]], budget: int, topk: int) -> float:
    """Tokens per verify step that trees of `budget` nodes reach along `outputs`, in float32 on the CPU.

    Prefill gives the first token of an output; a step that runs past the end is cut there, as the engine counts.
    """
    target, drafter, tokenizer = _pair(pair)
    tokens = steps = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*tokenizer.encode(prompt).ids, *output]
        states = target.model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in drafter.features], -1)
        root = len(text) - len(output)
        while root < len(text) - 1:
            tree = best_prefixes(drafter.log_probs(features[:root], text[root]), budget, topk)
            length = 0
            while root + 1 + length < len(text) and tuple(text[root + 1 : root + 2 + length]) in tree:
                length += 1
            took = min(length + 1, len(text) - 1 - root)
            tokens, steps, root = tokens + took, steps + 1, root + took
    return tokens / steps
