# SPDX-License-Identifier: Apache-2.0
"""Role code is importable under Ansible's names, and an ambiguous name is an error instead of a coin toss."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.importer import RoleFinder


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A roles folder that the finder looks into first, forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [RoleFinder(tmp_path), *sys.meta_path])
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def put(roles: Path, where: str, text: str) -> None:
    file = roles / where
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_module_finds_its_utility(roles: Path) -> None:
    put(roles, "one/module_utils/one_sum.py", "def add(a, b):\n    return a + b\n")
    put(roles, "two/library/two_adds.py", "from ansible.module_utils.one_sum import add\nRESULT = add(2, 3)\n")
    assert importlib.import_module("two_adds").RESULT == 5


def test_ansible_keeps_its_own_names(roles: Path) -> None:
    put(roles, "one/module_utils/unrelated.py", "")
    assert hasattr(importlib.import_module("ansible.module_utils.basic"), "AnsibleModule")


def test_same_name_in_two_roles_is_an_error(roles: Path) -> None:
    put(roles, "one/module_utils/same_name.py", "")
    put(roles, "two/module_utils/same_name.py", "")
    with pytest.raises(ImportError, match="several roles"):
        importlib.import_module("ansible.module_utils.same_name")


def test_real_roles_have_unique_names(repo: Path) -> None:
    for folder in ("module_utils", "library", "lookup_plugins"):
        names = [f.name for f in repo.glob(f"roles/*/{folder}/*.py") if f.name != "__init__.py"]
        assert len(names) == len(set(names)), f"Ansible flattens {folder}: {sorted(names)}"
