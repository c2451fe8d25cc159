# SPDX-License-Identifier: Apache-2.0
"""For machines that have nothing of the control environment: torch, PyYAML and pytest are enough. See docs/gpu-h200.md."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (ROOT, ROOT / "models", ROOT / "tests/engine", ROOT / "ddtree_patches/common", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def missing() -> str | None:
    """Why these tests cannot run on this machine. GPU_TESTS_DEVICE=cpu asks for what Triton's interpreter can run."""
    if os.environ.get("GPU_TESTS_DEVICE") == "cpu":
        return None
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU on this machine (/dev/nvidiactl is missing)"
    if importlib.util.find_spec("torch") is None:
        return f"no torch in {sys.executable}"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := missing():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where the packed engine is not on the path: kernels of the project alone need none."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("no engine on the path; bin/gpu-pack packs it, tests/gpu/run.sh unpacks it")
