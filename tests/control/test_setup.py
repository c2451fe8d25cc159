# SPDX-License-Identifier: Apache-2.0
"""bin/setup.sh makes the control environment from the locks: once, also when two doors open at the same time.

Needs the package registry, or a cache that has the locked files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

TOOLS = ["bash", "cat", "dirname", "env", "flock", "id", "locale", "mkdir", "sha256sum", "ssh", "uname"]
SHOW = 'set -euo pipefail; source bin/setup.sh; printf "%s\\n" "$VIRTUAL_ENV" "$UV_CACHE_DIR" "$(command -v ansible)"'


@pytest.fixture
def clone(repo: Path, tmp_path: Path) -> Path:
    """What setup reads, in a folder of its own."""
    root = tmp_path / "clone"
    shutil.copytree(repo / "bin", root / "bin")
    shutil.copytree(repo / "requirements", root / "requirements")
    return root


def clean_env(**more: str) -> dict[str, str]:
    """The environment of a fresh shell: no virtual environment of ours on PATH."""
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "ANSIBLE_CONFIG", "LC_ALL")}
    ours = os.environ.get("VIRTUAL_ENV", "/nowhere") + "/bin"
    env["PATH"] = ":".join(p for p in env["PATH"].split(":") if p != ours)
    return {**env, **more}


def start(root: Path, script: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=root,
        env=clean_env(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_at_once_make_one_environment_and_a_third_finds_it(clone: Path) -> None:
    both = [start(clone, SHOW) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert all(out.splitlines()[2] == str(clone / ".venv/bin/ansible") for out, _ in outputs)
    assert sum("new control environment" in err for _, err in outputs) == 1

    began = time.monotonic()
    warm = start(clone, SHOW)
    out, err = warm.communicate()
    assert (warm.returncode, err) == (0, "")
    assert time.monotonic() - began < 1.0
    assert out.splitlines()[1] == os.environ["UV_CACHE_DIR"]

    versions = subprocess.run(
        [clone / ".venv/bin/uv", "pip", "freeze"],
        env={**clean_env(), "VIRTUAL_ENV": str(clone / ".venv")},
        capture_output=True,
        text=True,
    )
    locked = {line.split()[0] for line in (clone / "requirements/control.txt").read_text().splitlines() if "==" in line}
    seeds = {line for line in versions.stdout.split() if line.startswith(("pip==", "setuptools=="))}  # venv's own
    installed = set(versions.stdout.split()) - seeds
    assert f"uv=={uv_version(clone)}" in installed
    assert installed <= locked | {f"uv=={uv_version(clone)}"}

    # An environment knows its place: a moved clone gets a new one instead of scripts that point at the old folder.
    moved = clone.rename(clone.with_name("moved"))
    again = start(moved, SHOW)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert "new control environment" in err and out.splitlines()[2] == str(moved / ".venv/bin/ansible")


def uv_version(root: Path) -> str:
    return next(
        line.split("==")[1].split()[0]
        for line in (root / "requirements/uv.txt").read_text().splitlines()
        if line.startswith("uv==")
    )


def test_a_wrong_hash_is_refused_and_leaves_no_stamp(clone: Path) -> None:
    lock = clone / "requirements/uv.txt"
    lock.write_text(f"uv=={uv_version(clone)} --hash=sha256:{'0' * 64}\n")
    process = start(clone, SHOW)
    _, err = process.communicate()
    assert process.returncode == 2
    assert "uv could not be installed from its lock" in err
    assert not (clone / ".venv/.stamp").exists()


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the base system's tools and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return folder


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)


def test_an_old_python_gets_one_clear_error(clone: Path, bare_path: Path) -> None:
    fake(
        bare_path,
        "python3",
        '[ "$1" = --version ] && echo Python 3.9.2 && exit; [[ "$2" == *version_info* ]] && exit 1; exit 0',
    )
    process = start(clone, SHOW, PATH=str(bare_path))
    _, err = process.communicate()
    assert process.returncode == 2
    assert err.splitlines() == [
        "setup: needs Python 3.11, 3.12 or 3.13 with venv, found Python 3.9.2; install e.g. python3.11 and python3.11-venv"
    ]


def test_missing_packages_are_asked_of_apt_once(clone: Path, bare_path: Path, tmp_path: Path) -> None:
    # No python3 at first; "installing" brings one that is too old, which ends it after apt was asked.
    old = '[ "$1" = --version ] && echo Python 3.9.2 && exit; [[ "$2" == *version_info* ]] && exit 1; exit 0'
    fake(bare_path, "made", old)
    fake(
        bare_path,
        "apt-get",
        f'echo "$@" >>{tmp_path}/asked; [[ "$*" == *install* ]] && ln -s made {bare_path}/python3; exit 0',
    )
    fake(bare_path, "sudo", 'exec "$@"')
    (bare_path / "ln").symlink_to(shutil.which("ln") or "")
    process = start(clone, SHOW, PATH=str(bare_path))
    _, err = process.communicate()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert process.returncode == 2
    assert len(asked) == 2 and "update" in asked[0]
    assert asked[1].endswith("-y python3 python3-venv")
    assert "found Python 3.9.2" in err


def test_without_apt_the_packages_are_named(clone: Path, bare_path: Path) -> None:
    process = start(clone, SHOW, PATH=str(bare_path))
    _, err = process.communicate()
    assert process.returncode == 2
    assert "missing: python3 python3-venv; this is no Debian or Ubuntu" in err
