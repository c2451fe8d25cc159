#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: brings the engine of a release from clean to patched, or reports what it is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ddtree_apply
author: sglang-fleet (@sglang-fleet)
short_description: Apply a patch series to the engine of a release
description:
  - Checks the sha256 of every touched file, computes the whole series in memory, replaces the files by rename (links into
    a package cache are replaced, never written through), checks all hashes from disk, imports every patched module with
    the release's own Python and writes the stamp C(ddtree.json) into the release.
  - A release whose stamp and hashes agree with the series is left alone.
options:
  release:
    description: Folder of the release or of its build; the engine is in C(venv/lib/python3.*/site-packages) below it.
    type: path
    required: true
  series:
    description: The series, packed, from C(lookup('ddtree_series', ENGINE).payload).
    type: str
    required: true
  state:
    description: V(applied) patches, V(reported) only says what the release is.
    type: str
    choices: [applied, reported]
    default: applied
  published:
    description: Whether the release is published. A published release is never changed, only checked.
    type: bool
    default: false
  import_check:
    description: Whether to import the patched modules after patching.
    type: bool
    default: true
  import_env:
    description:
      - Environment of the imports, on top of a bare one; what the profile says.
      - C({release}) in a value stands for O(release).
    type: dict
    default: {}
  import_timeout:
    description: Seconds that the imports may take.
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Predicts; a release that is not there yet is taken for a clean one.
  diff_mode:
    support: full
    description: Shows the hunks of the series, new files included.
"""

EXAMPLES = r"""
- name: Patch the build
  ddtree_apply:
    release: "{{ sglang_venv_release.build_path }}"
    series: "{{ lookup('ddtree_series', 'sglang-0.5.11').payload }}"
"""

RETURN = r"""
state:
  description:
    - State of the release now.
    - V(clean), V(applied), V(partial), V(foreign), V(superseded) or, while it is not built, V(absent).
  type: str
  returned: always
was:
  description: State that was found.
  type: str
  returned: always
digest:
  description: Digest of the series.
  type: str
  returned: always
reason:
  description: Why the state is what it is, empty for a clean or applied release.
  type: str
  returned: always
stamped:
  description: Whether the release carries the stamp of this series, so that its imports were proven.
  type: bool
  returned: always
imported:
  description: Modules that were imported in this run.
  type: list
  elements: str
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils import ddtree_patches_series as core
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "release": {"type": "path", "required": True},
            # Not a secret, but 100 kB that do not belong into the journal of every host.
            "series": {"type": "str", "required": True, "no_log": True},
            "state": {"type": "str", "choices": ["applied", "reported"], "default": "applied"},
            "published": {"type": "bool", "default": False},
            "import_check": {"type": "bool", "default": True},
            "import_env": {"type": "dict", "default": {}},
            "import_timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    try:
        answer = answer_for(module.params, module.check_mode)
    except core.SeriesError as e:
        module.fail_json(msg=str(e))
    if not module._diff:
        answer.pop("diff", None)
    for text in answer.pop("warn", []):
        module.warn(text)
    module.exit_json(**answer)


def answer_for(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """What the module returns. Raises SeriesError."""
    if not params["release"]:
        raise core.SeriesError(
            "release is empty; expected the folder of a release (role variable ddtree_patches_release)"
        )
    series = core.Series.unpack(params["series"])
    release = Path(params["release"])
    stamp, published = release / core.STAMP, params["published"]
    warn: list[str] = []
    answer: dict[str, Any] = {
        "changed": False,
        "digest": series.digest,
        "reason": "",
        "stamped": False,
        "imported": [],
        "warn": warn,
    }
    hunks = {"prepared": series.diff_text()}
    patches = params["state"] == "applied"

    try:
        site = core.find_site(release / "venv")
    except core.SeriesError as e:
        if patches and (published or not check_mode):
            raise
        # Nothing is built yet: the role before this one predicts its folder, this one its hunks.
        answer |= {"was": "absent", "state": "absent", "reason": str(e), "changed": patches}
        return answer | ({"diff": hunks} if patches else {})
    found = core.inspect(site, series)
    answer |= {"was": found.state, "state": found.state, "reason": found.reason}
    if patches and check_mode and not published and found.state in core.NEXT_STEP:
        # The real run throws an unfinished build away and makes a clean one first.
        warn.append(f"{release} is an unfinished build and {found.state}; a run makes it anew: {found.reason}")
        return answer | {"changed": True, "diff": hunks}
    if patches:
        python = release / "venv/bin/python"
        env = {name: str(value).replace("{release}", str(release)) for name, value in params["import_env"].items()}

        def imports() -> list[str]:
            names: list[str] = core.check_imports(python, site, series, env, params["import_timeout"])
            return names

        done = core.apply(
            series,
            site,
            stamp=stamp,
            imports=imports if params["import_check"] else None,
            published=published,
            dry=check_mode,
        )
        answer |= {"changed": done.changed, "imported": done.imported}
        if not check_mode:
            answer["state"] = done.state
        if done.was == "clean":
            answer["diff"] = hunks
    if patches and answer["state"] == "superseded":
        warn.append(f"{release} stays as it is: {found.reason}")
    answer["stamped"] = core.read_stamp(stamp).get("digest") == series.digest
    if published and answer["state"] == "applied" and not answer["stamped"]:
        warn.append(f"{stamp} is missing or of another series, though every file is as the series makes it")
    return answer


if __name__ == "__main__":
    main()
