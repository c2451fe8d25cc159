# SPDX-License-Identifier: Apache-2.0
"""A patch series, the state of a site-packages folder towards it, and the way from clean to applied.

A site is `clean` (every touched file is the wheel's), `applied` (every file is the series'), `partial` (some of each: an
apply was interrupted), `foreign` (some file is neither) or `superseded` (another engine version that has the work itself).
Files are replaced, never written in place: uv links them out of its cache, where every other venv would see the change.

Runs on the host with the system's Python: standard library only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.module_utils import ddtree_patches_diff as diff

FORMAT = 1
STAMP = "ddtree.json"
TEMP = ".{name}.ddtree-new"


class SeriesError(Exception):
    """The series does not fit, or could not be applied; the message says what was expected, what is there and what to do."""


@dataclass(frozen=True)
class FileHash:
    """sha256 of a touched file; `before` is None for a file that the series adds."""

    before: str | None
    after: str


@dataclass(frozen=True)
class Series:
    """All that is needed to apply a series; paths are relative to site-packages."""

    engine: str
    distribution: str
    version: str
    files: Mapping[str, FileHash]
    patches: tuple[tuple[str, str], ...]
    overlay: Mapping[str, str]
    imports: tuple[str, ...]
    superseded: Mapping[str, str] | None = None

    @property
    def digest(self) -> str:
        """sha256 over what the series makes of an engine; headers, names and order of the patches do not count."""
        files = {path: [h.before, h.after] for path, h in self.files.items()}
        return _sha(canonical([FORMAT, self.distribution, self.version, files]))

    def pack(self) -> str:
        """The series as one line of text, for the argument of a module."""
        return base64.b64encode(zlib.compress(canonical(asdict(self)), 9)).decode()

    @classmethod
    def unpack(cls, packed: str) -> Series:
        """The reverse of pack(). Raises SeriesError if the text is no packed series."""
        try:
            raw = json.loads(zlib.decompress(base64.b64decode(packed, validate=True)))
            raw["files"] = {path: FileHash(**h) for path, h in raw["files"].items()}
            raw["patches"] = tuple((name, text) for name, text in raw["patches"])
            raw["imports"] = tuple(raw["imports"])
            return cls(**raw)
        except (ValueError, zlib.error, TypeError, KeyError, AttributeError) as e:
            raise SeriesError(
                f"the series is unreadable ({e}); it comes from lookup('ddtree_series', ENGINE).payload"
            ) from e

    def diff_text(self) -> str:
        """Every hunk of the series, new files included, as one unified diff."""
        out = []
        for name, text in self.patches:
            out.append(text.removeprefix(diff.parse(name, text).header))
        for path, text in sorted(self.overlay.items()):
            lines = diff.split_lines(text)
            body = "".join("+" + line for line in lines)
            if lines and not body.endswith("\n"):
                body += f"\n{diff.NO_NEWLINE}\n"
            out.append(f"--- /dev/null\n+++ b/{path}\n" + (f"@@ -0,0 +1,{len(lines)} @@\n{body}" if lines else ""))
        return "".join(out)


@dataclass(frozen=True)
class FileState:
    """What one touched file is now: `before`, `after` or `foreign`; hashes are sha256 or "absent"."""

    path: str
    state: str
    before: str
    after: str
    observed: str


@dataclass(frozen=True)
class Report:
    """What a site is. `version` is the installed version, None if the distribution is not there."""

    state: str
    version: str | None
    files: tuple[FileState, ...] = ()
    reason: str = ""


@dataclass
class Outcome:
    """What apply() did: `was` is the state found, `state` the state now (or predicted, in a dry run)."""

    was: str
    state: str
    changed: bool
    imported: list[str] = field(default_factory=list)


def canonical(value: Any) -> bytes:
    """JSON with one spelling per value, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read(site: Path, path: str) -> bytes | None:
    """Content of a file of the site, None if absent. Raises SeriesError if the path leaves the site or is no file."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise SeriesError(f"{path}: the path of a series must be relative to site-packages and stay inside")
    full = site / pure
    folder = full.parent
    # A folder linked to elsewhere (a cache, another venv) would carry our new files there.
    if folder.exists() and not folder.resolve().is_relative_to(site.resolve()):
        raise SeriesError(f"{folder} is a link out of {site}; install the engine with real folders and try again")
    try:
        return full.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise SeriesError(f"{full} cannot be read: {e.strerror}") from e


def installed_version(site: Path, distribution: str) -> str | None:
    """Version of a distribution in a site, from its METADATA; None if it is not installed."""
    name = re.sub(r"[-_.]+", "_", distribution)
    for meta in sorted(site.glob(f"{name}-*.dist-info/METADATA")):
        fields = dict(re.findall(r"^(Name|Version): *(\S+)", meta.read_text(encoding="utf-8"), re.M))
        if fields.get("Name") == distribution:
            return fields.get("Version")
    return None


def has_upstream(rule: Mapping[str, str], data: bytes | None) -> bool:
    """Whether the content of the rule's file has its pattern; ^ and $ are ends of lines."""
    return re.search(rule["pattern"], (data or b"").decode("utf-8", "replace"), re.M) is not None


def _file_state(site: Path, path: str, want: FileHash) -> FileState:
    data = read(site, path)
    seen = None if data is None else _sha(data)
    state = "after" if seen == want.after else "before" if seen == want.before else "foreign"
    return FileState(path, state, want.before or "absent", want.after, seen or "absent")


def inspect(site: Path, series: Series) -> Report:
    """The state of a site towards a series. Changes nothing. Raises SeriesError if the site is no folder."""
    if not site.is_dir():
        raise SeriesError(f"{site} is no folder; expected the site-packages of an installed {series.engine}")
    version = installed_version(site, series.distribution)
    if version is None:
        return Report("foreign", None, reason=f"{series.distribution} is not installed in {site}")
    if version != series.version:
        rule = series.superseded
        if rule and has_upstream(rule, read(site, rule["path"])):
            reason = f"{series.distribution} {version} has it upstream: {rule['path']} contains /{rule['pattern']}/"
            return Report("superseded", version, reason=reason)
        reason = f"expected {series.distribution} {series.version}, observed {version}"
        return Report("foreign", version, reason=reason)
    files = tuple(_file_state(site, path, want) for path, want in sorted(series.files.items()))
    states = {file.state for file in files}
    if "foreign" in states:
        named = [
            f"{f.path}: expected sha256 {f.before} (unpatched) or {f.after} (patched), observed {f.observed}"
            for f in files
            if f.state == "foreign"
        ]
        return Report("foreign", version, files, "; ".join(named))
    if states == {"before", "after"}:
        old, new = ([f.path for f in files if f.state == state] for state in ("before", "after"))
        return Report("partial", version, files, f"patched: {', '.join(new)}; unpatched: {', '.join(old)}")
    return Report("clean" if states == {"before"} else "applied", version, files)


def dry_run(series: Series, get: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """The new content of every file, computed in memory and checked: before-hash, hunks, after-hash, syntax.

    `get` reads a file of the unpatched engine. Raises SeriesError.
    """
    new: dict[str, bytes] = {}
    for name, text in series.patches:
        for file in diff.parse(name, text).files:
            old = get(file.path)
            want = series.files.get(file.path)
            if want is None or old is None or _sha(old) != want.before:
                seen = "absent" if old is None else _sha(old)
                raise SeriesError(f"{file.path}: expected sha256 {want and want.before}, observed {seen}")
            if file.path in new:
                raise SeriesError(f"{name}: {file.path} is changed by an earlier patch already; one patch owns a file")
            try:
                new[file.path] = diff.apply(name, file, old.decode("utf-8")).encode()
            except ValueError as e:
                raise SeriesError(str(e)) from e
    for path, text in series.overlay.items():
        if get(path) is not None:
            raise SeriesError(f"{path}: the overlay would replace a file of the engine; change it with a patch")
        new[path] = text.encode()
    if sorted(new) != sorted(series.files):
        odd = ", ".join(sorted(set(new) ^ set(series.files)))
        raise SeriesError(f"manifest and series disagree about {odd}; run bin/series refresh {series.engine}")
    for path, data in new.items():
        if _sha(data) != series.files[path].after:
            raise SeriesError(
                f"{path}: the series makes sha256 {_sha(data)} of it, the manifest expects {series.files[path].after}; "
                f"run bin/series refresh {series.engine}"
            )
        if path.endswith(".py"):
            try:
                compile(data, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as e:
                raise SeriesError(f"{path}: does not compile after patching: {e}") from e
    return new


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_beside(target: Path, data: bytes) -> Path:
    """Writes the new content next to the target, with the target's mode and owner, and forces it to disk."""
    temp = target.with_name(TEMP.format(name=target.name))
    temp.unlink(missing_ok=True)  # left by a run that was killed
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(data)
        old = target.stat() if target.exists() else None
        if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()) and os.geteuid() == 0:
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, old.st_mode & 0o777 if old else 0o644)
        out.flush()
        os.fsync(fd)
    return temp


def replace(site: Path, new: Mapping[str, bytes]) -> None:
    """Replaces files of a site: all are written beside their targets first, then renamed one by one.

    A failure before the first rename (a full disk) leaves the site as it was. Links are replaced, not followed.
    Raises SeriesError.
    """
    temps: list[tuple[Path, Path]] = []
    made: list[Path] = []
    renamed = 0
    try:
        for path, data in sorted(new.items()):
            target = site / path
            for folder in reversed(target.parents):
                if folder.is_relative_to(site) and not folder.exists():
                    folder.mkdir()
                    made.append(folder)
                    folder.chmod(0o755)  # whatever the umask: the engine runs as another user
            temps.append((target.with_name(TEMP.format(name=target.name)), target))
            _write_beside(target, data)
        for temp, target in temps:
            temp.replace(target)
            renamed += 1
        for folder in sorted({target.parent for _, target in temps} | {folder.parent for folder in made}):
            _sync(folder)
    except OSError as e:
        for temp, _ in temps[renamed:]:
            temp.unlink(missing_ok=True)
        if not renamed:
            for folder in reversed(made):
                folder.rmdir()
            raise SeriesError(f"{site}: nothing was changed, writing the patched files failed: {e}") from e
        raise SeriesError(
            f"{site}: {renamed} of {len(temps)} files were replaced, then: {e}; throw this build away and build again"
        ) from e


def drop_bytecode(site: Path, paths: Mapping[str, Any]) -> None:
    """Removes compiled forms of the old sources, which an unchecked .pyc would keep alive."""
    for path in paths:
        source = site / path
        for old in source.parent.glob(f"__pycache__/{source.stem}.*.pyc"):
            old.unlink()


IMPORTER = """
import importlib, json, os, sys, traceback
wanted, failed = json.load(sys.stdin), {}
try:  # as the engine does first of all: a profile's plugin may decide what its modules are
    from sglang.srt.plugins import load_plugins
except ModuleNotFoundError as e:
    if not "sglang.srt.plugins".startswith(e.name or "?"):
        raise
else:
    load_plugins()
for name, path in wanted.items():
    try:
        found = importlib.import_module(name).__file__
        if not os.path.samefile(found, path):
            failed[name] = f"came from {found}, expected {path}"
    except BaseException as e:
        frames = traceback.extract_tb(e.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        failed[name] = "".join(traceback.format_exception_only(e)).strip() + where
sys.stdout.flush()
print("\\nddtree-imports " + json.dumps(failed), flush=True)
"""


def module_name(path: str) -> str:
    """The module that a .py file of site-packages is."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def check_imports(python: Path, site: Path, series: Series, env: Mapping[str, str], timeout: float) -> list[str]:
    """Imports the series' modules with the release's own Python, in one process, and returns their names.

    `env` is added to a bare environment (PATH, an empty HOME); on a machine without a GPU it carries what the profile says.
    Nothing is written into the site. Raises SeriesError naming each module that fails and its reason; `timeout` in seconds.
    """
    paths = {module_name(path): str(site / path) for path in series.files if path.endswith(".py")}
    wanted = {name: paths[name] for name in series.imports}
    with tempfile.TemporaryDirectory(prefix="ddtree-import-") as home:
        base = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "LANG": "C.UTF-8"}
        try:
            done = subprocess.run(
                [str(python), "-B", "-P", "-s", "-c", IMPORTER],
                input=json.dumps(wanted),
                capture_output=True,
                text=True,
                errors="replace",
                cwd=home,
                env={**base, **env},
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise SeriesError(f"importing {len(wanted)} patched modules took longer than {timeout:g} s") from e
        except OSError as e:
            raise SeriesError(f"{python} cannot be started: {e.strerror}; expected the Python of the release") from e
    answer = re.search(r"^ddtree-imports (\{.*\})$", done.stdout, re.M)
    if answer is None:
        tail = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise SeriesError(f"importing the patched modules ended with exit code {done.returncode}: {tail}")
    failed = json.loads(answer[1])
    if failed:
        raise SeriesError(
            "patched modules cannot be imported: " + "; ".join(f"{m}: {why}" for m, why in failed.items())
        )
    return list(wanted)


def read_stamp(stamp: Path | None) -> dict[str, Any]:
    """The stamp's content, {} if there is none or it is unreadable."""
    try:
        found = json.loads(stamp.read_text(encoding="utf-8")) if stamp else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def stamp_content(series: Series, imported: list[str]) -> dict[str, Any]:
    """What the stamp records: it follows from the series and the check alone, so the same release has the same stamp."""
    return {
        "format": FORMAT,
        "engine": series.engine,
        "digest": series.digest,
        "patches": {name: _sha(text.encode()) for name, text in series.patches},
        "files": {path: asdict(h) for path, h in sorted(series.files.items())},
        "imported": imported,
    }


def write_stamp(stamp: Path, series: Series, imported: list[str]) -> None:
    """Writes the stamp, whole or not at all. Raises SeriesError."""
    try:
        text = json.dumps(stamp_content(series, imported), indent=2) + "\n"
        _write_beside(stamp, text.encode()).replace(stamp)
        _sync(stamp.parent)
    except OSError as e:
        raise SeriesError(f"{stamp} cannot be written: {e.strerror}; the site is patched, run again") from e


NEXT_STEP = {
    "partial": "an apply was interrupted. Throw this build away and build again (the next run of the play does both)",
    "foreign": "somebody else changed it, or it is another build of the engine. Remove it and build again from the lock",
}


def apply(
    series: Series,
    site: Path,
    *,
    stamp: Path | None = None,
    imports: Callable[[], list[str]] | None = None,
    published: bool = False,
    dry: bool = False,
) -> Outcome:
    """Brings a site from clean to applied, or leaves it as it is.

    The stamp is written last, after hashes, syntax and `imports` (which runs check_imports, or is None to skip it), so a
    site with a stamp was proven; an applied site without one is proven again. A `published` site is never changed.
    With `dry`, everything up to the first write is done and checked. A superseded site is left alone.
    Raises SeriesError for partial and foreign sites and for every failed step.
    """
    report = inspect(site, series)
    was = report.state
    if was in NEXT_STEP:
        raise SeriesError(f"{site} is {was} towards {series.engine}: {report.reason}; {NEXT_STEP[was]}")
    if was == "superseded":
        return Outcome(was, was, False)
    proven = imports is None if stamp is None else read_stamp(stamp).get("digest") == series.digest
    if was == "applied" and (published or proven):
        return Outcome(was, was, False)
    if published:
        raise SeriesError(
            f"{site} belongs to a published release and is unpatched; a release is never changed. "
            "Roll back or point the host at another release, remove this one and build again"
        )
    if was == "clean":
        new = dry_run(series, lambda path: read(site, path))
        if dry:
            return Outcome(was, "applied", True)
        replace(site, new)
        after = inspect(site, series)
        if after.state != "applied":
            raise SeriesError(f"{site}: after replacing, the site is {after.state}: {after.reason}; build again")
    elif dry:
        return Outcome(was, was, stamp is not None)
    drop_bytecode(site, series.files)
    imported = imports() if imports else []
    if stamp is not None:
        write_stamp(stamp, series, imported)
    return Outcome(was, "applied", was == "clean" or stamp is not None, imported)


def find_site(venv: Path) -> Path:
    """The one site-packages folder of a venv. Raises SeriesError if there is none or more than one."""
    found = sorted(venv.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise SeriesError(f"{venv}: expected one lib/python3.*/site-packages, found {len(found)}")
    return found[0]
