# SPDX-License-Identifier: Apache-2.0
"""Puts the lock's packages into a venv with uv, from an index or a wheelhouse. Standard library only."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.sglang_venv_base import BuildError, Options, environment, run, sha256_of, tail
from ansible.module_utils.sglang_venv_release import installed, requirements
from ansible.module_utils.sglang_venv_room import room_message

_FULL = re.compile(r"No space left on device|os error 28|ENOSPC|Disk quota exceeded|os error 122")


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
        env, wanted = environment(options), scratch / "uv.txt"
        wanted.write_text(f"uv=={version} {' '.join(f'--hash=sha256:{digest}' for digest in sorted(hashes))}\n")
        pip = [*_pip(), "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        got = run([*pip, "-r", str(wanted), "-d", str(scratch)], env, scratch)
        found = sorted(scratch.glob(f"uv-{version}-*.whl"))
        if got.returncode or not found:
            raise BuildError(
                f"uv {version} could not be downloaded; give this host an index (sglang_venv_index_url) or a wheelhouse "
                f"(sglang_venv_wheelhouse)\n{tail(got.stdout + got.stderr)}"
            )
    if (digest := sha256_of(found[0])) not in hashes:
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
        said = run([str(ready / "bin" / "uv"), "--version"], environment(options), scratch)
        if said.returncode or said.stdout.split()[1:2] != [version]:
            raise BuildError(f"{wheel.name} does not run here or is another version: {tail(said.stdout + said.stderr)}")
        ready.chmod(0o755)
        ready.rename(folder)
    return binary


def check_wheelhouse(plan: Mapping[str, Any], options: Options, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """BuildError unless the wheelhouse, where one is given, holds every file that is wanted, in its size."""
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
        return room_message(plan, options, tail(words, 3))
    for row in wanted.values() if options.wheelhouse else ():  # whatever uv says of a damaged file, its hash is wrong
        path = Path(str(options.wheelhouse), row["name"])
        if path.is_file() and (digest := sha256_of(path)) != row["sha256"]:
            return _wrong_hash(plan, row["package"], str(path), row["sha256"], digest)
    if match := re.search(r"Hash mismatch for `([^`\s]+)", words):
        rows = [row for row in plan["files"] if row["package"] == match[1] or row["name"] in words]
        got = re.search(r"Computed:\s+sha256:([0-9a-f]{64})", words)
        names, digests = (" or ".join(row[key] for row in rows) for key in ("name", "sha256"))
        return _wrong_hash(
            plan, match[1], names or "unknown", digests or "another one", got[1] if got else "another one"
        )
    return f"uv could not install the lock of {plan['engine']}; nothing was kept\n{tail(words)}"


def install(plan: Mapping[str, Any], options: Options, uv: Path, folder: Path, wanted: Mapping[str, Any]) -> None:
    """A venv in the build folder with the wanted files of the lock, by hash. BuildError says which file or disk is at fault."""
    env, venv = environment(options), folder / "venv"
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
        done = run([str(uv), *step], env, folder)
        if done.returncode:
            raise BuildError(_explain(plan, options, wanted, done.stdout + done.stderr))
    pins.unlink()


def check_versions(plan: Mapping[str, Any], site: Path) -> None:
    """BuildError unless the versions of a site-packages folder are the lock's."""
    found, wanted = installed(site), plan["packages"]
    wrong = [
        f"{name}: locked {wanted.get(name, 'not at all')}, installed {found.get(name, 'not at all')}"
        for name in sorted(set(wanted) | set(found))
        if wanted.get(name) != found.get(name)
    ]
    if wrong:
        raise BuildError(f"{site} is not what the lock of {plan['engine']} says: {'; '.join(wrong[:5])}")
