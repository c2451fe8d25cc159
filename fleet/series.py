# SPDX-License-Identifier: Apache-2.0
"""Patch series on the control side: reading, checking, refreshing and cutting them. See docs/patch-series.md.

    bin/series check [ENGINE...]                          does everything in the repository agree?
    bin/series refresh ENGINE --site SITE                 compute the hashes of manifest.yml anew
    bin/series new ENGINE NAME FILE... --site SITE --edited TREE     cut a new patch from an edited copy
    bin/series diff ENGINE --site SITE --edited TREE      cut all patches anew, headers kept
    bin/series state|apply ENGINE --site SITE             what is a local site-packages; patch it
    bin/series apply ENGINE --release DIR                 the same for a release folder, with its stamp

SITE is the site-packages of an unpatched engine, or its wheel where nothing is written. TREE is an edited copy of
site-packages or of the package's folder in it. Exit codes: 0 ok, 1 a check failed, 2 misuse.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import hashlib
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import ddtree_patches_diff as diff
from ansible.module_utils import ddtree_patches_series as core

ROOT = Path(__file__).resolve().parent.parent / "ddtree_patches"
SeriesError = core.SeriesError
Reader = Callable[[str], bytes | None]
PATCH_NAME = re.compile(r"^\d{4}-[a-z0-9][a-z0-9-]*\.patch$")
MANIFEST_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Hashes are written by `bin/series refresh {engine}`; common, superseded and imports_skip are yours to edit.
"""


@dataclass(frozen=True)
class Folder:
    """A series as it lies in the repository, before anything is compared with the manifest.

    `added` maps a path below site-packages to the file of the repository that is installed there.
    """

    path: Path
    manifest: Mapping[str, Any]
    patches: tuple[diff.Patch, ...]
    texts: Mapping[str, str]
    added: Mapping[str, Path]

    @property
    def engine(self) -> str:
        return self.path.name

    @property
    def touched(self) -> list[str]:
        return [file.path for patch in self.patches for file in patch.files]


def sha(data: bytes) -> str:
    """sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def split_engine(engine: str) -> tuple[str, str]:
    """Distribution and version of an engine's name, e.g. ("sglang", "0.5.11")."""
    name, _, version = engine.rpartition("-")
    if not name or not version[:1].isdigit():
        raise SeriesError(f"{engine!r}: expected DISTRIBUTION-VERSION, e.g. sglang-0.5.11")
    return name, version


def read_series(folder: Path) -> list[str]:
    """Patch names in the order of the `series` file; `#` starts a comment, blank lines do not count."""
    try:
        lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as e:
        raise SeriesError(f"{folder} has no file 'series'; see docs/patch-series.md on adding an engine") from e
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    if len(set(names)) != len(names):
        raise SeriesError(f"{folder}/series: {next(n for n in names if names.count(n) > 1)} is listed twice")
    return names


def read_manifest(folder: Path) -> dict[str, Any]:
    """manifest.yml as it is, {} before the first refresh."""
    try:
        found = yaml.safe_load((folder / "manifest.yml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as e:
        raise SeriesError(f"{folder}/manifest.yml is no YAML: {e}") from e
    if not isinstance(found, dict):
        raise SeriesError(f"{folder}/manifest.yml: expected a mapping")
    return found


def read_folder(engine: str, root: Path = ROOT) -> Folder:
    """Reads a series from the repository. Raises SeriesError naming what is missing, twice there or malformed."""
    split_engine(engine)
    folder = root / engine
    if not folder.is_dir():
        known = ", ".join(engines(root)) or "none"
        raise SeriesError(f"no patch series for engine {engine!r} in {root}; there are: {known}")
    names = read_series(folder)
    stray = sorted({p.name for p in folder.glob("*.patch")} - set(names))
    if stray:
        raise SeriesError(f"{folder}/series does not list {', '.join(stray)}; add or delete it")
    texts, patches = {}, []
    for name in names:
        if not PATCH_NAME.match(name):
            raise SeriesError(f"{folder}/series: expected NNNN-what.patch, found {name!r}")
        try:
            texts[name] = (folder / name).read_bytes().decode("utf-8")
        except FileNotFoundError as e:
            raise SeriesError(f"{folder}/series lists {name}, which is not there") from e
        try:
            patches.append(diff.parse(name, texts[name]))
        except diff.PatchError as e:
            raise SeriesError(f"{engine}: {e}") from e
    if names != sorted(names):
        raise SeriesError(f"{folder}/series: the order differs from the numbers of the patches")
    manifest = read_manifest(folder)
    added = {}
    overlay = folder / "overlay"
    for file in sorted(overlay.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            added[file.relative_to(overlay).as_posix()] = file
    for source, target in (manifest.get("common") or {}).items():
        if target in added:
            raise SeriesError(f"{engine}: {target} comes from overlay/ and from common/{source}")
        if not (root / "common" / source).is_file():
            raise SeriesError(f"{engine}: manifest.yml maps common/{source}, which is not there")
        added[target] = root / "common" / source
    found = Folder(folder, manifest, tuple(patches), texts, added)
    twice = sorted({p for p in found.touched if found.touched.count(p) > 1 or p in added})
    if twice:
        raise SeriesError(f"{engine}: {', '.join(twice)} is changed in two places; one patch owns a file")
    return found


def engines(root: Path = ROOT) -> list[str]:
    """Names of all engines that have a series."""
    return sorted(p.parent.name for p in root.glob("*/series"))


def load(engine: str, root: Path = ROOT) -> core.Series:
    """The series of an engine, proven to agree with its manifest.

    Raises SeriesError if a file was changed without `bin/series refresh`: the digest goes into the release id, so a stale
    one would let a host keep an old release.
    """
    return agreed(read_folder(engine, root))


def agreed(folder: Folder) -> core.Series:
    """The series that a folder and its manifest make. Raises SeriesError where they differ."""
    engine, m = folder.engine, folder.manifest
    again = f"run bin/series refresh {engine} --site SITE"
    try:
        files = {path: core.FileHash(h["before"], h["after"]) for path, h in m["files"].items()}
        listed, imports = dict(m["patches"]), tuple(m["imports"])
        named = (m["distribution"], m["version"])
    except (KeyError, TypeError, AttributeError) as e:
        raise SeriesError(f"{engine}: manifest.yml is not complete ({e!r}); {again}") from e
    if named != split_engine(engine):
        raise SeriesError(f"{engine}: manifest.yml is of {'-'.join(map(str, named))}; {again}")
    now = {name: sha(text.encode()) for name, text in folder.texts.items()}
    if now != listed:
        odd = sorted(name for name in now.keys() | listed.keys() if now.get(name) != listed.get(name))
        raise SeriesError(f"{engine}: {', '.join(odd)} differs from manifest.yml; {again}")
    texts = {path: file.read_bytes() for path, file in folder.added.items()}
    for path, data in texts.items():
        if files.get(path) != core.FileHash(None, sha(data)):
            raise SeriesError(f"{engine}: {folder.added[path]} differs from manifest.yml; {again}")
    odd = sorted(set(files) ^ (set(texts) | set(folder.touched)))
    if odd:
        raise SeriesError(f"{engine}: manifest.yml and the series disagree about {', '.join(odd)}; {again}")
    try:
        overlay = {path: data.decode("utf-8") for path, data in texts.items()}
    except UnicodeDecodeError as e:
        raise SeriesError(f"{engine}: a file of the overlay is no UTF-8 text: {e}") from e
    return core.Series(
        engine=engine,
        distribution=named[0],
        version=named[1],
        files=files,
        patches=tuple(folder.texts.items()),
        overlay=overlay,
        imports=imports,
        superseded=m.get("superseded"),
    )


# --- lint


def header_fields(header: str) -> dict[str, str]:
    """Fields of a DEP-3 header; continuation lines start with a blank, a lone `---` or blank line ends the fields."""
    fields: dict[str, str] = {}
    name = ""
    for line in header.splitlines():
        if line.strip() in ("", "---"):
            break
        if line[0].isspace() and name:
            fields[name] += "\n" + line.strip()
        elif match := re.match(r"^([A-Z][A-Za-z-]*): *(.*)$", line):
            name = match[1]
            fields[name] = match[2].strip()
        else:
            fields.setdefault("", line)
    return fields


# Stands in the header of a new patch until its author writes there; such a series is refused.
UNFILLED = "TODO"


def lint_header(patch: diff.Patch) -> list[str]:
    """What is wrong with a patch's header, as sentences."""
    fields = header_fields(patch.header)
    bad = []
    if "" in fields:
        bad.append(f"{fields['']!r} is no 'Field: value' line")
    for name in ("Description", "Author", "Origin", "Forwarded", "Last-Update"):
        if not fields.get(name):
            bad.append(f"field {name} is missing")
    bad += [f"field {name} is not filled in" for name, text in fields.items() if UNFILLED in text]
    origin = fields.get("Origin", "vendor")
    if origin.split(",")[0] not in ("vendor", "upstream", "backport", "other"):
        bad.append(f"Origin is vendor, upstream, backport or other (and a URL after a comma), found {origin!r}")
    forwarded = fields.get("Forwarded", "no")
    if forwarded not in ("no", "not-needed") and not forwarded.startswith("https://"):
        bad.append(f"Forwarded is no, not-needed or a URL, found {forwarded!r}")
    if not fields.get("Applied-Upstream") and not fields.get("Kept"):
        bad.append("say since when upstream has it (Applied-Upstream) or why we carry it (Kept)")
    for name in ("Bug", "Applied-Upstream"):
        if fields.get(name) and "https://" not in fields[name]:
            bad.append(f"{name} needs a URL, found {fields[name]!r}")
    try:
        datetime.date.fromisoformat(fields.get("Last-Update", "2000-01-01"))
    except ValueError:
        bad.append(f"Last-Update is a date (YYYY-MM-DD), found {fields['Last-Update']!r}")
    return [f"{patch.name}: {text}" for text in bad]


def lint(engine: str, root: Path = ROOT) -> list[str]:
    """Everything wrong with a series that can be seen without the engine, as sentences; [] if all agrees."""
    try:
        series = load(engine, root)
        folder = read_folder(engine, root)
    except SeriesError as e:
        return [str(e)]
    bad = [text for patch in folder.patches for text in lint_header(patch)]
    for patch in folder.patches:
        for file in patch.files:
            for hunk in file.hunks:
                edge = [i for i, pair in enumerate(zip(hunk.old, hunk.new, strict=False)) if pair[0] != pair[1]]
                if edge and edge[0] > 3:
                    bad.append(f"{patch.name}: {file.path}:{hunk.line}: more than 3 lines of context")
    rule = series.superseded
    if not isinstance(rule, dict) or set(rule) != {"path", "pattern", "bug"}:
        bad.append("manifest.yml: superseded needs path, pattern and bug (what shows that upstream has it)")
    else:
        try:
            re.compile(rule["pattern"])
        except re.error as e:
            bad.append(f"manifest.yml: superseded.pattern: {e}")
    for path, text in series.overlay.items():
        if path.endswith(".py"):
            try:
                compile(text, path, "exec", dont_inherit=True)
            except SyntaxError as e:
                bad.append(f"{path}: {e}")
    return [f"{engine}: {text}" for text in bad]


# --- the engine's files


def reader(site: Path, distribution: str) -> tuple[Reader, str]:
    """A function that reads files of a site-packages folder or of a wheel, and the distribution's version there."""
    if site.is_dir():
        version = core.installed_version(site, distribution)
        if version is None:
            raise SeriesError(
                f"{distribution} is not installed in {site}; expected the site-packages of an unpatched engine"
            )
        return lambda path: core.read(site, path), version
    if not zipfile.is_zipfile(site):
        raise SeriesError(f"{site}: expected a site-packages folder or a wheel")
    wheel = zipfile.ZipFile(site)
    names = set(wheel.namelist())
    name, version = site.name.split("-")[:2]
    if name != re.sub(r"[-_.]+", "_", distribution):
        raise SeriesError(f"{site}: expected a wheel of {distribution}")
    return lambda path: wheel.read(path) if path in names else None, version


def original(engine: str, site: Path) -> Reader:
    """Reads files of the unpatched engine. Raises SeriesError if the site holds another version."""
    distribution, want = split_engine(engine)
    get, version = reader(site, distribution)
    if version != want:
        raise SeriesError(f"{site}: expected {distribution} {want}, observed {version}")
    return get


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        del indentless
        super().increase_indent(flow, False)


def refresh(engine: str, site: Path, root: Path = ROOT) -> bool:
    """Writes manifest.yml from the folder and the unpatched engine; True if it changed. Raises SeriesError."""
    folder = read_folder(engine, root)
    get = original(engine, site)
    distribution, version = split_engine(engine)
    files: dict[str, dict[str, str | None]] = {}
    for patch in folder.patches:
        for file in patch.files:
            old = get(file.path)
            if old is None:
                raise SeriesError(f"{patch.name}: {file.path} is not in {site}")
            try:
                new = diff.apply(patch.name, file, old.decode("utf-8"))
            except diff.PatchError as e:
                raise SeriesError(f"{e}; is {site} unpatched?") from e
            files[file.path] = {"before": sha(old), "after": sha(new.encode())}
    for path, source in folder.added.items():
        if get(path) is not None:
            raise SeriesError(f"{path}: the engine has this file; change it with a patch, or is {site} patched?")
        files[path] = {"before": None, "after": sha(source.read_bytes())}
    rule = folder.manifest.get("superseded") or {}
    if rule and core.has_upstream(rule, get(rule["path"])):
        raise SeriesError(f"{engine} has it upstream: its {rule['path']} contains /{rule['pattern']}/ before any patch")
    skip = folder.manifest.get("imports_skip") or {}
    made = {
        "engine": engine,
        "distribution": distribution,
        "version": version,
        "common": folder.manifest.get("common") or {},
        "superseded": rule,
        "imports_skip": skip,
        "patches": {name: sha(text.encode()) for name, text in folder.texts.items()},
        "files": dict(sorted(files.items())),
        "imports": [n for p in sorted(files) if p.endswith(".py") and (n := core.module_name(p)) not in skip],
    }
    body = yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)
    text = MANIFEST_HEAD.format(engine=engine) + body
    # The whole way once, in memory, before anything is written.
    core.dry_run(agreed(replace(folder, manifest=made)), get)
    target = folder.path / "manifest.yml"
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return False
    target.write_text(text, encoding="utf-8")
    return True


# --- cutting patches from an edited copy


def _find(lines: Sequence[str], part: Sequence[str]) -> int:
    return sum(1 for i in range(len(lines) - len(part) + 1) if list(lines[i : i + len(part)]) == list(part))


def cut(path: str, old: str, new: str) -> str:
    """The hunks from old to new with as few lines of context (1 to 3) as make each hunk's old text unique in the file."""
    before, after = diff.split_lines(old), diff.split_lines(new)
    text = ""
    for context in (1, 2, 3):
        out = []
        for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=context):
            out.append(line if line.endswith("\n") else f"{line}\n{diff.NO_NEWLINE}\n")
        text = "".join(out)
        hunks = diff.parse(path, text).files[0].hunks
        if all(_find(before, hunk.old) == 1 for hunk in hunks):
            break
    return text


def edited_files(tree: Path, distribution: str) -> dict[str, Path]:
    """Source files of an edited copy of site-packages, or of the package's folder in it, by their path in site-packages."""
    package = tree / distribution if (tree / distribution).is_dir() else tree
    if not (package / "version.py").is_file() and not (package / "__init__.py").is_file():
        raise SeriesError(f"{tree}: expected an edited copy of site-packages or of its folder {distribution}")
    return {
        f"{distribution}/{p.relative_to(package).as_posix()}": p
        for p in sorted(package.rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts and p.suffix not in (".pyc", ".orig", ".rej")
    }


@dataclass(frozen=True)
class Edits:
    """What an edited copy differs in: path -> (old, new) text, and the files that the engine does not have."""

    changed: Mapping[str, tuple[str, str]]
    added: Mapping[str, bytes]


def edits(engine: str, site: Path, tree: Path) -> Edits:
    """Compares an edited copy with the unpatched engine. Raises SeriesError if the site is patched or another version."""
    get = original(engine, site)
    changed, added = {}, {}
    for path, file in edited_files(tree, split_engine(engine)[0]).items():
        new, old = file.read_bytes(), get(path)
        if old is None:
            added[path] = new
        elif old != new:
            changed[path] = (old.decode("utf-8"), new.decode("utf-8"))
    return Edits(changed, added)


HEADER = f"""\
Description: {UNFILLED} one line on what this hook does
 More lines, each after a blank, on how.
Author: {UNFILLED} name
Origin: vendor
Forwarded: not-needed
Bug: https://github.com/sgl-project/sglang/issues/22887
Last-Update: {{today}}
Kept: {UNFILLED} why the series carries this and upstream does not
"""


def write_patch(path: Path, header: str, names: Sequence[str], changed: Mapping[str, tuple[str, str]]) -> bool:
    """Writes a patch of the named files under a header; True if the hunks changed, and then the date of it is renewed."""
    body = "".join(cut(name, *changed[name]) for name in sorted(names))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    old = path.read_bytes().decode("utf-8") if path.exists() else None
    if old is not None and old.removeprefix(header) == body:
        return False
    header = re.sub(
        r"(?m)^Last-Update:.*$", f"Last-Update: {today}", header.format(today=today) if old is None else header
    )
    path.write_bytes((header.rstrip("\n") + "\n\n" + body).encode())
    return True


def new_patch(engine: str, name: str, names: Sequence[str], site: Path, tree: Path, root: Path = ROOT) -> Path:
    """Cuts a new patch of some files and lists it in `series`. `name` is NNNN-what or what (the next number is taken)."""
    folder = root / engine
    folder.mkdir(parents=True, exist_ok=True)
    series = folder / "series"
    listed = read_series(folder) if series.exists() else []
    what = name.removesuffix(".patch")
    if not what[:4].isdigit():
        what = f"{int(listed[-1][:4]) + 1 if listed else 1:04d}-{what}"
    if not PATCH_NAME.match(what + ".patch"):
        raise SeriesError(f"{name!r}: expected NNNN-what or what, in small letters, digits and dashes")
    if f"{what}.patch" in listed:
        raise SeriesError(f"{what}.patch exists; bin/series diff {engine} cuts it anew")
    found = edits(engine, site, tree).changed
    same = [n for n in names if n not in found]
    if same:
        raise SeriesError(
            f"{', '.join(same)}: no difference to {site}; edited are: {', '.join(sorted(found)) or 'none'}"
        )
    owned = {f.path: p.name for p in (read_folder(engine, root).patches if listed else ()) for f in p.files}
    for n in names:
        if n in owned:
            raise SeriesError(f"{n} belongs to {owned[n]}; one patch owns a file")
    path = folder / f"{what}.patch"
    write_patch(path, HEADER, names, found)
    lines = (
        series.read_text(encoding="utf-8") if series.exists() else f"# Patches of {engine}, applied top to bottom.\n"
    )
    order = sorted([*listed, path.name])
    if order[-1] == path.name:
        series.write_text(lines + path.name + "\n", encoding="utf-8")
    else:
        after = order[order.index(path.name) + 1]
        series.write_text(
            re.sub(rf"(?m)^{re.escape(after)}", f"{path.name}\n{after}", lines, count=1), encoding="utf-8"
        )
    return path


def recut(engine: str, site: Path, tree: Path, root: Path = ROOT) -> list[str]:
    """Cuts every patch anew from an edited copy; headers stay. Returns a line per thing done or left to the author.

    Files that the copy no longer changes leave their patch; a patch left with no file is an error.
    """
    folder = read_folder(engine, root)
    found = edits(engine, site, tree)
    said = []
    for patch in folder.patches:
        keep = [f.path for f in patch.files if f.path in found.changed]
        if not keep:
            raise SeriesError(f"{patch.name}: {tree} changes none of its files; delete it and its line in series")
        if write_patch(folder.path / patch.name, patch.header, keep, found.changed):
            said.append(f"{patch.name}: cut anew ({', '.join(keep)})")
    for path in sorted(set(found.changed) - set(folder.touched)):
        said.append(f"{path}: edited, in no patch (bin/series new {engine} NAME {path} ...)")
    for path, data in found.added.items():
        home = folder.added.get(path)
        if home is None:
            said.append(f"{path}: new, not in the series; copy it to {folder.path}/overlay/{path}")
        elif home.read_bytes() != data:
            said.append(f"{path}: differs from {home}; the file in the repository is the one that counts")
    return said


# --- the door


def _paths(args: argparse.Namespace) -> tuple[Path, Path | None, Path]:
    if args.release:
        venv = args.release / "venv"
        return core.find_site(venv), args.release / core.STAMP, venv / "bin/python"
    return args.site, args.stamp, args.python or args.site.parents[2] / "bin/python"


def _apply(args: argparse.Namespace) -> dict[str, Any]:
    series = load(args.engine, args.root)
    site, stamp, python = _paths(args)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env.update(item.split("=", 1) for item in args.env)

    def imports() -> list[str]:
        names: list[str] = core.check_imports(python, site, series, env, args.timeout)
        return names

    done = core.apply(series, site, stamp=stamp, imports=imports if args.imports else None, dry=args.dry_run)
    return {"engine": args.engine, "digest": series.digest, "site": str(site), **vars(done)}


def _state(args: argparse.Namespace) -> dict[str, Any]:
    series = load(args.engine, args.root)
    site, stamp, _ = _paths(args)
    report = core.inspect(site, series)
    proven = core.read_stamp(stamp).get("digest") == series.digest
    return {"engine": args.engine, "digest": series.digest, "site": str(site), "state": report.state, "stamped": proven,
            "reason": report.reason}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bin/series", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of all series (default: ddtree_patches/)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.add_argument("--json", action="store_true", help="answer as JSON on stdout")
        return made

    check = verb("check", "does everything in the repository agree?")
    check.add_argument("engines", nargs="*", metavar="ENGINE", help="default: all")
    for name, text in (
        ("refresh", "write the hashes of manifest.yml anew"),
        ("diff", "cut all patches anew from an edited copy, keeping their headers"),
        ("new", "cut a new patch of some files from an edited copy"),
    ):
        made = verb(name, text)
        made.add_argument("engine", metavar="ENGINE")
        if name == "new":
            made.add_argument("name", metavar="NAME", help="NNNN-what, or what to take the next number")
            made.add_argument(
                "files", nargs="+", metavar="FILE", help="path in site-packages, e.g. sglang/srt/server_args.py"
            )
        made.add_argument("--site", type=Path, required=True, help="unpatched site-packages, or the wheel")
        if name != "refresh":
            made.add_argument(
                "--edited", type=Path, required=True, help="edited copy of site-packages or of the package"
            )
    for name, text in (("state", "report what a site is"), ("apply", "patch a site")):
        made = verb(name, text)
        made.add_argument("engine", metavar="ENGINE")
        where = made.add_mutually_exclusive_group(required=True)
        where.add_argument("--site", type=Path, help="a site-packages folder")
        where.add_argument("--release", type=Path, help="a release folder, with venv/ and ddtree.json")
        made.add_argument("--stamp", type=Path, help="stamp file to read and write with --site (default: none)")
        made.add_argument("--python", type=Path, help="Python of the site (default: bin/python of its venv)")
        if name == "apply":
            made.add_argument("--imports", action="store_true", help="import every patched module afterwards")
            made.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the imports")
            made.add_argument("--timeout", type=float, default=600, help="seconds for the imports (default: 600)")
            made.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    return parser


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Runs one verb: exit code, answer for --json, lines for a person."""
    if args.verb == "check":
        names = args.engines or engines(args.root)
        bad = [text for name in names for text in lint(name, args.root)]
        good = [f"{name}: ok, digest {load(name, args.root).digest}" for name in names] if not bad else []
        return (1 if bad else 0), {"ok": not bad, "engines": names, "problems": bad}, bad or good or ["no series"]
    if args.verb == "refresh":
        changed = refresh(args.engine, args.site, args.root)
        digest = load(args.engine, args.root).digest
        line = f"{args.engine}: manifest.yml {'written' if changed else 'unchanged'}, digest {digest}"
        return 0, {"ok": True, "changed": changed, "digest": digest}, [line]
    if args.verb == "new":
        path = new_patch(args.engine, args.name, args.files, args.site, args.edited, args.root)
        line = f"{path}: written; fill in its header, then bin/series refresh {args.engine} --site {args.site}"
        return 0, {"ok": True, "patch": str(path)}, [line]
    if args.verb == "diff":
        said = recut(args.engine, args.site, args.edited, args.root)
        return 0, {"ok": True, "said": said}, said or ["nothing to do: the patches are what the copy differs in"]
    if args.verb == "apply":
        got = _apply(args)
        note = "unchanged" if not got["changed"] else "would be changed" if args.dry_run else "changed"
        line = f"{got['site']}: {got['was']} -> {got['state']} ({note})"
        return 0, {"ok": True, **got}, [line]
    got = _state(args)
    ok = got["state"] not in core.NEXT_STEP
    line = f"{got['site']}: {got['state']}" + (f": {got['reason']}" if got["reason"] else "")
    return (0 if ok else 1), {"ok": ok, **got}, [line]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see the top of this file."""
    args = _parser().parse_args(argv)
    try:
        code, answer, lines = run(args)
    except SeriesError as e:
        code, answer, lines = 1, {"ok": False, "problems": [str(e)]}, [str(e)]
    if args.json:
        json.dump(answer, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print("\n".join(lines), file=sys.stdout if code == 0 else sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
