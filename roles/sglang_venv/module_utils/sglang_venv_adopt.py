# SPDX-License-Identifier: Apache-2.0
"""Takes an engine over that something else has installed: what lies in its folders, whether it is the lock's, and the copy.

A folder is a venv or a plain site-packages folder. Of several folders the first that holds a distribution wins. Nothing is
written into them, and nothing in a release leads back to them. Standard library only; runs as root under the host's Python.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.sglang_venv_copy import copy_file
from ansible.module_utils.sglang_venv_lock import canonical

__all__ = ["AdoptError", "Adoption", "Distribution", "adopted_id", "check", "find_known", "scan", "take_over"]

ENGINE = "sglang"
MARGIN = 200 * 2**20  # bytes beside the copy: venv, profile, manifest
_SHOWN = 20  # names per list in the manifest where a list may get long
_ABI = re.compile(r"^Tag: cp3(\d+)-cp3\1-", re.M)


class AdoptError(RuntimeError):
    """Folders that can't be taken over; says host, folder, what was expected and the next step."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{socket.gethostname()}: {text}")


@dataclass
class Distribution:
    """One installed distribution: its site-packages folder, sha256 of its RECORD, files as (path, hash or '', size or -1),
    paths of its native programs."""

    name: str
    version: str
    site: str
    record: str
    files: list[tuple[str, str, int]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)


@dataclass
class Adoption:
    """What the folders hold. `loose` are files no distribution has brought, as (site, path), copied; `left` stay behind;
    `skipped` says per distribution why; `added` are modules that were put into the engine's own package."""

    folders: list[str]
    pythons: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, Distribution] = field(default_factory=dict)
    loose: list[tuple[str, str]] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    bytes: int = 0
    files: int = 0

    @property
    def packages(self) -> dict[str, str]:
        """Canonical name -> version."""
        return {name: one.version for name, one in sorted(self.chosen.items())}

    def identity(self) -> str:
        """sha256 over name, version, RECORD and missing files of every distribution, and over the loose files' contents."""
        rows = [[d.name, d.version, d.record, sorted(d.missing)] for _, d in sorted(self.chosen.items())]
        loose = sorted([path, _sha256(f"{site}/{path}")] for site, path in self.loose)
        return hashlib.sha256(json.dumps([rows, loose]).encode()).hexdigest()


def _sha256(path: str) -> str:
    with open(path, "rb") as handle:  # a path object for each of some ten thousand files costs
        return hashlib.file_digest(handle, "sha256").hexdigest()


# -- what is there -----------------------------------------------------------------------------------------------------


def _site(folder: Path) -> Path:
    """The site-packages of a folder. AdoptError if it is none."""
    if not folder.is_absolute():
        raise AdoptError(f"sglang_venv_adopt: {folder} is not absolute; give the whole path of the folder on this host")
    if not folder.is_dir():
        raise AdoptError(
            f"sglang_venv_adopt: {folder} is no folder here, expected a venv or a site-packages folder; correct the path "
            "(it may go once a release was made of it; another engine, series or profile is another release and needs it again)"
        )
    found = sorted(folder.glob("lib/python3.*/site-packages"))
    if next(folder.glob("*.dist-info"), None):
        return folder
    if len(found) == 1:
        return found[0]
    raise AdoptError(
        f"sglang_venv_adopt: {folder} holds {'several site-packages folders' if found else 'no installed distribution'}, "
        "expected a venv, or a folder with *.dist-info; name the site-packages folder itself"
    )


def _python(site: Path, infos: Iterable[Path]) -> str:
    """The Python minor that a site-packages folder is for: by its path, else by what its wheels were built for; '' unknown."""
    if match := re.fullmatch(r"python(3\.\d+)", site.parent.name):
        return match[1]
    for info in infos:
        wheel = info / "WHEEL"
        if wheel.is_file() and (match := _ABI.search(wheel.read_text(errors="replace"))):
            return f"3.{match[1]}"
    return ""


def _named(info: Path) -> tuple[str, str]:
    """Name and version by the METADATA of a dist-info folder; ('', '') without one."""
    try:
        head = (info / "METADATA").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    fields = dict(re.findall(r"^(Name|Version):\s*(\S+)", head, re.M))
    return canonical(fields.get("Name", "")), fields.get("Version", "")


def _editable(info: Path) -> bool:
    try:
        said = json.loads((info / "direct_url.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(said.get("dir_info", {}).get("editable"))


def _outside(path: str) -> bool:
    """Whether a path of a RECORD is none of site-packages' own: programs, headers, byte code."""
    return path.startswith(("../", "/", "bin/")) or "/../" in path or _bytecode(path)


def _bytecode(path: str) -> bool:
    return path.endswith(".pyc") or "__pycache__/" in path


def _read_record(info: Path, name: str, version: str) -> Distribution:
    text = (info / "RECORD").read_bytes()
    one = Distribution(name, version, str(info.parent), hashlib.sha256(text).hexdigest())
    for row in csv.reader(text.decode("utf-8", "replace").splitlines()):
        if not row or _outside(row[0]):
            if row and (program := _program(info.parent, row[0])):
                one.programs.append(program)
            continue
        said = row[1].removeprefix("sha256=") if len(row) > 1 and row[1].startswith("sha256=") else ""
        one.files.append((row[0], said, int(row[2]) if len(row) > 2 and row[2].isdigit() else -1))
    return one


def _program(site: Path, path: str) -> str:
    """Where a native program of a RECORD lies; '' if it is none. Scripts start the Python of the place that they lie in."""
    where = Path(os.path.normpath(site / path))
    for file in (where, site / "bin" / where.name):  # pip install --target puts it there
        if where.parent.name == "bin" and file.is_file():
            with file.open("rb") as handle:
                return str(file) if handle.read(4) == b"\x7fELF" else ""
    return ""


def scan(folders: Sequence[str]) -> Adoption:
    """Reads the folders. Changes nothing. AdoptError for a folder that is none, or holds a distribution twice."""
    found = Adoption([str(folder) for folder in folders])
    for folder in map(Path, folders):
        site = _site(folder)
        infos = sorted(path for path in site.glob("*.dist-info") if not path.name.startswith("~"))
        found.pythons[str(folder)] = _python(site, infos)
        here: dict[str, Distribution] = {}
        for info in infos:
            name, version = _named(info)
            if not name or not (info / "RECORD").is_file():
                if name:
                    found.skipped.setdefault(name, f"no RECORD in {info}, so its files are not known")
                continue
            if _editable(info):
                found.skipped[name] = f"installed editable: {info} only points to a source tree"
                continue
            if name in here:
                raise AdoptError(
                    f"sglang_venv_adopt: {site} holds {name} twice ({here[name].version} and {version}), expected one; give a "
                    "copy of the folder in which it was installed once"
                )
            here[name] = _read_record(info, name, version)
        fresh = {name: one for name, one in here.items() if name not in found.chosen}
        for one in fresh.values():
            _measure(one, found)
        found.chosen |= fresh
        _read_rest(site, here, fresh, found)
    found.skipped = {name: why for name, why in found.skipped.items() if name not in found.chosen}
    return found


def _measure(one: Distribution, found: Adoption) -> None:
    """Splits the files of a distribution into those that are there and those that are missing."""
    there = []
    for row in one.files:
        try:
            state = os.stat(f"{one.site}/{row[0]}")  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            one.missing.append(row[0])
            continue
        there.append(row)
        found.bytes += state.st_size
        found.files += 1
    one.files = there
    found.bytes += sum(Path(path).stat().st_size for path in one.programs)
    found.files += len(one.programs)


def _read_rest(
    site: Path, here: Mapping[str, Distribution], fresh: Mapping[str, Distribution], found: Adoption
) -> None:
    """Files that no distribution of this folder has brought. A package of nobody is copied; what lies in another's is not."""
    owned = {path for one in here.values() for path, _, _ in one.files}
    tops = {path.partition("/")[0] for one in found.chosen.values() for path, _, _ in one.files}
    tops |= {path.partition("/")[0] for path in owned} | {path.partition("/")[0] for _, path in found.loose}
    left = []
    for path, size in _walk(site):
        top = path.partition("/")[0]
        if path in owned:
            continue
        if top == ENGINE and ENGINE in fresh and path.endswith(".py"):
            found.added.append(f"{site}/{path}")
        elif top in tops or top.endswith((".dist-info", ".pth", ".lock")) or top in ("bin", "_virtualenv.py"):
            left.append(path)
        else:
            found.loose.append((str(site), path))
            found.bytes += size
            found.files += 1
    if left:
        found.left[str(site)] = left


def _walk(site: Path) -> Iterator[tuple[str, int]]:
    """Files below a folder but byte code, as (path relative to it, bytes), in order; links to folders are not followed."""
    root = f"{site}/"
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name != "__pycache__")
        base = folder.removeprefix(root).strip("/")
        for name in sorted(files):
            path = f"{base}/{name}" if base else name
            if not _bytecode(path) and os.path.exists(root + path):  # noqa: PTH110
                yield path, os.stat(root + path).st_size  # noqa: PTH116


# -- the id ------------------------------------------------------------------------------------------------------------


def adopted_id(base: str, identity: str) -> str:
    """The id of an adopted release, as long as `base`, the id that a build from the same plan has."""
    return hashlib.sha256(f"adopted {base} {identity}".encode()).hexdigest()[: len(base)]


def find_known(root: Path, base: str, folders: Sequence[str]) -> str:
    """Id of the newest published release that was made of these folders and this plan; '' if there is none.

    A folder may disappear after it was taken over; then the manifest tells which release it became.
    """
    known: list[tuple[str, str]] = []
    for path in (root / "releases").glob("[0-9a-f]*/manifest.json"):
        try:
            manifest = json.loads(path.read_text())
        except ValueError:
            continue
        made = manifest.get("adopted") or {}
        if (made.get("base"), made.get("folders")) == (base, [str(folder) for folder in folders]):
            known.append((manifest["built"], manifest["id"]))
    return max(known)[1] if known else ""


# -- is it the engine? -------------------------------------------------------------------------------------------------


def _same(one: str, other: str) -> bool:
    return one.partition("+")[0] == other.partition("+")[0]


def changed_files(one: Distribution) -> list[str]:
    """Python files of a distribution that are not what its RECORD says."""
    return [path for path, said, _ in one.files if said and path.endswith(".py") and _encoded(one, path) != said]


def _encoded(one: Distribution, path: str) -> str:
    """The hash of a file as a RECORD writes it."""
    return base64.urlsafe_b64encode(bytes.fromhex(_sha256(f"{one.site}/{path}"))).rstrip(b"=").decode()


def check(found: Adoption, plan: Mapping[str, Any]) -> list[str]:
    """Holds the folders against the plan; the answer are warnings. AdoptError with everything that forbids taking over."""
    wanted, where = plan["packages"], ", ".join(found.folders)
    faults = [
        f"{folder} is for Python {python}, the release is for {plan['python']}: set sglang_venv_python to a Python {python} of "
        "this host, or give a folder of the same one"
        for folder, python in found.pythons.items()
        if python not in ("", plan["python"])
    ]
    for name in dict.fromkeys([ENGINE, *plan["load_bearing"]]):
        if name not in wanted:
            continue
        got = found.packages.get(name)
        if got is None or not _same(got, wanted[name]):
            why = found.skipped.get(name) or (f"found is {got}" if got else "found is none")
            faults.append(
                f"{name}: {plan['engine']} needs {wanted[name]}, {why} in {where}: install {name}=={wanted[name]} there, or put "
                "a folder that has it first"
            )
    patched = changed_files(found.chosen[ENGINE]) if ENGINE in found.chosen and ENGINE in wanted else []
    if patched or found.added:
        site = found.chosen[ENGINE].site
        named = [f"{site}/{path}" for path in patched] + found.added
        faults.append(
            f"somebody patched this already: {', '.join(named[:3])}{f' and {len(named) - 3} more' if named[3:] else ''} "
            f"{'are' if named[1:] else 'is'} not as the wheel of {ENGINE} has it; expected the unpatched {wanted.get(ENGINE)}: "
            f"install it into a folder of its own (pip install --no-deps --target FOLDER {ENGINE}=={wanted.get(ENGINE)}) and "
            "name that first"
        )
    if faults:
        raise AdoptError(
            f"{where} can't be taken over: {'; '.join(faults)}. Or unset sglang_venv_adopt to build from the lock"
        )
    return _warnings(found, wanted, plan["engine"])


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")


def compared(found: Adoption, wanted: Mapping[str, str]) -> dict[str, list[str]]:
    """Distributions that differ from the lock, are missing, or are none of its own."""
    have = found.packages
    return {
        "differ": [
            f"{n} {have[n]} (lock: {wanted[n]})" for n in sorted(have) if not _same(have[n], wanted.get(n, have[n]))
        ],
        "missing": [f"{name} {version}" for name, version in sorted(wanted.items()) if name not in have],
        "extra": [f"{name} {have[name]}" for name in sorted(have) if name not in wanted],
    }


def _warnings(found: Adoption, wanted: Mapping[str, str], engine: str) -> list[str]:
    lists, where = compared(found, wanted), ", ".join(found.folders)
    said = []
    if lists["differ"]:
        said.append(f"{where}: not the versions of {engine}'s lock: {_listed(lists['differ'])}")
    if lists["missing"]:
        said.append(f"{where}: of {engine}'s lock these are missing: {_listed(lists['missing'])}")
    partly = [f"{d.name} {len(d.missing)} of {len(d.missing) + len(d.files)}" for d in _partly(found)]
    if partly:
        said.append(f"{where}: files that a RECORD names are not there: {_listed(partly)}")
    if found.skipped:
        said.append(f"{where}: not taken over: {_listed([f'{n} ({why})' for n, why in sorted(found.skipped.items())])}")
    return said


def _partly(found: Adoption) -> list[Distribution]:
    return [one for _, one in sorted(found.chosen.items()) if one.missing]


# -- the copy ----------------------------------------------------------------------------------------------------------


def take_over(found: Adoption, site: Path) -> dict[str, list[str]]:
    """Copies everything into a new venv's site-packages folder, native programs into its bin; the answer: distribution ->
    files that are not as RECORD says.

    Python files are compared by hash, all others by size. Of a path in two folders the first is kept.
    """
    odd: dict[str, list[str]] = {}
    made: set[str] = set()
    taken: set[str] = set()

    def copy(source: str, path: str) -> None:
        target = f"{site}/{path}"
        folder = target.rpartition("/")[0]
        if folder not in made:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            made.add(folder)
        copy_file(f"{source}/{path}", target)
        taken.add(path)

    for name, one in found.chosen.items():
        changed = set(changed_files(one))
        for path, _, size in one.files:
            if size >= 0 and not path.endswith(".py") and os.stat(f"{one.site}/{path}").st_size != size:  # noqa: PTH116
                changed.add(path)
            if path not in taken:
                copy(one.site, path)
        for program in one.programs:
            target = site.parents[2] / "bin" / Path(program).name
            if not target.exists():
                copy_file(program, str(target))
        if changed:
            odd[name] = sorted(changed)
    for source, path in found.loose:
        if path not in taken:
            copy(source, path)
    return odd


def manifest(found: Adoption, base: str, wanted: Mapping[str, str], odd: Mapping[str, list[str]]) -> dict[str, Any]:
    """As the manifest of the release keeps it."""
    order = {str(_site(Path(folder))): folder for folder in found.folders}
    return {
        "base": base,
        "identity": found.identity(),
        "folders": found.folders,
        "bytes": found.bytes,
        "files": found.files,
        "distributions": {
            name: {"version": one.version, "folder": order[one.site], "record": one.record}
            for name, one in sorted(found.chosen.items())
        },
        **compared(found, wanted),
        "incomplete": {
            one.name: {
                "missing": len(one.missing),
                "of": len(one.missing) + len(one.files),
                "files": one.missing[:_SHOWN],
            }
            for one in _partly(found)
        },
        "changed": {name: paths[:_SHOWN] for name, paths in odd.items()},
        "skipped": found.skipped,
        "loose": sorted({path.partition("/")[0] for _, path in found.loose}),
        "left": {site: {"files": len(paths), "first": paths[:_SHOWN]} for site, paths in found.left.items()},
    }
