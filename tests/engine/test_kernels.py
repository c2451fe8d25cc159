# SPDX-License-Identifier: Apache-2.0
"""The tree's Triton kernels with the engine's Triton, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kernel_checks.py")
KERNELS = ("_top_k_chunk_kernel", "_top_k_merge_kernel", "_grow_kernel", "_mask_kernel", "_walk_kernel")

pytestmark = pytest.mark.engine


def run(python: Path, what: str, **env: str) -> dict[str, int]:
    done = subprocess.run(
        [python, SCRIPT, what], capture_output=True, text=True, timeout=400, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


def test_interpreted_kernels_give_the_reference_bit_for_bit(engine_python: Path) -> None:
    assert run(engine_python, "interpret", TRITON_INTERPRET="1") == {"top_k": 6, "trees": 20, "masks": 3}


def test_kernels_compile_for_hopper_and_blackwell(engine_python: Path, tmp_path: Path) -> None:
    sizes = run(engine_python, "compile", TRITON_CACHE_DIR=str(tmp_path))
    assert set(sizes) == {f"sm{capability} {name}" for capability in (90, 120) for name in KERNELS}
    assert all(size > 1000 for size in sizes.values())


def test_kernels_import_torch_and_triton_only() -> None:
    """common/ knows no SGLang: it has to serve every engine."""
    text = (SCRIPT.parents[2] / "ddtree_patches/common/ddtree_kernels.py").read_text()
    imports = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imports == {"__future__", "torch", "triton", "triton.language"}
