# SPDX-License-Identifier: Apache-2.0
"""Lookup of an engine's patch series, whole, so that one task carries it to the host."""

from __future__ import annotations

DOCUMENTATION = r"""
name: ddtree_series
author: sglang-fleet (@sglang-fleet)
short_description: The patch series of an engine, proven to agree with its manifest
description:
  - Reads C(ddtree_patches/ENGINE) of the repository and checks every file against the hashes of its C(manifest.yml).
  - Fails if a patch or an overlay file was edited without C(bin/series refresh), so a digest never lies.
options:
  _terms:
    description: Names of engines, e.g. V(sglang-0.5.11).
    required: true
    type: list
    elements: str
  root:
    description: Folder that holds the series of all engines. Empty means C(ddtree_patches) of the repository.
    type: str
    default: ''
"""

EXAMPLES = r"""
- name: Show what a release id is made of
  ansible.builtin.debug:
    msg: "{{ lookup('ddtree_series', 'sglang-0.5.11').digest }}"
"""

RETURN = r"""
_raw:
  description: One mapping per engine.
  type: list
  elements: dict
  contains:
    engine:
      description: Name of the engine.
      type: str
    distribution:
      description: Python distribution that is patched.
      type: str
    version:
      description: Version of the distribution.
      type: str
    digest:
      description: sha256 over all that the series changes; part of the release id.
      type: str
    patches:
      description: Names of the patches in order.
      type: list
      elements: str
    files:
      description: Touched files, path to C(before) and C(after) sha256; C(before) is null for a new file.
      type: dict
    imports:
      description: Modules that must be importable afterwards.
      type: list
      elements: str
    payload:
      description: The whole series as one line, for the module M(ddtree_apply).
      type: str
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

REPO = Path(__file__).resolve().parents[3]


class LookupModule(LookupBase):
    """Runs on the controller, from the repository that holds the role."""

    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """One mapping per engine; AnsibleLookupError names what does not agree."""
        self.set_options(var_options=variables, direct=kwargs)
        if str(REPO) not in sys.path:
            sys.path.append(str(REPO))
        from fleet import series

        root = Path(self.get_option("root") or series.ROOT)
        try:
            found = [series.load(engine, root) for engine in terms]
        except series.SeriesError as e:
            raise AnsibleLookupError(f"ddtree_series: {e}") from e
        return [
            {
                "engine": one.engine,
                "distribution": one.distribution,
                "version": one.version,
                "digest": one.digest,
                "patches": [name for name, _ in one.patches],
                "files": {path: asdict(h) for path, h in one.files.items()},
                "imports": list(one.imports),
                "payload": one.pack(),
            }
            for one in found
        ]
