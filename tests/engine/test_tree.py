# SPDX-License-Identifier: Apache-2.0
"""The tree's building blocks against brute force, with the engine's torch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("tree_checks.py")
EXPECTED = {
    "best_sum": 200, "subsets": 200, "batch": 200, "spine": 200, "impossible": 1, "masks": 200, "walks": 200,
    "links": 200, "shards": 200, "refusals": 7,
}  # fmt: skip

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checked(engine_python: Path) -> dict[str, int]:
    done = subprocess.run([engine_python, SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("check", EXPECTED)
def test_tree(checked: dict[str, int], check: str) -> None:
    assert checked[check] == EXPECTED[check]


def test_imports_torch_only() -> None:
    """common/ knows no SGLang: it has to serve every engine."""
    text = (SCRIPT.parents[2] / "ddtree_patches/common/ddtree_utils.py").read_text()
    imports = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imports == {"__future__", "dataclasses", "functools", "torch"}
