# SPDX-License-Identifier: Apache-2.0
"""Writes, checks and carries the lock of an engine. Behind bin/lock.

`engines/<engine>/lock.txt` is the lock. `files.json` beside it names the wheels that the supported hosts take out of it,
with size and sha256: what a wheelhouse has to hold, what a download weighs, and which file an error is about.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ansible.module_utils.sglang_venv_lock import LockError, body_digest, canonical, lint, parse, select, write_marker
from packaging.markers import Marker

from fleet import engine as engines
from fleet import wheels
from fleet.engine import Engine, EngineError

DEFAULT = "sglang-0.5.11"


class ToolError(RuntimeError):
    """uv is missing, is another version than the pinned one, or failed; the message carries its words."""


def pinned_uv(root: Path = engines.ROOT) -> str:
    """The version of uv that this repository pins."""
    for line in (root / "requirements" / "uv.in").read_text().splitlines():
        if line.startswith("uv=="):
            return line.removeprefix("uv==").strip()
    raise ToolError("requirements/uv.in does not pin uv==VERSION")


def find_uv() -> str:
    """Path of the pinned uv, from the control environment or PATH; ToolError if it is none or another version."""
    path = shutil.which("uv", path=f"{engines.ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    if not path:
        raise ToolError(f"uv {pinned_uv()} not found; bin/lock installs it into .venv, or put it on PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    if version != pinned_uv():
        raise ToolError(f"{path} is uv {version}, requirements/uv.in pins {pinned_uv()}; use that one")
    return path


def _uv(arguments: list[str], cwd: Path) -> str:
    done = subprocess.run([find_uv(), *arguments], check=False, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise ToolError(f"uv {' '.join(arguments[:2])} failed:\n{done.stderr.strip()}")
    return done.stdout


def _environments(engine: Engine) -> list[str]:
    upper = ".".join((engine.pythons[-1].split(".")[0], str(int(engine.pythons[-1].split(".")[1]) + 1)))
    return [
        f"sys_platform == 'linux' and platform_machine == '{m}' and python_full_version < '{upper}'"
        for m in engine.machines
    ]


def _project(folder: Path, engine: Engine) -> None:
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "lock"\nversion = "0"\nrequires-python = ">={engine.pythons[0]}"\n'
        f"[tool.uv]\nenvironments = {json.dumps(_environments(engine))}\n"
    )


def _simplify(text: str, engine: Engine) -> str:
    """uv's requirements with each marker rewritten over the engine's own Pythons and machines."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith((" ", "#")) or not line.strip():
            lines.append(line)
            continue
        head, _, marker = line.removesuffix("\\").strip().partition(" ; ")
        wanted = [
            (python, machine)
            for python in engine.pythons
            for machine in engine.machines
            if not marker or Marker(marker).evaluate(_environment(python, machine))
        ]
        if not wanted:
            lines.append("#drop")
            continue
        short = write_marker(wanted, engine.pythons, engine.machines)
        lines.append(f"{head}{f' ; {short}' if short else ''} \\")
    kept, dropping = [], False
    for line in lines:
        dropping = line == "#drop" or (dropping and line.startswith(" "))
        if not dropping:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _environment(python: str, machine: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }


def resolve(engine: Engine) -> str:
    """The text of a new lock, resolved now by the pinned uv. Needs the package index."""
    with tempfile.TemporaryDirectory(prefix="fleet-lock-") as name:
        folder = Path(name)
        _project(folder, engine)
        (folder / "requirements.in").write_text("\n".join(engine.requirements) + "\n")
        (folder / "constraints.txt").write_text("\n".join(engine.constraints) + "\n")
        arguments = ["pip", "compile", "-q", "--universal", "--generate-hashes", "--no-header", "--no-annotate"]
        arguments += ["--python-version", engine.pythons[0], "--exclude-newer", engine.exclude_newer]
        arguments += ["--prerelease", "explicit"]
        arguments += [f"--prerelease-package={package}=allow" for package in engine.prereleases]
        arguments += ["--constraints", "constraints.txt", "requirements.in"]
        body = _simplify(_uv(arguments, folder), engine)
    header = (
        f"# Lock of {engine.name}, written by bin/lock and never by hand.\n"
        f"# Python {', '.join(engine.pythons)} on Linux {', '.join(engine.machines)}; sha256 of every file.\n"
        f"# resolver: uv {pinned_uv()}\n"
        f"# inputs: sha256:{engine.input_digest()}\n"
        f"# body: sha256:{body_digest(body)}\n"
    )
    return header + body


def export(arguments: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What uv resolves in `folder`, with every wheel as the index has it now: 'name==version' -> [{name, size, sha256, url}]."""
    command = ["pip", "compile", "-q", "--universal", "--format", "pylock.toml", "--no-header"]
    _uv([*command, *arguments, "-o", "pylock.toml"], folder)
    data = tomllib.loads((folder / "pylock.toml").read_text())
    return {
        f"{package['name']}=={package['version']}": [
            {
                "name": unquote(wheel["url"].rsplit("/", 1)[1]),
                "size": wheel["size"],
                "sha256": wheel["hashes"]["sha256"],
                "url": wheel["url"],
            }
            for wheel in package.get("wheels", [])
        ]
        for package in data["packages"]
    }


def remote_files(engine: Engine, text: str) -> dict[str, list[dict[str, Any]]]:
    """Every wheel of a lock's versions as the index has it now, in the form of `export`."""
    with tempfile.TemporaryDirectory(prefix="fleet-lock-") as name:
        folder = Path(name)
        _project(folder, engine)
        (folder / "lock.txt").write_text(text)
        return export(["--python-version", engine.pythons[0], "--no-deps", "lock.txt"], folder)


def list_files(engine: Engine, text: str, remote: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What files.json holds. LockError if a package has no wheel for one of the engine's Pythons and machines."""
    pins = parse(text)
    files: dict[str, dict[str, Any]] = {}
    oldest = 0
    for python in engine.pythons:
        for machine in engine.machines:
            for pin in select(pins, python, machine):
                found = {wheel["name"]: wheel for wheel in remote.get(str(pin), [])}
                needed = wheels.needed(found, python, machine)
                if not needed:
                    raise LockError(
                        f"{pin} has no wheel for Python {python} on {machine}; hosts never build from source"
                    )
                oldest = max(oldest, min(needed.values()))
                for name, glibc in needed.items():
                    row = files.setdefault(
                        name,
                        {
                            "package": str(pin),
                            "name": name,
                            "size": found[name]["size"],
                            "sha256": found[name]["sha256"],
                            "for": [],
                        },
                    )
                    row["for"].append(f"{python}/{machine}/{glibc}")
    return {
        "engine": engine.name,
        "body": body_digest(text),
        "glibc": f"2.{oldest}",
        "files": [files[name] for name in sorted(files)],
    }


def write_files(data: dict[str, Any]) -> str:
    """files.json, one file a line."""
    head = {key: value for key, value in data.items() if key != "files"}
    rows = ",\n".join(f"  {json.dumps(row)}" for row in data["files"])
    return json.dumps(head)[:-1] + ', "files": [\n' + rows + "\n]}\n"


def faults(engine: Engine) -> list[str]:
    """Everything that is wrong with an engine's lock: lint, stale inputs, edits by hand, wheels that it does not cover."""
    if not engine.lock.exists():
        return [f"{engine.lock} is missing; run bin/lock {engine.name}"]
    text = engine.lock.read_text()
    found: list[str] = lint(text, engine.pythons, engine.machines, engine.prereleases)
    head = dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("# ") and ": " in line)
    if head.get("inputs") != f"sha256:{engine.input_digest()}":
        found.append(f"the inputs changed since the lock was written; run bin/lock {engine.name}")
    if head.get("body") != f"sha256:{body_digest(text)}":
        found.append(f"the lock was changed by hand; run bin/lock {engine.name}")
    if found:
        return found
    try:
        data = json.loads(engine.files.read_text())
        rows = data["files"]
        if data["body"] != body_digest(text):
            found.append(f"files.json belongs to another lock; run bin/lock {engine.name}")
        hashes = {str(pin): set(pin.hashes) for pin in parse(text)}
        for row in rows:
            if row["sha256"] not in hashes.get(row["package"], set()):
                found.append(f"{row['name']}: its sha256 in files.json is not one of {row['package']} in the lock")
        pairs = {(row["package"], *tag.split("/")[:2]) for row in rows for tag in row["for"]}
        for python in engine.pythons:
            for machine in engine.machines:
                for pin in select(parse(text), python, machine):
                    if (str(pin), python, machine) not in pairs:
                        found.append(f"{pin}: files.json names no wheel for Python {python} on {machine}")
    except (OSError, ValueError, KeyError) as error:
        found.append(f"files.json: {error!r}; run bin/lock {engine.name}")
    return found


def _replace(path: Path, text: str) -> bool:
    if path.exists() and path.read_text() == text:
        return False
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)
    return True


def write(engine: Engine) -> int:
    """Resolves and writes both files; a lock that does not pass its lint is not written."""
    text = resolve(engine)
    wrong = lint(text, engine.pythons, engine.machines, engine.prereleases)
    if wrong:
        raise LockError("the resolved lock breaks a rule and was not written:\n  " + "\n  ".join(wrong))
    files = list_files(engine, text, remote_files(engine, text))
    before = {canonical(p.name): str(p) for p in parse(engine.lock.read_text())} if engine.lock.exists() else {}
    changed = _replace(engine.lock, text) | _replace(engine.files, write_files(files))
    pins = parse(text)
    for name, now in {p.name: str(p) for p in pins}.items():
        if before and before.get(name) != now:
            print(f"  {before.get(name, 'new')} -> {now}")
    size = sum(row["size"] for row in files["files"])
    print(
        f"{engine.name}: {len(pins)} packages, {len(files['files'])} wheels, {size / 1e9:.2f} GB over all hosts, "
        f"glibc {files['glibc']} or newer; {'written' if changed else 'unchanged'}"
    )
    return 0


def check(engine: Engine, as_json: bool) -> int:
    """Prints whether the lock is as its inputs say."""
    found = faults(engine)
    if as_json:
        print(json.dumps({"ok": not found, "engine": engine.name, "lock": str(engine.lock), "faults": found}))
    else:
        print(
            "\n".join(f"{engine.name}: {fault}" for fault in found) or f"{engine.name}: the lock is as its inputs say"
        )
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    """bin/lock. Returns 0 done or in order, 1 the lock is not in order or a step failed, 2 misuse."""
    parser = argparse.ArgumentParser(prog="bin/lock", description="Write, check or carry the lock of an engine.")
    parser.add_argument("engine", nargs="?", default=DEFAULT, help=f"folder below engines/ (default {DEFAULT})")
    verb = parser.add_mutually_exclusive_group()
    verb.add_argument(
        "--check", action="store_true", help="say whether the lock is as its inputs say; needs no network"
    )
    verb.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="download every wheel of the lock, and uv, into DIR"
    )
    parser.add_argument("--json", action="store_true", help="with --check: the verdict as JSON")
    parser.add_argument(
        "--python", action="append", help="with --wheelhouse: only this Python, e.g. 3.11 (may be repeated)"
    )
    parser.add_argument(
        "--platform", action="append", help="with --wheelhouse: only this machine, e.g. x86_64 (may be repeated)"
    )
    options = parser.parse_args(argv)
    if options.json and not options.check:
        parser.error("--json goes with --check")
    if (options.python or options.platform) and not options.wheelhouse:
        parser.error("--python and --platform go with --wheelhouse")
    try:
        engine = engines.load(options.engine)
    except EngineError as error:
        print(f"bin/lock: {error}", file=sys.stderr)
        return 2
    for given, known in ((options.python, engine.pythons), (options.platform, engine.machines)):
        if wrong := set(given or ()) - set(known):
            parser.error(f"{engine.name} is locked for {', '.join(known)}, not for {', '.join(sorted(wrong))}")
    try:
        if options.check:
            return check(engine, options.json)
        if options.wheelhouse:
            from fleet import wheelhouse

            return wheelhouse.fill(
                engine, options.wheelhouse, options.python or engine.pythons, options.platform or engine.machines
            )
        return write(engine)
    except (LockError, ToolError, OSError) as error:
        print(f"bin/lock: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
