# SPDX-License-Identifier: Apache-2.0
"""Lookup that turns a profile's data file into the published `kernel_backends_profile`."""

from __future__ import annotations

DOCUMENTATION = r"""
name: kernel_backends_profile
author: sglang-fleet
short_description: Load a device profile of SGLang
description:
  - Reads C(files/profiles/<name>.yml) of the role, checks it and returns what an engine of that profile needs.
  - Runs on the controller and touches no host.
options:
  _terms:
    description: Names of profiles, e.g. V(cpu) or V(sm90).
    required: true
"""

EXAMPLES = r"""
- ansible.builtin.set_fact:
    kernel_backends_profile: "{{ lookup('kernel_backends_profile', 'sm90') }}"
"""

RETURN = r"""
_raw:
  description:
    - One dictionary per term with C(name), C(args) (SGLang flag to value), C(env), C(files) (path below the release's
      C(profile) folder to text), C(stub_libcuda) and C(stub_symbols).
    - Values of C(env) may hold C({release}), the folder through which units see the release.
  type: list
  elements: dict
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

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


def load(name: str, files: Path = FILES) -> dict[str, Any]:
    """Load and check one profile.

    Args:
        name: profile name, the file's stem.
        files: folder that holds `profiles/`.

    Returns:
        `{name, args, env, files, stub_libcuda, stub_symbols}`.

    Raises:
        ProfileError: unknown name, or a data file that breaks the schema.
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
    for variable, value in env.items():
        _need(isinstance(value, str), f"{where}: env: {variable}", "must be a string (quote it)")
        _need(set(PLACEHOLDER.findall(value)) <= {"release"}, f"{where}: env: {variable}", "knows only {release}")
    for flag in ("attention-backend", "sampling-backend"):
        _need(flag in args, where, f"must name {flag}")
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
    }


class LookupModule(LookupBase):
    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        try:
            return [load(str(term)) for term in terms]
        except ProfileError as error:
            raise AnsibleError(f"kernel_backends: {error}") from error
