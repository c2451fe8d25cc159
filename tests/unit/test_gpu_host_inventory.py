# SPDX-License-Identifier: Apache-2.0
"""What the rules hold an inventory against: flags of the engine, variables of the roles, words of messages."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import (
    gpu_host_rules_args,
    gpu_host_rules_ports,
    gpu_host_rules_speculation,
    gpu_host_words,
)

from fleet import declared, flags
from tests.unit.judge_cases_inventory import NO_GPU_AT_ALL, RIGHT
from tests.unit.judge_kit import findings
from tests.unit.test_inventory import read


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_engine_takes_is_not_refused(name: str) -> None:
    assert {finding["id"] for finding in findings(RIGHT[name])} <= {"cpu-profile", "engine-unknown"}


def test_a_host_without_a_gpu_is_told_one_cause() -> None:
    (finding,) = findings(NO_GPU_AT_ALL)
    assert finding["id"] == "gpu-none" and finding["fix"].endswith(
        "gpu_host_profile: cpu, and gpus: [] for every instance"
    )


# --- the list of flags -------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """One flag of each kind that the engine's parser has."""
    made = argparse.ArgumentParser()
    made.add_argument("--tp-size", "--tensor-parallel-size", type=int)
    made.add_argument("--dtype", choices=["auto", "on", "bfloat16"])
    made.add_argument("--trace", action="store_true")
    made.add_argument("--hooks", type=json.loads)
    made.add_argument("--sizes", type=int, nargs="+")
    made.add_argument("--strict", action=argparse.BooleanOptionalAction)
    return made


def test_a_parser_is_described_as_data_that_reads_back() -> None:
    found = flags.described(parser())
    assert found == {
        "dtype": {"type": "text", "choices": ["auto", "bfloat16", "on"]},
        "hooks": {"type": "json"},
        "no-strict": {"type": "command-line", "also": ["strict"]},
        "sizes": {"type": "int", "many": True},
        "tensor-parallel-size": {"type": "int", "also": ["tp-size"]},
        "trace": {"type": "switch"},
    }
    assert yaml.safe_load(flags.text(found)) == found
    many = {"long": {"type": "text", "choices": [f"word-{n}" for n in range(100, 160)]}}
    assert yaml.safe_load(flags.text(many)) == many
    assert max(map(len, flags.text(many).splitlines())) <= flags.WIDTH


def test_a_converter_that_nobody_knows_is_no_text() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--odd", type=complex)
    with pytest.raises(KeyError, match="complex"):
        flags.described(made)


def test_every_type_of_the_list_is_judged(repo: Path) -> None:
    for path in repo.glob("engines/*/flags.yml"):
        types = {row["type"] for row in yaml.safe_load(path.read_text()).values()}
        assert types <= {"switch", "command-line", *gpu_host_rules_args.READERS}


def test_an_abbreviation_is_one_where_argparse_takes_it() -> None:
    known = declared.table("sglang-0.5.11")
    assert known is not None
    assert declared.entry("tp-size", known)["flag"] == "tensor-parallel-size"
    assert declared.entry("tp", known)["short"]
    assert declared.entry("enable-nan", known)["near"] == ["enable-nan-detection"]  # a switch's name is looked up whole
    assert "attention-backend" in declared.entry("attention", known)["near"]  # the beginning of several
    assert declared.flags("sglang-0.5.11", "junk", [1]) == {}


# --- variables ---------------------------------------------------------------------------------------------------


def test_a_misspelt_variable_is_found_with_the_name_that_is_meant() -> None:
    found = declared.unread(
        (
            "gpu_unit_defaults",
            "gpu_units_instnaces",
            "smoke_token",
            "sglang_venv_wheelhous",
            "fleet_engin",
            "fleet_rack",
        )
    )
    assert {name: names[:1] for name, names in found.items()} == {
        "gpu_unit_defaults": ["gpu_units_defaults"],
        "gpu_units_instnaces": ["gpu_units_instances"],
        "smoke_token": ["smoke_tokens"],
        "sglang_venv_wheelhous": ["sglang_venv_wheelhouse"],
        "fleet_engin": ["fleet_engine"],
        "fleet_rack": [],
    }


def test_variables_of_a_play_and_of_a_site_are_left_alone(repo: Path) -> None:
    options = declared.options()
    own = ("ansible_host", "inventory_dir", "smoke_test_url", "rack", "my_variable", "bench_press")
    results = ("gpu_host_result", "kernel_backends_profile", "smoke_verdict", "mode_instance", "ddtree_patches_root")
    assert declared.unread((*own, *results, *options)) == {}
    for host in read(repo, "inventory/hosts.yml").values():
        assert declared.unread(host) == {}
    lab = yaml.safe_load((repo / "inventory/group_vars/lab.yml").read_text())
    assert declared.unread(lab) == {}


def test_folders_of_the_host_come_from_the_argument_specs() -> None:
    assert declared.folders() == (
        "gpu_host_root", "gpu_host_state_dir", "sglang_venv_adopt", "sglang_venv_root", "sglang_venv_uv_cache",
        "sglang_venv_wheelhouse",
    )  # fmt: skip
    given = {"gpu_host_root": "x", "sglang_venv_uv_cache": "{{ sglang_venv_root }}/cache", "my_variable": 1}
    known = declared.known("sglang-9", [], None, given)
    told = {"flags": None, "envs": {}, "unread": {}, "paths": {"gpu_host_root": "x"}}
    assert {key: known[key] for key in told} == told


# --- numbers that stand elsewhere too ----------------------------------------------------------------------------


def test_sizes_of_the_kernels_are_theirs(repo: Path) -> None:
    text = (repo / "ddtree_patches/common/ddtree_kernels.py").read_text()
    sizes = dict(re.findall(r"^(MAX_SLOTS|_CHUNK) = (\d+)$", text, re.M))
    rules = gpu_host_rules_speculation
    assert sizes == {"MAX_SLOTS": str(rules.MAX_SLOTS), "_CHUNK": str(rules.CHUNK)}
    presets = re.search(r"^PRESETS = .*\b(\d+)\)$", _arguments(repo), re.M)
    assert presets and int(presets[1]) == rules.LARGEST_PRESET
    topk = re.search(r"^DEFAULT_TOPK = (\d+)$", _arguments(repo), re.M)
    assert topk and int(topk[1]) == rules.DEFAULT_TOPK


def _arguments(repo: Path) -> str:
    folder = repo / "ddtree_patches/sglang-0.5.11/overlay/sglang/srt/speculative"
    return (folder / "ddtree_args.py").read_text()


def test_inner_ports_are_few() -> None:
    one: dict[str, Any] = {"port": 30000, "args": {"enable-dp-attention": True, "nccl-port": 29000}, "env": {}}
    assert sorted(gpu_host_rules_ports.inner_ports(one)) == [29000, 30013, *range(30233, 30239)]
    assert gpu_host_rules_ports.inner_ports({"port": 30000, "args": {}, "env": {"SGLANG_GRPC_PORT": 1}}) == {}


# --- words -------------------------------------------------------------------------------------------------------


class Tagged(dict[str, Any]):
    """As Ansible's own map, which is none of JSON's by name."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "nothing"),
        ("x", "'x'"),
        (True, "true"),
        (Tagged(a=Tagged(b=[1, "c"])), '{"a": {"b": [1, "c"]}}'),
        ({"HF_TOKEN": "hush", "max-total-tokens": 8192}, '{"HF_TOKEN": "(hidden)", "max-total-tokens": 8192}'),
        (["--api-key", "hush", "--x"], '["--api-key", "(hidden)", "--x"]'),
        (["--api-key=hush"], '["--api-key=(hidden)"]'),
        ("API_KEY=hush", "'API_KEY=(hidden)'"),
    ],
)
def test_a_value_is_shown_as_it_was_written_and_never_a_secret(value: Any, words: str) -> None:
    assert gpu_host_words.shown(value) == words


def test_a_long_value_is_shortened_and_a_secret_is_known_by_its_name() -> None:
    assert gpu_host_words.shown("hush", "api-key") == "(hidden)"
    assert len(gpu_host_words.shown("x" * 1000)) == gpu_host_words.LONGEST
