# SPDX-License-Identifier: Apache-2.0
"""What the parts of a build share: its options and its error, tools that are run, their environment. Standard library only."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


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


def _die_with_parent() -> None:
    """In a child: end when this run ends, however it ends. A uv that went on alone would write into the next run's build."""
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(command: list[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program without stdin to its end; its output as text. It ends with this process."""
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


def tail(text: str, lines: int = 12) -> str:
    """The last lines of an output."""
    return "\n".join(text.strip().splitlines()[-lines:])


def environment(options: Options) -> dict[str, str]:
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


def sha256_of(path: Path) -> str:
    """sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
