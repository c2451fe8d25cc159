# SPDX-License-Identifier: Apache-2.0
"""Programs that the lab needs on the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from fleet.lab.base import Suite
from fleet.lab.shell import LabError, run

PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "mount": "mount",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}


def missing(suite: Suite) -> list[str]:
    """Packages whose program or keyring is not here."""
    found = {package for program, package in PROGRAMS.items() if not shutil.which(program)}
    if not suite.keyring.exists():
        found.add(suite.keyring_package)
    return sorted(found)


def ensure(suite: Suite, say: Callable[[str], None]) -> None:
    """Install what is missing by apt; LabError with the names where there is no apt."""
    need = missing(suite)
    if not need:
        return
    if not shutil.which("apt-get"):
        raise LabError(
            f"missing: {' '.join(need)}; the lab installs them on Debian and Ubuntu only: install them yourself"
        )
    say(f"installing {' '.join(need)}")
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run([*apt, "update"], env=env)
    run([*apt, "install", "-y", "--no-install-recommends", *need], env=env)
