# SPDX-License-Identifier: Apache-2.0
"""Rules about what the tensor-parallel ranks of an instance share: heads, widths, and GPUs of one size."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    SIZES,
    Case,
    Hit,
    Map,
    called,
    env_of,
    label,
    on,
    on_gpus,
    rule,
    spelled,
    whole,
)

# Models whose code was read for it (sglang 0.5.11, models/: llama.py, qwen2.py, qwen3.py, qwen3_moe.py, qwen3_next.py,
# qwen3_5.py, dflash.py), by `model_type`; all of them ask the same of heads.
SPLIT_BY_HEADS = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
LEAST_SHARE = 0.9  # model_runner.py: of a rank's free memory, what the rank with the least has to have


def undivided(model: Map | None, tp: int, attention: int | None = None) -> str:
    """Why a model cannot be split over so many ranks, in numbers; empty if it can, or nobody knows.

    attention: ranks that share one attention, where that is not all of them.
    """
    shape, ranks = (model or {}).get("shape") or {}, attention or tp
    if not model or model.get("model_type") not in SPLIT_BY_HEADS or shape.get("latent"):
        return ""
    heads, groups, width = shape.get("heads"), shape.get("kv_heads"), shape.get("intermediate")
    values = (shape.get("net") or {}).get("value_heads")
    if heads and heads % ranks:
        return f"{heads} attention heads over {ranks} ranks"
    if groups and max(groups, ranks) % min(groups, ranks):
        return f"{groups} heads of keys and values over {ranks} ranks"
    if values and values % ranks:
        return f"{values} linear-attention heads over {ranks} ranks"
    if width and width % tp and not shape.get("experts"):
        return f"an MLP of {width} units over {tp} ranks"
    return ""


def divides(model: Map | None, tp: int) -> bool:
    """Whether a model can be split over so many ranks, as far as anybody knows."""
    return not undivided(model, tp)


def ranks_of(case: Case, instance: Map) -> tuple[int, int, int] | None:
    """(tensor-parallel ranks, those that share one attention, ranks of one copy of the model); None where sizes are none."""
    args, gpus = spelled(case, instance), instance.get("gpus")
    given = [args.get(SIZES[size]) for size in ("tp-size", "pp-size", "dp-size")]
    context = args.get("attention-context-parallel-size") or 1
    if not isinstance(gpus, list) or not all(one is None or (whole(one) and one > 0) for one in (*given, context)):
        return None
    tp, pp, dp = (one or 1 for one in given)
    if given == [None] * 3:
        tp = max(1, len(gpus))  # as units are written
    shared = tp // dp if args.get("enable-dp-attention") else tp
    return tp, max(1, shared // context), tp * pp


def fitting(case: Case, instance: Map, tp: int) -> str:
    """Numbers of ranks below `tp` that the pair can be split over, for a fix."""
    models = _pair(case, instance)
    return ", ".join(str(one) for one in range(1, tp) if all(divides(model, one) for _, _, model in models))


def _pair(case: Case, instance: Map) -> list[tuple[str, str, Map]]:
    """(key, folder, facts) of the models that an instance loads."""
    keys = ("model_path",) if instance.get("mode") == "baseline" else ("model_path", "draft_model_path")
    found = [(key, str(instance.get(key)), case.model(instance.get(key))) for key in keys]
    return [(key, path, model) for key, path, model in found if model]


@rule(
    "tp-heads",
    BLOCK,
    "Ranks share the heads of a layer evenly; the engine's code of a model asserts it (assert total_num_heads % attn_tp_size "
    "== 0) and ends.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/models/qwen3.py",
)
def tp_heads(case: Case) -> Iterator[Hit]:
    """Heads and widths of target and drafter divide by the ranks."""
    for at, instance in enumerate(case.instances):
        ranks = ranks_of(case, instance)
        if not ranks or ranks[0] < 2:
            continue
        for key, path, model in _pair(case, instance):
            if told := undivided(model, *ranks[:2]):
                sizes = fitting(case, instance, ranks[0])
                yield Hit(
                    label(instance, at),
                    f"{told} ({key} {path})",
                    "numbers that divide",
                    f"Give it another number of gpus, and that as tp-size, in {case.where}: {sizes}.",
                )
                break


@rule(
    "tp-memory",
    BLOCK,
    "The engine compares the free memory of its ranks before it loads a model and ends if one has less than nine tenths of "
    "another's (The memory capacity is unbalanced).",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/model_executor/model_runner.py",
)
def tp_memory(case: Case) -> Iterator[Hit]:
    """GPUs that hold one copy of a model are of one size."""
    for at, instance in enumerate(case.instances):
        ranks, asked = ranks_of(case, instance), instance.get("gpus")
        checked = on(env_of(instance).get("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", 1)) is not False
        if not ranks or ranks[0] < 2 or not on_gpus(case) or not checked or not isinstance(asked, list):
            continue
        gpus = [gpu for one in asked if (gpu := case.gpu(one)) and gpu.get("memory_total_mib")]
        for begin in range(0, len(gpus), ranks[2]):
            mine = sorted(gpus[begin : begin + ranks[2]], key=lambda gpu: int(gpu["memory_total_mib"]))
            least, most = mine[0], mine[-1]
            if least["memory_total_mib"] < most["memory_total_mib"] * LEAST_SHARE:
                yield Hit(
                    label(instance, at),
                    " and ".join(
                        f"{called(gpu)} with {gpu['memory_total_mib'] / 1024:.0f} GiB" for gpu in (least, most)
                    ),
                    "GPUs of one size under one model",
                    f"Give it GPUs of one size in {case.where}, or, to use of each what the smallest has, "
                    "env: {SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK: 0}.",
                )
                break
