#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: build and publish a release. Its action plugin makes the plan on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_release
short_description: Build and publish a hash-locked SGLang release
description:
  - A release is an immutable folder with a venv out of a lock, the files of a device profile and a manifest. Its id is a hash
    of its inputs, so that a second run finds it and changes nothing.
  - O(state=probed) says what is there and what is missing. O(state=built) builds into C(releases/.build-<id>); anything that
    goes wrong removes that folder. O(state=published) renames the finished build.
  - The plan (id, files with their sha256, bounds) is made on the controller from the engine's folder; nothing is resolved on
    the host.
version_added: "1.0"
author: sglang-fleet
options:
  state:
    description: What to do.
    type: str
    choices: [probed, built, published]
    default: built
  root:
    description: Folder that holds C(releases) and C(tools).
    type: path
    required: true
  id:
    description: Id of the release, for O(state=published); the other states compute it.
    type: str
  engine:
    description: Name of the engine, a folder below O(engines).
    type: str
  engines:
    description: Folder on the controller with one folder per engine.
    type: str
  uv_requirements:
    description: Requirements file on the controller with the one pin of uv.
    type: str
  python:
    description: The Python of the venv on the host, C(version) as C(3.12) and C(path).
    type: dict
  machine:
    description: Platform of the host, C(x86_64) or C(aarch64).
    type: str
  profile:
    description: The published device profile; C(name), C(files), C(stub_libcuda) and C(stub_symbols) are used.
    type: dict
  series:
    description: Digest of the patch series that the release will carry; empty for an unpatched one.
    type: str
    default: ""
  uv_cache:
    description: Cache of uv on the host. Below O(root), so that files are linked and not copied.
    type: path
  link_mode:
    description: How uv puts files into the venv.
    type: str
    choices: [hardlink, symlink, copy, clone]
    default: hardlink
  wheelhouse:
    description: Folder on the host with all wheels of the lock and of uv; then no index is asked.
    type: path
  index_url:
    description: Package index to ask instead of the default one. Handed on by environment; hidden in output.
    type: str
  adopt:
    description:
      - Folders on the host, each a venv or a site-packages folder, to take the engine over from by copy; of a distribution in
        several the first counts. Nothing is installed then, and what is in them becomes part of the id.
      - Versions that the engine depends on have to be the lock's; others that differ or are missing are told as a warning.
    type: list
    elements: path
    default: []
  user:
    description: Owner of the release's C(cache) folder.
    type: str
  packages:
    description: Debian packages that the host must have; O(state=probed) says which are missing.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Build the release
  sglang_release:
    root: /opt/sglang-fleet
    engine: sglang-0.5.11
    engines: "{{ playbook_dir }}/engines"
    uv_requirements: "{{ playbook_dir }}/requirements/uv.txt"
    python: {version: "3.12", path: /usr/bin/python3.12}
    machine: x86_64
    profile: {name: sm90, files: {}}
    uv_cache: /opt/sglang-fleet/cache/uv

- name: Publish it
  sglang_release:
    state: published
    root: /opt/sglang-fleet
    id: 0123456789abcd
"""

RETURN = r"""
release:
  description: Id, path, path of the build (equal to path if published) and whether it is published.
  type: dict
  returned: always
  sample: {id: 0123456789abcd, path: /opt/sglang-fleet/releases/0123456789abcd, present: true}
adopted:
  description: What was taken over, with O(adopt); distributions that differ from the lock, are missing or incomplete, and more.
  type: dict
  returned: when a release was taken over
missing_packages:
  description: Debian packages to install, for O(state=probed).
  type: list
  returned: when probed
manifest:
  description: The manifest of the build.
  type: dict
  returned: when a release was built
seconds:
  description: Seconds of the build by step.
  type: dict
  returned: when a release was built
"""

import json
import os
import pwd
from pathlib import Path
from typing import Any

from ansible.module_utils import sglang_venv_adopt as adopting
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_venv_adopt import AdoptError, Adoption
from ansible.module_utils.sglang_venv_base import BuildError, Options
from ansible.module_utils.sglang_venv_build import build, publish, unfinished
from ansible.module_utils.sglang_venv_release import build_path, compare, release_path


def current_packages(root: Path) -> tuple[str, dict[str, str]]:
    """Id and packages of the release that `current` names; ('', {}) if there is none."""
    try:
        manifest = json.loads((root / "current" / "manifest.json").read_text())
        return manifest["id"], manifest["packages"]
    except (OSError, ValueError, KeyError):
        return "", {}


def published_facts(root: Path, identifier: str) -> dict[str, Any]:
    """The `release` of the answer."""
    path, folder = release_path(root, identifier), build_path(root, identifier)
    present = path.exists()
    return {"id": identifier, "path": str(path), "build_path": str(path if present else folder), "present": present}


def missing_packages(module: AnsibleModule, wanted: list[str]) -> list[str]:
    """Which Debian packages are not installed."""
    if not wanted:
        return []
    query = module.get_bin_path("dpkg-query", required=True)
    _, out, _ = module.run_command([query, "-W", "-f", "${binary:Package} ${db:Status-Status}\n", *wanted])
    there = {line.split()[0].split(":")[0] for line in out.splitlines() if line.endswith(" installed")}
    return [name for name in wanted if name not in there]


def read_folders(root: Path, plan: dict[str, Any], folders: list[str]) -> Adoption | None:
    """What the folders to adopt hold; the plan gets the id that comes of it. None if there are none, or if they are gone and
    `root` has the release that was made of them. AdoptError."""
    if not folders:
        return None
    plan["base"] = plan["id"]
    if any(not Path(folder).exists() for folder in folders) and (
        known := adopting.find_known(root, plan["base"], folders)
    ):
        plan["id"] = known
        return None
    adoption = adopting.scan(folders)
    plan["id"] = adopting.adopted_id(plan["base"], adoption.identity())
    return adoption


def diff_of(root: Path, plan: dict[str, Any], adoption: Adoption | None) -> dict[str, str]:
    """What a build would add, as a diff: the release by its inputs, then every package that differs from the current one."""
    before, packages = current_packages(root)
    after = adoption.packages if adoption else plan["packages"]
    lines = [
        f"release: {plan['id']}",
        f"engine: {plan['engine']}",
        f"python: {plan['python']} on {plan['machine']}",
        f"profile: {plan['profile']['name']}",
        f"series: {plan['series'] or 'none'}",
        f"packages: {len(after)}",
        *(f"taken over from: {folder}" for folder in (adoption.folders if adoption else [])),
    ]
    if before:
        lines += [f"against {before}: {line}" for line in compare(packages, after) or ["same packages"]]
    return {"before": "", "after": "\n".join(lines) + "\n", "after_header": str(release_path(root, plan["id"]))}


def run(module: AnsibleModule) -> dict[str, Any]:
    """One state; the answer for exit_json. BuildError for a failure."""
    params, root = module.params, Path(module.params["root"])
    if params["state"] == "published":
        before = published_facts(root, params["id"])
        if module.check_mode or before["present"]:
            if not module.check_mode:
                publish(root, params["id"])  # throws away this run's own build if another run was first
            return {"changed": not before["present"], "release": before}
        changed = publish(root, params["id"])
        return {"changed": changed, "release": published_facts(root, params["id"])}

    plan = json.loads(params["plan"]) if params["plan"] else json.loads(Path(params["plan_file"]).read_text())
    adoption = read_folders(root, plan, params["adopt"])
    answer: dict[str, Any] = {"changed": False, "release": published_facts(root, plan["id"])}
    if params["state"] == "probed":
        answer["missing_packages"] = missing_packages(module, params["packages"])
        answer["unfinished"] = [str(path) for path in unfinished(root)]
        return answer
    if answer["release"]["present"]:
        return answer
    for text in adopting.check(adoption, plan) if adoption else []:
        module.warn(text)
    answer |= {"changed": True, "diff": diff_of(root, plan, adoption)}
    if module.check_mode:
        return answer
    owner = pwd.getpwnam(params["user"]) if params["user"] else None
    options = Options(
        root=root,
        python=params["python"]["path"],
        uv_cache=Path(params["uv_cache"]),
        link_mode=params["link_mode"],
        wheelhouse=Path(params["wheelhouse"]) if params["wheelhouse"] else None,
        index_url=params["index_url"] or "",
        uid=owner.pw_uid if owner else -1,
        gid=owner.pw_gid if owner else -1,
    )
    done = build(plan, options, adoption)
    if adoption and not done["present"]:
        adopted = done["manifest"]["adopted"]
        answer["adopted"] = {key: value for key, value in adopted.items() if key != "distributions"}
        if adopted["changed"]:
            module.warn(f"files that are not as their wheel has them were taken over: {adopted['changed']}")
    return answer | {
        "changed": not done["present"],
        "release": published_facts(root, plan["id"]),
        "discarded": done["discarded"],
        "seconds": done["seconds"],
        "manifest": {
            key: value
            for key, value in done.get("manifest", {}).items()
            if key not in ("packages", "backends", "adopted")
        },
    }


def main() -> None:
    """Entry point. Options that only the action plugin reads are taken out by it; `plan` and `plan_file` are its own."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["probed", "built", "published"], "default": "built"},
            "root": {"type": "path", "required": True},
            "id": {"type": "str"},
            "plan": {"type": "str"},
            "plan_file": {"type": "path"},
            "python": {"type": "dict"},
            "uv_cache": {"type": "path"},
            "link_mode": {"type": "str", "choices": ["hardlink", "symlink", "copy", "clone"], "default": "hardlink"},
            "wheelhouse": {"type": "path"},
            "index_url": {"type": "str", "no_log": True},
            "adopt": {"type": "list", "elements": "path", "default": []},
            "user": {"type": "str"},
            "packages": {"type": "list", "elements": "str", "default": []},
        },
        required_if=[
            ("state", "probed", ["plan", "plan_file"], True),
            ("state", "built", ["plan", "plan_file"], True),
            ("state", "published", ["id"]),
        ],
        supports_check_mode=True,
    )
    os.umask(0o022)
    try:
        answer = run(module)
    except (BuildError, AdoptError) as error:
        module.fail_json(msg=str(error))
    except KeyError as error:
        module.fail_json(msg=f"the user {module.params['user']!r} does not exist on this host ({error})")
    else:
        module.exit_json(**answer)


if __name__ == "__main__":
    main()
