# SPDX-License-Identifier: Apache-2.0
"""Releases on real hosts that no package index can be reached from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet import engine as engines
from fleet import lock, wheelhouse
from fleet.lab.client import LabClient, LabHost
from tests.lab.plays import Play, run_play
from tests.lab.plays import releases as listed

HOUSE = "/srv/wheelhouse"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Engines and wheelhouse of a small engine: a few packages of the real one, locked and downloaded as a person does it."""
    top = tmp_path_factory.mktemp("carried")
    source = engines.load(lock.DEFAULT)
    shutil.copytree(source.folder, top / "engines" / lock.DEFAULT)
    folder = top / "engines" / lock.DEFAULT
    (folder / "requirements.in").write_text("anyio\nmsgspec\n")
    text = (folder / "engine.yml").read_text()
    (folder / "engine.yml").write_text(text.replace("  bytes: ", "  bytes: 1 # "))
    engine = engines.load(lock.DEFAULT, top / "engines")
    assert lock.write(engine) == 0
    assert wheelhouse.fill(engine, top / "house", engine.pythons, ["x86_64", "aarch64"]) == 0
    return top / "engines", top / "house"


@pytest.fixture(scope="module")
def cut(make_lab: Callable[[str], LabClient], folders: tuple[Path, Path]) -> LabHost:
    """A host that has the wheelhouse and no way out."""
    host = make_lab("cut").fresh(1, binds=[f"{folders[1]}:{HOUSE}:ro"])[0]
    host.cut()
    return host


def build(host: LabHost, folders: tuple[Path, Path], **variables: Any) -> Play:
    """Builds with a cache of the host's own, so that nothing comes out of the machine's."""
    given = {"sglang_venv_uv_cache": "/opt/sglang-fleet/cache/uv", "sglang_venv_link_mode": "hardlink"}
    engines_dir = str(folders[0])
    return run_play(
        "tests/lab/release_play.yml", hosts=[host], sglang_venv_engines_dir=engines_dir, **{**given, **variables}
    )


def releases(host: LabHost) -> list[str]:
    return [name for name in listed(host) if name != ".lock"]


def test_without_a_wheelhouse_the_error_says_what_to_give_the_host(cut: LabHost, folders: tuple[Path, Path]) -> None:
    play = build(cut, folders)
    assert play.status != 0
    assert "sglang_venv_wheelhouse" in play.failure(cut.name), play.text
    assert releases(cut) == []


def test_a_wheelhouse_lacking_a_file_names_it(cut: LabHost, folders: tuple[Path, Path]) -> None:
    cut.ssh(f"mkdir -p /srv/part && cp {HOUSE}/* /srv/part/ && rm /srv/part/msgspec-*")
    play = build(cut, folders, sglang_venv_wheelhouse="/srv/part")
    assert "lacks msgspec-" in play.failure(cut.name), play.text
    assert releases(cut) == []


def test_a_file_that_was_changed_on_the_way_is_named(cut: LabHost, folders: tuple[Path, Path]) -> None:
    cut.ssh(
        f"cp {HOUSE}/* /srv/part/ && f=$(ls /srv/part/anyio-*.whl) && printf X | dd of=$f bs=1 seek=99 conv=notrunc"
    )
    play = build(cut, folders, sglang_venv_wheelhouse="/srv/part")
    assert "wrong hash: anyio==" in play.failure(cut.name), play.text
    assert releases(cut) == []


def test_the_wheelhouse_is_all_that_a_host_needs(cut: LabHost, folders: tuple[Path, Path]) -> None:
    play = build(cut, folders, sglang_venv_wheelhouse=HOUSE)
    assert play.status == 0, play.text
    (release,) = releases(cut)
    python = f"/opt/sglang-fleet/releases/{release}/venv/bin/python"
    assert cut.ssh(f"{python} -c 'import anyio, msgspec; print(msgspec.__file__)'").stdout.startswith(
        "/opt/sglang-fleet/"
    )
    assert cut.ssh(f"stat -c %U:%a /opt/sglang-fleet/releases/{release}/cache").stdout.split() == ["sglang:750"]
    again = build(cut, folders, sglang_venv_wheelhouse=HOUSE)
    assert again.recap[cut.name]["changed"] == 0


def test_an_environment_that_is_there_is_taken_over_and_may_go(cut: LabHost, folders: tuple[Path, Path]) -> None:
    """A venv in another place, with the role's whole way; not even a wheelhouse is there for it."""
    (built,) = releases(cut)
    (folders[0] / lock.DEFAULT / "imports.yml").write_text("load_bearing: [anyio]\n")
    cut.ssh(f"cp -a /opt/sglang-fleet/releases/{built}/venv /srv/theirs && rm /srv/theirs/bin/python*")
    there = "find /srv/theirs -type f -printf '%p %n %s %T@ %m\\n' | sort | sha256sum"
    before = cut.ssh(there).stdout
    made = build(cut, folders, sglang_venv_adopt=["/srv/theirs"])
    assert made.status == 0, made.text
    assert cut.ssh(there).stdout == before
    (release,) = set(releases(cut)) - {built}
    cut.ssh("rm -r /srv/theirs")
    again = build(cut, folders, sglang_venv_adopt=["/srv/theirs"])
    assert again.recap[cut.name]["changed"] == 0, again.text
    venv = f"/opt/sglang-fleet/releases/{release}/venv"
    said = cut.ssh(f"{venv}/bin/python -I -c 'import anyio, msgspec; print(msgspec.__file__)'").stdout
    assert said.startswith(venv)
    assert cut.ssh(f"find {venv} -type f -links +1").stdout == ""
