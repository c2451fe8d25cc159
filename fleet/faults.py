# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the files of an inventory, with file, line and host: one sentence instead of Ansible's screens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

YAML_NAMES = (".yml", ".yaml", ".json")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class Told:
    """What Ansible would have printed."""

    warnings: list[str] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)  # (what failed, why): one of each plugin that tried

    def reasons(self) -> list[str]:
        """Why a source could not be read, as the YAML plugin has it: others try the same file and understand it less."""
        own = [why for what, why in self.errors if "'yaml'" in what]
        return own or [why for _, why in self.errors[-1:]]


@contextmanager
def collected() -> Iterator[Told]:
    """Keeps Ansible's own words about an inventory, which would come before and beside ours."""
    from ansible.utils.display import Display

    told = Told()
    kept = Display.warning, Display.error_as_warning
    try:
        Display.warning = lambda _, msg, *__, **___: told.warnings.append(str(msg))
        Display.error_as_warning = lambda _, msg, exception, **__: told.errors.append((str(msg), text(exception)))
        yield told
    finally:
        Display.warning, Display.error_as_warning = kept


def text(error: BaseException) -> str:
    """An error of Ansible's on one line, with its place where it has one."""
    said = " ".join(str(error).split())
    where = getattr(error, "_formatted_source_context", None) or ""
    match = re.search(r"Origin: (\S+:\d+)", where)
    if match is None or match[1] in said:
        return said
    return f"{said} ({_near(match[1])})"


def place(value: Any) -> str | None:
    """`file:line` that a value of the inventory comes from."""
    from ansible.errors import AnsibleError

    match = re.search(r"\((\S+:\d+)\)$", text(AnsibleError("here", obj=value)))
    return match[1] if match else None


def _near(path: str | Path) -> str:
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


# --- files -------------------------------------------------------------------------------------------------------


def _files(sources: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """(file, whether it holds variables instead of hosts) of every YAML file that the sources bring along."""
    for source in (Path(one) for one in sources if "," not in one):
        folder = source if source.is_dir() else source.parent
        for kind in ("group_vars", "host_vars"):
            for path in sorted((folder / kind).glob("**/*")):
                if path.is_file() and path.suffix in ("", *YAML_NAMES) and not path.name.startswith("."):
                    yield path, True
        inside = sorted(folder.iterdir()) if source.is_dir() else [source]
        for path in inside:
            if path.is_file() and path.suffix in YAML_NAMES:
                yield path, False


def _node(path: Path) -> Any:
    """The file as a tree of nodes with their places; None for an empty or encrypted one. Raises yaml.YAMLError."""
    said = path.read_text(encoding="utf-8", errors="replace")
    return None if said.startswith("$ANSIBLE_VAULT") else yaml.compose(said, LOADER)


def in_files(sources: Sequence[str]) -> str | None:
    """The first fault in form of an inventory's YAML files, for people; None if there is none."""
    for path, variables in _files(sources):
        whose = f"host {path.stem}: " if path.parent.name == "host_vars" else ""
        try:
            node = _node(path)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line if mark else 0
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = lines[line].strip() if line < len(lines) else "(the end of the file)"
            return f"{whose}{_near(path)}:{line + 1}: no valid YAML: {error.problem or error.context}; the line is: {shown}"
        except yaml.YAMLError as error:
            return f"{whose}{_near(path)}: no valid YAML: {' '.join(str(error).split())}"
        fault = _not_a_map(node, "variables") if variables else _groups(node)
        if fault:
            return f"{whose}{_near(path)}:{fault}"
    return None


def unreadable(sources: Sequence[str], loader: Any) -> str | None:
    """The first file that Ansible cannot take though its form is right: a vault without its password, an unknown tag."""
    from ansible.errors import AnsibleError

    for path, _ in _files(sources):
        try:
            loader.load_from_file(str(path), cache="none")
        except AnsibleError as error:
            vault = "vault" in str(error) and "; name its password file: `export ANSIBLE_VAULT_PASSWORD_FILE=FILE`"
            return f"{_near(path)}: {text(error)}{vault or ''}"
    return None


def _not_a_map(node: Any, what: str) -> str | None:
    """`line: text` for a node that is neither a map nor empty."""
    if node is None or isinstance(node, yaml.MappingNode) or node.tag == "tag:yaml.org,2002:null":
        return None
    kind = "a list" if isinstance(node, yaml.SequenceNode) else f"the text {node.value!r}"
    return f"{node.start_mark.line + 1}: {what} are {kind}, expected a map, as in `name: value`"


def _groups(node: Any) -> str | None:
    """`line: text` for what cannot be groups of hosts; the configuration of an inventory plugin is its own business."""
    if fault := _not_a_map(node, "groups"):
        return fault
    groups = [(name.value, group) for name, group in getattr(node, "value", None) or []]
    if any(name == "plugin" for name, _ in groups):
        return None
    for name, group in groups:
        for key, value in group.value if isinstance(group, yaml.MappingNode) else []:
            if key.value in ("hosts", "vars", "children") and isinstance(value, yaml.SequenceNode):
                return _not_a_map(value, f"{key.value} of group {name}")
            if key.value == "children" and isinstance(value, yaml.MappingNode) and (fault := _groups(value)):
                return fault
    return None


def line_of(name: str, sources: Sequence[str]) -> str | None:
    """`file:line` where a host is named."""
    for path, variables in _files(sources):
        for node in yaml.parse(path.read_text(encoding="utf-8"), LOADER) if not variables else []:
            if isinstance(node, yaml.ScalarEvent) and node.value == name and node.start_mark:
                return f"{_near(path)}:{node.start_mark.line + 1}"
    return None
