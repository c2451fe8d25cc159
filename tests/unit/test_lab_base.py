# SPDX-License-Identifier: Apache-2.0
"""Where a base comes from, when it is built again, and that half a base is never used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fleet.lab import base
from fleet.lab.base import SUITES, Source, default_suite, ensure, folder, mirrors, parse_sources
from fleet.lab.shell import LabError

DEB822 = """Types: deb deb-src
# a comment
URIs: http://archive.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://archive.example/debian-security/
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://old.example/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main
"""
ONE_LINE = """# deb http://off.example/ubuntu noble main
deb http://archive.example/ubuntu/ noble main restricted # main
deb [arch=amd64 signed-by=/k.gpg] http://archive.example/ubuntu noble-updates main
deb-src http://archive.example/ubuntu noble main
deb http://security.example/ubuntu noble-security main universe
"""
OTHERS = [
    Source("https://packages.example/debian/12/prod", ("bookworm",), ("main",)),
    Source("https://docker.example/linux/debian", ("bookworm",), ("stable",)),
    Source("https://cloud.example/apt", ("cloud-sdk-bookworm",), ("main",)),
]


def test_field_format() -> None:
    assert parse_sources(DEB822, True) == [
        Source("http://archive.example/debian", ("bookworm", "bookworm-updates"), ("main", "contrib")),
        Source("http://archive.example/debian-security/", ("bookworm-security",), ("main",)),
    ]


def test_line_format() -> None:
    found = parse_sources(ONE_LINE, False)
    assert [(s.uri, s.suites) for s in found] == [
        ("http://archive.example/ubuntu/", ("noble",)),
        ("http://archive.example/ubuntu", ("noble-updates",)),
        ("http://security.example/ubuntu", ("noble-security",)),
    ]
    assert found[0].components == ("main", "restricted")


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_mirrors_are_the_machines_own(suite: str) -> None:
    assert mirrors(SUITES[suite], OTHERS + parse_sources(DEB822, True)) == [
        f"http://archive.example/debian {suite} main",
        f"http://archive.example/debian {suite}-updates main",
        f"http://archive.example/debian-security {suite}-security main",
    ]


def test_ubuntu_gets_universe_too() -> None:
    assert mirrors(SUITES["noble"], parse_sources(ONE_LINE, False)) == [
        "http://archive.example/ubuntu noble main universe",
        "http://archive.example/ubuntu noble-updates main universe",
        "http://security.example/ubuntu noble-security main universe",
    ]


def test_an_archive_with_another_path_is_known_by_its_suite() -> None:
    assert mirrors(SUITES["noble"], [Source("https://mirror.example/pub/", ("noble",), ("main",))]) == [
        "https://mirror.example/pub noble main universe"
    ]


def test_mirror_lists_give_their_first_archive(tmp_path: Path) -> None:
    listing = tmp_path / "mirrors.txt"
    listing.write_text("# mirrors\nhttp://near.example/ubuntu/ priority:1\nhttp://far.example/ubuntu/ priority:2\n")
    found = mirrors(SUITES["noble"], [Source(f"mirror+file:{listing}", ("noble",), ("main",))])
    assert found == ["http://near.example/ubuntu noble main universe"]


def test_a_machine_without_that_distribution() -> None:
    with pytest.raises(LabError, match="no debian archive; choose another --suite or set FLEET_LAB_MIRROR"):
        mirrors(SUITES["bookworm"], parse_sources(ONE_LINE, False))
    assert mirrors(SUITES["bookworm"], [], "http://given.example/debian") == [
        "http://given.example/debian bookworm main"
    ]


def test_default_suite_is_the_machines() -> None:
    assert default_suite("ID=ubuntu\nVERSION_CODENAME=noble\n") == "noble"
    assert default_suite('VERSION_CODENAME="trixie"\n') == "trixie"
    assert default_suite("VERSION_CODENAME=jammy\n") == "bookworm"
    assert default_suite("ID=other\n") == "bookworm"


def test_the_recipe_decides_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, archives = SUITES["bookworm"], ["http://a.example/debian bookworm main"]
    first = folder(tmp_path, suite, archives)
    assert folder(tmp_path, suite, archives) == first
    assert folder(tmp_path, suite, ["http://b.example/debian bookworm main"]) != first
    assert folder(tmp_path, dataclasses.replace(suite, name="trixie"), archives) != first
    monkeypatch.setattr(base, "PACKAGES", (*base.PACKAGES, "vim"))
    assert folder(tmp_path, suite, archives) != first


def test_base_is_built_once_and_never_half(tmp_path: Path) -> None:
    suite, archives, said = SUITES["bookworm"], ["http://a.example/debian bookworm main"], []
    (tmp_path / ".build-bookworm-left").mkdir()
    (tmp_path / ".build-bookworm-left/file").touch()

    def interrupted(work: Path) -> None:
        (work / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path, suite, archives, interrupted, said.append)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]

    builds = []

    def build(work: Path) -> None:
        assert work.parent == tmp_path
        assert work.stat().st_mode & 0o777 == 0o755  # it becomes the host's /
        builds.append(work)
        (work / "whole").touch()

    for _ in range(2):
        root = ensure(tmp_path, suite, archives, build, said.append)
        assert (root / "whole").exists()
    assert len(builds) == 1
    assert root == folder(tmp_path, suite, archives)
