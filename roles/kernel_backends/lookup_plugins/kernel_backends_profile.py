# SPDX-License-Identifier: Apache-2.0
"""Lookup that turns a profile's data file into the published `kernel_backends_profile`."""

from __future__ import annotations

DOCUMENTATION = r"""
name: kernel_backends_profile
author: sglang-fleet
short_description: Load a device profile of SGLang
description:
  - Reads C(files/profiles/<name>.yml) of the role and the rows of C(files/matrix.yml) that are for it, checks them and returns
    what an engine of that profile needs.
  - Runs on the controller and touches no host.
options:
  _terms:
    description: Names of profiles, e.g. V(cpu) or V(sm90).
    required: true
  engine:
    description: Engine that the rows are for.
    type: str
    default: sglang-0.5.11
  gpus:
    description: GPUs of the host, each with C(index), C(uuid) and C(compute_cap); without them all rows of the profile may apply.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- ansible.builtin.set_fact:
    kernel_backends_profile: "{{ lookup('kernel_backends_profile', 'sm90', engine=fleet_engine, gpus=gpu_host_result.gpus) }}"
"""

RETURN = r"""
_raw:
  description:
    - One dictionary per term with C(name), C(args) (SGLang flag to value), C(env), C(files) (path below the release's
      C(profile) folder to text), C(stub_libcuda), C(stub_symbols), C(row) (the chosen rows of the matrix in one line) and
      C(backends) (those rows; each with C(id), C(sm), C(families), C(engines), C(env) and C(backends), by topic what is used,
      allowed and forbidden, with the source of each).
    - Values of C(env) may hold C({release}), the folder through which units see the release.
  type: list
  elements: dict
"""

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

# Ansible makes the roles' module_utils importable for modules only; the repository's own finder does it for the controller.
REPO = Path(__file__).resolve().parents[3]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))
backends = import_module("fleet.backends")

from ansible.module_utils import kernel_backends_matrix as matrices

ENGINE = "sglang-0.5.11"
FILES = Path(__file__).resolve().parent.parent / "files"
KEYS = {"name", "summary", "args", "env", "files", "stub_libcuda"}
FLAG = re.compile(r"[a-z][a-z0-9-]*\Z")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*\Z")
SYMBOL = re.compile(r"cu[A-Z]\w*\Z")
DATE = re.compile(r"\d{4}-\d\d-\d\d\Z")
PLACEHOLDER = re.compile(r"\{(\w*)\}")


class ProfileError(ValueError):
    """A profile that is unknown or whose data file is wrong; the text names the file and the row."""


def known(files: Path = FILES) -> list[str]:
    """Names of all profiles, sorted."""
    return sorted(path.stem for path in (files / "profiles").glob("*.yml"))


def _need(condition: object, where: str, problem: str) -> None:
    if not condition:
        raise ProfileError(f"{where}: {problem}")


def _sourced(row: dict[str, Any], where: str) -> None:
    """Facts carry the place and the day they were read."""
    _need(str(row.get("source", "")).startswith("https://"), where, "needs a source (https link)")
    _need(DATE.match(str(row.get("date", ""))), where, "needs a date (YYYY-MM-DD)")


def _table(data: dict[str, Any], section: str, key: str, pattern: re.Pattern[str], where: str) -> dict[str, Any]:
    """Rows `{key, value, why, source, date}` as one mapping, checked."""
    table: dict[str, Any] = {}
    for row in data.get(section, []):
        name = str(row.get(key, ""))
        place = f"{where}: {section}: {name or repr(row)}"
        _need(
            set(row) == {key, "value", "why", "source", "date"}, place, f"needs exactly {key}, value, why, source, date"
        )
        _need(pattern.match(name), place, f"is no valid {key}")
        _need(name not in table, place, "appears twice")
        _need(str(row["value"]).lower() != "auto", place, "is auto; a profile names its choice")
        _sourced(row, place)
        table[name] = row["value"]
    return table


def _texts(data: dict[str, Any], files: Path, where: str) -> dict[str, str]:
    """Files of the profile: path below `profile/` to text."""
    texts: dict[str, str] = {}
    for row in data.get("files", []):
        place = f"{where}: files: {row!r}"
        _need(set(row) == {"path", "from"}, place, "needs exactly path and from")
        path = PurePosixPath(row["path"])
        _need(not path.is_absolute() and ".." not in path.parts, place, "path must stay inside the profile folder")
        source = files / row["from"]
        _need(source.is_file(), place, f"there is no {source}")
        texts[str(path)] = source.read_text(encoding="utf-8")
    return texts


def load(name: str, files: Path = FILES, engine: str = ENGINE, capabilities: Iterable[str] = ()) -> dict[str, Any]:
    """Load and check one profile; what the matrix says about its backends is part of it.

    Args:
        name: profile name, the file's stem.
        files: folder that holds `profiles/` and `matrix.yml`.
        engine: name of the engine that the matrix' rows are for.
        capabilities: compute capabilities of the host's GPUs, such as `12.0`; unknown ones leave all rows of the profile.

    Returns:
        `{name, args, env, files, stub_libcuda, stub_symbols, row, backends}`.

    Raises:
        ProfileError, MatrixError: unknown name, no row, or a data file that breaks its schema.
    """
    if name not in known(files):
        raise ProfileError(f"unknown profile {name!r}; known: {', '.join(known(files))}")
    where = f"profiles/{name}.yml"
    data = yaml.safe_load((files / where).read_text(encoding="utf-8"))
    _need(isinstance(data, dict), where, "must be a mapping")
    _need(set(data) <= KEYS, where, f"has unknown keys {sorted(set(data) - KEYS)}")
    _need(data.get("name") == name, where, f"says it is {data.get('name')!r}")
    args = _table(data, "args", "flag", FLAG, where)
    env = _table(data, "env", "name", VARIABLE, where)
    known_backends = backends.read(files / "matrix.yml")
    rows = matrices.rows_of(matrices.rows_for(known_backends, name, engine), capabilities)
    flags, required = matrices.profile_parts(rows)
    owned = {flag for topic in known_backends["topics"].values() for flag in topic.get("flags") or topic["switches"]}
    for table, taken, more in ((args, owned, flags), (env, set(required), required)):
        both = sorted(taken & set(table))
        _need(not both, where, f"{', '.join(both)} belong to matrix.yml, which says it with reasons for other choices")
        table.update(more)
    for variable, value in env.items():
        _need(isinstance(value, str), f"{where}: env: {variable}", "must be a string (quote it)")
        _need(set(PLACEHOLDER.findall(value)) <= {"release"}, f"{where}: env: {variable}", "knows only {release}")
    symbols: list[str] = []
    if stub := data.get("stub_libcuda"):
        _sourced(stub, f"{where}: stub_libcuda")
        symbols = list(stub["symbols"])
        _need(symbols and all(SYMBOL.match(s) for s in symbols), f"{where}: stub_libcuda", "symbols must be cu* names")
    return {
        "name": name,
        "args": args,
        "env": env,
        "files": _texts(data, files, where),
        "stub_libcuda": bool(symbols),
        "stub_symbols": symbols,
        "row": matrices.summary(rows),
        "backends": matrices.published(rows),
    }


class LookupModule(LookupBase):
    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        engine = str(kwargs.get("engine") or ENGINE)
        capabilities = [str(gpu.get("compute_cap")) for gpu in kwargs.get("gpus") or []]
        try:
            return [load(str(term), engine=engine, capabilities=capabilities) for term in terms]
        except (ProfileError, matrices.MatrixError) as error:
            raise AnsibleError(f"kernel_backends: {error}") from error
