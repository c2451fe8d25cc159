# SPDX-License-Identifier: Apache-2.0
"""Lookup: the benchmark's files, whole, so that one task carries them to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: bench_core
author: sglang-fleet (@sglang-fleet)
short_description: The files of fleet.bench by their path in the repository
description:
  - What the benchmark needs on a host beside a release, the package itself and the data of other roles that it reads.
options:
  _terms:
    description: A file of prompts of the control machine, added as C(prompts.jsonl); empty for none.
    required: true
    type: list
    elements: str
"""

EXAMPLES = r"""
- name: Lay out the benchmark
  bench_files:
    path: /var/lib/sglang-fleet/bench/core
    files: "{{ lookup('bench_core', '') }}"
"""

RETURN = r"""
_raw:
  description: One mapping of path and text.
  type: list
  elements: dict
"""

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ("*.py", "*.yml", "*.jsonl")
BESIDE = (
    "fleet/__init__.py",
    "fleet/importer.py",
    "roles/gpu_units/files/modes.yml",
    "roles/smoke/files/hooks.yml",
)


def files() -> list[Path]:
    """Every file, sorted."""
    package = [path for pattern in PACKAGE for path in (ROOT / "fleet/bench").glob(pattern)]
    return sorted([*package, *(ROOT / path for path in BESIDE)])


class LookupModule(LookupBase):
    """See DOCUMENTATION."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, str]]:
        """One mapping."""
        texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files()}
        for term in filter(None, terms):
            try:
                texts["prompts.jsonl"] = Path(term).expanduser().read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise AnsibleError(
                    f"bench_prompts {term} of the control machine can't be read ({error}); name a file of JSON lines"
                ) from error
        return [texts]
