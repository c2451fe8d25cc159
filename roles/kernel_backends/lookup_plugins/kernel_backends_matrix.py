# SPDX-License-Identifier: Apache-2.0
"""Lookup that gives the preflight as much of the matrix of backends as it needs to judge an inventory."""

from __future__ import annotations

DOCUMENTATION = r"""
name: kernel_backends_matrix
author: sglang-fleet
short_description: The part of the matrix of backends that can judge an inventory
description:
  - Reads C(files/matrix.yml) of the role on the controller, checks it, and leaves out what no instance asks for.
options:
  _terms:
    description: Engine whose rows are kept.
    required: true
  instances:
    description: As C(gpu_units_instances). Other rules tell what is malformed.
    type: raw
  defaults:
    description: As C(gpu_units_defaults).
    type: raw
"""

EXAMPLES = r"""
- ansible.builtin.debug:
    msg: "{{ lookup('kernel_backends_matrix', fleet_engine, instances=gpu_units_instances, defaults=gpu_units_defaults) }}"
"""

RETURN = r"""
_raw:
  description: One dictionary per engine with C(topics), C(modes) and C(rows).
  type: list
  elements: dict
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

# Ansible makes the roles' module_utils importable for modules only; the repository's own finder does it for the controller.
REPO = Path(__file__).resolve().parents[3]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

backends = import_module("fleet.backends")


class LookupModule(LookupBase):
    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        try:
            return [backends.asked(term, kwargs.get("instances"), kwargs.get("defaults")) for term in terms]
        except ValueError as error:
            raise AnsibleError(f"kernel_backends: {error}") from error
