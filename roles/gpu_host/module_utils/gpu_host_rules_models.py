# SPDX-License-Identifier: Apache-2.0
"""Rules about what target and drafter are: their size, and whether they belong together."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_memory import plan
from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    GIB,
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
from ansible.module_utils.gpu_host_rules_files import DRAFTER, copy, uses
from ansible.module_utils.gpu_host_rules_ranks import divides

MIB = 1 << 20
TIGHT = 0.85
MIN_BLOCK = 2  # its first place is the token that is known already


# Flags after which the weights in memory are no longer as large as the files.
RESIZED_BY = ("quantization", "torchao-config", "cpu-offload-gb", "load-format", "dtype", "json-model-override-args")


def weights(case: Case, instance: Map) -> int | None:
    """Bytes of the weights as an instance holds them, its drafter's included; None where files do not tell."""
    paths = [instance.get("model_path")] + (
        [instance.get("draft_model_path")] if instance.get("mode") != "baseline" else []
    )
    models = [case.model(path) for path in paths]
    if set(args_of(instance)) & set(RESIZED_BY) or not all(model and model.get("weights") for model in models):
        return None
    # The engine loads float32 files as 16 bits unless it is told otherwise.
    return sum(int(model["weights"]) // (2 if "32" in str(model.get("dtype")) else 1) for model in models if model)


def _sizes(case: Case) -> Iterator[tuple[int, Map, int, int]]:
    """Instances on GPUs: (position, instance, bytes of weights, bytes of GPU memory for one copy of them)."""
    for at, instance in enumerate(case.instances):
        gpus, need = gpus_of(case, instance), weights(case, instance)
        sizes = [gpu.get("memory_total_mib") for gpu in gpus]
        args = args_of(instance)
        copies = next((args[name] for name in ("dp-size", "data-parallel-size") if name in args), 1)
        if need and sizes and all(sizes) and whole(copies) and copies > 0:
            shared = 1 if args.get("enable-dp-attention") else copies
            yield at, instance, need, sum(size for size in sizes if size) * MIB // shared


@rule(
    "model-too-large",
    BLOCK,
    "Weights lie in GPU memory as a whole; what is left of it holds the KV cache.",
    source="https://docs.sglang.ai/advanced_features/hyperparameter_tuning.html",
)
def model_too_large(case: Case) -> Iterator[Hit]:
    """Target and drafter fit into the GPUs of their instance."""
    for at, instance, need, have in _sizes(case):
        if need > have:
            least = -(-need * len(gpus_of(case, instance)) // int(have * TIGHT))
            models = [case.model(instance.get(key)) for key in ("model_path", "draft_model_path")]
            fits = (n for n in range(least, 8 * least) if all(divides(model, n) for model in models))
            count = next(fits, least)
            yield Hit(
                label(instance, at),
                f"{need / GIB:.1f} GiB of weights (target and drafter) for {have / GIB:.1f} GiB of GPU memory",
                "weights that fit, and room beside them",
                f"Give it {count} or more such GPUs (gpus, and args: {{tp-size: {count}}}) or a smaller model in {case.where}.",
            )


@rule(
    "model-tight",
    WARN,
    "What the weights leave has to hold the KV cache, the states of the tree and CUDA graphs; too little ends the start.",
    source="https://docs.sglang.ai/advanced_features/hyperparameter_tuning.html",
)
def model_tight(case: Case) -> Iterator[Hit]:
    """A part of the GPUs' memory is left beside the weights."""
    for at, instance, need, have in _sizes(case):
        if have * TIGHT < need <= have and not _planned(case, instance):
            yield Hit(
                label(instance, at),
                f"{need / GIB:.1f} GiB of weights leave {(have - need) / GIB:.1f} of {have / GIB:.1f} GiB of GPU memory",
                f"{(1 - TIGHT) * 100:.0f} % left",
                f"If its start runs out of memory: more GPUs, args: {{context-length: 8192}} or a smaller model in {case.where}.",
            )


def _planned(case: Case, instance: Map) -> bool:
    """Whether rules about memory add up all of it, and say more."""
    target, draft = case.model(instance.get("model_path")), case.model(instance.get("draft_model_path"))
    return bool(target) and plan(instance, target or {}, draft, 1 << 20, len(gpus_of(case, instance))) is not None


@rule(
    "ram-low",
    WARN,
    "Weights pass through the host's memory as they are loaded, and on the cpu profile they stay there.",
    source="https://huggingface.co/docs/safetensors/index",
)
def ram_low(case: Case) -> Iterator[Hit]:
    """The host's memory holds the weights of the largest instance."""
    limits = case.facts.get("limits") or {}
    have = (limits.get("memory_total") or 0) + (limits.get("swap_total") or 0)
    for at, instance in enumerate(case.instances):
        need = weights(case, instance)
        if have and need and need > have:
            yield Hit(
                label(instance, at),
                f"{need / GIB:.1f} GiB of weights, {have / GIB:.1f} GiB of memory and swap",
                "memory for all of the weights",
                "Add memory, or swap for the time of loading: `fallocate -l 64G /swapfile && chmod 600 /swapfile && mkswap "
                "/swapfile && swapon /swapfile`; loading takes longer then.",
            )


@rule(
    "target-kind",
    BLOCK,
    "A DFlash drafter has no embedding and no head of its own: it can serve nobody.",
    source="https://github.com/sgl-project/sglang/pull/16818",
)
def target_kind(case: Case) -> Iterator[Hit]:
    """The target is no drafter."""
    for use in uses(case, "model_path"):
        if DRAFTER in use.model.get("architectures", []):
            other = use.instances[0][1].get("draft_model_path")
            kinds = (case.model(other) or {}).get("architectures", [DRAFTER])
            fix = f"Set model_path in {case.where} to the target"
            if DRAFTER not in kinds:
                fix = f"Exchange the two in {case.where}: model_path: {other}"
            yield Hit(
                use.thing,
                f"model_path {use.path} is a {DRAFTER}",
                "the model that it drafts for",
                f"{fix}, draft_model_path: {use.path}.",
            )


@rule(
    "drafter-kind",
    BLOCK,
    "DFLASH and DDTREE draft with a block drafter; another model cannot answer them.",
    source="https://github.com/sgl-project/sglang/pull/16818",
)
def drafter_kind(case: Case) -> Iterator[Hit]:
    """The drafter is a DFlashDraftModel. Where the target is one, that is told."""
    for thing, instance, draft, target in _pairs(case):
        if DRAFTER not in draft["architectures"] and DRAFTER not in target["architectures"]:
            found = ", ".join(draft["architectures"]) or "no architecture"
            same = " and the target itself" if instance["draft_model_path"] == instance["model_path"] else ""
            yield Hit(
                thing,
                f"draft_model_path {instance['draft_model_path']} is {found}{same}",
                DRAFTER,
                f"Set draft_model_path in {case.where} to a DFlash drafter of this target; without one, mode: baseline.",
            )


@rule(
    "drafter-foreign",
    BLOCK,
    "A drafter reads the target's hidden states and shares its vocabulary: it fits the target that it was trained for.",
    source="https://github.com/sgl-project/sglang/pull/16818",
)
def drafter_foreign(case: Case) -> Iterator[Hit]:
    """Vocabulary, width, layers and mask token of drafter and target agree, as far as both say them."""
    for thing, _, draft, target in _pairs(case):
        if DRAFTER not in draft["architectures"]:
            continue
        vocabulary, layers = target["vocab_size"], target["num_layers"]
        ids = draft.get("target_layer_ids")
        ids, mask = ids if isinstance(ids, list) else [], draft.get("mask_token_id")
        told = [
            (f"{words} {mine} in the drafter", f"{theirs}, as the target has")
            for words, mine, theirs in (
                ("vocabulary", draft["vocab_size"], vocabulary),
                ("hidden size", draft["hidden_size"], target["hidden_size"]),
                ("target layers", draft["num_target_layers"], layers),
            )
            if mine is not None and theirs is not None and mine != theirs
        ]
        if not told and whole(layers) and any(whole(one) and not 0 <= one < layers for one in ids):
            told = [(f"target_layer_ids {ids} in the drafter", f"layers 0 to {layers - 1}, as the target has")]
        if not told and whole(vocabulary) and whole(mask) and mask >= vocabulary:
            told = [(f"mask token {mask} in the drafter", f"one of the target's {vocabulary} tokens")]
        for observed, expected in told:
            fix = f"Set draft_model_path in {case.where} to the drafter of this target; without one, mode: baseline."
            yield Hit(thing, observed, expected, fix)


@rule(
    "drafter-malformed",
    BLOCK,
    "The engine reads these keys of the drafter's config.json and ends at its start over a wrong one.",
    source="https://github.com/sgl-project/sglang/pull/16818",
)
def drafter_malformed(case: Case) -> Iterator[Hit]:
    """Block size, layers and mask token of a drafter's config are what the engine takes, where they are given."""
    for use in uses(case, "draft_model_path"):
        if DRAFTER not in use.model.get("architectures", []):
            continue
        block, ids, mask = (use.model.get(key) for key in ("block_size", "target_layer_ids", "mask_token_id"))
        told = []
        if block is not None and not (whole(block) and block >= MIN_BLOCK):
            told.append((f"block_size {shown(block)}", f"a whole number of {MIN_BLOCK} or more"))
        if ids is not None and not (isinstance(ids, list) and ids and all(whole(one) for one in ids)):
            told.append((f"target_layer_ids {shown(ids)}", "a list of layers of the target"))
        if mask is not None and not (whole(mask) and mask >= 0):
            told.append((f"mask_token_id {shown(mask)}", "the number of a token"))
        for observed, expected in told:
            yield Hit(
                use.thing,
                f"{observed} in {use.path}/config.json",
                expected,
                f"Copy the drafter's own file again: `{copy(case, use.path, ['config.json'])}`, with FOLDER where it lies.",
            )


def _pairs(case: Case) -> Iterator[tuple[str, Map, Map, Map]]:
    """Every drafter and target whose configurations could be read, once: (instances, the first of them, drafter, target)."""
    told = set()
    for use in uses(case, "draft_model_path"):
        for _, instance in use.instances:
            target, pair = case.model(instance.get("model_path")), (use.path, instance.get("model_path"))
            if target and "architectures" in target and "architectures" in use.model and pair not in told:
                told.add(pair)
                mine = [one for one in use.instances if one[1].get("model_path") == pair[1]]
                yield use._replace(instances=mine).thing, instance, use.model, target
