# SPDX-License-Identifier: Apache-2.0
"""Memory of an instance, added up: against what was measured, against the engine's own plan of states, and against arithmetic."""

from __future__ import annotations

import ast
import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_host_memory as m
from ansible.module_utils.gpu_host_gather_models import describe_config
from ansible.module_utils.gpu_host_memory_engine import engine_defaults

GIB = 1 << 30
H200, RTX5090 = 143771, 32607


def shaped(weights: float, **config: Any) -> dict[str, Any]:
    """Facts of a model folder from a config.json and the bytes of its weights."""
    return {"weights": int(weights), **describe_config({"model_type": "qwen3", "dtype": "bfloat16", **config})}


# The inflated pairs of docs/benchmarks.md: inflate_pair.py --hidden 6144 --layers 24 --intermediate 8192 --vocab 65536.
WIDE = {
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "num_attention_heads": 96,
    "num_key_value_heads": 24,
    "head_dim": 64,
    "vocab_size": 65536,
}
DENSE7 = shaped(6.69e9 * 2, num_hidden_layers=24, **WIDE)
DRAFT7 = shaped(0.89e9 * 2, num_hidden_layers=3, dflash_config={"block_size": 16}, **WIDE)
NET = {
    "linear_num_key_heads": 48,
    "linear_num_value_heads": 96,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
HYBRID7 = shaped(6.60e9 * 2, model_type="qwen3_next", num_hidden_layers=24, **{**WIDE, **NET}) | {
    "model_type": "qwen3_next"
}
# Qwen3.6-27B in FP8 and a drafter of a part of its size: what the field put on one RTX 5090.
LARGE = shaped(
    27e9, num_hidden_layers=64, **{**WIDE, **NET, "hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320}
)


def instance(mode: str = "ddtree", budget: Any = 15, **args: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "mode": mode,
        "budget": budget,
        "args": {name.replace("_", "-"): v for name, v in args.items()},
    }


def planned(one: dict[str, Any], target: Any = DENSE7, draft: Any = DRAFT7, mib: int = H200, count: int = 1) -> m.Plan:
    found = m.plan(one, target, draft, mib, count)
    assert found
    return found


BENCH = {"max_running_requests": 16, "cuda_graph_max_bs": 16, "max_total_tokens": 10176, "mem_fraction_static": 0.95}


def test_the_sum_is_near_what_a_server_was_seen_to_take() -> None:
    """docs/bench.md: 18 to 20 GiB a server with drafter, KV of 10176 tokens, graphs and about 1 GiB, on an H200."""
    for mode in ("dflash", "ddtree"):
        found = planned(instance(mode, **BENCH, disable_piecewise_cuda_graph=True))
        assert 17.5 * GIB < found.sum < 21 * GIB, (mode, found.lines())
    assert found.target == int(6.69e9 * 2)
    assert found.draft == int(0.89e9 * 2)
    assert found.entry == 24 * 2 * 64 * 2 * (24 + 3)  # KV heads x (key + value) x bytes x layers of both


def test_a_state_of_the_hybrid_is_what_it_was_seen_to_be() -> None:
    state, elements = m.state_bytes(HYBRID7["shape"], 1, {}) or (0, 0)
    recurrent = 18 * 96 * 64 * 64 * 4
    window = 18 * (96 * 64 + 2 * 48 * 64) * 3 * 2
    assert (state, elements) == (recurrent + window, 96 * 64 * 64)
    assert recurrent == pytest.approx(28e6, rel=0.02)
    halves = m.state_bytes(HYBRID7["shape"], 2, {"mamba-ssm-dtype": "bfloat16"})
    assert halves == (recurrent // 4 + window // 2, 48 * 64 * 64)
    assert m.state_bytes(HYBRID7["shape"], 5, {}) is None  # heads that do not divide


def test_only_layers_with_keys_and_values_fill_the_cache() -> None:
    assert HYBRID7["shape"]["linear_layers"] == 18
    assert planned(instance(disable_radix_cache=True), HYBRID7).entry == 24 * 128 * 2 * (6 + 3)
    listed = describe_config({"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]})
    assert listed["shape"]["linear_layers"] == 3


@pytest.mark.parametrize(
    ("mode", "budget", "args", "slots"),
    [
        ("baseline", 15, {}, 0),
        ("dflash", 15, {}, 16),
        ("ddtree-shadow", 31, {}, 16),
        ("ddtree", 7, {}, 16),  # the chain is verified too
        ("ddtree", 7, {"speculative_ddtree_linear": "off"}, 8),
        ("ddtree", 22, {}, 23),
        ("ddtree", "auto", {}, 32),
        ("dflash", 15, {"speculative_dflash_block_size": 8}, 8),
    ],
)
def test_slots_of_a_step(mode: str, budget: Any, args: dict[str, Any], slots: int) -> None:
    found = planned(instance(mode, budget, disable_radix_cache=True, **args), HYBRID7)
    assert found.slots == slots
    assert found.tree_states == found.state * (found.requests + 1) * slots


@pytest.fixture(scope="module")
def engines_plan(repo: Path) -> Any:
    """StatePlan of the series, cut out of its module, which needs torch."""
    path = repo / "ddtree_patches/sglang-0.5.11/overlay/sglang/srt/speculative/ddtree_hybrid.py"
    module = ast.parse(path.read_text())
    kept = [
        node
        for node in module.body
        if (isinstance(node, ast.ClassDef) and node.name == "StatePlan")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_MIB", "_GIB", "_INDEX_LIMIT"))
    ]
    space: dict[str, Any] = {"dataclass": dataclasses.dataclass, "__name__": __name__}
    exec(compile(ast.Module(kept, []), str(path), "exec"), space)
    return space["StatePlan"]


def test_states_are_planned_as_the_engine_plans_them(engines_plan: Any) -> None:
    seen = set()
    for requests, budget, gib in product((1, 8, 48, 200), (1, 15, 31, 63), (24, 48, 141)):
        args = {"max_running_requests": requests, "disable_radix_cache": True, "speculative_ddtree_linear": "off"}
        mine = planned(instance(budget=budget, **args), HYBRID7, mib=gib * 1024)
        theirs = engines_plan(
            state=mine.state,
            kv=mine.entry,
            requests=requests,
            request_states=requests,
            elements=mine.elements,
            free=mine.static - mine.target,
        )
        assert mine.tree_states + mine.entry * requests * (budget + 1) == theirs.trees(budget)
        assert mine.states - mine.tree_states == theirs.others()
        assert mine.largest_budget() == theirs.largest_budget()
        assert mine.most_requests() == theirs.most_requests(budget)
        if not theirs.fits(budget):
            assert mine.impossible() or mine.short()
        if mine.impossible():
            assert not theirs.fits(budget)
        seen.add((bool(mine.impossible()), bool(mine.impossible() or mine.short()), theirs.fits(budget)))
    assert seen >= {(True, True, False), (False, True, False), (False, False, True)}


def test_what_cannot_start_is_told_from_what_may_not() -> None:
    assert not planned(instance()).impossible()
    assert not planned(instance()).short()
    assert "weights alone" in planned(instance(), DENSE7, DRAFT7, 12 * 1024).impossible()
    assert "no token's KV" in planned(instance(mem_fraction_static=0.3), DENSE7, DRAFT7, 32 * 1024).impossible()
    assert (
        "2^31"
        in planned(instance(max_running_requests=400, disable_radix_cache=True), HYBRID7, mib=1 << 20).impossible()
    )
    # One tenth of a file may be layers that the engine leaves out: nothing is refused for it.
    nearly = planned(instance(mem_fraction_static=0.5), DENSE7, DRAFT7, 24 * 1024)
    assert nearly.target > nearly.static
    assert not nearly.impossible()
    assert nearly.short()


def test_trees_of_a_hybrid_need_their_keys_and_values_at_once() -> None:
    """The engine plans them together with the states; a dense model's are part of its cache."""
    args = {"max_running_requests": 100, "disable_radix_cache": True}
    assert planned(instance(budget=63, **args), HYBRID7).wanted_tokens == 100 * 64
    assert planned(instance(budget=63, **args)).wanted_tokens == 2048
    assert planned(instance("dflash", **args), HYBRID7).wanted_tokens == 2048


def test_a_dense_model_is_asked_for_no_states() -> None:
    assert planned(instance("ddtree", 63)).states == 0


def test_the_field_bug_of_a_fraction_without_room_for_graphs_is_seen() -> None:
    """sgl-project/sglang#35777: the cookbook's fraction leaves too little for graphs, drafter and context, about 5 GB."""
    small = shaped(3.4e9, num_hidden_layers=6, **WIDE)
    tight = planned(instance("dflash", mem_fraction_static=0.88), DENSE7, small, RTX5090)
    assert tight.beside > 5e9
    assert "mem-fraction-static 0.88 leaves 3.8 GiB" in tight.short()
    fraction = tight.recommended()
    assert fraction is not None
    assert fraction < 0.88
    assert not planned(instance("dflash", mem_fraction_static=fraction), DENSE7, small, RTX5090).short()


def test_the_engines_own_fraction_leaves_room_on_every_card() -> None:
    for mib in (24564, RTX5090, 49140, 81559, 97887, H200, 183359):
        found = planned(instance("dflash"), DENSE7, DRAFT7, mib)
        assert (found.given, found.fraction) == (False, engine_defaults(mib, 1, {}, True)[2])
        assert found.short() == "", (mib, found.lines())


def test_what_is_asked_for_and_does_not_fit_is_named() -> None:
    many = planned(instance(max_total_tokens=400_000), DENSE7, DRAFT7, RTX5090)
    assert many.short() == f"KV of {many.fitting} tokens fits, and 400000 are asked for"
    assert planned(instance(context_length=300_000), DENSE7, DRAFT7, RTX5090).short()
    assert not planned(instance(context_length=2048), DENSE7, DRAFT7, RTX5090).short()


def test_whole_prompts_are_planned_where_chunks_are_off() -> None:
    for chunk in (0, -1, -5):
        found = planned(instance(chunked_prefill_size=chunk, max_prefill_tokens=5000))
        assert found.chunk == 5000
        assert planned(instance(chunked_prefill_size=chunk)).chunk == 16384


def test_ranks_share_weights_heads_and_states() -> None:
    one, two = (planned(instance(disable_radix_cache=True), HYBRID7, count=count) for count in (1, 2))
    assert two.target == one.target // 2
    assert two.entry == one.entry // 2
    assert two.elements == one.elements // 2
    copies = planned(instance(dp_size=2), count=2)
    assert copies.target == DENSE7["weights"]


def test_fewer_heads_than_ranks_are_repeated() -> None:
    assert m.kv_entry(DENSE7["shape"] | {"kv_heads": 2}, 8, {}) == 1 * 128 * 24 * 2


def test_eight_bit_and_compressed_keys_take_less() -> None:
    assert m.kv_entry(DENSE7["shape"], 1, {"kv-cache-dtype": "fp8_e4m3"}) == 24 * 128 * 24
    latent = describe_config({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64})["shape"]
    assert m.kv_entry(latent, 8, {}) == 576 * 61 * 2
    assert m.kv_entry(DENSE7["shape"], 1, {"kv-cache-dtype": "fp4_e2m1"}) is None


@pytest.mark.parametrize(
    ("one", "target", "draft"),
    [
        (instance(max_running_requests="many"), DENSE7, DRAFT7),
        (instance(mem_fraction_static=2), DENSE7, DRAFT7),
        (instance(cuda_graph_bs=[]), DENSE7, DRAFT7),
        (instance(enable_dp_attention=True), DENSE7, DRAFT7),
        (instance(budget="a lot"), DENSE7, DRAFT7),
        (instance(), DENSE7, None),
        (instance(), {"weights": 1}, DRAFT7),
        (instance(), {**DENSE7, "hybrid": True}, DRAFT7),  # another kind of state than a gated delta net's
    ],
)
def test_what_is_unknown_is_not_planned(one: Any, target: Any, draft: Any) -> None:
    assert m.plan(one, target, draft, H200, 1) is None


def test_the_bundled_pairs_are_known(repo: Path) -> None:
    for name, linear in (("nano", 0), ("nano-hybrid", 3)):
        configs = [
            json.loads((repo / "models" / name / part / "config.json").read_text()) for part in ("target", "draft")
        ]
        target, draft = ({"weights": 1 << 20, **describe_config(config)} for config in configs)
        assert target["shape"]["linear_layers"] == linear
        assert m.plan(instance(disable_radix_cache=True), target, draft, H200, 1)


def test_experts_count_as_many_as_a_token_is_sent_to() -> None:
    shape = describe_config({"moe_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512})["shape"]
    assert (shape["intermediate"], shape["experts"]) == (5120, 512)


def test_the_text_part_of_a_multimodal_model_is_what_counts() -> None:
    text = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    found = describe_config({"text_config": text, "quantization_config": {"quant_method": "fp8"}})["shape"]
    assert (found["layers"], found["head_dim"], found["kv_heads"], found["quantization"]) == (4, 16, 4, "fp8")
