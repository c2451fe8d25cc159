# SPDX-License-Identifier: Apache-2.0
"""Rules about targets with recurrent layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, TREE_MODES, WARN, Case, Hit, Map, args_of, label, rule

HYBRID_FLAG = "speculative-ddtree-allow-hybrid-unsafe"
# Gated delta nets: hybrid targets whose states the engine forks at every node of a tree.
FORKING_MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@rule(
    "hybrid-tree",
    BLOCK,
    "A hybrid model keeps a recurrent state per sequence. The engine can fork that of gated delta nets at every node of a "
    "tree; with other kinds branches would leak into each other and change the output.",
    source="https://github.com/sgl-project/sglang/pull/11133",
)
def hybrid_tree(case: Case) -> Iterator[Hit]:
    """No hybrid target in a tree mode whose states cannot fork, without the unsafe flag."""
    for at, instance, target in _hybrids(case, ("ddtree",)):
        if target["model_type"] not in FORKING_MODEL_TYPES and not args_of(instance).get(HYBRID_FLAG):
            yield Hit(
                label(instance, at),
                f"mode {instance['mode']} with the hybrid target {instance['model_path']} ({target['model_type']})",
                "a dense target, or one with gated delta nets (Qwen3-Next, Qwen3.5), in a tree mode",
                f"Set mode: dflash for it in {case.where}; for research only: args: {{{HYBRID_FLAG}: true}}.",
            )


@rule(
    "hybrid-radix",
    BLOCK,
    "With speculation, the radix cache of a hybrid model needs a buffer for the state at the end of a shared prefix; the engine "
    "does not start without it.",
    source="https://github.com/sgl-project/sglang/issues/22908",
)
def hybrid_radix(case: Case) -> Iterator[Hit]:
    """A drafting mode on gated delta nets says what becomes of the radix cache."""
    for at, instance, target in _hybrids(case, ("dflash", *TREE_MODES)):
        args = args_of(instance)
        buffered = args.get("mamba-scheduler-strategy") == "extra_buffer"
        if target["model_type"] in FORKING_MODEL_TYPES and not buffered and not args.get("disable-radix-cache"):
            yield Hit(
                label(instance, at),
                f"mode {instance['mode']} with the hybrid target {instance['model_path']} and the radix cache as it is",
                "disable-radix-cache, or mamba-scheduler-strategy extra_buffer (GPU only)",
                f"Add to it in {case.where}: args: {{disable-radix-cache: true}}, "
                "or on a GPU args: {mamba-scheduler-strategy: extra_buffer}.",
            )


@rule(
    "hybrid-unsafe",
    WARN,
    "With the unsafe flag the output may differ from baseline: for research, not for service.",
    source="docs/architecture.md",
)
def hybrid_unsafe(case: Case) -> Iterator[Hit]:
    """The unsafe flag is in use."""
    for at, instance, target in _hybrids(case, TREE_MODES):
        if args_of(instance).get(HYBRID_FLAG):
            yield Hit(
                label(instance, at),
                f"{HYBRID_FLAG} on {target['model_type']}",
                "a tree mode without that flag",
                f"Remove the flag in {case.where}, or set mode: dflash, before it serves people.",
            )


def _hybrids(case: Case, modes: Collection[str]) -> Iterator[tuple[int, Map, Map]]:
    for at, instance in enumerate(case.instances):
        target = case.model(instance.get("model_path"))
        if instance.get("mode") in modes and target and target.get("hybrid"):
            yield at, instance, target
