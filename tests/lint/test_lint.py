# SPDX-License-Identifier: Apache-2.0
"""The linters, as tests: one failure shows that linter's own output."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

PYTHON_ROOMS = ["fleet", "tests", "roles", "models", "ddtree_patches"]


ANYTHING = """from typing import Any, NoReturn
def __getattr__(name: str) -> Any: ...
"""
ENDS = """
class AnsibleModule:
    check_mode: bool
    params: dict[str, Any]
    def __init__(self, argument_spec: dict[str, Any], **rest: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def exit_json(self, **result: Any) -> NoReturn: ...
    def fail_json(self, msg: str, **result: Any) -> NoReturn: ...
"""


def lint(repo: Path, *argv: str | Path, names: Mapping[str, str] | None = None, **more: str) -> None:
    """Runs one linter in the repository; its whole output is the failure's text, with `names` put for what they replace."""
    env = {**os.environ, "NO_COLOR": "1", "PY_COLORS": "0", "ANSIBLE_NOCOLOR": "1", **more}
    done = subprocess.run(
        [str(a) for a in argv], cwd=repo, env=env, stdin=subprocess.DEVNULL, text=True, capture_output=True
    )
    if done.returncode:
        text = f"{done.stdout}\n{done.stderr}"
        for path, name in (names or {}).items():
            text = text.replace(path, name)
        pytest.fail(f"{argv[0]} exited {done.returncode}\n{text}", pytrace=False)


def tracked(repo: Path, *patterns: str) -> list[str]:
    """Files that git knows or would add, so that build outputs are never linted."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    out = subprocess.run(argv, cwd=repo, check=True, capture_output=True, text=True).stdout
    return sorted({f for f in out.split("\0") if f and (repo / f).is_file()})


def test_yamllint(repo: Path) -> None:
    lint(repo, "yamllint", "--strict", *tracked(repo, "*.yml", "*.yaml", ".yamllint", ".ansible-lint"))


def test_ansible_lint(repo: Path) -> None:
    lint(repo, "ansible-lint", "--offline", "-q")


def test_playbook_syntax(repo: Path) -> None:
    books = tracked(repo, "site.yml", ":(glob)playbooks/*.yml")
    assert books, "no playbook found"
    lint(repo, "ansible-playbook", "--syntax-check", *books)


def test_ruff_check(repo: Path) -> None:
    lint(repo, "ruff", "check", "--no-cache", ".")


def test_ruff_format(repo: Path) -> None:
    lint(repo, "ruff", "format", "--no-cache", "--check", "--diff", ".")


def typed_names(repo: Path) -> tuple[Path, dict[str, str]]:
    """A folder of links that gives the Python of roles the names it has for others, and link to file.

    Utilities are imported as ansible.module_utils.X, so their importers see their types; Ansible itself has none. Modules and
    plugins are imported by nobody; a module and its action plugin share a file name. The place is fixed for mypy's cache.
    """
    names = repo / ".cache" / "mypy-names"
    shutil.rmtree(names, ignore_errors=True)
    places = {"module_utils": "ansible/module_utils"}
    places |= {room: f"role_{room}" for room in ("library", "action_plugins", "filter_plugins", "lookup_plugins")}
    origin = {}
    for room, place in places.items():
        (names / place).mkdir(parents=True)
        for file in tracked(repo, f"roles/*/{room}/*.py"):
            link = names / place / Path(file).name
            link.symlink_to(repo / file)
            origin[str(link.relative_to(repo))] = file
    for package in ("ansible", "ansible/module_utils"):
        (names / package / "__init__.pyi").write_text(ANYTHING)
    (names / "ansible/module_utils/basic.pyi").write_text(ANYTHING + ENDS)
    return names, origin


def test_mypy(repo: Path) -> None:
    names, origin = typed_names(repo)
    argv = ["mypy", "--explicit-package-bases", "--no-error-summary", "fleet", *origin]
    common = tracked(repo, "ddtree_patches/common/*.py")
    lint(repo, *argv, *common, names=origin, MYPYPATH=f"{names}:{repo}")


def test_shellcheck(repo: Path) -> None:
    scripts = [
        f for f in tracked(repo, "bin/*", ".ci/*", "*.sh") if (repo / f).read_bytes()[:2] == b"#!" or f.endswith(".sh")
    ]
    shells = [f for f in scripts if f.endswith(".sh") or b"bash" in (repo / f).read_bytes().split(b"\n", 1)[0]]
    assert "bin/test" in shells
    lint(repo, "shellcheck", "-x", "--source-path=SCRIPTDIR", "--severity=style", *shells)
