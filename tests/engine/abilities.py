# SPDX-License-Identifier: Apache-2.0
"""Requests that ask something of the target's logits; every mode that serves them has to answer as baseline does."""

from __future__ import annotations

from typing import Any

from tests.engine import cases

NEW = 40
PENALTIES: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 1.0},
    "presence_penalty": {"presence_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "frequency and presence": {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    # the stop token comes early in the answers to prompts 1 and 3
    "min_new_tokens": {"ignore_eos": False, "min_new_tokens": 12, "stop_token_ids": [17]},
}
BIAS: dict[str, dict[str, Any]] = {"logit_bias": {"logit_bias": {"17": -100.0, "20": 2.0}}}
PROCESSORS: dict[str, dict[str, Any]] = {
    "Forbid": {"custom_params": {"forbidden": [17, 5, 30]}},
    "Rhythm": {"custom_params": {"beat": 77}},
}
KINDS = [*PENALTIES, *BIAS, *PROCESSORS]
PROMPTS = 4


def asking(walk: cases.Walk, processors: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Kind and request: each prompt with each kind and once plainly, neighbours of a batch all differing."""
    found: list[tuple[str, dict[str, Any]]] = []
    for ids in walk.prompts[:PROMPTS]:
        found.append(("plain", cases.body(ids, ignore_eos=True, max_new_tokens=NEW)))
        for kind, sampling in (PENALTIES | BIAS | PROCESSORS).items():
            request = cases.body(ids, **({"ignore_eos": True, "max_new_tokens": NEW} | sampling))
            if kind in PROCESSORS:
                request["custom_logit_processor"] = processors[kind]
            found.append((kind, request))
    return found
