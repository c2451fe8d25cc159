# SPDX-License-Identifier: Apache-2.0
"""One release of the real engine for all tests that read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import venv


@pytest.fixture(scope="session")
def release() -> Iterator[Path]:
    """A published release of the default engine, profile cpu, unpatched; for reading only."""
    try:
        with venv.scratch() as root:
            yield venv.build_release(root)
    except venv.NoPython as error:  # the lock has wheels for 3.11 and 3.12 only; such a machine can build no release
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def release_venv(release: Path) -> Path:
    """Its venv."""
    return release / "venv"


@pytest.fixture(scope="session")
def engine_site(release: Path) -> Path:
    """Its site-packages."""
    return venv.site_packages(release)
