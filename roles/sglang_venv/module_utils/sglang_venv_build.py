# SPDX-License-Identifier: Apache-2.0
"""Builds and publishes a release on a host, out of a plan. Standard library only; runs as root under the host's Python.

Everything happens in `releases/.build-<id>` under a lock, and a failure removes that folder before it is reported. The
finished folder is renamed by `publish`, so a release is either whole or not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils import sglang_venv_adopt as adopting
from ansible.module_utils.sglang_venv_adopt import Adoption
from ansible.module_utils.sglang_venv_elf import ElfError, audit, stub_source, undefined_cuda
from ansible.module_utils.sglang_venv_imports import ImportAudit, audit_imports, import_faults
from ansible.module_utils.sglang_venv_release import (
    BUILD_PREFIX,
    build_path,
    installed,
    pick_files,
    release_path,
    requirements,
)

__all__ = ["BuildError", "Options", "build", "ensure_uv", "locked", "publish", "site_packages", "unfinished"]

_CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_FULL = re.compile(r"No space left on device|os error 28|ENOSPC|Disk quota exceeded|os error 122")


class BuildError(RuntimeError):
    """A release that could not be built or published; says the thing, what was expected and the next step."""


@dataclass(frozen=True)
class Options:
    """Where and how to build: folders of this host, the Python of the venv, where packages come from."""

    root: Path
    python: str
    uv_cache: Path
    link_mode: str = "hardlink"
    wheelhouse: Path | None = None
    index_url: str = ""
    uid: int = -1
    gid: int = -1
    lock_timeout: float = 900.0


def site_packages(venv: Path, python: str) -> Path:
    """The site-packages folder of a venv of a Python minor."""
    return venv / "lib" / f"python{python}" / "site-packages"


@contextlib.contextmanager
def locked(root: Path, timeout: float) -> Iterator[None]:
    """Keeps runs apart that build or publish below `root`. BuildError names the holder if it is busy for `timeout` seconds."""
    releases = root / "releases"
    releases.mkdir(parents=True, exist_ok=True, mode=0o755)
    with (releases / ".lock").open("a+") as handle:
        until = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    handle.seek(0)
                    holder = handle.read().strip() or "unknown"
                    raise BuildError(
                        f"{releases} is locked by process {holder} for more than {timeout:.0f} s; wait for that run to end, "
                        "or end it, and run again"
                    ) from None
                time.sleep(0.1)
        handle.seek(0)
        handle.truncate()
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def unfinished(root: Path) -> list[Path]:
    """Builds that no run has published."""
    return sorted((root / "releases").glob(f"{BUILD_PREFIX}*"))


def _discard(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _die_with_parent() -> None:
    """In a child: end when this run ends, however it ends. A uv that went on alone would write into the next run's build."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(command: list[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=dict(env),
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,  # this process has no threads
    )


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _environment(options: Options) -> dict[str, str]:
    """What the tools see: the host's own environment without anything that would point uv or Python elsewhere."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PYTHON", "VIRTUAL_ENV", "CONDA"))}
    env["UV_CACHE_DIR"] = str(options.uv_cache)
    env["UV_NO_PROGRESS"] = "1"
    env["UV_PYTHON_DOWNLOADS"] = "never"
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    env["LC_ALL"] = "C.UTF-8"
    if _CA_BUNDLE.exists():  # the host's own trust store, which a site may have added to
        env.setdefault("SSL_CERT_FILE", str(_CA_BUNDLE))
        env.setdefault("PIP_CERT", str(_CA_BUNDLE))
    if options.index_url:  # by environment, since a URL may carry a password and arguments are for everybody to read
        env["UV_DEFAULT_INDEX"] = options.index_url
        env["PIP_INDEX_URL"] = options.index_url
    return env


def _glibc() -> int:
    library, version = platform.libc_ver()
    parts = version.split(".")
    if library != "glibc" or len(parts) < 2:
        raise BuildError(f"this host's C library is {library or 'unknown'} {version}, the lock's wheels are for glibc")
    return int(parts[1])


# -- room --------------------------------------------------------------------------------------------------------------


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _warm_mark(plan: Mapping[str, Any], options: Options) -> Path:
    return options.uv_cache / f".fleet-{plan['lock'][:16]}-{plan['python']}"


def check_room(plan: Mapping[str, Any], options: Options, adoption: Adoption | None = None) -> None:
    """BuildError if the disk is too full for this build: bytes and inodes, of the releases' and of the cache's file system.

    A cache that has served this lock before, on the same file system and by links, needs next to nothing. What is taken over
    is copied, and no cache is used.
    """
    size, files = int(plan["unpacked"]["bytes"]), int(plan["unpacked"]["files"])
    if adoption:
        size, files = adoption.bytes + adopting.MARGIN, adoption.files
    releases, cache = _existing(options.root / "releases"), _existing(options.uv_cache)
    linked = options.link_mode == "symlink" or (
        options.link_mode in ("hardlink", "clone") and releases.stat().st_dev == cache.stat().st_dev
    )
    warm = _warm_mark(plan, options).exists()
    small = 200 * 2**20
    needs: dict[int, list[Any]] = {}
    places = [(cache, 0 if warm else size), (releases, small if linked else size)]
    for path, amount in [(releases, size)] if adoption else places:
        entry = needs.setdefault(path.stat().st_dev, [path, 0])
        entry[1] += amount
    for path, amount in needs.values():
        state = os.statvfs(path)
        free = state.f_bavail * state.f_frsize
        if free < amount:
            raise BuildError(
                f"disk full: the release needs {amount} bytes ({amount / 2**30:.1f} GiB) below {path}, {free} bytes are free. "
                f"Free some space there, mount a larger file system there, or move sglang_venv_uv_cache to one"
            )
        if state.f_files and state.f_favail < files:
            raise BuildError(f"no inodes left: the release needs {files} below {path}, {state.f_favail} are free")


def _room_message(plan: Mapping[str, Any], options: Options, words: str) -> str:
    return (
        f"disk full while building {build_path(options.root, plan['id'])} (cache {options.uv_cache}): the release needs about "
        f"{plan['unpacked']['bytes']} bytes ({plan['unpacked']['bytes'] / 2**30:.1f} GiB). The build was removed; free some "
        f"space and run again. Reported: {words}"
    )


# -- uv ----------------------------------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _pip() -> list[str]:
    """How to call pip here: out of the wheel that the distribution ships for making venvs, which needs no installation."""
    folders = [Path("/usr/share/python-wheels")]
    if (own := importlib.util.find_spec("ensurepip")) and own.origin:  # Debian leaves it out
        folders.append(Path(own.origin).parent / "_bundled")
    for folder in folders:
        for wheel in sorted(folder.glob("pip-*.whl"), reverse=True):
            return [sys.executable, str(wheel / "pip")]
    raise BuildError(f"no pip wheel in {' or '.join(map(str, folders))}; install python3-pip-whl (Debian, Ubuntu)")


def _uv_wheel(plan: Mapping[str, Any], options: Options, scratch: Path) -> Path:
    version, hashes = plan["uv"]["version"], set(plan["uv"]["hashes"])
    pattern = f"uv-{version}-*_{plan['machine']}*.whl"
    if options.wheelhouse:
        found = sorted(path for path in options.wheelhouse.glob(pattern) if "musllinux" not in path.name)
        if not found:
            raise BuildError(
                f"the wheelhouse {options.wheelhouse} has no {pattern}; fill it with bin/lock --wheelhouse and copy it again"
            )
    else:
        env, wanted = _environment(options), scratch / "uv.txt"
        wanted.write_text(f"uv=={version} {' '.join(f'--hash=sha256:{digest}' for digest in sorted(hashes))}\n")
        pip = [*_pip(), "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        got = _run([*pip, "-r", str(wanted), "-d", str(scratch)], env, scratch)
        found = sorted(scratch.glob(f"uv-{version}-*.whl"))
        if got.returncode or not found:
            raise BuildError(
                f"uv {version} could not be downloaded; give this host an index (sglang_venv_index_url) or a wheelhouse "
                f"(sglang_venv_wheelhouse)\n{_tail(got.stdout + got.stderr)}"
            )
    if (digest := _sha256(found[0])) not in hashes:
        raise BuildError(
            f"wrong hash: {found[0]} has sha256 {digest}, which is none of uv {version} in requirements/uv.txt"
        )
    return found[0]


def ensure_uv(plan: Mapping[str, Any], options: Options) -> Path:
    """The path of the pinned uv, installed below `root`/tools if it is not there yet."""
    version = plan["uv"]["version"]
    folder = options.root / "tools" / f"uv-{version}"
    binary = folder / "bin" / "uv"
    if binary.exists():
        return binary
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tempfile.TemporaryDirectory(prefix=".uv-", dir=folder.parent) as name:
        scratch = Path(name)
        wheel = _uv_wheel(plan, options, scratch)
        ready = scratch / "ready"
        (ready / "bin").mkdir(parents=True)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"uv-{version}.data/scripts/uv") as source,
            (ready / "bin" / "uv").open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        (ready / "bin" / "uv").chmod(0o755)
        said = _run([str(ready / "bin" / "uv"), "--version"], _environment(options), scratch)
        if said.returncode or said.stdout.split()[1:2] != [version]:
            raise BuildError(
                f"{wheel.name} does not run here or is another version: {_tail(said.stdout + said.stderr)}"
            )
        ready.chmod(0o755)
        ready.rename(folder)
    return binary


# -- build -------------------------------------------------------------------------------------------------------------


def _check_wheelhouse(plan: Mapping[str, Any], options: Options, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    if options.wheelhouse is None:
        return
    if not options.wheelhouse.is_dir():
        raise BuildError(f"the wheelhouse {options.wheelhouse} is no folder on this host; copy it there, or unset it")
    missing = [
        row["name"]
        for row in wanted.values()
        if not (options.wheelhouse / row["name"]).is_file()
        or (options.wheelhouse / row["name"]).stat().st_size != row["size"]
    ]
    if missing:
        names = ", ".join(sorted(missing)[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise BuildError(
            f"the wheelhouse {options.wheelhouse} lacks {names} (or holds them in another size); fill it with "
            f"bin/lock {plan['engine']} --wheelhouse DIR (Python {plan['python']}, {plan['machine']}) and copy it again"
        )


def _wrong_hash(plan: Mapping[str, Any], package: str, files: str, wanted: str, got: str) -> str:
    where = "Nothing was installed. Find out who changed the file (index, mirror, copy or lock) before you run again"
    asked = f"the lock of {plan['engine']} asks for sha256 {wanted}, the file offered has {got}"
    return f"wrong hash: {package}, file {files}: {asked}. {where}"


def _explain(plan: Mapping[str, Any], options: Options, wanted: Mapping[str, Mapping[str, Any]], words: str) -> str:
    """uv's words as ours: which file has the wrong hash, which disk is full."""
    if _FULL.search(words):
        return _room_message(plan, options, _tail(words, 3))
    for row in wanted.values() if options.wheelhouse else ():  # whatever uv says of a damaged file, its hash is wrong
        path = Path(str(options.wheelhouse), row["name"])
        if path.is_file() and (digest := _sha256(path)) != row["sha256"]:
            return _wrong_hash(plan, row["package"], str(path), row["sha256"], digest)
    if match := re.search(r"Hash mismatch for `([^`\s]+)", words):
        rows = [row for row in plan["files"] if row["package"] == match[1] or row["name"] in words]
        got = re.search(r"Computed:\s+sha256:([0-9a-f]{64})", words)
        names, digests = (" or ".join(row[key] for row in rows) for key in ("name", "sha256"))
        return _wrong_hash(
            plan, match[1], names or "unknown", digests or "another one", got[1] if got else "another one"
        )
    return f"uv could not install the lock of {plan['engine']}; nothing was kept\n{_tail(words)}"


def _install(plan: Mapping[str, Any], options: Options, uv: Path, folder: Path, wanted: Mapping[str, Any]) -> None:
    env, venv = _environment(options), folder / "venv"
    pins = folder / ".requirements.txt"
    pins.write_text(requirements(wanted.values()))
    offline = ["--no-config", "--no-index", "--offline"] if options.wheelhouse else []
    steps = [
        ["venv", "-q", "--relocatable", "--no-project", "--python", options.python, str(venv)],
        ["pip", "install", "-q", "--python", str(venv / "bin" / "python"), "--no-deps", "--require-hashes"]
        + ["--only-binary", ":all:", "--link-mode", options.link_mode]
        + ([*offline, "--find-links", str(options.wheelhouse)] if options.wheelhouse else [])
        + ["-r", str(pins)],
    ]
    if options.wheelhouse:
        steps[0][1:1] = ["--no-config", "--offline"]
    for step in steps:
        done = _run([str(uv), *step], env, folder)
        if done.returncode:
            raise BuildError(_explain(plan, options, wanted, done.stdout + done.stderr))
    pins.unlink()


def _check_versions(plan: Mapping[str, Any], site: Path) -> None:
    found, wanted = installed(site), plan["packages"]
    wrong = [
        f"{name}: locked {wanted.get(name, 'not at all')}, installed {found.get(name, 'not at all')}"
        for name in sorted(set(wanted) | set(found))
        if wanted.get(name) != found.get(name)
    ]
    if wrong:
        raise BuildError(f"{site} is not what the lock of {plan['engine']} says: {'; '.join(wrong[:5])}")


def _write_profile(plan: Mapping[str, Any], folder: Path, driver_users: Iterable[Path]) -> None:
    profile = plan["profile"]
    top = folder / "profile"
    top.mkdir()
    for name, text in sorted(profile["files"].items()):
        path = Path(os.path.normpath(top / name))
        if top not in path.parents:
            raise BuildError(f"profile {profile['name']}: the file {name!r} would lie outside the release")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if not profile["stub_libcuda"]:
        return
    symbols = {*profile["stub_symbols"], *undefined_cuda(driver_users)}
    (top / "lib").mkdir(exist_ok=True)
    source = top / "lib" / "libcuda_stub.c"
    source.write_text(stub_source(symbols))
    library = top / "lib" / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    try:
        done = _run(command, os.environ, folder)
    except FileNotFoundError:
        raise BuildError(
            "gcc is missing; profile cpu compiles its stub of libcuda.so.1 with it. Install gcc and libc6-dev"
        ) from None
    if done.returncode:
        raise BuildError(f"gcc could not compile the stub of libcuda.so.1:\n{_tail(done.stderr)}")


def _take_over(plan: Mapping[str, Any], options: Options, adoption: Adoption, folder: Path) -> dict[str, list[str]]:
    """A venv of the host's Python with a copy of the adopted folders; answers the files that are not as their RECORD says."""
    venv = folder / "venv"
    command = [options.python, "-I", "-m", "venv", "--without-pip", "--symlinks", str(venv)]
    done = _run(command, _environment(options), folder)
    site = site_packages(venv, plan["python"])
    if done.returncode or not site.is_dir():
        raise BuildError(
            f"{options.python} could not make a venv for Python {plan['python']}; set sglang_venv_python to one that can\n"
            f"{_tail(done.stdout + done.stderr)}"
        )
    for script in (venv / "bin").glob("[aA]ctivate*"):
        script.unlink()  # it and the line `command` hold the path of the build
    lines = (venv / "pyvenv.cfg").read_text().splitlines(keepends=True)
    (venv / "pyvenv.cfg").write_text("".join(line for line in lines if not line.startswith("command")))
    return adopting.take_over(adoption, site)


def _unfit(adoption: Adoption | None) -> str:
    """The next step when the audits refuse what was taken over."""
    if adoption is None:
        return ""
    return (
        f". Taken over from {', '.join(adoption.folders)}: put a folder that has it right first in sglang_venv_adopt, or unset "
        "that to build from the lock"
    )


def _missing_programs(plan: Mapping[str, Any], programs: Path) -> list[str]:
    """Programs that the engine calls by name and a unit would not find: neither in the release nor on the host."""
    rows = plan["imports"].get("programs") or []
    missing = [row for row in rows if not shutil.which(row["program"], path=f"{programs}:/usr/local/bin:/usr/bin:/bin")]
    return [
        f"no program {row['program']} in {programs} and none on this host ({row['why']}): install {row['package']} where the "
        "packages come from"
        for row in missing
    ]


def _check_imports(plan: Mapping[str, Any], folder: Path, site: Path, adoption: Adoption | None) -> ImportAudit:
    """What imports.yml of the engine asks of the venv. BuildError with every fault at once."""
    # Other versions of what an adopted engine doesn't depend on were told as a warning.
    pinned = {*plan["load_bearing"]} if adoption else None
    verdict = audit_imports(site, plan["imports"], installed(site), pinned)
    verdict.faults += _missing_programs(plan, folder / "venv" / "bin")
    modules = [name for name in plan["imports"].get("imports") or [] if (site / name).exists()]
    if plan["profile"]["name"] == "cpu":
        verdict.not_imported = "profile cpu: the import check of the patch series imports the engine itself"
    elif modules and not verdict.faults:
        verdict.faults = import_faults(folder / "venv" / "bin" / "python", modules)
        verdict.imported = modules
    if verdict.faults:
        raise BuildError(
            f"packages of the release do not fit {plan['engine']}: {'; '.join(verdict.faults[:8])}"
            + (f"; and {len(verdict.faults) - 8} more" if len(verdict.faults) > 8 else "")
            + _unfit(adoption)
        )
    return verdict


def build(plan: Mapping[str, Any], options: Options, adoption: Adoption | None = None) -> dict[str, Any]:
    """Builds the release of a plan, or takes `adoption` over for it, unless it is published.

    Answers `{present, path, manifest?, discarded, seconds}`.

    Unfinished builds of earlier runs are removed first. BuildError after a clean-up on any failure.
    """
    os.umask(0o022)
    with locked(options.root, options.lock_timeout):
        path = release_path(options.root, plan["id"])
        if path.exists():
            return {"present": True, "path": str(path), "discarded": [], "seconds": {}}
        discarded = []
        for old in unfinished(options.root):
            _discard(old)
            discarded.append(str(old))
        folder = build_path(options.root, plan["id"])
        try:
            manifest = _fill(plan, options, folder, adoption)
        except BaseException as error:
            _discard(folder)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise BuildError(_room_message(plan, options, str(error))) from None
            if isinstance(error, (ElfError, OSError)):
                raise BuildError(f"the release could not be built: {error}") from error
            raise
        return {
            "present": False,
            "path": str(folder),
            "discarded": discarded,
            "manifest": manifest,
            "seconds": manifest["seconds"],
        }


def _fill(plan: Mapping[str, Any], options: Options, folder: Path, adoption: Adoption | None) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    last = time.monotonic()

    def stamp(step: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[step], last = round(now - last, 3), now

    glibc = _glibc()
    if glibc < int(plan["glibc"].split(".")[1]):
        raise BuildError(f"this host has glibc 2.{glibc}, the wheels of {plan['engine']} need {plan['glibc']} or newer")
    site = site_packages(folder / "venv", plan["python"])
    source: dict[str, Any] = {"kind": "built", "uv": plan["uv"]["version"], "link_mode": options.link_mode}
    if adoption:
        check_room(plan, options, adoption)
        folder.mkdir(mode=0o755)
        odd = _take_over(plan, options, adoption, folder)
        stamp("copy")
        source = {"kind": "adopted", "adopted": adopting.manifest(adoption, plan["base"], plan["packages"], odd)}
    else:
        wanted = pick_files(plan["files"], glibc)
        _check_wheelhouse(plan, options, wanted)
        check_room(plan, options)
        folder.mkdir(mode=0o755)
        options.uv_cache.mkdir(parents=True, exist_ok=True, mode=0o755)
        uv = ensure_uv(plan, options)
        stamp("uv")
        _install(plan, options, uv, folder, wanted)
        _warm_mark(plan, options).touch()
        stamp("install")
        _check_versions(plan, site)
        stamp("versions")
    verdict = audit(site, plan["audit"]["cuda_major"], plan["audit"]["exceptions"])
    if verdict.faults:
        raise BuildError(
            f"more than one CUDA in the release of {plan['engine']}: {'; '.join(verdict.faults[:5])}. Lock another version of "
            f"the package, or add an exception with its reason to engine.yml if the file is never loaded{_unfit(adoption)}"
        )
    stamp("audit")
    _write_profile(plan, folder, verdict.driver_users)
    (folder / "cache").mkdir(mode=0o750)
    if options.uid >= 0:
        os.chown(folder / "cache", options.uid, options.gid)
    stamp("profile")
    imports = _check_imports(plan, folder, site, adoption)
    stamp("imports")
    manifest = {
        "schema": 1,
        **{key: plan[key] for key in ("id", "engine", "version", "machine", "series", "lock")},
        "python": {"version": plan["python"], "path": options.python},
        "profile": plan["profile"]["name"],
        **source,
        "packages": installed(site) if adoption else plan["packages"],
        "audit": verdict.data(),
        "imports": imports.data(),
        "backends": plan["backends"],
        "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": seconds,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


# -- publish -----------------------------------------------------------------------------------------------------------


def _flush(path: Path) -> None:
    """Everything of the file system of `path` to disk: a rename must never be on disk before what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.syncfs(handle) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed", str(path))
    finally:
        os.close(handle)


def publish(root: Path, identifier: str, lock_timeout: float = 900.0) -> bool:
    """Renames a finished build to its release. True if this call did it, False if it was published already."""
    with locked(root, lock_timeout):
        folder, path = build_path(root, identifier), release_path(root, identifier)
        if path.exists():
            _discard(folder)
            return False
        if not (folder / "manifest.json").exists():
            raise BuildError(
                f"there is no finished build {folder}; another run has removed it, or it was never built. Run the build again"
            )
        _flush(folder)
        folder.rename(path)
        _flush(path.parent)
        return True
