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
import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils import sglang_venv_adopt as adopting
from ansible.module_utils.sglang_venv_adopt import Adoption
from ansible.module_utils.sglang_venv_base import LIBC, BuildError, Options, environment, run, site_packages, tail
from ansible.module_utils.sglang_venv_elf import ElfError, audit, stub_source, undefined_cuda
from ansible.module_utils.sglang_venv_imports import ImportAudit, audit_imports, import_faults
from ansible.module_utils.sglang_venv_install import check_versions, check_wheelhouse, ensure_uv, install
from ansible.module_utils.sglang_venv_release import BUILD_PREFIX, build_path, installed, pick_files, release_path
from ansible.module_utils.sglang_venv_room import check_room, room_message, warm_mark

__all__ = ["build", "locked", "publish", "unfinished"]


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


def _glibc() -> int:
    library, version = platform.libc_ver()
    parts = version.split(".")
    if library != "glibc" or len(parts) < 2:
        raise BuildError(f"this host's C library is {library or 'unknown'} {version}, the lock's wheels are for glibc")
    return int(parts[1])


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
        done = run(command, os.environ, folder)
    except FileNotFoundError:
        raise BuildError(
            "gcc is missing; profile cpu compiles its stub of libcuda.so.1 with it. Install gcc and libc6-dev"
        ) from None
    if done.returncode:
        raise BuildError(f"gcc could not compile the stub of libcuda.so.1:\n{tail(done.stderr)}")


def _take_over(plan: Mapping[str, Any], options: Options, adoption: Adoption, folder: Path) -> dict[str, list[str]]:
    """A venv of the host's Python with a copy of the adopted folders; answers the files that are not as their RECORD says."""
    venv = folder / "venv"
    command = [options.python, "-I", "-m", "venv", "--without-pip", "--symlinks", str(venv)]
    done = run(command, environment(options), folder)
    site = site_packages(venv, plan["python"])
    if done.returncode or not site.is_dir():
        raise BuildError(
            f"{options.python} could not make a venv for Python {plan['python']}; set sglang_venv_python to one that can\n"
            f"{tail(done.stdout + done.stderr)}"
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
    """Programs of the lock's packages that the engine calls by name and a unit would not find: neither in the release nor on
    the host."""
    rows = [row for row in plan["imports"].get("programs") or [] if row["package"] in plan["packages"]]
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
                raise BuildError(room_message(plan, options, str(error))) from None
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
        check_wheelhouse(plan, options, wanted)
        check_room(plan, options)
        folder.mkdir(mode=0o755)
        options.uv_cache.mkdir(parents=True, exist_ok=True, mode=0o755)
        uv = ensure_uv(plan, options)
        stamp("uv")
        install(plan, options, uv, folder, wanted)
        warm_mark(plan, options).touch()
        stamp("install")
        check_versions(plan, site)
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


def _flush(path: Path) -> None:
    """Everything of the file system of `path` to disk: a rename must never be on disk before what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if LIBC.syncfs(handle) != 0:
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
