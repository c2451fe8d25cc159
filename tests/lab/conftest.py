# SPDX-License-Identifier: Apache-2.0
"""Real hosts for tests. Every lab carries the pid of this run in its name and is taken down at its end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.lab.client import REPO, LabClient, LabHost
from fleet.lab.labs import all_labs
from fleet.lab.settings import settings

FreshHosts = Callable[..., list[LabHost]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform == "linux" and os.geteuid() == 0:
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="lab hosts need Linux and root (sudo -E bin/test tests/lab)"))


@pytest.fixture(scope="session")
def make_lab() -> Iterator[Callable[[str], LabClient]]:
    """Gives a lab by a word of the test's choice; nothing boots before it is asked to. All are taken down at the end."""
    made: dict[str, LabClient] = {}
    # what a run that was killed could not take down
    for name in all_labs(settings(os.environ, REPO)):
        pid = re.match(r"t(\d+)-", name)
        if pid and not Path(f"/proc/{pid[1]}").exists():
            LabClient(name).call("down")

    def make(word: str) -> LabClient:
        return made.setdefault(word, LabClient(f"t{os.getpid()}-{word}"))

    yield make
    failures = [done for lab in made.values() if (done := lab.call("down", check=False)).returncode]
    assert not failures, "\n".join(done.stderr for done in failures)


@pytest.fixture(scope="session")
def lab(make_lab: Callable[[str], LabClient]) -> LabClient:
    """The lab that all tests of this run share: `lab.fresh(2)` boots two new hosts that stay until the end of the run."""
    return make_lab("main")


@pytest.fixture
def fresh_hosts(lab: LabClient) -> Iterator[FreshHosts]:
    """`fresh_hosts(2, memory="6G")` boots new hosts in the shared lab; they are removed when the test ends."""
    made: list[LabHost] = []

    def fresh(count: int = 1, **options: object) -> list[LabHost]:
        hosts = lab.fresh(count, **options)
        made.extend(hosts)
        return hosts

    yield fresh
    if made:
        lab.call("down", *(h.name for h in made))


@pytest.fixture
def fresh_host(fresh_hosts: FreshHosts) -> LabHost:
    """One new host for one test."""
    return fresh_hosts(1)[0]
