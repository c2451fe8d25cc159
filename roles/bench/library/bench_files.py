#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: a folder with exactly these files."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bench_files
short_description: Make a folder hold exactly the given text files
description:
  - Writes what differs and removes what is not named, folders that become empty included. Files are root's and readable by all.
options:
  path:
    description: The folder.
    type: str
    required: true
  files:
    description: Text by path below the folder.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - The sglang-fleet authors
"""

EXAMPLES = r"""
- name: Lay out the benchmark
  bench_files:
    path: /var/lib/sglang-fleet/bench/core
    files: "{{ lookup('bench_core', '') }}"
"""

RETURN = r"""
written:
  description: Paths that differed or were missing.
  returned: always
  type: list
  elements: str
removed:
  description: Paths that were there and are not named.
  returned: always
  type: list
  elements: str
"""

import os
import platform
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def differences(folder: Path, files: dict[str, str]) -> tuple[list[str], list[str]]:
    """(paths to write, paths to remove). Raises ValueError for a path that leaves the folder."""
    for path in files:
        if Path(path).is_absolute() or ".." in Path(path).parts or not path:
            raise ValueError(f"{path!r} is not a path below {folder}")
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_symlink() or not file.is_dir()}
    wrong = [path for path, text in files.items() if path not in there or _differs(folder / path, text)]
    return sorted(wrong), sorted(there - set(files))


def _differs(file: Path, text: str) -> bool:
    return file.is_symlink() or file.read_bytes() != text.encode() or file.stat().st_mode & 0o777 != 0o644


def apply(folder: Path, files: dict[str, str], written: list[str], removed: list[str]) -> None:
    """Write and remove; a file is replaced as a whole."""
    for path in removed:
        (folder / path).unlink()
    for path in written:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.new")
        new.write_bytes(files[path].encode())
        new.chmod(0o644)
        new.replace(file)
    for place in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        if not any(place.iterdir()):
            place.rmdir()


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={"path": {"type": "str", "required": True}, "files": {"type": "dict", "required": True}},
        supports_check_mode=True,
    )
    os.umask(0o022)
    folder, files = Path(module.params["path"]), module.params["files"]
    try:
        written, removed = differences(folder, files)
        if not module.check_mode:
            apply(folder, files, written, removed)
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"{platform.node()}: {folder}: {error}")
    diff = {
        "before_header": str(folder),
        "after_header": str(folder),
        "before": "".join(f"{path}\n" for path in removed),
        "after": "".join(f"{path}\n" for path in written),
    }
    module.exit_json(changed=bool(written or removed), written=written, removed=removed, diff=diff)


if __name__ == "__main__":
    main()
