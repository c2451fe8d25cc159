# SPDX-License-Identifier: Apache-2.0
"""Cases of the rules about numbers that the engine's code refuses, and about names written wrongly: as in judge_cases.py."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.gpu_host_gather_shape import describe_shape

from tests.unit.judge_cases_inventory import defaults, gives
from tests.unit.judge_kit import CPU, GIB, TARGET, Change, both, drafter, first, inventory, on_first, pair, target

# 4 heads, 2 of keys and values, as the newcomer's model had.
HEADS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
NANO = describe_shape({**HEADS, "max_position_embeddings": 4096})
WIDER = describe_shape({**HEADS, "num_attention_heads": 16, "num_key_value_heads": 3})
LINEAR = WIDER | {"kv_heads": 4, "net": {"value_heads": 6}}
SCALED = describe_shape(
    {
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096},
    }
)
SMALL = {"name": "NVIDIA GeForce RTX 5090", "memory_total_mib": 32607}
UNEVEN = both(pair(), on_first(**SMALL))
BESIDE = [{"path": f"/srv/{name}", "drafter": False} for name in ("big130", "big60", "target")]
LONGER = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
UNCHECKED: dict[str, Any] = {"env": {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": 0}}


def ranks(count: int, **shape: Any) -> Change:
    """One instance on so many GPUs, and a target of this shape."""
    return both(pair(*range(count)), target(shape={**NANO, **shape}))


SIZES: list[tuple[str, Change, list[str]]] = [
    # ranks
    ("tp-heads", ranks(3), ["4 attention heads over 3 ranks", "model_path /srv/target", "as tp-size, in", ": 1, 2."]),
    ("tp-heads", ranks(8), ["4 attention heads over 8 ranks"]),
    ("tp-heads", ranks(4, **WIDER), ["3 heads of keys and values over 4 ranks"]),
    ("tp-heads", ranks(4, **LINEAR), ["6 linear-attention heads over 4 ranks"]),
    ("tp-heads", ranks(2, intermediate=255), ["an MLP of 255 units over 2 ranks"]),
    ("tp-heads", both(pair(0, 1, 2), drafter(shape=NANO)), ["draft_model_path /srv/drafter"]),
    (
        "tp-memory",
        UNEVEN,
        ["GPU 0 (NVIDIA GeForce RTX 5090) with 32 GiB and GPU 1", "with 96 GiB", "INBALANCE_CHECK: 0}"],
    ),
    ("parallel-size", gives(tensor_parallel_size=2), ["tp-size 2 on 1 GPUs"]),
    ("parallel-size", gives(ep=4), ["ep-size 4 of tp-size 1", "ep_size * moe_dp_size"]),
    ("parallel-size", pair(args={"tp-size": 2, "ep": 2, "moe-dp-size": 2}), ["ep-size 2 x moe-dp-size 2 of tp-size 2"]),
    ("parallel-size", gives(ep_size=0), ["ep-size 0"]),
    (
        "model-too-large",
        target(weights=200 * GIB, shape=NANO | {"kv_heads": 4}),
        ["Give it 4 or more such GPUs", "tp-size: 4"],  # 3 would hold it, and 4 heads do not divide by 3
    ),
    # numbers
    (
        "flag-range",
        gives(mem_fraction_static=85),
        ["mem-fraction-static: 85", "Write mem-fraction-static: 0.85 under args"],
    ),
    ("flag-range", gives(mem_fraction_static=1.0), ["mem-fraction-static: 1", "between 0 and 1", "Remove mem-frac"]),
    ("flag-range", gives(mem_fraction_static=0), ["Not enough memory", "Remove mem-fraction-static"]),
    ("flag-range", both(CPU, defaults(args={"mem-fraction-static": -1})), ["mem-fraction-static: -1"]),
    (
        "flag-range",
        gives(max_running_requests=0),
        ["max-running-requests: 0", "max_running_request is zero", "1 or more"],
    ),
    ("flag-range", gives(max_running_requests=-1), ["max-running-requests: -1"]),
    ("flag-range", first(budget=1, args={"context-length": 6}), ["Memory pool size is too small", "7 or more"]),
    (
        "fraction-whole",
        both(CPU, defaults(args={"mem-fraction-static": 85})),
        ["85", "Write mem-fraction-static: 0.85"],
    ),
    ("fraction-whole", gives(mem_fraction_static=1.5, max_total_tokens=10000), ["1.5"]),
    (
        "context-long",
        both(gives(context_length=200000), target(shape=NANO)),
        ["context-length 200000", "at most 4096, the target's own", "Write context-length: 4096", "CONTEXT_LEN: 1"],
    ),
    ("context-long", both(gives(context_length="17k"), target(shape=SCALED)), ["context-length 17000", "16384"]),
    (
        "context-long",
        both(target(shape={**NANO, "context": [8192, 8192]}), drafter(shape=NANO)),
        ["a context of 8192 tokens and a drafter of 4096", "context-length: 4096"],
    ),
    # names
    ("flag-twice", gives(**{"mem-fraction-static": 0.8, "mem_fraction_static": 0.9}), ["mem-fraction-static once"]),
    ("flag-twice", pair(args={"tp-size": 2, "tensor_parallel_size": 2}), ["tp-size and tensor_parallel_size"]),
    ("flag-twice", defaults(args={"page-size": 1, "--page-size": 1}), ["gpu_units_defaults", "page-size once"]),
    (
        "env-unknown",
        first(env={"SGLANG_ENABLE_JIT_DEPGEMM": "0"}),
        ["did you mean SGLANG_ENABLE_JIT_DEEPGEMM?", "Write SGLANG_ENABLE_JIT_DEEPGEMM instead", "envs.yml"],
    ),
    ("env-unknown", first(env={"SGL_LOG_MS": "1"}), ["Write SGLANG_LOG_MS instead of SGL_LOG_MS"]),
    ("env-unknown", first(env={"SGLANG_ZZZ": "1"}), ["Remove SGLANG_ZZZ under env"]),
    (
        "backend-refused",
        first(env={"SGL_ENABLE_JIT_DEEPGEMM": "1"}),
        ["env: SGL_ENABLE_JIT_DEEPGEMM: 1", "Remove SGL_ENABLE_JIT_DEEPGEMM from env"],
    ),
    ("mode-unknown", first(mode="shadow"), ["did you mean ddtree-shadow?", "Set mode: ddtree-shadow, or"]),
    (
        "instance-key-unknown",
        first(model="/srv/target"),
        ["did you mean model_path?", "Write model_path instead of model"],
    ),
    ("instance-key-unknown", first(**{"spec-algorithm": "x"}), ["args: {spec-algorithm: ..}"]),
    ("instance-key-unknown", first(**{"speculative-algorithm": "x"}), ["Write mode instead"]),
    ("instance-key-unknown", first(api_key="hush"), ["file on this machine, and its path as api_key_file"]),
    ("instance-key-unknown", first(**{"port:30003": None}), ["'port:30003'", "`port: 30003`"]),
    ("instance-key-unknown", first(**{"api_key:hush": None}), ["`api_key: ..`"]),
    (
        "flag-unknown",
        gives(enable_custom_all_reduce=True),
        ["Remove enable-custom-all-reduce, which is so unless disable-custom-all-reduce is given,"],
    ),
    (
        "flag-value",
        gives(quantization="fp4"),
        ["with that of modelopt_fp4, mxfp4, petit_nvfp4 which is meant, under args"],
    ),
    ("flag-value", gives(dtype="fp8"), ["Remove dtype, or give it"]),
    (
        "model-missing",
        both(
            inventory(defaults={"mode": "baseline", "model_path": "/srv/tagret"}),
            lambda _, facts: facts["models"].update(
                {"/srv/tagret": {**TARGET, "exists": False, "instead": {"file": False, "link": None, "models": BESIDE}}}
            ),
        ),
        ["Set model_path: /srv/target in host_vars/ct200.yml"],
    ),
    ("model-path-bad", first(draft_model_path=None), ["without a drafter, mode: baseline."]),
]
# What is no fault.
SIZES_RIGHT: dict[str, Change] = {
    "chunked prefill off, as the engine writes it": gives(chunked_prefill_size=-1),
    "whole prompts on a model whose memory is added up": both(
        target(shape={**NANO, "hidden": 64, "kv_heads": 4, "vocab": 1024}), gives(chunked_prefill_size=-5)
    ),
    "ranks that repeat heads": both(pair(*range(4)), target(shape=NANO)),
    "ranks of a model whose code nobody read": both(ranks(3), target(model_type="other")),
    "experts of another number than heads": ranks(2, experts=8, intermediate=255),
    "unlike GPUs of instances by themselves": on_first(**SMALL),
    "unlike GPUs and a check that is off": both(pair(**UNCHECKED), on_first(**SMALL)),
    "groups of experts": pair(*range(4), args={"tp-size": 4, "ep-size": 2, "moe-dp-size": 2}),
    "an all-to-all that makes its own groups": gives(ep_size=4, moe_a2a_backend="deepep"),
    "a context that the model has": both(gives(context_length=16384), target(shape=SCALED)),
    "a longer context that is asked for": both(first(env=LONGER, args={"context-length": 8192}), target(shape=NANO)),
    "a drafter that is served no longer than it is": both(
        defaults(args={"context-length": 4096}), target(shape={**NANO, "context": [8192, 8192]}), drafter(shape=NANO)
    ),
    "a baseline beside a short drafter": both(
        first(mode="baseline"), inventory(instances=[{"name": "b", "gpus": [0], "port": 30000, "mode": "baseline"}]),
        target(shape={**NANO, "context": [8192, 8192]}), drafter(shape=NANO),
    ),
    "a flag of the defaults that an instance overrides": both(
        defaults(args={"mem_fraction_static": 0.8}), gives(**{"mem-fraction-static": 0.7})
    ),
    "variables that the engine knows, and others": first(
        env={"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "SGL_USE_DEEPGEMM_BMM": "0", "SGLANG_FLEET_X": "1", "NCCL_DEBUG": "INFO"}
    ),
}  # fmt: skip
