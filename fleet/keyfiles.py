# SPDX-License-Identifier: Apache-2.0
"""Files with API keys on the control machine, looked at before anything is changed. The keys themselves are never told."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import Any

from ansible.module_utils.gpu_host_judge import instances_of

VAULT = "$ANSIBLE_VAULT"


def found(instances: Any, defaults: Any, folder: Any) -> list[dict[str, Any]]:
    """What the rules about key files look at: `[{path, quoted, of, fault, fix, open}]`, a file each.

    of: the instances that name it. fault: why it cannot be used, None for a good one, and fix, what to do then. open: its mode
    where everybody may read it, else None. folder: the inventory's, where relative paths start.
    """
    named: dict[Path, list[str]] = {}
    for instance in instances_of({"instances": instances, "defaults": defaults}):
        if isinstance(file := instance.get("api_key_file"), str) and file:
            path = Path(folder or ".", Path(file).expanduser())
            named.setdefault(path, []).append(f"instance {instance.get('name')}")
    return [{"of": " and ".join(who), **_look(path)} for path, who in named.items()]


def _look(path: Path) -> dict[str, Any]:
    short = os.path.relpath(path)
    shown = str(path) if short.startswith("..") else short
    quoted = shlex.quote(shown)
    folder = "" if path.parent.is_dir() else f"mkdir -p {shlex.quote(str(Path(shown).parent))} && "
    make = f"`(umask 077; {folder}openssl rand -hex 32 >{quoted})` on this control machine makes one"
    about = {"path": shown, "quoted": quoted, "fault": None, "fix": None, "open": None}
    try:
        text = path.read_text(encoding="ascii").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return {**about, "fault": "no such file", "fix": make}
    except IsADirectoryError:
        return {**about, "fault": "a folder", "fix": f"Name a file in it, or `rmdir {quoted}` and {make}"}
    except PermissionError:
        own = f'`sudo chown "$USER" {quoted} && chmod 600 {quoted}` on this control machine'
        return {**about, "fault": "not readable by the user who runs this", "fix": own}
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else "no plain text"
        return {**about, "fault": told, "fix": make}
    if text.startswith(VAULT):
        plain = f"`ansible-vault decrypt {quoted} && chmod 600 {quoted}` (the file is read as it is)"
        return {**about, "fault": "encrypted by ansible-vault", "fix": plain}
    if not text:
        return {**about, "fault": "empty", "fix": make}
    if len(text.splitlines()) > 1 or not text.isprintable():
        return {**about, "fault": f"{len(text.splitlines())} lines, or letters that no header may have", "fix": make}
    return {**about, "open": f"{mode:04o}" if mode & stat.S_IROTH else None}
