# SPDX-License-Identifier: Apache-2.0
"""Controller side of sglang_release: reads the engine's folder, makes the plan, hands it over.

Only what the state needs travels: to probe a host or to find a published release there, the id; to build, the whole plan
as a file, since it is too long for an argument that modules write to the host's log.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Ansible makes the roles' module_utils importable for modules only; the repository's own finder does it for the controller.
REPO = Path(__file__).resolve().parents[3]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))
import_module("fleet")

from ansible.module_utils.sglang_venv_lock import LockError
from ansible.module_utils.sglang_venv_release import make_plan

# Read here and of no use to the module.
_OWN = ("engine", "engines", "uv_requirements", "machine", "profile", "series")


def read_engine(folder: Path, uv_requirements: Path) -> dict[str, Any]:
    """The arguments of make_plan that come from files. LockError names a file that is missing or can't be read."""
    try:
        return {
            "engine": yaml.safe_load((folder / "engine.yml").read_text()),
            "overrides": yaml.safe_load((folder / "overrides.yml").read_text()) or {},
            "lock": (folder / "lock.txt").read_text(),
            "files": json.loads((folder / "files.json").read_text()),
            "uv": uv_requirements.read_text(),
            "imports": yaml.safe_load((folder / "imports.yml").read_text())
            if (folder / "imports.yml").exists()
            else {},
        }
    except FileNotFoundError as error:
        known = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/engine.yml"))) or "none"
        raise LockError(f"engine {folder.name}: {error.filename} is missing; engines here: {known}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise LockError(f"engine {folder.name}: {error}") from None


class ActionModule(ActionBase):
    """See roles/sglang_venv/library/sglang_release.py for the options."""

    _requires_connection = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = dict(self._task.args)
        state = arguments.get("state", "built")
        if state == "published":
            return self._call(arguments, variables)
        if not isinstance(arguments.get("adopt") or [], list):
            raise AnsibleActionFail(
                f"sglang_venv_adopt: {arguments['adopt']!r} is no list of folders; write [FOLDER, ..]"
            )
        plan = self._plan(arguments)
        arguments = {key: value for key, value in arguments.items() if key not in _OWN}
        # What a probe, a check and a converged host need, and no more.
        short = {key: value for key, value in plan.items() if key not in ("files", "imports", "backends")}
        short["profile"] = {"name": plan["profile"]["name"]}
        if state == "probed":
            return self._call(arguments | {"plan": json.dumps({"id": plan["id"]})}, variables)
        if self._task.check_mode:
            return self._call(arguments | {"plan": json.dumps(short)}, variables)
        found = self._call(
            arguments | {"state": "probed", "packages": [], "plan": json.dumps({"id": plan["id"]})}, variables
        )
        if found.get("failed") or found["release"]["present"]:
            return {key: value for key, value in found.items() if key != "missing_packages"}
        self._make_tmp_path()
        remote = self._connection._shell.join_path(self._connection._shell.tmpdir, "plan.json")
        self._transfer_data(remote, json.dumps(plan))
        self._fixup_perms2((self._connection._shell.tmpdir, remote))
        return self._call(arguments | {"plan_file": remote}, variables)

    def _plan(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not arguments.get("python"):
            raise AnsibleActionFail("no supported Python was found on this host; install python3.12 or python3.11")
        try:
            folder = Path(arguments["engines"]) / arguments["engine"]
            return make_plan(
                **read_engine(folder, Path(arguments["uv_requirements"])),
                python=str(arguments["python"]["version"]),
                machine=str(arguments["machine"]),
                profile=arguments["profile"],
                series=str(arguments.get("series") or ""),
            )
        except LockError as error:
            raise AnsibleActionFail(str(error)) from None
        except KeyError as error:
            raise AnsibleActionFail(f"sglang_release: the option or key {error} is missing") from None

    def _call(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name="sglang_release", module_args=arguments, task_vars=variables
        )
        return result
