# SPDX-License-Identifier: Apache-2.0
"""The matrix of backends: sound as it is, every defect named, every refusal with its row, reason and way out."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.module_utils import gpu_host_judge, gpu_host_rules
from ansible.module_utils import gpu_host_rules_backends as backend_rules
from ansible.module_utils import gpu_host_rules_toolchain as toolchain
from ansible.module_utils import kernel_backends_matrix as matrices

from fleet import backends
from tests.unit.test_kernel_backends import profiles

Data = dict[str, Any]
ENGINE = "sglang-0.5.11"
GPUS = [
    {"index": 0, "uuid": "GPU-0", "compute_cap": "12.0"},
    {"index": 1, "uuid": "GPU-1", "compute_cap": "12.1"},
]


@pytest.fixture
def matrix() -> Data:
    """The data without shared parts, so that a test changes one place only."""
    return copy.deepcopy(yaml.safe_load(yaml.dump(backends.read(), Dumper=_Plain, sort_keys=False)))


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def hits(
    profile: str, instances: list[Any], defaults: Any = None, models: Data | None = None
) -> list[gpu_host_rules.Hit]:
    """What the preflight's rule says of an inventory, with as much of the matrix as reaches a host."""
    wanted = {"instances": instances, "defaults": defaults, "matrix": backends.asked(ENGINE, instances, defaults)}
    facts = {"gpu": {"gpus": GPUS}, "models": models or {}}
    case = gpu_host_rules.Case("ct200", wanted, facts, gpu_host_judge.instances_of(wanted), profile)
    return list(backend_rules.backend_refused(case))


def refused(profile: str = "sm120", models: Data | None = None, **instance: Any) -> list[gpu_host_rules.Hit]:
    one = {"name": "gpu0", "gpus": [0], "mode": "baseline", "model_path": "/srv/m", **instance}
    return hits(profile, [one], models=models)


# -- the data ----------------------------------------------------------------------------------------------------------


def test_every_gpu_that_preflight_serves_has_one_row_for_every_family(matrix: Data) -> None:
    places = {(row["profile"], sm, family) for row in matrix["rows"] for sm in row["sm"] for family in row["families"]}
    served = {(profile, sm) for sm, profile in gpu_host_rules.CAPABILITIES.items()} | {("cpu", "cpu")}
    assert places == {(*where, family) for where in served for family in matrices.FAMILIES}


def test_every_claim_is_used(matrix: Data) -> None:
    used = [claim for row in matrix["rows"] for topic in row["backends"].values()
            for verdict in ("allowed", "forbidden") for claim in topic[verdict].values()]  # fmt: skip
    used += [
        {k: v for k, v in entry.items() if k != "value"} for row in matrix["rows"] for entry in row["env"].values()
    ]
    used += [claim for mode in matrix["modes"].values() for values in mode.values() for claim in values.values()]
    assert [name for name, claim in matrix["claims"].items() if claim not in used] == []


def test_preflight_asks_for_the_compiler_that_allowed_values_need(matrix: Data) -> None:
    asked = [
        (row["profile"], claim["nvcc"])
        for row in matrix["rows"]
        for topic in row["backends"].values()
        for claim in topic["allowed"].values()
        if "nvcc" in claim
    ]
    assert {profile for profile, _ in asked} == {"sm90", "sm100", "sm120"}
    for profile, nvcc in asked:
        assert matrices.version(nvcc) <= matrices.version(toolchain.MIN_NVCC[profile]), (profile, nvcc)


def test_sm120_is_served_without_the_kernels_it_lacks(matrix: Data) -> None:
    rows = [row for row in matrix["rows"] if row["profile"] == "sm120"]
    assert len(rows) == 4
    for row in rows:
        attention = row["backends"]["attention"]
        assert attention["use"] == {"attention-backend": "triton"}
        assert {"trtllm_mha", "trtllm_mla", "fa3"} <= set(attention["forbidden"])
        assert set(row["backends"]["sampling"]["allowed"]) <= {"pytorch", "flashinfer"}
        assert "deep_gemm" in row["backends"]["moe"]["forbidden"]
        assert row["env"]["SGLANG_ENABLE_JIT_DEEPGEMM"]["value"] == "0"
    assert profiles.load("sm120")["env"]["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"


def test_trees_are_allowed_with_the_backends_that_ddtree_itself_takes(repo: Path, matrix: Data) -> None:
    """Its arguments' rule and its worker's, read from the overlay."""
    overlay = repo / "ddtree_patches" / ENGINE / "overlay/sglang/srt/speculative"

    def constant(file: str, name: str) -> Any:
        for node in ast.parse((overlay / file).read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return ast.literal_eval(node.value)
        raise AssertionError(f"{file} has no {name}")

    trees = set(constant("ddtree_args.py", "TREE_ATTENTION_BACKENDS"))
    assert (
        set(matrix["modes"]["ddtree"]["attention"])
        == trees
        == set(constant("ddtree_worker.py", "_TREE_BACKEND_CLASSES"))
    )
    for row in matrix["rows"]:
        assert row["backends"]["attention"]["use"]["attention-backend"] in trees


def test_profiles_take_their_backends_from_the_rows() -> None:
    cpu, sm100 = profiles.load("cpu")["args"], profiles.load("sm100")["args"]
    common = {
        "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "xgrammar",
        "moe-runner-backend": "triton", "linear-attn-backend": "triton",
    }  # fmt: skip
    assert common.items() <= cpu.items()
    extra = {"linear-attn-decode-backend": "triton", "enforce-disable-flashinfer-allreduce-fusion": True}
    assert (common | extra).items() <= sm100.items()
    assert "enforce-disable-flashinfer-allreduce-fusion" not in cpu


def test_the_chosen_row_is_told_in_one_line_and_published() -> None:
    profile = profiles.load("sm120", capabilities=["12.1"])
    assert profile["row"].startswith("sm121 or sm121-hybrid: attention-backend triton, sampling-backend pytorch, ")
    assert profile["row"].endswith(", SGLANG_ENABLE_JIT_DEEPGEMM=0")
    assert [row["id"] for row in profile["backends"]] == ["sm121", "sm121-hybrid"]
    attention = profile["backends"][0]["backends"]["attention"]
    assert attention["use"] == {"attention-backend": "triton"}
    assert attention["forbidden"]["trtllm_mha"] == "https://github.com/flashinfer-ai/flashinfer/issues/3263"
    assert profiles.load("sm120", capabilities=["7.5"])["backends"] == profiles.load("sm120")["backends"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_forbidden_backend_is_refused_with_row_reason_source_and_way_out() -> None:
    (hit,) = refused(args={"attention_backend": "trtllm_mha"})
    assert hit == gpu_host_rules.Hit(
        "instance gpu0",
        "args: attention-backend: trtllm_mha, refused by row sm120 (SM 12.0): trtllm-gen kernels exist for SM100 and SM103 "
        'alone (TllmGenFmhaRunner ends in "Unsupported architecture") (https://github.com/flashinfer-ai/flashinfer/issues/3263, '
        "2026-12-01)",
        "triton or flashinfer",
        "Remove attention-backend from args of it in host_vars/ct200.yml (beside the inventory in use); the profile's own choice "
        "is taken then.",
    )


REFUSED: dict[str, tuple[str, Data, str]] = {
    "trtllm for decode": ("sm120", {"args": {"decode-attention-backend": "trtllm_mla"}}, "decode-attention-backend: trtllm_mla"),
    "fa3 above Hopper": ("sm120", {"args": {"attention-backend": "fa3"}}, "no kernels above SM90"),
    "fa3 for the drafter": ("sm120", {"args": {"speculative-draft-attention-backend": "fa3"}}, "no kernels above SM90"),
    "unknown to the matrix": ("sm90", {"args": {"attention-backend": "brand_new"}}, "not in the matrix"),
    "spark": ("sm120", {"gpus": [1], "args": {"sampling-backend": "flashinfer"}}, r"row sm121 \(SM 12.1\)"),
    "tree on flashinfer": ("sm90", {"mode": "ddtree", "args": {"attention-backend": "flashinfer"}}, "refused in mode ddtree"),
    "tree by default": ("sm90", {"mode": "ddtree", "args": {"attention-backend": "fa3"}}, "an ancestor mask"),
    "drafter on trtllm": ("sm100", {"mode": "dflash", "args": {"attention-backend": "trtllm_mha"}}, "refused in mode dflash"),
    "tree on flashinfer's nets": ("sm90", {"mode": "ddtree", "args": {"linear-attn-backend": "flashinfer"}}, "parent links"),
    "nets on flashinfer": ("sm120", {"args": {"linear-attn-decode-backend": "flashinfer"}}, "row sm120-hybrid"),
    "experts": ("sm120", {"args": {"moe-runner-backend": "flashinfer_trtllm"}}, "tcgen05"),
    "the engine's own experts": ("sm100", {"args": {"moe-runner-backend": None}}, r"null \(the engine's own choice\)"),
    "the engine's own attention": ("sm90", {"args": {"attention-backend": None}}, "not in the matrix"),
    "fused all-reduce": ("sm120", {"args": {"enable-flashinfer-allreduce-fusion": True}}, "graph capture fails"),
    "DeepGEMM on": ("sm120", {"env": {"SGLANG_ENABLE_JIT_DEEPGEMM": "1"}}, "SGLANG_ENABLE_JIT_DEEPGEMM: 1, refused by row sm120"),
    "a GPU's sampler on the CPU": ("cpu", {"gpus": [], "args": {"sampling-backend": "flashinfer"}}, "Needs a GPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    profile, instance, words = REFUSED[case]
    (hit,) = refused(profile, **instance)
    assert hit.thing == "instance gpu0"
    assert "https://" in hit.observed or "nobody has looked at it" in hit.observed
    assert re.search(words, hit.observed), hit.observed
    assert hit.expected
    assert hit.fix.startswith("Remove ")


@pytest.mark.parametrize(("key", "malformed"), [("args", False), ("env", True)])
def test_preflight_lets_null_take_a_flag_of_the_profile_out(key: str, malformed: bool) -> None:
    """What that means for a backend is the matrix' to judge."""
    (rule,) = (rule for rule in gpu_host_rules.RULES if rule.id == "args-malformed")
    instance = {"name": "gpu0", "args": {}, "env": {}, key: {"moe-runner-backend" if key == "args" else "X": None}}
    assert bool(list(rule.check(gpu_host_rules.Case(host="h", wanted={}, instances=[instance])))) is malformed


ALLOWED: dict[str, tuple[str, Data]] = {
    "nothing asked": ("sm120", {}),
    "the profile's own, said again": ("sm120", {"mode": "ddtree", "args": {"attention-backend": "triton"}}),
    "flashinfer without trees": ("sm120", {"args": {"attention-backend": "flashinfer", "sampling-backend": "flashinfer"}}),
    "chains on fa3": ("sm90", {"mode": "dflash", "args": {"attention-backend": "fa3"}}),
    "a GPU not known, one of two rows allows it": ("sm120", {"gpus": [7], "args": {"sampling-backend": "flashinfer"}}),
    "GPTQ experts": ("sm120", {"args": {"moe-runner-backend": None}}),
    "fusion left off": ("sm120", {"args": {"enable-flashinfer-allreduce-fusion": False}}),
    "fusion where it is built": ("sm90", {"args": {"enable-flashinfer-allreduce-fusion": True}}),
    "the variable as it is needed": ("sm120", {"env": {"SGLANG_ENABLE_JIT_DEEPGEMM": 0}}),
    "other flags": ("sm120", {"args": {"max-running-requests": 4}, "env": {"SGLANG_X": "1"}}),
}  # fmt: skip


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case: str) -> None:
    profile, instance = ALLOWED[case]
    assert refused(profile, **instance) == []


def test_defaults_are_judged_as_every_instance() -> None:
    defaults = {"mode": "dflash", "args": {"attention_backend": "fa3"}, "env": {"SGLANG_ENABLE_JIT_DEEPGEMM": "1"}}
    told = hits(
        "sm120", [{"name": "a", "gpus": [0]}, {"name": "b", "env": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}}], defaults
    )
    assert [(hit.thing, hit.observed.split(": ")[1]) for hit in told] == [
        ("instance a", "attention-backend"), ("instance a", "SGLANG_ENABLE_JIT_DEEPGEMM"), ("instance b", "attention-backend"),
    ]  # fmt: skip
    assert told[1].expected == "0"


def test_the_models_family_chooses_among_the_rows() -> None:
    """On Blackwell the engine takes fewer attention backends for gated delta nets; without the model's facts both rows speak."""
    nets = {"/srv/m": {"hybrid": True, "model_type": "qwen3_next"}}
    (hit,) = refused(models=nets, args={"attention-backend": "torch_native"})
    assert "row sm120-hybrid" in hit.observed and "for gated delta nets" in hit.observed
    (hit,) = refused(models={"/srv/m": {"hybrid": False}}, args={"attention-backend": "torch_native"})
    assert "row sm120 (SM 12.0)" in hit.observed
    for other in ({"hybrid": True, "model_type": "mamba"}, {"exists": False}):
        (hit,) = refused(models={"/srv/m": other}, args={"attention-backend": "torch_native"})
        assert "row sm120 (SM 12.0)" in hit.observed
    assert refused(models={"/srv/m": {"hybrid": False}}, args={"linear-attn-backend": "flashinfer"}) == [], (
        "it has no effect"
    )


@pytest.mark.parametrize("instances", [None, "gpu0", [None], [{"name": "a", "args": "x", "env": 3, "gpus": 7}], []])
def test_malformed_inventories_are_left_to_their_rules(instances: Any) -> None:
    assert hits("sm120", instances, "x") == []


def test_only_what_is_asked_for_travels_to_the_host() -> None:
    none = backends.asked(ENGINE, [{"name": "a", "args": {"max-running-requests": 4}}], {})
    assert none["topics"] == {} and all(not row["backends"] and not row["env"] for row in none["rows"])
    some = backends.asked(ENGINE, [{"args": {"attention_backend": "fa3"}}], {"args": {"moe-runner-backend": None}})
    assert set(some["topics"]) == {"attention", "moe"}
    assert len(json.dumps(some)) < 12000
    assert backends.asked("sglang-0.5.99", [], {})["rows"] == backends.asked(None, [], {})["rows"] == []


def test_a_site_can_waive_it_with_a_reason() -> None:
    assert "backend-refused" in gpu_host_judge.WAIVABLE


def test_the_lookup_takes_the_rows_of_the_hosts_gpus() -> None:
    (profile,) = profiles.LookupModule().run(["sm120"], engine=ENGINE, gpus=GPUS[:1])
    assert [row["id"] for row in profile["backends"]] == ["sm120", "sm120-hybrid"]


def test_an_engine_without_rows_is_named_with_those_that_have_some() -> None:
    with pytest.raises(
        AnsibleError,
        match=r"no row for profile sm90 and engine sglang-0\.5\.12; rows of sm90 are for 0\.5\.11 to below 0\.5\.12",
    ):
        profiles.LookupModule().run(["sm90"], engine="sglang-0.5.12")
    with pytest.raises(AnsibleError, match="'main' is no version"):
        profiles.LookupModule().run(["sm90"], engine="sglang-main")


# -- schema ------------------------------------------------------------------------------------------------------------

Change = Callable[[Data], Any]
DEFECTS: dict[str, tuple[Change, str]] = {
    "unknown key": (lambda m: m.update(extra=1), "the file: needs exactly"),
    "topic": (lambda m: m["topics"].update(x={}), "topics: x: needs flags or switches"),
    "claim without source": (lambda m: m["claims"]["xgrammar"].pop("source"), "claims: xgrammar: needs why, source, date"),
    "claim with a bad link": (lambda m: m["claims"]["xgrammar"].update(source="x"), r"needs a source \(https link\)"),
    "claim with a bad date": (lambda m: m["claims"]["xgrammar"].update(date="today"), "needs a date"),
    "claim without a sentence": (lambda m: m["claims"]["xgrammar"].update(why="so"), "why must be a sentence"),
    "claim with a bad compiler": (lambda m: m["claims"]["xgrammar"].update(nvcc="new"), "nvcc must be a version"),
    "mode": (lambda m: m["modes"]["ddtree"].update(colour={"red": 1}), "modes: ddtree: colour"),
    "row": (lambda m: m["rows"][0].pop("env"), "row sm90: needs exactly"),
    "sm": (lambda m: m["rows"][0].update(sm=[12.0]), "row sm90: sm must be like"),
    "family": (lambda m: m["rows"][0]["families"].append("huge"), r"row sm90: unknown families \['huge'\]"),
    "engines": (lambda m: m["rows"][0]["engines"].update(below="0.5.11"), "row sm90: engines: from must be less than below"),
    "unknown topic": (lambda m: m["rows"][0]["backends"].update(colour={}), "row sm90: colour: is no topic"),
    "both": (
        lambda m: m["rows"][0]["backends"]["sampling"]["forbidden"].update(pytorch=m["claims"]["xgrammar"]),
        "row sm90: sampling: pytorch both allowed and forbidden",
    ),
    "use of a forbidden one": (
        lambda m: m["rows"][0]["backends"]["sampling"]["use"].update({"sampling-backend": "ascend"}),
        "row sm90: sampling: use: sampling-backend: ascend is not allowed here",
    ),
    "use of auto": (lambda m: m["rows"][0]["backends"]["moe"]["use"].update({"moe-runner-backend": "auto"}), "is auto"),
    "use of a foreign flag": (lambda m: m["rows"][0]["backends"]["moe"]["use"].update(x="triton"), "is no flag of the topic"),
    "switch": (
        lambda m: m["rows"][0]["backends"]["all-reduce"]["allowed"].update(x=m["claims"]["xgrammar"]),
        "is no switch of the topic",
    ),
    "env": (lambda m: m["rows"][4]["env"]["SGLANG_ENABLE_JIT_DEEPGEMM"].update(value=0), r"must be a string \(quote it\)"),
    "said twice": (lambda m: m["rows"][0]["sm"].append("10.0"), "row sm100: says again what row sm90 says of SM 10.0, dense"),
    "id twice": (lambda m: m["rows"][1].update(id="sm90"), "rows: an id is used twice"),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(matrix: Data, defect: str) -> None:
    change, message = DEFECTS[defect]
    assert matrices.check(copy.deepcopy(matrix)) == matrix
    change(matrix)
    with pytest.raises(matrices.MatrixError, match=f"^matrix\\.yml: .*{message}"):
        matrices.check(matrix)


def test_rows_of_one_profile_that_disagree_are_named(matrix: Data) -> None:
    matrix["rows"][1]["backends"]["sampling"]["use"]["sampling-backend"] = "flashinfer"
    with pytest.raises(
        matrices.MatrixError,
        match="row sm90-hybrid: sampling-backend is flashinfer, another row of its profile says pytorch",
    ):
        matrices.profile_parts(matrices.rows_for(matrices.check(matrix), "sm90", ENGINE))


def test_the_table_in_the_docs_is_the_matrix(repo: Path, matrix: Data) -> None:
    lines = [
        line.strip("| \n").split(" | ")
        for line in (repo / "docs/backends.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    rows = {row["id"]: row["backends"] for row in matrix["rows"]}
    told = set()
    for ids, _, *cells in lines:
        for ident in re.findall(r"`([^`]+)`", ids):
            told.add(ident)
            for topic, cell in zip(("attention", "sampling", "linear-attention", "moe"), cells, strict=True):
                if topic not in rows[ident]:
                    continue
                assert cell.replace("**", "").split(", ") == list(rows[ident][topic]["allowed"]), (ident, topic)
                assert re.findall(r"\*\*(\w+)\*\*", cell) == list(dict.fromkeys(rows[ident][topic]["use"].values()))
    assert told == set(rows)
