# SPDX-License-Identifier: Apache-2.0
"""Files with API keys on the control machine, looked at before anything is changed. The keys themselves are never told."""

from __future__ import annotations

import re
import shlex
import stat
from pathlib import Path
from typing import Any

from ansible.module_utils.gpu_host_judge import instances_of

from fleet.target import short_path

VAULT = "$ANSIBLE_VAULT"


# Keys as services hand them out, and long words in no folder: nobody names a file like this.
KEY_LIKE = re.compile(
    r"(sk|hf|gsk|xai|ghp|nvapi)[-_][^\s.]{8,}|Bearer\s.*|(?=(?:\D*\d){3})(?:[A-Za-z0-9_+=-]{16,}|[A-Za-z0-9/_+=-]{24,})"
)
HIDDEN = "(hidden)"


def found(instances: Any, defaults: Any, folder: Any) -> list[dict[str, Any]]:
    """What the rules about key files look at: `[{path, quoted, of, fault, fix, instead, open}]`, a file each.

    of: the instances that name it. fault: why it cannot be used, None for a good one, and fix, what to do then: a file that holds
    anything is never written over. instead: the name in the inventory of the file that the fix makes in its place. open: its mode
    where everybody may read it, else None. folder: the inventory's, where relative paths start.
    """
    named: dict[str, list[str]] = {}
    for instance in instances_of({"instances": instances, "defaults": defaults}):
        if isinstance(file := instance.get("api_key_file"), str) and file:
            named.setdefault(str(file), []).append(str(instance.get("name")))
    looks: dict[Path, dict[str, Any]] = {}
    for file, who in named.items():
        path = Path(folder or ".", Path(file).expanduser())
        if path in looks:
            looks[path]["of"] += who
        else:
            looks[path] = {"of": who, **_look(path, file, Path(folder or "."), who[0])}
    return [{**look, "of": " and ".join(f"instance {name}" for name in look["of"])} for look in looks.values()]


def _pasted(path: Path, written: str) -> bool:
    """Whether the value is a key itself, not the name of a file."""
    there = (
        path.exists() or written.startswith(("/", "~", ".")) or (len(Path(written).parts) > 1 and path.parent.is_dir())
    )
    return not there and KEY_LIKE.fullmatch(written.strip()) is not None


def _another(folder: Path, name: str) -> tuple[str, str]:
    """(command that opens a new file for what {} prints, its name in the inventory): beside it, where nothing is yet."""
    names = (f"keys/{name}", *(f"keys/{name}-{number}" for number in range(2, 1000)))
    free = next(one for one in names if not (folder / one).exists())
    made = "" if (folder / "keys").is_dir() else f"mkdir -p {shlex.quote(short_path(folder / 'keys'))} && "
    return f"umask 077; set -C; {made}{{}} >{shlex.quote(short_path(folder / free))}", free


def _look(path: Path, written: str, folder: Path, name: str) -> dict[str, Any]:
    shown = short_path(path)
    quoted = shlex.quote(shown)
    parent = "" if path.parent.is_dir() else f"mkdir -p {shlex.quote(short_path(path.parent))} && "
    make = f"`(umask 077; {parent}openssl rand -hex 32 >{quoted})` on this control machine makes one"
    command, free = _another(folder, name)
    other = f"Leave it as it is: `({command.format('openssl rand -hex 32')})` on this control machine makes another"
    about: dict[str, Any] = {"path": shown, "quoted": quoted, "fault": None, "fix": None, "instead": None, "open": None}
    if _pasted(path, written):
        paste = f"`({command.format('cat')})` on this control machine takes the key: paste it, Enter, Ctrl-D"
        about |= {"path": HIDDEN, "quoted": HIDDEN, "fault": "no such file, and it looks like a key itself"}
        return {**about, "fix": paste, "instead": free}
    try:
        text = path.read_text(encoding="ascii").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return {**about, "fault": "no such file", "fix": make}
    except IsADirectoryError:
        return {**about, "fault": "a folder", "fix": other, "instead": free}
    except PermissionError:
        own = f'`sudo chown "$USER" {quoted} && chmod 600 {quoted}` on this control machine'
        return {**about, "fault": "not readable by the user who runs this", "fix": own}
    except NotADirectoryError:
        return {**about, "fault": "below a file, which is no folder", "fix": other, "instead": free}
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else "no plain text"
        return {**about, "fault": told, "fix": other, "instead": free}
    if text.startswith(VAULT):
        plain = f"`ansible-vault decrypt {quoted} && chmod 600 {quoted}` (the file is read as it is)"
        return {**about, "fault": "encrypted by ansible-vault", "fix": plain}
    if not text:
        return {**about, "fault": "empty", "fix": make}
    if len(text.splitlines()) > 1 or not text.isprintable():
        told = f"{len(text.splitlines())} lines, or letters that no header may have"
        return {**about, "fault": told, "fix": other, "instead": free}
    return {**about, "open": f"{mode:04o}" if mode & stat.S_IROTH else None}
