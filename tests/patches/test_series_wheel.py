# SPDX-License-Identifier: Apache-2.0
"""The repository's series on the wheels that the lock names, installed by uv out of a cache of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils import ddtree_patches_series as core

from fleet import series
from tests.unit.series_kit import KILLED, apply_in_child, kill_after, tree_hash

ENGINE = "sglang-0.5.11"
TARGETS = [("3.11", "x86_64"), ("3.11", "aarch64"), ("3.12", "x86_64"), ("3.12", "aarch64")]


@pytest.fixture(scope="session")
def series_wheels(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The engine's wheel per Python and machine, with the hash that the lock demands."""
    folder = tmp_path_factory.mktemp("wheels")
    name, version = series.split_engine(ENGINE)
    lock = (repo / f"engines/{ENGINE}/lock.txt").read_text()
    block = re.search(rf"^{name}=={re.escape(version)} .*(?:\n +--hash=\S+.*)+", lock, re.M)
    assert block, "the lock does not name the engine"
    (folder / "wanted.txt").write_text(block[0].rstrip(" \\") + "\n")
    found = {}
    for python, machine in TARGETS:
        into = folder / f"{python}-{machine}"
        argv = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "-q",
            "--no-deps",
            "--require-hashes",
        ]
        argv += ["--only-binary", ":all:", "--python-version", python, "--platform", f"manylinux_2_34_{machine}"]
        done = subprocess.run([*argv, "-r", folder / "wanted.txt", "-d", into], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (found[python, machine],) = into.glob("*.whl")
    return found


class Installed:
    """A venv with the engine alone, its files linked out of a private cache of uv."""

    def __init__(self, wheel: Path, folder: Path, mode: str) -> None:
        self.cache = folder / "cache"
        env = {**os.environ, "UV_CACHE_DIR": str(self.cache), "UV_NO_CONFIG": "1", "UV_OFFLINE": "1"}
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert uv, "uv is part of the control environment"
        venv = folder / "venv"
        for argv in (
            ["venv", "-q", "--python", sys.executable, venv],
            ["pip", "install", "-q", "--no-deps", "--link-mode", mode, "--python", venv / "bin/python", wheel],
        ):
            done = subprocess.run([uv, *argv], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        self.site = core.find_site(venv)

    def cached(self) -> dict[str, str]:
        """Every file in uv's cache of wheels with its hash."""
        return tree_hash(self.cache)


@pytest.fixture
def wheel(series_wheels: dict[tuple[str, str], Path]) -> Path:
    python = "3.12" if sys.version_info >= (3, 12) else "3.11"
    return series_wheels[python, os.uname().machine]


@pytest.fixture(params=["hardlink", "symlink"])
def linked(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Installed:
    return Installed(wheel, tmp_path, request.param)


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Installed:
    return Installed(wheel, tmp_path, "hardlink")


@pytest.fixture(scope="session")
def one() -> core.Series:
    return series.load(ENGINE, series.ROOT)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_manifest_is_that_of_every_wheel(
    target: tuple[str, str], series_wheels: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """Hashes computed anew from the wheel of each Python and machine are the ones in the repository."""
    root = tmp_path / "ddtree_patches"
    shutil.copytree(series.ROOT, root)
    assert not series.refresh(ENGINE, series_wheels[target], root), "bin/series refresh would change manifest.yml"


def test_patches_are_cut_as_the_tool_cuts(wheel: Path, installed: Installed, tmp_path: Path) -> None:
    """Cutting the patches anew from a patched engine gives them back, byte for byte."""
    root = tmp_path / "ddtree_patches"
    shutil.copytree(series.ROOT, root)
    core.apply(series.load(ENGINE, root), installed.site)
    assert series.recut(ENGINE, wheel, installed.site, root) == []
    assert tree_hash(root) == tree_hash(series.ROOT)


def test_dry_run_leaves_every_byte(one: core.Series, installed: Installed) -> None:
    before = tree_hash(installed.site)
    done = core.apply(one, installed.site, dry=True)
    assert (done.was, done.state, done.changed) == ("clean", "applied", True)
    assert tree_hash(installed.site) == before


def test_apply_changes_what_the_manifest_says_and_not_the_cache(one: core.Series, linked: Installed) -> None:
    before, cached = tree_hash(linked.site), linked.cached()
    links = {path: (linked.site / path).stat().st_nlink for path, h in one.files.items() if h.before}
    for path, want in one.files.items():
        assert before.get(path) == want.before
    assert core.apply(one, linked.site).state == "applied"
    after = tree_hash(linked.site)
    assert {p for p in after.keys() | before.keys() if after.get(p) != before.get(p)} == set(one.files)
    for path, want in one.files.items():
        assert after[path] == want.after
        assert not (linked.site / path).is_symlink()
        assert (linked.site / path).stat().st_nlink == 1
    assert linked.cached() == cached, "a file in uv's cache was changed"
    assert links, "the series touches no file of the engine"
    inodes = {path: (linked.site / path).stat().st_ino for path in one.files}
    assert core.apply(one, linked.site).changed is False
    assert {path: (linked.site / path).stat().st_ino for path in one.files} == inodes


def test_hard_links_were_there_to_be_harmed(one: core.Series, installed: Installed) -> None:
    """The negative control of the test above: uv did link, and writing in place does reach its cache."""
    path = next(path for path, h in one.files.items() if h.before)
    cached = installed.cached()
    assert (installed.site / path).stat().st_nlink > 1
    with (installed.site / path).open("a") as out:
        out.write("# in place\n")
    assert installed.cached() != cached


def test_a_foreign_change_is_refused(one: core.Series, installed: Installed) -> None:
    path = next(path for path, h in one.files.items() if h.before)
    file = installed.site / path
    text = file.read_text() + "# a local change\n"
    file.unlink()
    file.write_text(text)
    before = tree_hash(installed.site)
    with pytest.raises(
        core.SeriesError, match=rf"is foreign .*{re.escape(path)}: expected sha256 {one.files[path].before}"
    ):
        core.apply(one, installed.site)
    assert tree_hash(installed.site) == before


def test_interrupted_at_every_rename(one: core.Series, installed: Installed) -> None:
    """Killed before rename number n: files are whole, and the state is partial unless nothing or all was done."""
    paths = sorted(one.files)
    cached = installed.cached()
    originals = {path: core.read(installed.site, path) for path in paths}
    for n in range(len(paths)):
        done = apply_in_child(series.ROOT, ENGINE, installed.site, kill_after(n))
        assert done.returncode == KILLED, done.stderr
        report = core.inspect(installed.site, one)
        assert [f.path for f in report.files if f.state == "after"] == paths[:n]
        assert [f.path for f in report.files if f.state == "before"] == paths[n:]
        assert report.state == ("partial" if n else "clean")
        if n:
            with pytest.raises(core.SeriesError, match="is partial") as e:
                core.apply(one, installed.site)
            assert all(path in str(e.value) for path in paths)
        for path in paths[:n]:
            (installed.site / path).unlink()
            if (data := originals[path]) is not None:
                (installed.site / path).write_bytes(data)
    assert core.apply(one, installed.site).state == "applied"
    assert not list(installed.site.rglob("*ddtree-new")), "what the killed runs left is gone"
    assert installed.cached() == cached
