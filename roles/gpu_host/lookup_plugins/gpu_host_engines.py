# SPDX-License-Identifier: Apache-2.0
"""The engines that this repository can build: folders under engines/ that hold a lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: gpu_host_engines
author: sglang-fleet
short_description: Names of the engines that have a lock
description: Reads the folder engines of the repository on the controller.
options:
  _terms:
    description: Path of the folder.
    required: true
"""

EXAMPLES = r"""
- name: Show what can be built
  ansible.builtin.debug:
    msg: "{{ query('gpu_host_engines', role_path ~ '/../../engines') }}"
"""

RETURN = r"""
_raw: {description: Names in order., type: list, elements: str}
"""


class LookupModule(LookupBase):
    """Lists folders; an absent folder is an empty list, which the rule engine-unknown then reports."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:
        """Sorted names of the folders that hold a lock.txt."""
        del variables, kwargs
        return sorted(lock.parent.name for term in terms for lock in Path(str(term)).glob("*/lock.txt"))
