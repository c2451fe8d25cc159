# SPDX-License-Identifier: Apache-2.0
"""A tiny engine `demo` 1.0, an edited copy of it and its series, made anew for every test."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils import ddtree_patches_series as core

from fleet import series

ENGINE = "demo-1.0"
FILES = {
    "demo/__init__.py": "",
    "demo/version.py": "VERSION = '1.0'\n",
    "demo/a.py": "import os\n\n\ndef a():\n    return 1\n\n\ndef b():\n    return 1\n",
    "demo/srt/__init__.py": "",
    "demo/srt/args.py": "FLAGS = [\n    'x',\n    'y',\n]\n",
    "demo/srt/other.py": "OTHER = 1\n",
    "demo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n\nAbout demo.\n",
}
EDITS = {
    "demo/a.py": "import os\n\n\ndef a():\n    return 1\n\n\ndef b():\n    return 2\n",
    "demo/srt/args.py": "FLAGS = [\n    'x',\n    'tree',\n    'y',\n]\n",
}
OVERLAY = {"demo/tree/__init__.py": "", "demo/tree/worker.py": "from demo.srt.args import FLAGS\n\nN = len(FLAGS)\n"}
COMMON = {"utils.py": "demo/tree/utils.py"}
TOUCHED = sorted([*EDITS, *OVERLAY, *COMMON.values()])
HEADER = """\
Description: Adds a thing
 that is described at length.
Author: A Person <person@example.com>
Origin: vendor
Forwarded: not-needed
Bug: https://example.com/1
Last-Update: 2026-11-29
Kept: this is a test
"""
SUPERSEDED = {"path": "demo/srt/args.py", "pattern": "^    'tree',$", "bug": "https://example.com/1"}


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


@dataclass
class Kit:
    """`root` is the folder of all series, `release` a release with a real venv, `site` its unpatched site-packages."""

    root: Path
    release: Path
    site: Path
    tree: Path
    python: Path

    @property
    def folder(self) -> Path:
        return self.root / ENGINE

    @property
    def stamp(self) -> Path:
        return self.release / core.STAMP

    def load(self) -> core.Series:
        return series.load(ENGINE, self.root)

    def state(self) -> str:
        return str(core.inspect(self.site, self.load()).state)


def make(tmp: Path) -> Kit:
    release = tmp / "release"
    venv.create(release / "venv", symlinks=True, with_pip=False)
    site = core.find_site(release / "venv")
    kit = Kit(tmp / "ddtree_patches", release, site, tmp / "tree", release / "venv/bin/python")
    write(site, FILES)
    write(kit.tree, FILES | EDITS)
    write(kit.folder / "overlay", OVERLAY)
    write(kit.root / "common", dict.fromkeys(COMMON, "U = 'common'\n"))
    series.new_patch(ENGINE, "count", ["demo/a.py"], site, kit.tree, kit.root)
    series.new_patch(ENGINE, "flag", ["demo/srt/args.py"], site, kit.tree, kit.root)
    for patch in kit.folder.glob("*.patch"):
        text = patch.read_text()
        patch.write_text(HEADER + "\n" + text[text.index("--- a/") :])
    (kit.folder / "manifest.yml").write_text(series.yaml.safe_dump({"common": COMMON, "superseded": SUPERSEDED}))
    series.refresh(ENGINE, site, kit.root)
    return kit


def tree_hash(root: Path) -> dict[str, str]:
    """Every file below a folder with its sha256."""
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts
    }


def apply_in_child(
    root: Path, engine: str, site: Path, before: str, stamp: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Applies in a process of its own, after the statements `before`: what a kill or a limit does to a real run."""
    code = f"""
    import os, resource, signal, sys
    from pathlib import Path
    from fleet import series
    core = series.core
    one = series.load({engine!r}, Path({str(root)!r}))
    """
    run = f"""
    try:
        core.apply(one, Path({str(site)!r}), stamp={f"Path({str(stamp)!r})" if stamp else None})
    except core.SeriesError as e:
        sys.exit(f"SeriesError: {{e}}")
    """
    text = textwrap.dedent(code) + textwrap.dedent(before) + textwrap.dedent(run)
    env = {**os.environ, "PYTHONPATH": str(series.ROOT.parent)}
    return subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120)


def kill_after(renames: int) -> str:
    """Statements that let a number of renames pass and kill the process at the next."""
    return f"""
    real, left = Path.replace, [{renames}]
    def counted(self, target):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return real(self, target)
    Path.replace = counted
    """


KILLED = -signal.SIGKILL
