# SPDX-License-Identifier: Apache-2.0
"""The controller's half of the preflight: what this repository declares, and NVIDIA's pynvml, so that a bare host needs nothing.

pynvml is one file of pure Python. It travels as a packed argument of the module (65 KB): that costs no connection of its own,
leaves no file behind, and takes a host without a GPU no time, as it is unpacked only where the driver's library is.
"""

from __future__ import annotations

import base64
import sys
import zlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Ansible makes the roles' module_utils importable for modules only; the repository's own finder does it for the controller.
REPO = Path(__file__).resolve().parents[3]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))
declared, keyfiles, recording, remote = (
    import_module(f"fleet.{name}") for name in ("declared", "keyfiles", "recording", "remote")
)


def source() -> str:
    """The control environment's pynvml.py, packed as `gpu_host_nvml.load` takes it."""
    spec = find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise AnsibleActionFail(
            "The control environment has no pynvml, which reads the GPUs' facts. Next: run Ansible from the environment that "
            "`source bin/setup.sh` makes, or install nvidia-ml-py beside Ansible."
        )
    return base64.b85encode(zlib.compress(Path(spec.origin).read_bytes(), 9)).decode("ascii")


class ActionModule(ActionBase):
    """Calls the module with one argument more, and with what the rules about an inventory hold it against."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Result of the module."""
        task_vars = task_vars or {}
        super().run(tmp, task_vars)
        wanted = self._task.args.get("wanted")
        if not isinstance(wanted, dict):
            raise AnsibleActionFail("gpu_host_preflight: wanted is no map; roles/gpu_host/tasks/main.yml has its keys.")
        asked = (wanted.get(key) for key in ("engine", "instances", "defaults"))
        known = declared.known(*asked, task_vars)
        known["key_files"] = keyfiles.found(
            wanted.get("instances"), wanted.get("defaults"), task_vars.get("inventory_dir")
        )
        way = {name: self._templar.template(task_vars[name]) for name in remote.WAY if name in task_vars}
        known["ssh"] = remote.client_options(way)
        arguments = {**self._task.args, "wanted": {**wanted, **known}, "pynvml": source()}
        try:
            arguments["stand_in"] = recording.read(arguments.pop("facts_file", "")) or None
        except recording.RecordingError as error:
            raise AnsibleActionFail(f"{self._task.args.get('host')}: {error}") from error
        return dict(self._execute_module(module_name="gpu_host_preflight", module_args=arguments, task_vars=task_vars))
