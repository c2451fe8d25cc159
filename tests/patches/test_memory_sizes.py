# SPDX-License-Identifier: Apache-2.0
"""The preflight's memory sizes against the engine's own code, cut out of its source and run as it is: no torch, no GPU."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.gpu_host_memory import state_bytes
from ansible.module_utils.gpu_host_memory_engine import engine_defaults, graph_sizes

from fleet.envs import known
from fleet.flags import variables

MEMORY = ("_handle_gpu_memory_settings", "_generate_cuda_graph_batch_sizes", "_generate_piecewise_cuda_graph_tokens")
CARDS_MIB = (16384, 24564, 32607, 49140, 81559, 97887, 143771, 183359)


def functions(path: Path, owner: str, names: tuple[str, ...], **known: Any) -> dict[str, Any]:
    """Functions of a module and methods of one of its classes by name, compiled on their own."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    owners = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner]
    nodes = [node for body in (module, *owners) for node in body.body if isinstance(node, ast.FunctionDef)]
    found = [node for node in nodes if node.name in names]
    assert sorted(node.name for node in found) == sorted(names)
    for node in found:
        node.decorator_list = []
    space: dict[str, Any] = dict(known)
    exec(compile(ast.Module(list(found), []), str(path), "exec"), space)
    return space


@pytest.fixture(scope="module")
def server_args(engine_site: Path) -> type:
    methods = functions(engine_site / "sglang/srt/server_args.py", "ServerArgs", MEMORY)
    return type("ServerArgs", (SimpleNamespace,), {name: methods[name] for name in MEMORY})


def theirs(server_args: type, mib: int, tp: int, drafting: bool, args: dict[str, Any]) -> tuple[Any, list[int]]:
    """What the engine makes of a GPU: ((chunk, largest graph, fraction), captured batch sizes)."""
    unset = ("chunked_prefill_size", "cuda_graph_max_bs", "cuda_graph_bs", "max_total_tokens", "mem_fraction_static")
    given = {name.replace("-", "_"): value for name, value in args.items()}
    one = server_args(
        **dict.fromkeys((*unset, "piecewise_cuda_graph_max_tokens", "piecewise_cuda_graph_tokens")),
        tp_size=tp,
        pp_size=1,
        dp_size=1,
        device="cuda",
        model_path="/srv/target",
        **dict.fromkeys(
            ("enable_dp_attention", "enable_symm_mem", "disable_cuda_graph_padding", "language_only"), False
        ),
        speculative_algorithm="DFLASH" if drafting else None,
        use_mla_backend=lambda: False,
        get_model_config=lambda: SimpleNamespace(is_multimodal=False),
        max_prefill_tokens=16384,
    )
    vars(one).setdefault("disable_piecewise_cuda_graph", False)
    vars(one).update(given)
    one._handle_gpu_memory_settings(mib)
    return (one.chunked_prefill_size, one.cuda_graph_max_bs, one.mem_fraction_static), one.cuda_graph_bs


def test_the_engines_own_choices_are_known(server_args: type) -> None:
    own: tuple[dict[str, Any], ...] = (
        {},
        {"chunked-prefill-size": 2048},
        {"chunked-prefill-size": -1},
        {"chunked-prefill-size": 0, "max-prefill-tokens": 4096},
        {"cuda-graph-max-bs": 16},
        {"cuda-graph-bs": [1, 2, 300]},
        {"disable-piecewise-cuda-graph": True},
        {"max-total-tokens": 4096},
        {"mem-fraction-static": 0.7},
    )
    seen = set()
    for mib, tp, drafting, args in product(CARDS_MIB, (1, 2, 4, 8), (False, True), own):
        expected, sizes = theirs(server_args, mib, tp, drafting, args)
        assert engine_defaults(mib, tp, args, drafting) == expected, (mib, tp, drafting, args)
        if "cuda-graph-bs" not in args:
            assert graph_sizes(expected[1], drafting) == sorted(set(sizes)), (mib, tp, drafting, args)
        seen.add(expected)
    assert len(seen) > 50


def test_the_engines_variables_are_listed(repo: Path, engine_site: Path) -> None:
    """`PYTHON -m fleet.flags envs > engines/sglang-0.5.11/envs.yml` writes the list anew."""
    series = (repo / "ddtree_patches/sglang-0.5.11/overlay", repo / "ddtree_patches/common")
    assert known("sglang-0.5.11") == set(variables([engine_site / "sglang", *series]))


def test_a_state_is_as_large_as_the_engines(engine_site: Path) -> None:
    def divide(number: int, by: int) -> int:
        assert number % by == 0
        return number // by

    space = functions(
        engine_site / "sglang/srt/configs/mamba_utils.py",
        "Mamba2StateShape",
        ("create", "extra_groups_for_head_shards"),
        divide=divide,
        Mamba2StateShape=SimpleNamespace,
    )
    for keys, values, dims, tp in (
        (16, 32, 128, 1),
        (16, 32, 128, 2),
        (16, 32, 128, 8),
        (2, 96, 64, 4),
        (48, 96, 64, 1),
    ):
        shape = space["create"](
            tp_world_size=tp,
            intermediate_size=values * dims,
            n_groups=keys,
            num_heads=values,
            head_dim=dims,
            state_size=dims,
            conv_kernel=4,
        )
        (window,), temporal = shape.conv, shape.temporal
        elements = temporal[0] * temporal[1] * temporal[2]
        net = {
            "key_heads": keys,
            "value_heads": values,
            "key_dim": dims,
            "value_dim": dims,
            "kernel": 4,
            "dtype": "float32",
        }
        expected = ((window[0] * window[1] * 2 + elements * 4) * 18, elements)
        assert state_bytes({"net": net, "linear_layers": 18}, tp, {}) == expected
