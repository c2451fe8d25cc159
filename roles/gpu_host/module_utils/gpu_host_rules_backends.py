# SPDX-License-Identifier: Apache-2.0
"""The rule about backends: what an instance asks for, against the matrix of roles/kernel_backends."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils import kernel_backends_matrix as matrices
from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, Map, args_of, env_of, label, rule
from ansible.module_utils.gpu_host_rules_hybrid import FORKING_MODEL_TYPES


@rule(
    "backend-refused",
    BLOCK,
    "Without kernels for the GPU an engine fails at its start, or hours later, or takes another backend and says nothing.",
    source="roles/kernel_backends/files/matrix.yml",
)
def backend_refused(case: Case) -> Iterator[Hit]:
    """No backend and no variable that the rows of the instance's GPUs and model, or its mode, refuse."""
    matrix = case.wanted.get("matrix") or {"rows": []}
    rows = [row for row in matrix["rows"] if row["profile"] == case.profile]
    if not rows:
        return  # the profile or the engine is not known, which other rules tell
    for at, instance in enumerate(case.instances):
        asked = instance.get("gpus")
        gpus = [case.gpu(one) for one in asked] if isinstance(asked, list) else []
        mine = matrices.rows_of(rows, [gpu["compute_cap"] for gpu in gpus if gpu])
        family = _family(case.model(instance.get("model_path")))
        mine = [row for row in mine if family in row["families"]] or mine
        for name, observed, allowed in matrices.refusals(matrix, mine, {**instance, "env": env_of(instance)}):
            if str(args_of(instance).get(name)).lower() == "auto":
                continue  # the rule backend-auto tells it
            key = "args" if name in matrices.dashed(instance.get("args")) else "env"
            written = name
            if key == "env" and name not in (instance.get("env") or {}):
                written = name.replace("SGLANG_", "SGL_", 1)  # which the engine writes over the other
            yield Hit(
                label(instance, at),
                f"{key}: {written}: {observed}",
                " or ".join(allowed) if key == "env" or len(allowed) > 1 or allowed != (name,) else f"without {name}",
                f"Remove {written} from {key} of it in {case.where}; the profile's own choice is taken then.",
            )


def _family(model: Map | None) -> str | None:
    """One family of the rows that a model belongs to; None where its configuration is not known, or in no row."""
    if not model or "hybrid" not in model:
        return None
    if model["hybrid"]:
        return "hybrid-gdn" if model.get("model_type") in FORKING_MODEL_TYPES else None
    return "dense"
