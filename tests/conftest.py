# SPDX-License-Identifier: Apache-2.0
"""What every test may use. A folder below tests/ is a marker, and cheap folders run first."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleet.importer

ORDER = ["lint", "unit", "control", "patches", "engine", "lab", "gpu"]
HERE = Path(__file__).parent

fleet.importer.install()


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = {line.split(":")[0] for line in config.getini("markers")}
    no_gpu = pytest.mark.skip(reason="no NVIDIA GPU on this machine (/dev/nvidiactl is missing)")
    for item in items:
        if (folder := _folder(item)) in marks:
            item.add_marker(folder)
        if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
            item.add_marker(no_gpu)
    items.sort(key=lambda item: ORDER.index(f) if (f := _folder(item)) in ORDER else len(ORDER))


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the repository."""
    return HERE.parent
