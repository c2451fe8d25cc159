# SPDX-License-Identifier: Apache-2.0
"""Whether the packages of a finished venv fit the engine: by version, by import, by symbol. Standard library only.

A lock that is whole may still hold an xgrammar without the class that the engine imports, or kernels built for another torch.
Such an engine dies at its start with a message that blames something else, or serves on without a part of itself. Most is read,
not run, since on a host without a GPU half of these modules can't be imported. Data: engines/<engine>/imports.yml.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.sglang_venv_elf import names, read

__all__ = ["ImportAudit", "Modules", "audit_imports", "engine_imports", "import_faults"]

ENGINE = "sglang"
# The requirement of a wheel's metadata that is an exact pin and holds on every machine: `Requires-Dist: torch==2.11.0`.
_PIN = re.compile(r"^Requires-Dist: ([A-Za-z0-9._-]+)==([^;,\s]+)\s*$", re.M)
_IMPORT_LIMIT = 600.0  # seconds for all imports together; a few are usual
_IMPORTER = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"fleet-import {name}: {type(error).__name__}: {str(error)[:500]!r}")
print("fleet-import-end")
"""


@dataclass
class ImportAudit:
    """The verdict: faults in plain words; how many pins, imports and native symbols were held against what is there."""

    faults: list[str] = field(default_factory=list)
    pins: int = 0
    imports: int = 0
    symbols: int = 0
    imported: list[str] = field(default_factory=list)
    not_imported: str = ""

    def data(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        return asdict(self)


class Modules:
    """The names that modules of a site-packages folder bind at their top level, read from their source."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self._known: dict[str, set[str] | None] = {}
        self._sources: dict[str, bytes] = {}
        # Asked for again and again: a module, and a name in it.
        self.file = functools.cache(self._file)
        self.has = functools.cache(self._has)

    def _file(self, module: str) -> Path | None:
        """The source or native file of a module; None if there is none."""
        base = self.site / Path(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
        return next(iter(sorted(base.parent.glob(f"{base.name}.*so"))), None)

    def _source(self, module: str) -> bytes:
        if module not in self._sources:
            path = self.file(module)
            self._sources[module] = path.read_bytes() if path and path.suffix == ".py" else b""
        return self._sources[module]

    def _has(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds it: bound, a submodule, or in a module that makes names up at run time."""
        if _defines(name, self._source(module)):
            return True  # the usual case, without parsing a large module
        bound = self._bound(module)
        return bound is None or name in bound or self.file(f"{module}.{name}") is not None

    def _bound(self, module: str) -> set[str] | None:
        """Names of a module; None where they can't be read: native code, or a module with its own `__getattr__`."""
        if module not in self._known:
            self._known[module] = set()  # a module that imports itself in a circle
            path = self.file(module)
            if path is None:
                return set()
            found: set[str] | None = None
            if path.suffix == ".py":
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                found = set()
                for node in _top_level(ast.parse(self._source(module))):
                    more = self._names(node, package)
                    if more is None:
                        found = None
                        break
                    found |= more
            self._known[module] = found
        return self._known[module]

    def _names(self, node: ast.stmt, package: str) -> set[str] | None:
        match node:
            case ast.FunctionDef(name="__getattr__"):
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return {node.name}
            case ast.Assign():
                return {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                return {name}
            case ast.Import():
                return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.ImportFrom():
                if [alias.name for alias in node.names] == ["*"]:
                    return self._bound(_absolute(node, package))
                return {alias.asname or alias.name for alias in node.names}
        return set()


def _defines(name: str, source: bytes) -> bool:
    """Whether a line of a module's top level defines a name."""
    return (
        re.search(rf"^(?:(?:async[ ]+)?def|class)[ ]+{name}\b|^{name}[ ]*(?::[^\n]*)?=[^=]".encode(), source, re.M)
        is not None
    )


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return str(node.module)
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module that run at its import, those inside if, try, with and loops among them."""
    stack: list[ast.stmt] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
                stack += getattr(node, block, [])
        if isinstance(node, ast.Try):
            stack += [child for handler in node.handlers for child in handler.body]


# -- the audit ---------------------------------------------------------------------------------------------------------


def audit_imports(
    site: Path, data: Mapping[str, Any], versions: Mapping[str, str], pinned: Collection[str] | None = None
) -> ImportAudit:
    """Holds a site-packages folder against an engine's imports.yml.

    `versions` are the installed packages, canonical name to version; a row about a package that is not among them is left
    out, unless the engine's own metadata asks for it. Errors name package, version found, what was expected and the fix.
    With `pinned`, the engine's exact requirements count for these packages only.
    """
    verdict = ImportAudit()
    if not data:
        return verdict
    engine = versions.get(ENGINE, "")
    pins = {name: version for name, version in _pins(site, engine).items() if pinned is None or name in pinned}
    _judge_versions(data, versions, pins, engine, verdict)
    _judge_imports(site, data, versions, pins, verdict)
    for row in data.get("native") or []:
        if row["package"] in versions:
            _judge_native(site, row, versions, verdict)
    return verdict


def _fix(package: str, wanted: str = "") -> str:
    version = wanted or "the version that the engine's metadata names"
    return f"lock {package} {version} (engines/<engine>/overrides.yml, then bin/lock) and build again"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins(site: Path, engine: str) -> dict[str, str]:
    """Exact requirements of the engine's metadata; those for some machines or extras only are left out."""
    path = site / f"{ENGINE}-{engine}.dist-info" / "METADATA"
    text = path.read_text(encoding="utf-8", errors="replace") if engine and path.is_file() else ""
    return {_canonical(name): version for name, version in _PIN.findall(text)}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _judge_versions(
    data: Mapping[str, Any], versions: Mapping[str, str], pins: Mapping[str, str], engine: str, verdict: ImportAudit
) -> None:
    for name, wanted in pins.items():
        verdict.pins += 1
        if versions.get(name, "").partition("+")[0] != wanted:
            found = versions.get(name, "not at all")
            verdict.faults.append(
                f"{name}: {ENGINE} {engine} asks for {wanted}, installed is {found}; {_fix(name, wanted)}"
            )
    for row in data.get("bounds") or []:
        if (found := versions.get(row["package"], "")) == "":
            continue
        verdict.pins += 1
        if not _numbers(row["from"]) <= _numbers(found) < _numbers(row["below"]):
            verdict.faults.append(
                f"{row['package']} {found}: expected {row['from']} or newer and older than {row['below']}. {row['why']} "
                f"({row['source']}) {_fix(row['package'], row['from'])}"
            )
    for row in data.get("same") or []:
        there = {name: versions[name] for name in row["packages"] if name in versions}
        verdict.pins += len(there) > 1
        if len(set(there.values())) > 1:
            said = ", ".join(f"{name} {version}" for name, version in there.items())
            verdict.faults.append(
                f"{said}: expected one version. {row['why']} ({row['source']}) {_fix(' and '.join(there))}"
            )


def _judge_imports(
    site: Path, data: Mapping[str, Any], versions: Mapping[str, str], pins: Mapping[str, str], verdict: ImportAudit
) -> None:
    rows = {row["module"]: row for row in data.get("packages") or [] if row["package"] in versions}
    modules, optional = Modules(site), {(row["file"], row["module"]) for row in data.get("optional") or []}
    wanted = [(m, name, "") for row in rows.values() for m, some in row["symbols"].items() for name in some]
    wanted += [one for one in engine_imports(site, list(rows)) if (one[2].partition(":")[0], one[0]) not in optional]
    seen: set[tuple[str, str]] = set()
    for module, name, where in wanted:
        verdict.imports += 1
        if (module, name) in seen:
            continue
        if modules.file(module) is None:
            missing = f"has no module {module}"
        elif name and not modules.has(module, name):
            missing = f"has no {name} in module {module}"
        else:
            continue
        seen.add((module, name))
        row = rows[module.partition(".")[0]]
        package = row["package"]
        who = f"which {ENGINE}/srt/{where} imports" if where else "which the engine needs"
        verdict.faults.append(
            f"{package} {versions[package]} {missing}, {who}; expected {package} {pins.get(package, 'of another version')}. "
            f"{row['why']} ({row['source']}) {_fix(package, pins.get(package, ''))}"
        )


def engine_imports(site: Path, packages: list[str]) -> Iterator[tuple[str, str, str]]:
    """(module, name or '', file:line) of every import of these packages in the engine's source.

    Found by pattern and not by parsing, which takes a second for a hundred files; examples in docstrings come along.
    tests/patches compares the two.
    """
    some = "|".join(map(re.escape, packages))
    statement = re.compile(
        rf"[ \t]*(?:from[ \t]+(?P<module>(?:{some})(?:\.\w+)*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#;(]+)"
        rf"|import[ \t]+(?P<plain>(?:{some})\b[^\n#;]*))".encode()
    )
    root = str(site / ENGINE / "srt")
    for folder, _, files in sorted(os.walk(root)):
        for file in sorted(name for name in files if name.endswith(".py")):
            with open(f"{folder}/{file}", "rb") as handle:  # a path object for each of a thousand files costs
                text = handle.read()
            for start in sorted({at for name in packages for at in _lines_with(name.encode(), text)}):
                if (match := statement.match(text, start)) is None:
                    continue
                line = text.count(b"\n", 0, start) + 1
                where = f"{f'{folder}/{file}'.removeprefix(f'{root}/')}:{line}"
                listed = re.sub(r"#[^\n]*", "", (match["names"] or match["plain"]).decode()).strip("()").split(",")
                for name in (entry.split()[0] for entry in listed if entry.split()):
                    if match["module"] and name != "*":
                        yield match["module"].decode(), name, where
                    elif match["plain"] and name.partition(".")[0] in packages:
                        yield name, "", where


def _lines_with(word: bytes, text: bytes) -> Iterator[int]:
    """Where the lines begin that hold a word."""
    at = text.find(word)
    while at >= 0:
        yield text.rfind(b"\n", 0, at) + 1
        at = text.find(word, at + 1)


def _judge_native(site: Path, row: Mapping[str, Any], versions: Mapping[str, str], verdict: ImportAudit) -> None:
    """Undefined symbols of a package's native files that the other package's libraries don't know."""
    known: set[bytes] = set()
    for library in sorted(site.glob(row["libraries"])):
        known |= names(library)
    pattern = re.compile(row["symbols"])
    for path in sorted(site.glob(row["files"])):
        elf = read(path, symbols=True)
        wanted = [name for name in (elf.undefined if elf else ()) if pattern.match(name)]
        verdict.symbols += len(wanted)
        missing = [name for name in wanted if name.encode() not in known]
        if missing:
            other = row["against"]
            verdict.faults.append(
                f"{path.relative_to(site)} of {row['package']} {versions[row['package']]} needs {missing[0]}"
                f"{f' and {len(missing) - 1} more symbols' if missing[1:] else ''}, which {other} "
                f"{versions.get(other, 'that is not installed')} does not have; expected the {other} it was built for. "
                f"{row['why']} ({row['source']}) {_fix(f'{other} and ' + row['package'])}"
            )


def import_faults(python: Path, modules: list[str], env: Mapping[str, str] | None = None) -> list[str]:
    """Imports modules in one process of the release's own Python; what failed, one sentence each.

    Nothing is written into the release; `env` is added to a bare environment.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-import-") as home:
        base = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "LANG": "C.UTF-8"}
        try:
            done = subprocess.run(
                [str(python), "-B", "-s", "-c", _IMPORTER, *modules],
                capture_output=True, text=True, errors="replace", cwd=home, env={**base, **(env or {})},
                timeout=_IMPORT_LIMIT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [f"importing {', '.join(modules)} took more than {_IMPORT_LIMIT:.0f} s"]
    faults = re.findall(r"^fleet-import (.+)$", done.stdout, re.M)
    if not re.search(r"^fleet-import-end$", done.stdout, re.M):
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        faults.append(f"importing {', '.join(modules)} ended with exit code {done.returncode}: {tail}")
    return [f"{fault}; {_fix('the package')}" for fault in faults]
