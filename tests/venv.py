# SPDX-License-Identifier: Apache-2.0
"""Real releases for tests: built by the role's own code, out of the lock, by hard links beside the uv cache.

A warm build takes about three seconds and next to no disk; a cold one downloads 3.8 GB once. What a test gets is for reading:
files are links into the cache. A test that changes files replaces them (write new, rename), never in place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from ansible.module_utils import sglang_venv_base as base
from ansible.module_utils import sglang_venv_build as building
from ansible.module_utils import sglang_venv_release as releases

from fleet import engine as engines
from fleet import lock

ENGINE = lock.DEFAULT
CACHE = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "sglang-fleet" / "uv")
ROOT = engines.ROOT


class NoPython(RuntimeError):
    """This machine has none of the engine's Pythons."""


def action_plugin(root: Path = ROOT) -> ModuleType:
    """The action plugin of sglang_release as a module."""
    path = root / "roles" / "sglang_venv" / "action_plugins" / "sglang_release.py"
    spec = spec_from_file_location("sglang_release_action", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_python(versions: tuple[str, ...]) -> tuple[str, str]:
    """Minor version and real path of the first of these Pythons that runs here. NoPython if none does."""
    for version in versions:
        if path := shutil.which(f"python{version}"):
            said = subprocess.run(
                [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys._base_executable)"],
                capture_output=True,
                text=True,
            )
            found = said.stdout.split()
            if said.returncode == 0 and found[0] == version:
                return version, str(Path(found[1]).resolve())
    raise NoPython(f"needs one of Python {', '.join(versions)}")


def profile(name: str) -> dict[str, Any]:
    """A published device profile by name."""
    import kernel_backends_profile

    found: dict[str, Any] = kernel_backends_profile.LookupModule().run([name])[0]
    return found


def make_plan(
    name: str = ENGINE, *, device: str = "cpu", series: str = "", files: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The plan of an engine for this machine, as the role makes it. `files` replaces the content of files.json."""
    engine = engines.load(name)
    read = action_plugin().read_engine(engine.folder, ROOT / "requirements" / "uv.txt")
    version, _ = find_python(engine.pythons)
    return releases.make_plan(
        **(read | ({"files": files} if files else {})),
        python=version,
        machine=os.uname().machine,
        profile=profile(device),
        series=series,
    )


def make_options(root: Path, **changes: Any) -> base.Options:
    """Options of a build below `root` with the shared cache and the control environment's uv already in place."""
    binary = root / "tools" / f"uv-{lock.pinned_uv()}" / "bin" / "uv"
    binary.parent.mkdir(parents=True, exist_ok=True)
    if not binary.exists():
        shutil.copy2(lock.find_uv(), binary)
    _, path = find_python(engines.load(ENGINE).pythons)
    return replace(base.Options(root=root, python=path, uv_cache=CACHE), **changes)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the file system of the uv cache, so that links work; removed at the end, with everything in it."""
    parent = CACHE.parent / "tests"
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="release-", dir=parent) as name:
        yield Path(name)


def build_release(root: Path, *, device: str = "cpu", series: str = "") -> Path:
    """Builds and publishes a release below `root`; the answer is its folder with venv, profile, cache and manifest.json."""
    plan = make_plan(device=device, series=series)
    building.build(plan, make_options(root))
    building.publish(root, plan["id"])
    return releases.release_path(root, plan["id"])


def site_packages(release: Path) -> Path:
    """site-packages of a release."""
    version = json.loads((release / "manifest.json").read_text())["python"]["version"]
    return base.site_packages(release / "venv", version)
