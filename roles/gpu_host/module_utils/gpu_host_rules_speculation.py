# SPDX-License-Identifier: Apache-2.0
"""Rules about drafts and trees: sizes that the patched engine can serve, and flags that it refuses beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_memory import BLOCK_SIZE
from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    TREE_MODES,
    WARN,
    Case,
    Hit,
    Map,
    args_of,
    gpus_of,
    label,
    rule,
    shown,
    whole,
)

# ddtree_kernels.py: slots of a tree that its kernels take, root included; vocabulary entries of one program of the top-k.
MAX_SLOTS = 64
CHUNK = 4096
# Triton, language/core.py: elements of a tensor.
MAX_ELEMENTS = 1 << 20
DEFAULT_BUDGET = 15
DEFAULT_TOPK = 8
LARGEST_PRESET = 31  # budget: auto
DRAFTING = ("dflash", *TREE_MODES)
BLOCKS = ("speculative-dflash-block-size", "speculative-num-draft-tokens")


def _nodes(instance: Map) -> int:
    """Nodes of the largest tree; 0 where budget is no number, which is told elsewhere."""
    budget = instance.get("budget")
    return LARGEST_PRESET if budget == "auto" else budget if whole(budget) and budget > 0 else 0


@rule(
    "budget-room",
    BLOCK,
    "A step takes budget + 1 KV entries for a request beside its text; with no room for them the engine aborts every request "
    "(Out of memory even after retracting).",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/managers/schedule_batch.py",
    needs_host=False,
)
def budget_room(case: Case) -> Iterator[Hit]:
    """A tree is smaller than the longest text that the instance serves."""
    for at, instance in enumerate(case.instances):
        name, limit = _room(case, instance)
        if limit and _nodes(instance) >= limit:
            yield Hit(
                label(instance, at),
                f"budget {instance['budget']}",
                f"fewer than {limit} nodes ({name})",
                f"Set budget: {DEFAULT_BUDGET} for it in {case.where} or in gpu_units_defaults; auto tries 7, 15, 22 and "
                f"{LARGEST_PRESET}."
                if limit > DEFAULT_BUDGET  # a limit below that is the mistake, not the tree
                else f"Raise {name}, or remove it under args in {case.where} and in gpu_units_defaults: a request's text lies "
                "in it too.",
            )


def _room(case: Case, instance: Map) -> tuple[str, int]:
    """(what says so, most KV entries of one request); 0 where trees are not verified or nobody knows."""
    args, model = args_of(instance), case.model(instance.get("model_path")) or {}
    limits = {
        "max-total-tokens": args.get("max-total-tokens"),
        "context-length": args.get("context-length"),
        "the model's longest text": (model.get("shape") or {}).get("positions"),
    }
    known = [(name, limit) for name, limit in limits.items() if whole(limit) and limit > 0]
    return known[0] if known and instance.get("mode") == "ddtree" else ("", 0)


@rule(
    "budget-wide",
    WARN,
    "Larger trees are built without the kernels for it and their steps run without CUDA graphs, which costs more than they give.",
    source="ddtree_patches/common/ddtree_kernels.py",
    needs_host=False,
)
def budget_wide(case: Case) -> Iterator[Hit]:
    """On a GPU, trees fit the kernels."""
    for at, instance in enumerate(case.instances):
        nodes, room = _nodes(instance), _room(case, instance)[1]
        on_gpu = instance.get("mode") in TREE_MODES and case.wanted.get("profile") != "cpu"
        if on_gpu and nodes >= MAX_SLOTS and not 0 < room <= nodes:
            yield Hit(
                label(instance, at),
                f"budget {instance['budget']}",
                f"at most {MAX_SLOTS - 1} nodes",
                f"Set budget: {MAX_SLOTS - 1} or less for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "topk-wide",
    WARN,
    "A tree uses at most as many candidates of a position as it has nodes; the others are worked out for nothing, in a kernel "
    "that grows with each.",
    source="ddtree_patches/common/ddtree_kernels.py",
    needs_host=False,
)
def topk_wide(case: Case) -> Iterator[Hit]:
    """topk is no larger than what the budget can use."""
    for at, instance in enumerate(case.instances):
        topk, useful = instance.get("topk"), max(DEFAULT_TOPK, _nodes(instance))
        if instance.get("mode") not in TREE_MODES or not _nodes(instance) or not whole(topk):
            continue
        if useful < topk <= _largest_topk(case, instance):
            yield Hit(
                label(instance, at),
                f"topk {topk} with budget {instance['budget']}",
                f"at most {useful}",
                f"Set topk: {DEFAULT_TOPK} for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "topk-kernel",
    BLOCK,
    f"The kernel that takes the candidates holds topk of every {CHUNK} entries of the vocabulary at once, and Triton refuses to "
    f"compile one of more than {MAX_ELEMENTS} elements.",
    source="ddtree_patches/common/ddtree_kernels.py",
)
def topk_kernel(case: Case) -> Iterator[Hit]:
    """On a GPU, topk fits the kernel."""
    for at, instance in enumerate(case.instances):
        topk, largest = instance.get("topk"), _largest_topk(case, instance)
        if instance.get("mode") in TREE_MODES and whole(topk) and topk > largest:
            yield Hit(
                label(instance, at),
                f"topk {topk}",
                f"at most {largest} with this model's vocabulary",
                f"Set topk: {DEFAULT_TOPK} for it in {case.where} or in gpu_units_defaults.",
            )


def _largest_topk(case: Case, instance: Map) -> float:
    """What the kernel takes; endless on a CPU, and where the vocabulary is not known."""
    size, count = (case.model(instance.get("model_path")) or {}).get("vocab_size"), len(gpus_of(case, instance))
    return MAX_ELEMENTS // max(1, math.ceil(size / count / CHUNK)) if count and whole(size) else math.inf


@rule(
    "block-size-bad",
    BLOCK,
    "The engine ends at such a block: its first token is the known one, so a tree needs one more, and a window holds it all.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/server_args.py",
    needs_host=False,
)
def block_size_bad(case: Case) -> Iterator[Hit]:
    """The drafter's block, where it is given: large enough, said once, no larger than its window."""
    for at, instance in enumerate(case.instances):
        args, mode = args_of(instance), instance.get("mode")
        given = {name: args[name] for name in BLOCKS if whole(args.get(name))}
        if mode not in DRAFTING:
            continue
        least, window = 2 if mode in TREE_MODES else 1, args.get("speculative-dflash-draft-window-size")
        told = ", ".join(f"{name} {value}" for name, value in given.items())
        if any(value < least for value in given.values()):
            yield _block(case, at, instance, told, f"{least} or more in mode {mode}")
        elif len(set(given.values())) > 1:
            yield _block(case, at, instance, told, "the same number, or one of them alone")
        draft = case.model(instance.get("draft_model_path")) or {}
        block = next(iter(given.values()), draft.get("block_size") or BLOCK_SIZE)
        if whole(window) and window < max(1, block):
            told = f"speculative-dflash-draft-window-size {window}"
            yield _block(case, at, instance, told, f"a window of at least {block} tokens, the drafter's block")


def _block(case: Case, at: int, instance: Map, observed: str, expected: str) -> Hit:
    trained = "the drafter's config.json has the block that it was trained for"
    fix = f"Remove it from args in {case.where} or in gpu_units_defaults: {trained}."
    return Hit(label(instance, at), observed, expected, fix)


def _refused(mode: Any, args: Map) -> Iterator[tuple[str, str]]:
    """(flag with its value, what the engine wants), as ddtree_args.py and server_args.py refuse them in a mode."""

    def given(name: str, *fine: Any) -> bool:
        return args.get(name) not in (None, False, *fine)

    def told(name: str) -> str:
        return f"{name}: {shown(args[name])}"

    if given("enable-dp-attention"):
        yield told("enable-dp-attention"), "none with drafts"
    for name in ("pp-size", "pipeline-parallel-size"):
        if given(name, 1):
            yield told(name), "1 with drafts"
    trees = [name for name in sorted(args) if name.startswith("speculative-ddtree-") and given(name)]
    if mode == "dflash":
        yield from ((told(name), "none in mode dflash, where no tree is built") for name in trees)
        return
    for name in ("enable-deterministic-inference", "enable-lora"):
        if given(name):
            yield told(name), "none with a tree"
    if given("disaggregation-mode", "null"):
        yield told("disaggregation-mode"), "none with a tree"
    for name in ("speculative-accept-threshold-single", "speculative-accept-threshold-acc"):
        if args.get(name) not in (None, 1, 1.0):
            yield told(name), "1.0 with a tree: drafts are verified exactly"
    linear, above = args.get("speculative-ddtree-linear"), args.get("speculative-ddtree-linear-above")
    kind = linear or ("auto" if above is None else "on")
    if mode == "ddtree-shadow" and kind != "auto":
        yield f"speculative-ddtree-linear {kind}", "none in mode ddtree-shadow, which verifies every batch linearly"
    elif kind == "on" and not (whole(above) and above >= 0):
        yield "speculative-ddtree-linear on", "speculative-ddtree-linear-above N beside it, N from 0 up"
    elif kind != "on" and above is not None:
        yield (
            f"speculative-ddtree-linear-above with speculative-ddtree-linear {kind}",
            "it with speculative-ddtree-linear on",
        )


@rule(
    "flags-refused",
    BLOCK,
    "The patched engine refuses the flag in this mode and ends at its start.",
    source="ddtree_patches/sglang-0.5.11/overlay/sglang/srt/speculative/ddtree_args.py",
    needs_host=False,
)
def flags_refused(case: Case) -> Iterator[Hit]:
    """No flag that drafts or trees do without."""
    for at, instance in enumerate(case.instances):
        if instance.get("mode") in DRAFTING:
            for observed, expected in _refused(instance["mode"], args_of(instance)):
                yield Hit(
                    label(instance, at),
                    f"{observed} in mode {instance['mode']}",
                    expected,
                    f"Correct or remove it under args in {case.where} or in gpu_units_defaults, or use mode: baseline for it.",
                )
