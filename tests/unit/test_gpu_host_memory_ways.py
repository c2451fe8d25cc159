# SPDX-License-Identifier: Apache-2.0
"""Every way out that a finding about memory offers is applied as it is written, and the host is judged again."""

from __future__ import annotations

import copy
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.gpu_host_judge import judge

from fleet import declared
from tests.unit.judge_kit import DRAFTER, TARGET, good
from tests.unit.test_gpu_host_memory import DENSE7, DRAFT7, HYBRID7, LARGE

MEMORY = ("memory-sum", "memory-short")
RECORDINGS = ("rtx5090-2x", "rtxpro6000-8x", "h200-serving", "b200-8x")
DRAFT = {**DRAFTER, **DRAFT7, "architectures": ["DFlashDraftModel"]}
MODELS: dict[str, dict[str, Any]] = {"dense": DENSE7, "hybrid": HYBRID7, "large": {**LARGE, "model_type": "qwen3_next"}}
ARGS: tuple[dict[str, Any], ...] = (
    {"max-running-requests": 100_000},
    {"max-running-requests": 40_000},
    {"max-running-requests": 400, "mem-fraction-static": 0.97},
    {"mem-fraction-static": 0.3},
    {"mem-fraction-static": 0.99},
    {"max-total-tokens": 2_000_000},
    {"context-length": 2_000_000},
    {"chunked-prefill-size": -1, "cuda-graph-max-bs": 512, "max-running-requests": 512},
)


def asked(recording: dict[str, Any], model: str, mode: str, budget: Any, args: dict[str, Any]) -> tuple[Any, Any]:
    """(wanted, facts) of one instance on the first GPU of a recorded machine."""
    wanted, facts = copy.deepcopy(good())
    # Recorded is what the cards are; they are idle here, and one host links them all alike.
    facts["gpu"]["gpus"] = [{**gpu, "idle": True} for gpu in recording["gpu"]["gpus"]]
    facts["gpu"] |= {"cards": [], "on_bus": [], "p2p": [], "xids": []}
    target = {**TARGET, **MODELS[model]}
    draft = {
        **DRAFT,
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "num_target_layers": None,
    }
    draft |= {"target_layer_ids": None, "mask_token_id": None}
    facts["models"] = {"/srv/target": target, "/srv/drafter": draft}
    more = {"disable-radix-cache": True} if target["hybrid"] else {}
    one = {"name": "one", "gpus": [0], "port": 30000, "mode": mode, "budget": budget, "args": {**more, **args}}
    wanted["instances"] = [one]
    return wanted, facts


def verdict(wanted: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """What holds the host back or is short on memory: id and fix."""
    flags = declared.flags(wanted["engine"], wanted["instances"], wanted["defaults"])
    found = judge("ct200", {**wanted, "flags": flags}, facts)["findings"]
    return {one["id"]: one["fix"] for one in found if one["severity"] == "block" or one["id"] in MEMORY}


def applied(wanted: dict[str, Any], way: str) -> dict[str, Any]:
    """The inventory with a line of a fix written into its instance, as a person would."""
    changed = copy.deepcopy(wanted)
    one, keys = changed["instances"][0], yaml.safe_load(way)
    one["args"] |= keys.pop("args", {})
    one |= keys
    if "tp-size" in one["args"]:
        one["gpus"] = list(range(one["args"]["tp-size"]))
    return changed


@pytest.mark.parametrize("machine", RECORDINGS)
@pytest.mark.parametrize("model", MODELS)
def test_every_way_that_is_offered_leads_out(repo: Path, machine: str, model: str) -> None:
    recording = json.loads((repo / f"tests/unit/data/gpu_host/{machine}.json").read_text())
    tried = tight = 0
    for (mode, budget), args in product(
        (("ddtree", 15), ("ddtree", "auto"), ("ddtree", 63), ("dflash", 15), ("baseline", 1)), ARGS
    ):
        wanted, facts = asked(recording, model, mode, budget, args)
        before = verdict(wanted, facts)
        for rule in set(MEMORY) & set(before):
            ways = re.findall(r"`([^`]+)`", before[rule])
            assert ways or "smaller model" in before[rule]
            for way in ways:
                after = verdict(applied(wanted, way), facts)
                told = (mode, budget, args, way, after)
                # Where nothing makes it all fit, what at least starts is offered, and the warning says so.
                assert "memory-sum" not in after and set(after) - {"memory-short"} <= set(before), told
                assert rule == "memory-sum" or "memory-short" not in after, told
                tight += "memory-short" in after
                tried += 1
    assert tried > len(ARGS), "next to nothing was offered, so next to nothing was tried"
    assert tight <= tried / 8


def test_what_was_offered_in_vain_is_not_any_more(repo: Path) -> None:
    """2^31 elements are passed whatever the fraction is, and a tree below the drafter's block saves no slot."""
    recording = json.loads((repo / "tests/unit/data/gpu_host/rtxpro6000-8x.json").read_text())
    wanted, facts = asked(recording, "hybrid", "ddtree", 15, {"max-running-requests": 40_000})
    fix = verdict(wanted, facts)["memory-sum"]
    assert "max-running-requests" in fix
    assert "budget" not in fix and "`args: {mem-fraction-static" not in fix
