# SPDX-License-Identifier: Apache-2.0
"""Cases of the rules about an inventory's variables, flags and ports: as in judge_cases.py."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.gpu_host_gather_shape import describe_shape

from tests.unit.judge_kit import CPU, Change, both, drafter, first, good, host, inventory, on_gpu, target

LONGEST = describe_shape({"num_hidden_layers": 4, "max_position_embeddings": 40960})
UNREAD = {"gpu_units_instnaces": ["gpu_units_instances"]}
GRPC = {"SGLANG_ENABLE_GRPC": "1"}


def gives(**args: Any) -> Change:
    """Flags of the first instance, `_` for the dashes of their names."""
    return first(args=args)


def second(**keys: Any) -> Change:
    """Set keys of the second instance."""
    return lambda wanted, _: wanted["instances"][1].update(keys)


def defaults(**keys: Any) -> Change:
    """Set keys of the defaults."""
    return inventory(defaults={**good()[0]["defaults"], **keys})


INVENTORY: list[tuple[str, Change, list[str]]] = [
    ("engine-unknown", inventory(engine="sglang-0.5.1"), ["did you mean sglang-0.5.11?"]),
    ("defaults-malformed", inventory(defaults=["mode"]), ['a list: ["mode"]', "gpu_units_defaults: {mode: ddtree,"]),
    ("defaults-malformed", defaults(modle_path="/srv"), ["did you mean model_path?", "Write model_path instead"]),
    ("defaults-malformed", defaults(page_size=1), ["as args: {page-size: ..}", "Remove page_size"]),
    ("instance-key-unknown", first(budgett=1), ["did you mean budget?", "Write budget instead of budgett"]),
    ("instances-malformed", both(CPU, inventory(instances=[])), ["[{name: cpu0, gpus: [], port: 30000}]"]),
    ("instances-malformed", inventory(instances={"name": "gpu0"}), ['a map: {"name": "gpu0"}']),
    (
        "instances-malformed",
        inventory(instances=[], unread=UNREAD),
        ["gpu_units_instnaces is set", "Rename gpu_units_instnaces to gpu_units_instances"],
    ),
    ("mode-unknown", first(mode="dtree"), ["did you mean ddtree?"]),
    ("variable-unknown", inventory(unread={"fleet_rack": []}), ["fleet_rack", "`grep -rn fleet_rack .`"]),
    ("variable-unknown", inventory(unread={"gpu_unit_defaults": ["gpu_units_defaults"]}), ["mean gpu_units_defaults?"]),
    (
        "variable-unknown",
        inventory(unread={"smoke_token": ["smoke_tokens"]}, where="fleet/host_vars/ct200.yml"),
        ["Rename it to smoke_tokens in fleet/host_vars/ct200.yml", "`grep -rn smoke_token fleet/`"],
    ),
    ("path-relative", inventory(paths={"gpu_host_root": "opt/x"}), ["gpu_host_root", "'opt/x'", "absolute"]),
    ("path-relative", inventory(paths={"sglang_venv_adopt": ["/srv/a", "b"]}), ["sglang_venv_adopt", "'b'"]),
    (
        "root-elsewhere",
        inventory(paths={"sglang_venv_root": "/data/x"}),
        ["/data/x", "`mkdir -p /data/x /opt/sglang-fleet && mount --bind /data/x /opt/sglang-fleet`"],
    ),
    # ports
    (
        "port-inner",
        first(env={**GRPC, "SGLANG_GRPC_PORT": 30000}),
        ["30000 is port and SGLANG_GRPC_PORT of it", "Take SGLANG_GRPC_PORT out of env"],
    ),
    ("port-inner", both(gives(nccl_port=29500), second(args={"nccl-port": 29500})), ["nccl-port of instance gpu0"]),
    (
        "port-inner",
        both(first(mode="baseline", args={"enable-dp-attention": True}), second(port=30233)),
        ["30233", "messages of enable-dp-attention"],
    ),
    (
        "port-bad",
        first(env={"SGLANG_GRPC_PORT": 70000}),
        ["SGLANG_GRPC_PORT 70000", "Take SGLANG_GRPC_PORT out of env"],
    ),
    ("port-bad", first(port=65536, env={"SGLANG_GRPC_PORT": 40000}), ["65536", "65535"]),
    # sizes of trees
    ("budget-room", both(first(budget=100000), gives(max_total_tokens=8192)), ["100000", "8192 nodes (max-total"]),
    ("budget-room", both(first(budget=8192), gives(context_length=8192)), ["8192 nodes (context-length)"]),
    ("budget-room", both(first(budget=15), gives(max_total_tokens=12)), ["12 nodes", "Raise max-total-tokens"]),
    ("budget-room", both(defaults(budget=40960), target(shape=LONGEST), CPU), ["40960", "the model's longest text"]),
    ("budget-wide", first(budget=64), ["budget 64", "at most 63"]),
    ("topk-wide", first(topk=16), ["topk 16 with budget 15", "at most 15"]),
    ("topk-wide", first(topk=32, budget="auto"), ["topk 32 with budget auto", "at most 31"]),
    ("topk-kernel", both(first(topk=100000), target(vocab_size=151936), drafter(vocab_size=151936)), ["27594"]),
    ("block-size-bad", gives(speculative_dflash_block_size=1), ["block-size 1", "2 or more in mode ddtree"]),
    (
        "block-size-bad",
        gives(speculative_dflash_block_size=8, speculative_num_draft_tokens=4),
        ["block-size 8, speculative-num-draft-tokens 4", "the same number"],
    ),
    ("block-size-bad", gives(speculative_dflash_draft_window_size=8), ["window-size 8", "at least 16"]),
    # flags
    ("args-malformed", first(args=["--page-size=1", "--enable-metrics"]), ["{page-size: 1, enable-metrics: true}"]),
    ("args-malformed", first(args=["--api-key", "hush", "--tp-size", "1"]), ["a list", "tp-size: 1", "api-key: .."]),
    ("args-malformed", first(env="HF_TOKEN=hush"), ["(hidden)", "{HF_TOKEN: ..}"]),
    ("args-malformed", gives(chat_template={"a": 1}), ['{"a": 1}', "JSON in quotes"]),
    ("args-owned", gives(speculative_ddtree_budg=3), ["speculative-ddtree-budg under args", "the key budget"]),
    ("flag-unknown", gives(contxt_length=8192), ["contxt-length", "did you mean context-length?", "flags.yml"]),
    ("flag-unknown", gives(enable_metric=True), ["Write enable-metrics instead of enable-metric"]),
    ("flag-unknown", gives(zzz=1), ["Remove zzz"]),
    ("flag-unknown", defaults(args={"mem_fraction_statik": 0.8}), ["mem-fraction-static"]),
    ("flag-short", gives(mem_frac=0.8), ["mem-frac", "mem-fraction-static, written out"]),
    (
        "flag-value",
        gives(context_length="8192 tokens"),
        ["'8192 tokens'", "context-length: 8192 under args", "whole number, or one like 8k"],
    ),
    ("flag-value", gives(max_running_requests="many"), ["'many'", "a whole number"]),
    ("flag-value", gives(max_running_requests=True), ["true", "a whole number"]),
    ("flag-value", gives(max_running_requests=8.0), ["8.0", "Write max-running-requests: 8 under"]),
    ("flag-value", gives(max_running_requests=[1, 2]), ["[1, 2]", "one value, no list"]),
    ("flag-value", gives(mem_fraction_static="most"), ["'most'", "a number"]),
    (
        "flag-value",
        gives(enable_metrics="yes"),
        ["'yes'", "true or false, without quotes", "Write enable-metrics: true"],
    ),
    ("flag-value", gives(dtype="fp8"), ["'fp8'", "one of auto, bfloat16,", "Remove dtype"]),
    ("flag-value", gives(dtype="bfloat_16"), ["Write dtype: bfloat16 under args"]),
    ("flag-value", gives(log_requests_level=9), ["9", "one of 0, 1, 2, 3"]),
    ("flag-value", gives(speculative_ddtree_linear=False), ["false", 'linear: "off"', "'on' or 'off' in quotes"]),
    ("flag-value", gives(served_model_name="--name"), ["'--name'", "begins with -"]),
    ("flag-value", gives(limit_mm_data_per_request="{image: 1}"), ["JSON"]),
    ("flag-value", gives(lora_paths=["/srv/a"]), ["on a command line only", "Remove lora-paths"]),
    ("flags-refused", gives(enable_lora=True), ["enable-lora", "none with a tree"]),
    ("flags-refused", gives(enable_deterministic_inference=True), ["in mode ddtree"]),
    ("flags-refused", gives(enable_dp_attention=True), ["none with drafts"]),
    ("flags-refused", gives(disaggregation_mode="prefill"), ["'prefill'"]),
    ("flags-refused", gives(speculative_accept_threshold_acc=0.9), ["0.9", "1.0 with a tree"]),
    ("flags-refused", first(mode="dflash", args={"speculative-ddtree-linear": "off"}), ["no tree is built"]),
    ("flags-refused", gives(speculative_ddtree_linear="on"), ["speculative-ddtree-linear-above N beside it"]),
    (
        "flags-refused",
        gives(speculative_ddtree_linear="off", speculative_ddtree_linear_above=4),
        ["speculative-ddtree-linear-above with speculative-ddtree-linear off"],
    ),
    (
        "flags-refused",
        first(mode="ddtree-shadow", args={"speculative-ddtree-linear": "off"}),
        ["verifies every batch linearly"],
    ),
]
# What is no fault.
RIGHT: dict[str, Change] = {
    "flags in every type": gives(
        context_length="8k",
        max_total_tokens=100000,
        mem_fraction_static=0.8,
        enable_metrics=False,
        log_requests_level="1",
        cuda_graph_bs=[1, 2, 4],
        served_model_name="my model",
        speculative_ddtree_linear="off",
        max_running_requests="8",
        limit_mm_data_per_request='{"image": 1}',
        tokenizer_path=None,
        ep=1,
        moe_dp_size=1,
        stream_interval=[2],
    ),
    "an engine without a list of flags": both(
        inventory(engine="sglang-9", engines=["sglang-9"]), gives(zzz=1, context_length="x")
    ),
    "ports that only look like one another": both(first(port=30000), second(port=40000)),
    "gRPC, which this release opens no port for": both(first(env={**GRPC}), second(port=40000)),
    "another instance's port for gRPC": first(env={**GRPC, "SGLANG_GRPC_PORT": 30001}),
    "a high port with gRPC's named": first(port=65000, env={"SGLANG_GRPC_PORT": 40000}),
    "ports that the engine picks itself": both(
        first(mode="baseline", args={"enable-dp-attention": True, "dist-init-addr": "127.0.0.1:29000"}),
        second(port=30233),
    ),
    "folders from the root on": inventory(
        paths={
            "sglang_venv_root": "/opt/sglang-fleet/",
            "gpu_host_root": "~/x",
            "sglang_venv_wheelhouse": "",
            "sglang_venv_adopt": [],
        }
    ),
    "the largest tree of the kernels": first(budget=63, topk=63),
    "a large tree on a CPU": both(CPU, lambda wanted, _: wanted["instances"][0].update(budget=2000)),
    "a large budget that no tree is verified with": first(mode="ddtree-shadow", budget=60, args={"context-length": 50}),
    "a block and its window": gives(speculative_dflash_block_size=8, speculative_dflash_draft_window_size=8),
    "linear verification of large batches": gives(speculative_ddtree_linear_above=4),
    "flags of trees in a baseline": first(
        mode="baseline", args={"speculative-ddtree-linear": "off", "enable-lora": True}
    ),
}
NO_GPU_AT_ALL = both(on_gpu(gpus=[], nvidia_smi=None, on_bus=[]), host(nvcc=None), first(gpus=[]))
