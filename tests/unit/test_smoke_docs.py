# SPDX-License-Identifier: Apache-2.0
"""docs/checks.md has an entry for every check id in the code, and no entry for one that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ansible.module_utils import gpu_host_judge, gpu_host_rules

from tests.unit.smoke_fakes import HOOKS, PROMPTS

assert gpu_host_judge  # its import registers every rule

CHECK_ID = re.compile(r"[a-z]+\.[a-z-]+")


def smoke_ids(repo: Path) -> set[str]:
    """First arguments of every call of check(), the hooks and the backends."""
    found = set(HOOKS["hooks"]) | set(HOOKS["backends"])
    for path in [*(repo / "roles/smoke/module_utils").glob("*.py"), repo / "fleet/smoke.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("check", "judge.check"):
                (first, *_) = node.args
                if isinstance(first, ast.Constant):
                    found.add(first.value)
                elif isinstance(first, ast.JoinedStr):
                    assert ast.unparse(first) == "f'output.{way}'", "an id that this test cannot read"
                    found |= {"output.batch", "output.alone"}
                else:
                    assert ast.unparse(first) == "ident", "an id that this test cannot read"
    return found


def test_every_smoke_check_has_an_entry_and_every_entry_a_check(repo: Path) -> None:
    text = (repo / "docs/checks.md").read_text()
    documented = re.findall(r"^### `([^`]+)`$", text, re.M)
    assert len(documented) == len(set(documented))
    assert set(documented) == smoke_ids(repo)
    assert all(CHECK_ID.fullmatch(ident) for ident in documented)


def test_every_preflight_rule_has_a_row_with_its_severity(repo: Path) -> None:
    text = (repo / "docs/checks.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ", text, re.M)
    assert len(rows) == len(set(rows))
    assert dict(rows) == {rule.id: rule.severity for rule in gpu_host_rules.RULES}


def test_every_hook_is_complete_and_used() -> None:
    used = {i for mode in HOOKS["modes"].values() for i in mode["must"] + mode["never"]}
    assert used == set(HOOKS["hooks"])
    for ident, hook in HOOKS["hooks"].items():
        assert set(hook) == {"pattern", "why", "fix"}, ident
        re.compile(hook["pattern"])
    for name, mode in HOOKS["modes"].items():
        assert all(i.startswith("hook.") for i in mode["must"]), name
        assert all(i.startswith("never.") for i in mode["never"]), name


def test_prompts_differ_and_suffice() -> None:
    assert len(PROMPTS) >= 24
    assert len({p["id"] for p in PROMPTS}) == len({p["text"] for p in PROMPTS}) == len(PROMPTS)
    assert len({len(p["text"]) for p in PROMPTS[:16]}) > 8, "requests of one length hide mapping errors"
