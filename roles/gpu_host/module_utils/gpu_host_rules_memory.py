# SPDX-License-Identifier: Apache-2.0
"""Rules about the memory of an instance, with the sum shown, and about memory that GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_memory import Plan, plan
from ansible.module_utils.gpu_host_rules import BLOCK, WARN, Case, Hit, Map, args_of, gpus_of, label, rule
from ansible.module_utils.gpu_host_rules_models import RESIZED_BY

SYMMETRIC = ("enable-symm-mem", "enable-torch-symm-mem")


def plans(case: Case) -> Iterator[tuple[int, Map, Plan]]:
    """Instances on GPUs whose memory can be added up: (position, instance, plan)."""
    for at, instance in enumerate(case.instances):
        target, draft = case.model(instance.get("model_path")), case.model(instance.get("draft_model_path"))
        sizes = [gpu.get("memory_total_mib") for gpu in gpus_of(case, instance)]
        known = [size for size in sizes if size]
        if (
            not target
            or not target.get("weights")
            or len(known) < max(1, len(sizes))
            or set(args_of(instance)) & set(RESIZED_BY)
        ):
            continue
        found = plan(instance, target, draft, min(known), len(known))
        if found:
            yield at, instance, found


def _shown(found: Plan, why: str) -> str:
    return "\n        ".join([f"{why}; for each GPU:", *found.lines()])


def _ways(case: Case, instance: Map, found: Plan) -> str:
    """What would fit, as lines for the inventory."""
    ways = []
    if (fraction := found.recommended()) is not None and fraction != found.fraction:
        ways.append(f"args: {{mem-fraction-static: {fraction:g}, cuda-graph-max-bs: {found.graph or found.requests}}}")
    if found.state and found.slots:
        if instance.get("mode") == "ddtree" and 0 < (budget := found.largest_budget()) < found.slots - 1:
            ways.append(f"budget: {budget}, the largest that fits {found.requests} running requests")
        if 0 < (requests := found.most_requests()) < found.requests:
            ways.append(f"args: {{max-running-requests: {requests}}}, the most that fit {found.slots} slots")
    if found.tokens is not None and found.tokens > found.fitting > 0:
        ways.append(f"args: {{context-length: {found.fitting}, max-total-tokens: {found.fitting}}}")
    ways.append("more GPUs with tp-size, or a smaller model")
    return f"Write one of these for it in {case.where}: {'; or '.join(ways)}."


@rule(
    "memory-sum",
    BLOCK,
    "What an engine counts before its start (weights, one state per tree slot and running request) exceeds what it may take.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/model_executor/model_runner_kv_cache_mixin.py",
)
def memory_sum(case: Case) -> Iterator[Hit]:
    """No instance whose sum is too large whatever the estimates are."""
    for at, instance, found in plans(case):
        # More weights than memory is said by model-too-large.
        if (why := found.impossible()) and found.target + found.draft <= found.total:
            yield Hit(label(instance, at), _shown(found, why), "a sum that fits", _ways(case, instance, found))


@rule(
    "memory-short",
    WARN,
    "Graph capture or a long prefill runs out of memory when the static part leaves too little beside it. What is `about` is "
    "an estimate.",
    source="https://github.com/sgl-project/sglang/issues/35777",
)
def memory_short(case: Case) -> Iterator[Hit]:
    """The sum of every instance fits by estimate."""
    for at, instance, found in plans(case):
        if not found.impossible() and (why := found.short()):
            yield Hit(label(instance, at), _shown(found, why), "a sum that fits", _ways(case, instance, found))


@rule(
    "symmetric-memory",
    BLOCK,
    "These cards have no symmetric memory: what is asked to use it fails at the first exchange.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/distributed/device_communicators/all_reduce_utils.py",
)
def symmetric_memory(case: Case) -> Iterator[Hit]:
    """Nobody asks cards of SM 12.x for it."""
    for at, instance in enumerate(case.instances):
        asked = [name for name in SYMMETRIC if args_of(instance).get(name)]
        if asked and case.profile == "sm120" and len(gpus_of(case, instance)) > 1:
            yield Hit(
                label(instance, at),
                f"{' and '.join(asked)} on GPUs of SM 12.x",
                "neither of them",
                f"Remove {' and '.join(asked)} from args in {case.where}.",
            )
