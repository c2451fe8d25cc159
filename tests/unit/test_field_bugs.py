# SPDX-License-Identifier: Apache-2.0
"""docs/field-bugs.md: every known fault has a row, and what a row names exists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import gpu_host_judge, gpu_host_rules

from tests.unit.test_smoke_docs import smoke_ids

assert gpu_host_judge  # its import registers every rule

DOC = Path(__file__).parents[2] / "docs/field-bugs.md"
NUMBERS = [*range(1, 10), 12, 13, 14, *range(16, 22), 23, 24, 26, 28, 29, 30, 32, 33, 36, 38, 40, 41, 42, 43]
ROWS = {int(row[0]): row[1:] for row in re.findall(r"^\| (\d+) \| (.*) \| (.*) \| (.*) \|$", DOC.read_text(), re.M)}
NAME = re.compile(r"`(rule|check|message|matrix|imports|nccl|patch):([^`]+)`")


def test_every_known_fault_has_a_row() -> None:
    assert sorted(ROWS) == NUMBERS


def matrix(repo: Path, name: str) -> bool:
    data = yaml.safe_load((repo / "roles/kernel_backends/files/matrix.yml").read_text())
    row_id, topic, value = name.split("/")
    (row,) = [row for row in data["rows"] if row["id"] == row_id]
    return value in {**row["backends"][topic]["allowed"], **row["backends"][topic]["forbidden"]}


def imports(repo: Path, name: str) -> bool:
    return f"package: {name}\n" in (repo / "engines/sglang-0.5.11/imports.yml").read_text()


def message(repo: Path, name: str) -> bool:
    """Its beginning is in the table of messages, and some code says it."""
    words = name.split(":", maxsplit=1)[0]
    told = re.search(rf"^\| {re.escape(words)}", (repo / "docs/checks.md").read_text(), re.M)
    code = "\n".join(path.read_text() for path in (repo / "roles").glob("*/module_utils/*.py"))
    return bool(told) and name in code


FINDS: dict[str, Callable[[Path, str], bool]] = {
    "rule": lambda _, name: name in {rule.id for rule in gpu_host_rules.RULES},
    "check": lambda repo, name: name in smoke_ids(repo),
    "message": message,
    "matrix": matrix,
    "imports": imports,
    "nccl": lambda repo, name: f"- id: {name}\n" in (repo / "roles/gpu_units/files/nccl.yml").read_text(),
    "patch": lambda repo, name: name in (repo / "ddtree_patches/sglang-0.5.11/series").read_text().split(),
}


@pytest.mark.parametrize("number", ROWS)
def test_what_a_row_names_exists(repo: Path, number: int) -> None:
    seen, here, tests = ROWS[number]
    assert re.search(r"\]\(https://github\.com/[^)]+\)", seen), "no source"
    assert re.search(r"\b(prevented|detected|not here)\b", here)
    names = NAME.findall(here)
    assert names, "nothing is named"
    for kind, name in names:
        assert FINDS[kind](repo, name), f"{kind}:{name}"
    for file, test, case in re.findall(r"`(tests/[^`:]+)::(\w+)(?:\[([^\]]+)\])?`", tests) or [("", "", "")]:
        text = (repo / file).read_text()
        assert re.search(rf"^(async )?def {test}\(", text, re.M), test
        assert f'"{case}"' in text or not case, case


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("rule", "gpu-gone"),
        ("check", "backend.none"),
        ("message", "the engine is sad"),
        ("matrix", "sm120/attention/none"),
        ("imports", "sglang-none"),
        ("nccl", "sm0"),
        ("patch", "0010-request.patch"),
    ],
)
def test_a_name_that_does_not_exist_is_found_out(repo: Path, kind: str, name: str) -> None:
    assert not FINDS[kind](repo, name)


def test_only_known_kinds_of_names(repo: Path) -> None:
    kinds: set[Any] = set(re.findall(r"`([a-z]+):[^`/][^`]*`", "".join("".join(row) for row in ROWS.values())))
    assert kinds <= set(FINDS)
