# SPDX-License-Identifier: Apache-2.0
"""What travels so that a GPU machine can run the plays against itself."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from fleet.gpu import host
from fleet.lab.base import Source

STATUS = """Package: systemd
Status: install ok installed
Depends: libacl1 (>= 2.2.23), libkmod2 | other, mount
Pre-Depends: libc6 (>= 2.34), libcap2:any

Package: libacl1
Depends: libc6

Package: libkmod2
Depends: libacl1

Package: libcap2
Depends: libc6

Package: mount

Package: libc6
Depends: libgcc-s1

Package: openssh-server
Depends: libacl1
"""

LOCK = """# made by a program
first==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
    # via something
first==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ba
    # via something
second==3 \\
    --hash=sha256:ca
third==4 \\
    --hash=sha256:da
"""


def test_systemd_takes_what_it_needs_and_no_c_library() -> None:
    assert host.packages(STATUS) == ["libacl1", "libcap2", "libkmod2", "mount", "systemd"]


def test_subset_keeps_hashes_and_every_marker() -> None:
    kept = host.subset(LOCK, ["first", "third"])
    assert kept.count("==") == 3
    assert [digest for digest in ("aa", "ab", "ba", "ca", "da") if f"sha256:{digest}" in kept] == [
        "aa",
        "ab",
        "ba",
        "da",
    ]
    assert "via" not in kept


def test_a_package_that_is_not_locked_is_no_silent_gap() -> None:
    with pytest.raises(KeyError):
        host.subset(LOCK, ["fourth"])


def test_everything_that_plays_import_is_locked() -> None:
    names = host.closure("3.12")
    assert {"ansible-core", "jinja2", "paramiko", "nvidia-ml-py", "resolvelib"} <= set(names)
    assert not {"ansible-lint", "mypy", "pytest"} & set(names)
    assert host.subset(host.CONTROL.read_text(), names).count("--hash=sha256:") >= len(names)


@pytest.mark.parametrize(
    ("uri", "suite", "own", "taken"),
    [("https://a/debian", "bookworm", "noble", "bookworm"), ("https://a/ubuntu", "noble", "noble", "noble")],
)
def test_the_oldest_systemd_that_apt_has_here(
    uri: str, suite: str, own: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_LAB_MIRROR", raising=False)
    monkeypatch.setattr("fleet.lab.base.machine_sources", lambda: [Source(uri, (suite,), ("main", "universe"))])
    monkeypatch.setattr("fleet.lab.base.default_suite", lambda text: own)
    assert host.suite_here().name == taken


def test_files_land_behind_usr_and_manuals_stay(tmp_path: Path) -> None:
    base = tmp_path / "base"
    info = base / "var/lib/dpkg/info"
    info.mkdir(parents=True)
    (base / "var/lib/dpkg/status").write_text("Package: systemd\n\n")
    (info / "systemd.list").write_text(
        "/.\n/lib/systemd/systemd\n/bin/systemctl\n/usr/share/man/man1/systemctl.1\n/etc/gone\n"
    )
    for name in ("lib/systemd/systemd", "bin/systemctl", "usr/share/man/man1/systemctl.1"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    with tarfile.open(tmp_path / "out.tar", "w") as tar:
        assert host.add_systemd(tar, base) == (2, len("lib/systemd/systemd") + len("bin/systemctl"))
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert sorted(tar.getnames()) == ["usr/bin/systemctl", "usr/lib/systemd/systemd"]
