# SPDX-License-Identifier: Apache-2.0
"""The matrix of backends against the real engine's source: its choices, flags, names and tables, read and not run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from fleet import backends
from tests.unit.test_kernel_backends import profiles

Data = dict[str, Any]
CHOICES = {
    "attention": "ATTENTION_BACKEND_CHOICES",
    "sampling": "SAMPLING_BACKEND_CHOICES",
    "grammar": "GRAMMAR_BACKEND_CHOICES",
    "linear-attention": "LINEAR_ATTN_KERNEL_BACKEND_CHOICES",
    "moe": "MOE_RUNNER_BACKEND_CHOICES",
}


def tree(site: Path, module: str) -> ast.Module:
    return ast.parse((site / "sglang/srt" / module).read_text(encoding="utf-8"))


def constant(found: ast.AST, name: str) -> Any:
    """The literal that a name is set to, anywhere in a module."""
    for node in ast.walk(found):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"there is no {name}")


@pytest.fixture(scope="module")
def server_args(engine_site: Path) -> ast.Module:
    return tree(engine_site, "server_args.py")


@pytest.fixture(scope="module")
def matrix() -> Data:
    return dict(backends.read())


def test_every_choice_of_the_engine_has_a_verdict_in_every_row(server_args: ast.Module, matrix: Data) -> None:
    for topic, name in CHOICES.items():
        choices = set(constant(server_args, name))
        for row in (row for row in matrix["rows"] if topic in row["backends"]):
            entry = row["backends"][topic]
            judged = set(entry["allowed"]) | set(entry["forbidden"])
            assert judged == choices, f"{row['id']}: {topic}: {judged ^ choices}"


def test_every_flag_is_one_of_the_engine(server_args: ast.Module, matrix: Data) -> None:
    flags = {
        argument.value
        for node in ast.walk(server_args)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    named = {f"--{flag}" for topic in matrix["topics"].values() for flag in topic.get("flags") or topic["switches"]}
    assert named <= flags, named - flags
    profile_flags = {f"--{flag}" for name in profiles.known() for flag in profiles.load(name)["args"]}
    assert profile_flags <= flags, profile_flags - flags


def test_every_variable_is_one_of_the_engine(engine_site: Path, matrix: Data) -> None:
    names = {
        ast.unparse(node.targets[0])
        for node in ast.walk(tree(engine_site, "environ.py"))
        if isinstance(node, ast.Assign)
    }
    assert {name for row in matrix["rows"] for name in row["env"]} <= names


def test_drafts_are_allowed_with_the_backends_that_the_engines_drafter_takes(engine_site: Path, matrix: Data) -> None:
    supported = set(constant(tree(engine_site, "speculative/dflash_worker.py"), "supported_draft_backends"))
    for mode in ("dflash", "ddtree-shadow"):
        assert set(matrix["modes"][mode]["attention"]) == supported


def test_what_the_engines_tables_say_of_an_architecture(engine_site: Path, matrix: Data) -> None:
    """Sizes of the symmetric all-reduce, and FlashInfer's builds of the fused one: both for majors 9 and 10 only."""
    sizes = tree(engine_site, "distributed/device_communicators/all_reduce_utils.py")
    keys = next(
        node.value for node in ast.walk(sizes)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES"
    )  # fmt: skip
    assert isinstance(keys, ast.Dict)
    majors = {ast.literal_eval(key) for key in keys.keys if key}
    comm = ast.parse((engine_site / "flashinfer/jit/comm.py").read_text())
    fused = next(
        node for node in ast.walk(comm) if isinstance(node, ast.FunctionDef) and node.name == "gen_trtllm_comm_module"
    )
    built = next(
        set(ast.literal_eval(node.value))
        for node in ast.walk(fused)
        if isinstance(node, ast.keyword) and node.arg == "supported_major_versions"
    )
    assert majors == built == {9, 10}
    for row in (row for row in matrix["rows"] if row["profile"] != "cpu"):
        allowed = row["backends"]["all-reduce"]["allowed"]
        has = all(int(sm.split(".")[0]) in majors for sm in row["sm"])
        assert ("enable-torch-symm-mem" in allowed) is ("enable-flashinfer-allreduce-fusion" in allowed) is has, row[
            "id"
        ]


def test_trtllm_kernels_of_the_pinned_flashinfer_are_for_sm100_and_sm103_alone(engine_site: Path, matrix: Data) -> None:
    runner = (engine_site / "flashinfer/data/include/flashinfer/trtllm/fmha/fmhaRunner.cuh").read_text()
    assert 'FLASHINFER_CHECK(mSM == kSM_100 || mSM == kSM_103, "Unsupported architecture")' in runner
    for row in matrix["rows"]:
        if "trtllm_mha" in row["backends"]["attention"]["allowed"]:
            assert set(row["sm"]) <= {"10.0", "10.3"}, row["id"]


def test_flashinfer_wants_the_compiler_that_the_matrix_names_for_sm12x(engine_site: Path, matrix: Data) -> None:
    context = (engine_site / "flashinfer/compilation_context.py").read_text()
    assert 'raise RuntimeError("SM 12.x requires CUDA >= 12.9")' in context
    (row,) = (row for row in matrix["rows"] if row["id"] == "sm120")
    assert row["backends"]["attention"]["allowed"]["flashinfer"]["nvcc"] == "12.9"
    assert row["backends"]["sampling"]["allowed"]["flashinfer"]["nvcc"] == "12.9"
