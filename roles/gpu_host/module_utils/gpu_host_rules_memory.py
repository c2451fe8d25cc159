# SPDX-License-Identifier: Apache-2.0
"""Rules about the memory of an instance, with the sum shown, and about memory that GPUs share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ansible.module_utils.gpu_host_memory import Plan, plan
from ansible.module_utils.gpu_host_memory_ways import Again, ways
from ansible.module_utils.gpu_host_rules import BLOCK, WARN, Case, Hit, Map, args_of, gpus_of, label, rule
from ansible.module_utils.gpu_host_rules_models import RESIZED_BY

SYMMETRIC = ("enable-symm-mem", "enable-torch-symm-mem")


class Planned(NamedTuple):
    """An instance whose memory can be added up. again: the plan of a changed one on so many times its GPUs."""

    at: int
    instance: Map
    plan: Plan
    again: Again
    models: tuple[Map | None, Map | None]
    cards: int  # times that the host could give it GPUs as large


def plans(case: Case) -> Iterator[Planned]:
    """Instances on GPUs whose memory can be added up."""
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

        def again(
            changed: Map, times: int, target: Map = target, draft: Map | None = draft, known: list[int] = known
        ) -> Plan | None:
            return plan(changed, target, draft, min(known), len(known) * times)

        if found := again(instance, 1):
            alike = [gpu for gpu in case.gpus if (gpu.get("memory_total_mib") or 0) >= min(known)]
            drafting = instance.get("mode") != "baseline"
            models = (target, draft if drafting else None)
            yield Planned(at, instance, found, again, models, len(alike) // len(known))


def _shown(found: Plan, why: str) -> str:
    return "\n        ".join([f"{why}; for each GPU:", *found.lines()])


def _fix(case: Case, one: Planned) -> str:
    """What would fit, as lines for the inventory."""
    told = ways(one.instance, one.plan, one.again, one.cards, one.models)
    if not told:
        return f"Name a smaller model as model_path for it in {case.where}: no size that it could be given fits."
    return f"Write one of these for it in {case.where}: {'; or '.join(told)}; or a smaller model."


@rule(
    "memory-sum",
    BLOCK,
    "What an engine counts before its start (weights, one state per tree slot and running request) exceeds what it may take.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/model_executor/model_runner_kv_cache_mixin.py",
)
def memory_sum(case: Case) -> Iterator[Hit]:
    """No instance whose sum is too large whatever the estimates are."""
    for one in plans(case):
        # More weights than memory is said by model-too-large.
        if (why := one.plan.impossible()) and one.plan.target + one.plan.draft <= one.plan.total:
            yield Hit(label(one.instance, one.at), _shown(one.plan, why), "a sum that fits", _fix(case, one))


@rule(
    "memory-short",
    WARN,
    "Graph capture or a long prefill runs out of memory when the static part leaves too little beside it. What is `about` is "
    "an estimate.",
    source="https://github.com/sgl-project/sglang/issues/35777",
)
def memory_short(case: Case) -> Iterator[Hit]:
    """The sum of every instance fits by estimate."""
    for one in plans(case):
        if not one.plan.impossible() and (why := one.plan.short()):
            yield Hit(label(one.instance, one.at), _shown(one.plan, why), "a sum that fits", _fix(case, one))


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
