# SPDX-License-Identifier: Apache-2.0
"""The linters, as tests: one failure shows that linter's own output."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON_ROOMS = ["fleet", "tests", "roles", "models", "ddtree_patches"]


def lint(repo: Path, *argv: str | Path) -> None:
    """Runs one linter in the repository; its whole output is the failure's text."""
    env = {**os.environ, "NO_COLOR": "1", "PY_COLORS": "0", "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(
        [str(a) for a in argv], cwd=repo, env=env, stdin=subprocess.DEVNULL, text=True, capture_output=True
    )
    if done.returncode:
        pytest.fail(f"{argv[0]} exited {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)


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
    books = tracked(repo, "site.yml", "playbooks/*.yml")
    assert books, "no playbook found"
    lint(repo, "ansible-playbook", "--syntax-check", *books)


def test_ruff_check(repo: Path) -> None:
    lint(repo, "ruff", "check", "--no-cache", ".")


def test_ruff_format(repo: Path) -> None:
    lint(repo, "ruff", "format", "--no-cache", "--check", "--diff", ".")


def test_mypy(repo: Path) -> None:
    # Files of roles are modules of their own name there, so each goes by file.
    roles = tracked(
        repo,
        "roles/*/library/*.py",
        "roles/*/module_utils/*.py",
        "roles/*/lookup_plugins/*.py",
        "ddtree_patches/common/*.py",
    )
    lint(repo, "mypy", "fleet", *roles)


def test_shellcheck(repo: Path) -> None:
    scripts = [
        f for f in tracked(repo, "bin/*", ".ci/*", "*.sh") if (repo / f).read_bytes()[:2] == b"#!" or f.endswith(".sh")
    ]
    shells = [f for f in scripts if f.endswith(".sh") or b"bash" in (repo / f).read_bytes().split(b"\n", 1)[0]]
    assert "bin/test" in shells
    lint(repo, "shellcheck", "-x", "--source-path=SCRIPTDIR", "--severity=style", *shells)
