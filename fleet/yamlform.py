# SPDX-License-Identifier: Apache-2.0
"""The form of an inventory's YAML files: what cannot be read, where it begins and what mends it; names that stand twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ansible.module_utils.gpu_host_words import shown

from fleet.target import short_path

YAML_NAMES = (".yml", ".yaml", ".json")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
VAULT = "$ANSIBLE_VAULT"
# A value that YAML takes for a map of its own: the beginning of the line, and the template up to the end of it.
BARE_TEMPLATE = re.compile(r"^(\s*(?:- +)?(?:[\w.-]+: +|- +))(\{[{%].*?)\s*$")
# What libyaml was reading when it gave up, where that began in an earlier line: the line to look at is that one.
BEGUN = {
    "while scanning a quoted scalar": ("a quote is opened and not closed", "Close the quote"),
    "while parsing a flow mapping": (
        "a { is opened and not closed",
        "Close it with }, and set a comma between entries,",
    ),
    "while parsing a flow sequence": (
        "a [ is opened and not closed",
        "Close it with ], and set a comma between entries,",
    ),
    "while scanning a simple key": ("a name without a colon", "Write it as `name: value`"),
}


class Fault(NamedTuple):
    """What is wrong with a file, with its place, and the next step."""

    told: str
    fix: str


def files(sources: Sequence[str]) -> Iterator[tuple[Path, bool]]:
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


def node(path: Path) -> Any:
    """The file as a tree of nodes with their places; None for an empty or encrypted one. Raises yaml.YAMLError."""
    said = path.read_text(encoding="utf-8", errors="replace")
    return None if said.startswith(VAULT) else yaml.compose(said, LOADER)


def in_files(sources: Sequence[str]) -> Fault | None:
    """The first fault in form of an inventory's YAML files; None if there is none."""
    for path, variables in files(sources):
        whose = f"host {path.stem}: " if path.parent.name == "host_vars" else ""
        if fault := _in_file(path, variables):
            return Fault(f"{whose}{fault.told}", fault.fix)
    return None


def _in_file(path: Path, variables: bool) -> Fault | None:
    file = short_path(path)
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        return Fault(
            f"{file}:{line}: letters that are not UTF-8", f"Save {file} as UTF-8, or write that line without them"
        )
    try:
        tree = node(path)
    except yaml.MarkedYAMLError as error:
        return _form(file, lines, error)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        return Fault(f"{file}: no valid YAML: {said}", f"Remove what {file} has and no text has")
    if at := _template_as_key(tree):
        return _unquoted(file, lines, at - 1)
    told = _not_a_map(tree, "variables") if variables else _groups(tree)
    return Fault(f"{file}:{told}", f"Correct that line of {file}") if told else None


# --- text that is no YAML ----------------------------------------------------------------------------------------


def _form(file: str, lines: Sequence[str], error: yaml.MarkedYAMLError) -> Fault:
    """YAML's own words are about the place where it gave up; the fault is often before."""
    mark = error.problem_mark or error.context_mark
    at, column = (mark.line, mark.column) if mark else (0, 0)
    begun = error.context_mark.line if error.context_mark else at
    for one in (at, at - 1, begun):
        if 0 <= one < len(lines) and BARE_TEMPLATE.match(lines[one]):
            return _unquoted(file, lines, one)
    line = lines[at] if at < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())] or line[column : column + 1] == "\t":
        told = f"{file}:{at + 1}: no valid YAML: a tab (\\t), where YAML takes spaces only; the line is: {_told(lines, at)}"
        return Fault(told, f"Write spaces instead of the tab in line {at + 1} of {file}")
    if error.context in BEGUN and begun < at:
        what, way = BEGUN[error.context]
        return Fault(
            f"{file}:{begun + 1}: no valid YAML: {what}; the line is: {_told(lines, begun)}",
            f"{way} in line {begun + 1} of {file}",
        )
    before = f"; the fault may be on the line before: {_told(lines, at - 1)}" if at else ""
    told = f"{file}:{at + 1}: no valid YAML: {error.problem or error.context}; the line is: {_told(lines, at)}{before}"
    return Fault(told, f"Correct {'one of them' if before else 'it'} in {file}: names of one map begin in one column")


def _told(lines: Sequence[str], at: int) -> str:
    """A line as it stands, a tab as \\t, and no secret in it."""
    if at >= len(lines):
        return "(the end of the file)"
    return str(shown(re.sub(r"(_pass['\"]?\s*[:=]\s*)\S.*", r"\1(hidden)", lines[at].strip(" "))))


def _unquoted(file: str, lines: Sequence[str], at: int) -> Fault:
    """A template that YAML takes for a map in a map."""
    found = BARE_TEMPLATE.match(lines[at])
    quote = "'" if found and '"' in found[2] else '"'
    right = f"`{found[1].strip()} {quote}{found[2]}{quote}`" if found else '`name: "{{ .. }}"`'
    told = f"{file}:{at + 1}: a value that begins with {{{{ stands without quotes; the line is: {_told(lines, at)}"
    return Fault(told, f"Quote the whole value in line {at + 1} of {file}: {right}")


# --- YAML that is no inventory -----------------------------------------------------------------------------------


def _nodes(tree: Any) -> Iterator[Any]:
    """Every node of a tree once, in the order of the file; an anchor may lead to one again."""
    seen: set[int] = set()
    rest = [tree] if tree is not None else []
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, yaml.MappingNode):
            rest += reversed([part for pair in one.value for part in pair])
        elif isinstance(one, yaml.SequenceNode):
            rest += reversed(one.value)


def _template_as_key(tree: Any) -> int | None:
    """Line of a map that is the name in another: `{{ x }}` without quotes."""
    maps = (one for one in _nodes(tree) if isinstance(one, yaml.MappingNode))
    keys = (key for one in maps for key, _ in one.value if isinstance(key, yaml.MappingNode))
    return next((key.start_mark.line + 1 for key in keys), None)


def twice(tree: Any) -> Iterator[tuple[str, int, int]]:
    """(name, its line, the line where the same map has it already); a name beside `<<` that replaces a merged one is none."""
    for one in _nodes(tree):
        before: dict[tuple[str, str], int] = {}
        for key, _ in one.value if isinstance(one, yaml.MappingNode) else []:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in before:
                yield key.value, line, before[name]
            before[name] = line


def _not_a_map(tree: Any, what: str) -> str | None:
    """`line: text` for a node that is neither a map nor empty."""
    if tree is None or isinstance(tree, yaml.MappingNode) or tree.tag == "tag:yaml.org,2002:null":
        return None
    kind = "a list" if isinstance(tree, yaml.SequenceNode) else f"the text {shown(tree.value)}"
    return f"{tree.start_mark.line + 1}: {what} are {kind}, expected a map, as in `name: value`"


def _groups(tree: Any) -> str | None:
    """`line: text` for what cannot be groups of hosts; the configuration of an inventory plugin is its own business."""
    if fault := _not_a_map(tree, "groups"):
        return fault
    groups = [(name.value, group) for name, group in getattr(tree, "value", None) or []]
    if any(name == "plugin" for name, _ in groups):
        return None
    for name, group in groups:
        for key, value in group.value if isinstance(group, yaml.MappingNode) else []:
            if key.value in ("hosts", "vars", "children") and isinstance(value, yaml.SequenceNode):
                return _not_a_map(value, f"{key.value} of group {name}")
            if key.value == "children" and isinstance(value, yaml.MappingNode) and (fault := _groups(value)):
                return fault
    return None
