# SPDX-License-Identifier: Apache-2.0
"""What this repository declares, for the preflight's rules about an inventory: flags of an engine, names of variables, folders.

Read on the control machine and cut down to what the inventory names: the preflight module takes it along to a host.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.gpu_host_rules import flag
from ansible.module_utils.gpu_host_words import near, opposite

from fleet import varfiles
from fleet.envs import unknown

REPO = Path(__file__).resolve().parent.parent
# Safe and quick: read for every host of a run.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Roles whose name is a word of its own: a site may well have variables that begin with it.
COMMON_WORDS = ("bench", "rollback", "smoke")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _load(path: Path) -> Any:
    return yaml.load(path.read_bytes(), LOADER)  # noqa: S506 - a safe one


def known(engine: Any, instances: Any, defaults: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the rules hold an inventory against: `flags`, `envs`, `unread`, `paths`, folders as they are written, and what
    `varfiles.known` tells of files.

    variables: all of a host's, not templated. A folder that is a template stands for a default and is not judged.
    """
    paths = {name: variables[name] for name in folders() if name in variables and "{{" not in str(variables[name])}
    envs = unknown(engine, instances, defaults)
    own = {"flags": flags(engine, instances, defaults), "envs": envs, "unread": unread(variables), "paths": paths}
    return {**own, **varfiles.known(variables)}


# --- flags of an engine ------------------------------------------------------------------------------------------


@functools.cache
def table(engine: str) -> dict[str, dict[str, Any]] | None:
    """Every name of every flag of an engine, with `flag` its longest name; None for an engine without a list."""
    path = REPO / "engines" / engine / "flags.yml"
    if not re.fullmatch(r"[\w.-]+", engine) or not path.is_file():
        return None
    rows = _load(path)
    return {name: {"flag": key, **row} for key, row in rows.items() for name in (key, *row.get("also", ()))}


def flags(engine: Any, instances: Any, defaults: Any) -> dict[str, Any] | None:
    """What an engine knows of the flags under `args`, in the shape of `gpu_host_rules_args`; None where there is no list."""
    known = table(str(engine))
    layers = [*(instances if isinstance(instances, list) else []), defaults]
    args = [layer["args"] for layer in layers if isinstance(layer, dict) and isinstance(layer.get("args"), dict)]
    return None if known is None else {name: entry(name, known) for one in args for name in map(flag, one)}


def entry(name: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A flag by its name or, as argparse has it, by the beginning of one name only. A switch needs its whole name."""
    if name in known:
        return known[name]
    begun = [full for full in known if name and full.startswith(name)]
    if len(begun) == 1 and known[begun[0]]["type"] not in ("switch", "command-line"):
        return {**known[begun[0]], "short": True}
    contrary = [full for full in known if opposite(name, full)]
    return {"near": begun if len(begun) == 1 else near(name, known) or sorted(begun)[:3]} | (
        {"near": [], "opposite": contrary[0]} if contrary else {}
    )


# --- variables ---------------------------------------------------------------------------------------------------


@functools.cache
def options() -> dict[str, dict[str, Any]]:
    """Options of all roles, from their argument specs."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(REPO.glob("roles/*/meta/argument_specs.yml")):
        for point in _load(path)["argument_specs"].values():
            found |= point["options"]
    return found


@functools.cache
def read() -> frozenset[str]:
    """Every word of the plays, and of the roles' tasks, defaults and templates: a variable that is none of them, nobody reads."""
    roles = [path for ending in ("yml", "j2") for path in REPO.glob(f"roles/*/[dmtv]*/*.{ending}")]
    plays = [REPO / "site.yml", *REPO.glob("playbooks/**/*.yml")]
    return frozenset(word for path in (*roles, *plays) for word in WORD.findall(path.read_text(encoding="utf-8")))


def unread(names: Iterable[str]) -> dict[str, list[str]]:
    """Variables that nothing here reads though they look like ours, each with the options that may be meant.

    By a prefix of a role or of the fleet; or, whatever they begin with, by a name that is nearly an option's.
    """
    roles = (path.parent.parent.name for path in REPO.glob("roles/*/meta/main.yml"))
    prefixes = tuple(f"{name}_" for name in (*roles, "fleet"))
    common = tuple(f"{word}_" for word in COMMON_WORDS)
    known = {*options(), *(word for word in read() if word.startswith("fleet_"))}
    found = {}
    for name in set(names) - read():
        if name.startswith("ansible_") or "_" not in name:
            continue
        meant = near(name, known, least=0.85)
        if meant or (name.startswith(prefixes) and not name.startswith(common)):
            found[name] = meant or near(name, known)
    return found


@functools.cache
def folders() -> tuple[str, ...]:
    """Options that are folders of the host, from their argument specs; those that a play works out are not an inventory's."""
    found = []
    for name, option in options().items():
        told, default = str(option.get("description")), str(option.get("default", ""))
        path = "path" in (option.get("type"), option.get("elements")) or ("older on the host" in told)
        if path and "ontroller" not in told and "_release" not in default:
            found.append(name)
    return tuple(sorted(found))
