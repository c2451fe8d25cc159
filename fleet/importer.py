# SPDX-License-Identifier: Apache-2.0
"""Makes the roles' Python importable outside Ansible, under the names it has inside Ansible.

Ansible flattens the `module_utils` of all roles into `ansible.module_utils`, and finds modules and lookups of a role by
file name. `install()` does the same for this process: `ansible.module_utils.X` is `roles/*/module_utils/X.py`, and a file
of `roles/*/library` or `roles/*/lookup_plugins` is the top-level module of its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
UTILS = "ansible.module_utils."


class RoleFinder(MetaPathFinder):
    """Finds role code by name; files are looked up at import time, so a new file needs no new process."""

    def __init__(self, roles: Path) -> None:
        self.roles = roles

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a role's file, None for any other name; ImportError if two roles carry the name."""
        del path, target
        if fullname.startswith(UTILS):
            folders, name = ["module_utils"], fullname.removeprefix(UTILS)
        else:
            folders, name = ["library", "lookup_plugins"], fullname
        if "." in name:
            return None
        found = [f for folder in folders for f in sorted(self.roles.glob(f"*/{folder}/{name}.py"))]
        if len(found) > 1:
            raise ImportError(f"{fullname} is in several roles ({', '.join(map(str, found))}); Ansible would take any")
        return spec_from_file_location(fullname, found[0]) if found else None


def install(roles: Path = ROOT / "roles") -> None:
    """Puts the finder first, once per roles folder."""
    if not any(isinstance(f, RoleFinder) and f.roles == roles for f in sys.meta_path):
        sys.meta_path.insert(0, RoleFinder(roles))
