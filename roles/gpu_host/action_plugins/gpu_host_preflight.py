# SPDX-License-Identifier: Apache-2.0
"""The controller's half of the preflight: gives the module NVIDIA's pynvml, so that a bare host needs nothing installed.

pynvml is one file of pure Python. It travels as a packed argument of the module (65 KB): that costs no connection of its own,
leaves no file behind, and takes a host without a GPU no time, as it is unpacked only where the driver's library is.
"""

from __future__ import annotations

import base64
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


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
    """Calls the module with one argument more."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Result of the module."""
        task_vars = task_vars or {}
        super().run(tmp, task_vars)
        arguments = {**self._task.args, "pynvml": source()}
        return dict(self._execute_module(module_name="gpu_host_preflight", module_args=arguments, task_vars=task_vars))
