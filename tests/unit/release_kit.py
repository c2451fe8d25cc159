# SPDX-License-Identifier: Apache-2.0
"""A whole small engine for tests: wheels made here, its lock, a wheelhouse; real uv, no network."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import sglang_venv_release as releases
from ansible.module_utils.sglang_venv_base import Options

from tests import venv

NAME = "sglang-0"
PACKAGES = {"alpha": "1.0", "beta-two": "2.1.post1"}


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes] | None = None) -> Path:
    """A pure wheel of one module and `files`."""
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    content = {
        f"{stem}/__init__.py": f"__version__ = {version!r}\n".encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **(files or {}),
    }
    record = "".join(f"{path},,{len(data)}\n" for path, data in content.items()) + f"{info}/RECORD,,\n"
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for where, data in {**content, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(zipfile.ZipInfo(where), data)
    return path


def make_engine(top: Path, extra: dict[str, bytes] | None = None) -> Path:
    """`top`/house with the wheels and `top`/engines/<NAME> with the files of the engine; the answer is the latter."""
    pins, rows = [], []
    for name, version in PACKAGES.items():
        wheel = make_wheel(top / "house", name, version, extra if name == "alpha" else None)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        pins.append(f"{name}=={version} \\\n    --hash=sha256:{digest}\n")
        tags = [f"{python}/{machine}/17" for python in ("3.11", "3.12") for machine in ("x86_64", "aarch64")]
        row = {"package": f"{name}=={version}", "name": wheel.name, "size": wheel.stat().st_size}
        rows.append(row | {"sha256": digest, "for": tags})
    folder = top / "engines" / NAME
    folder.mkdir(parents=True)
    data = {
        "engine": NAME,
        "version": "0",
        "lock": {"python": ["3.11", "3.12"], "machines": ["x86_64", "aarch64"]},
        "unpacked": {"bytes": 10000, "files": 10},
        "audit": {"cuda_major": 13, "exceptions": []},
    }
    (folder / "engine.yml").write_text(yaml.safe_dump(data))
    (folder / "overrides.yml").write_text("{}\n")
    (folder / "lock.txt").write_text("".join(pins))
    (folder / "files.json").write_text(json.dumps({"glibc": "2.17", "files": rows}))
    return folder


def make_plan(folder: Path, profile: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The plan of the small engine for this machine."""
    read = venv.action_plugin().read_engine(folder, venv.ROOT / "requirements" / "uv.txt")
    python, _ = venv.find_python(("3.11", "3.12"))
    device = profile or {"name": "sm90", "files": {"plugin/x.py": "X = 1\n"}}
    return {**releases.make_plan(**read, python=python, machine=os.uname().machine, profile=device), **changes}


def make_options(top: Path, **changes: Any) -> Options:
    """Options of a build below `top`/root out of `top`/house."""
    given = {"uv_cache": top / "root" / "cache" / "uv", "wheelhouse": top / "house", "lock_timeout": 30.0}
    return venv.make_options(top / "root", **{**given, **changes})
