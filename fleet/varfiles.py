# SPDX-License-Identifier: Apache-2.0
"""Files of an inventory that are not what they look like: variables that no host reads, and names that stand twice.

As Ansible has it: of NAME, NAME.yml, NAME.yaml and NAME.json below host_vars and group_vars the first one is read, be it a file
or a folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.gpu_host_words import near as alike

from fleet.target import short_path
from fleet.yamlform import YAML_NAMES, node, twice

ENDINGS = ("", *(f".{name.lstrip('.')}" for name in YAML_NAMES))
# Groups of the plays: an inventory beside this one may be theirs.
USUAL = ("all", "ungrouped", "gpu_hosts", "lab")
LARGEST = 1 << 20  # of an inventory that is searched for a name


def known(variables: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """What the rules about files look at, for the host of these variables: `{twice: [..], unread_files: [..]}`.

    twice: `{name, at, before}`, places as file:line. unread_files: `{path, why, fix}`, files of variables that nothing reads and
    that may be meant for this host. Both are empty where the inventory is no file.
    """
    folder, host, groups = (variables.get(name) for name in ("inventory_dir", "inventory_hostname", "groups"))
    if not (isinstance(folder, str) and isinstance(host, str) and isinstance(groups, Mapping)):
        return {"twice": [], "unread_files": []}
    base = Path(folder)
    names = {"host_vars": [host], "group_vars": [*(variables.get("group_names") or ()), "all"]}
    everyone = {"host_vars": [*groups.get("all", ())], "group_vars": [*groups, *USUAL]}
    unread = []
    for kind, mine in names.items():
        for name in mine:
            unread += list(_beside(base / kind, name))
        unread += list(_strangers(base, kind, mine, everyone[kind]))
    files = [path for kind, mine in names.items() for name in mine for path in _read(base / kind, name)]
    source = Path(str(variables.get("inventory_file") or base / "none"))
    if source.is_file() and source.suffix in YAML_NAMES:
        files.append(source)
    return {"twice": [row for path in files for row in _twice(path)], "unread_files": unread}


def _entries(folder: Path, name: str) -> list[Path]:
    """What there is for a name, the one that is read first."""
    return [path for ending in ENDINGS if (path := folder / f"{name}{ending}").exists()]


def _read(folder: Path, name: str) -> Iterator[Path]:
    """Files of variables that are read for a name."""
    for first in _entries(folder, name)[:1]:
        inside = sorted(first.rglob("*")) if first.is_dir() else [first]
        yield from (
            path for path in inside if path.is_file() and path.suffix in ENDINGS and not path.name.startswith(".")
        )


def _twice(path: Path) -> Iterator[dict[str, str]]:
    """Names that stand twice in one map of a file; a file that is no YAML is told by whoever reads it."""
    try:
        found = list(twice(node(path)))
    except (yaml.YAMLError, OSError):
        return
    for name, line, before in found:
        yield {"name": name, "at": f"{short_path(path)}:{line}", "before": f"{short_path(path)}:{before}"}


# --- files that nothing reads ------------------------------------------------------------------------------------


def _beside(folder: Path, name: str) -> Iterator[dict[str, str]]:
    """Files of a name whose variables another one hides."""
    first, *others = _entries(folder, name) or [folder]
    for path in others:
        into = first / "main.yml" if first.is_dir() else first
        fix = f"Move what is needed of {short_path(path)} into {short_path(into)}, then `rm {_word(path)}`."
        yield {"path": short_path(path), "why": f"{short_path(first)} is read instead", "fix": fix}


def _strangers(base: Path, kind: str, mine: list[str], everyone: list[str]) -> Iterator[dict[str, str]]:
    """Files of nobody that look like one of this host or its groups, or like none at all."""
    folder, what = base / kind, kind.partition("_")[0]
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = _name(path)
        if path.name.startswith(".") or path.name.endswith("~") or path.suffix == ".md" or path.name in everyone:
            continue
        if path.suffix not in ENDINGS:
            owner = next((one for one in mine if path.name.startswith(f"{one}.") and not _entries(folder, one)), None)
            why = f"Ansible reads {', '.join(ENDINGS[1:])} or no ending"
        else:
            owner = next(iter(alike(name, everyone, 1, 0.6)), None)
            why = f"no {what} {name} is in this inventory"
            if (
                name in everyone
                or (owner and owner not in mine)
                or _mentioned(base, name)
                or not _holds_variables(path)
            ):
                continue
        if owner is None and path.suffix not in ENDINGS:
            continue
        yield {"path": short_path(path), "why": why, "fix": _rename(folder, path, owner, what)}


def _name(path: Path) -> str:
    return path.stem if path.suffix in YAML_NAMES else path.name


def _holds_variables(path: Path) -> bool:
    return path.is_file() or any(one.suffix in ENDINGS and one.is_file() for one in path.rglob("*"))


def _rename(folder: Path, path: Path, owner: str | None, what: str) -> str:
    if owner and not _entries(folder, owner):
        return f"`mv {_word(path)} {_word(folder / (owner if path.is_dir() else f'{owner}.yml'))}`"
    if owner:
        return f"Move what is needed of it into {short_path(_entries(folder, owner)[0])}, then `rm -r {_word(path)}`."
    return f"Name it after a {what} of the inventory, or `rm -r {_word(path)}`."


def _mentioned(base: Path, name: str) -> bool:
    """Whether an inventory in the same folder has the name: files of variables may be shared."""
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    files = (path for path in base.iterdir() if path.is_file() and path.stat().st_size < LARGEST)
    return any(word.search(path.read_text(encoding="utf-8", errors="replace")) for path in files)


def _word(path: Path) -> str:
    return shlex.quote(short_path(path))
