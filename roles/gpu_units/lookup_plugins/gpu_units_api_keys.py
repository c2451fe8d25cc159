# SPDX-License-Identifier: Apache-2.0
"""Lookup: API keys of a host's instances, read on the control machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: gpu_units_api_keys
short_description: API keys by instance, from files of the control machine
description:
  - Reads the file that each instance names as C(api_key_file), itself or by the defaults. Relative paths start at the
    inventory's folder.
options:
  _terms:
    description: The instances.
    required: true
  defaults:
    description: Keys that hold for every instance.
    type: dict
    default: {}
author:
  - The sglang-fleet authors
"""

EXAMPLES = r"""
- name: Show whose key is there
  ansible.builtin.debug:
    msg: "{{ lookup('gpu_units_api_keys', *gpu_units_instances, defaults=gpu_units_defaults).keys() | list }}"
"""

RETURN = r"""
_raw:
  description: "One mapping of instance: key."
  type: list
  elements: dict
"""


class LookupModule(LookupBase):
    """See DOCUMENTATION."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, str]]:
        """One mapping for all instances."""
        self.set_options(var_options=variables, direct=kwargs)
        defaults = self.get_option("defaults")
        keys = {}
        for instance in terms:
            file = (
                (instance.get("api_key_file") or defaults.get("api_key_file")) if isinstance(instance, dict) else None
            )
            if not file:
                continue
            path = Path((variables or {}).get("inventory_dir") or ".", Path(file).expanduser())
            try:
                keys[instance.get("name")] = path.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise AnsibleError(
                    f"instance {instance.get('name')}: api_key_file {path} of the control machine can't be read "
                    f"({error.strerror}); write the key into it, or take api_key_file out"
                ) from error
        return [keys]
