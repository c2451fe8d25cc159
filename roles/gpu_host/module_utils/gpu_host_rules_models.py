# SPDX-License-Identifier: Apache-2.0
"""Rules about the folders of target and drafter."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_memory import plan
from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    GIB,
    MODES,
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

MIB = 1 << 20
TIGHT = 0.85
HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - refused, not used


@rule(
    "model-path-bad",
    BLOCK,
    "An engine serves a folder of the host; nothing is fetched by name at its start.",
    source="docs/operations.md",
    needs_host=False,
)
def model_path_bad(case: Case) -> Iterator[Hit]:
    """Absolute paths for the target, and for the drafter in every speculating mode."""
    for at, instance in enumerate(case.instances):
        mode = instance.get("mode")
        for key in ("model_path", "draft_model_path"):
            path = instance.get(key)
            if key == "draft_model_path" and (mode == "baseline" or mode not in MODES) and path is None:
                continue
            if not isinstance(path, str) or not path.startswith("/"):
                yield Hit(
                    label(instance, at),
                    f"{key} {shown(path)}",
                    "the absolute path of a folder on the host",
                    f"Set {key} for it in {case.where} or in gpu_units_defaults.",
                )


@rule(
    "path-hidden",
    BLOCK,
    "The unit sees no home folder and has its own /tmp (ProtectHome, PrivateTmp), so the engine would not find it.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html",
    needs_host=False,
)
def path_hidden(case: Case) -> Iterator[Hit]:
    """Models lie where a hardened unit can read them."""
    for at, instance in enumerate(case.instances):
        for key in ("model_path", "draft_model_path"):
            path = instance.get(key)
            if isinstance(path, str) and path.startswith(HIDDEN):
                yield Hit(
                    label(instance, at),
                    f"{key} {path}",
                    "a folder outside of home folders and /tmp, such as /srv/models",
                    f"Move it on the host and correct {key} in {case.where}.",
                )


@rule(
    "model-missing",
    BLOCK,
    "The engine would fail at its start; nothing is fetched by it.",
    source="docs/operations.md",
)
def model_missing(case: Case) -> Iterator[Hit]:
    """The target's folder is whole."""
    for at, instance in enumerate(case.instances):
        yield from _folder(case, at, instance, "model_path")


@rule(
    "drafter-missing",
    BLOCK,
    "Every mode but baseline drafts with this model.",
    source="docs/operations.md",
)
def drafter_missing(case: Case) -> Iterator[Hit]:
    """The drafter's folder is whole, in every mode that drafts."""
    for at, instance in enumerate(case.instances):
        if instance.get("mode") != "baseline":
            yield from _folder(case, at, instance, "draft_model_path")


def _folder(case: Case, at: int, instance: Map, key: str) -> Iterator[Hit]:
    path = instance.get(key)
    model = case.model(path)
    if model is None:
        return
    fix = f"Copy it there: `rsync -a FOLDER/ {case.host}:{path}/` from where it lies; or correct {key} in {case.where}."
    if not model["exists"]:
        yield Hit(label(instance, at), f"{key} {path}: no such folder", "a folder with config.json and weights", fix)
    elif model["error"]:
        yield Hit(label(instance, at), f"{key} {path}: {model['error']}", "a config.json that can be read", fix)
    elif model["missing"]:
        yield Hit(
            label(instance, at),
            f"{key} {path}: no {', '.join(model['missing'][:3])}",
            "a folder with config.json and weights",
            fix,
        )


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
            count = -(-need * len(gpus_of(case, instance)) // int(have * TIGHT))
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
    "drafter-kind",
    BLOCK,
    "DFLASH and DDTREE draft with a block drafter; another model cannot answer them.",
    source="https://github.com/sgl-project/sglang/pull/16818",
)
def drafter_kind(case: Case) -> Iterator[Hit]:
    """The drafter is a DFlashDraftModel."""
    for at, instance, draft, _ in _pairs(case):
        if "DFlashDraftModel" not in draft["architectures"]:
            found = ", ".join(draft["architectures"]) or "no architecture"
            yield Hit(
                label(instance, at),
                f"draft_model_path {instance['draft_model_path']} is {found}",
                "DFlashDraftModel",
                f"Set draft_model_path in {case.where} to a DFlash drafter of this target.",
            )


@rule(
    "drafter-foreign",
    BLOCK,
    "A drafter reads the target's hidden states and shares its vocabulary: it fits the target that it was trained for.",
    source="https://github.com/sgl-project/sglang/pull/16818",
)
def drafter_foreign(case: Case) -> Iterator[Hit]:
    """Vocabulary, width and layers of drafter and target agree, as far as both say them."""
    for at, instance, draft, target in _pairs(case):
        for words, mine, theirs in (
            ("vocabulary", draft["vocab_size"], target["vocab_size"]),
            ("hidden size", draft["hidden_size"], target["hidden_size"]),
            ("target layers", draft["num_target_layers"], target["num_layers"]),
        ):
            if mine is not None and theirs is not None and mine != theirs:
                yield Hit(
                    label(instance, at),
                    f"{words} {mine} in the drafter",
                    f"{theirs}, as the target has",
                    f"Set draft_model_path in {case.where} to the drafter of this target.",
                )


def _pairs(case: Case) -> Iterator[tuple[int, Map, Map, Map]]:
    """Instances that draft and whose two configurations could be read: (position, instance, drafter, target)."""
    for at, instance in enumerate(case.instances):
        draft, target = case.model(instance.get("draft_model_path")), case.model(instance.get("model_path"))
        if (
            instance.get("mode") != "baseline"
            and draft
            and target
            and "architectures" in draft
            and "architectures" in target
        ):
            yield at, instance, draft, target
