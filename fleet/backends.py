# SPDX-License-Identifier: Apache-2.0
"""The matrix of backends on the control side: read, checked, and cut down to what an inventory asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import kernel_backends_matrix as matrices

FILE = Path(__file__).resolve().parent.parent / "roles/kernel_backends/files/matrix.yml"
# Safe and quick: the matrix is read for every host of a run.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read(file: Path = FILE) -> dict[str, Any]:
    """The checked matrix. Raises MatrixError (a ValueError) where it breaks its schema."""
    return dict(matrices.check(yaml.load(file.read_bytes(), LOADER)))  # noqa: S506 - a safe one


def asked(engine: Any, instances: Any, defaults: Any) -> dict[str, Any]:
    """What judges an inventory on an engine, as the preflight's rule takes it; what is malformed in it, other rules tell."""
    layers = [*(instances if isinstance(instances, list) else []), defaults]
    return dict(matrices.narrowed(read(), str(engine), layers))
