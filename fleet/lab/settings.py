# SPDX-License-Identifier: Apache-2.0
"""Where things are, and what they are called."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.lab.shell import MisuseError

MAX_HOSTS = 200
MODELS_AT = "/srv/sglang-fleet-models"
UV_CACHE_AT = "/var/cache/sglang-fleet-uv"
_LAB = re.compile(r"[a-z](?:[a-z0-9-]{0,28}[a-z0-9])?")


@dataclass(frozen=True)
class Settings:
    """Folders of this machine and of this clone. `owner` (uid, gid) and `home` are the caller's, also through sudo."""

    repo: Path
    state: Path
    cache: Path
    runtime: Path
    uv_cache: Path
    owner: tuple[int, int]
    home: Path

    def lab(self, lab: str) -> Path:
        return self.state / "labs" / lab

    def inventory(self, lab: str) -> Path:
        return self.repo / "inventory" / "lab" / lab / "hosts.yml"

    def lock(self, lab: str) -> Path:
        return self.runtime / f"{lab}.lock"


def settings(env: Mapping[str, str], repo: Path) -> Settings:
    """Folders from the environment. The runtime folder is one for the whole machine: labs share its network.

    Under sudo the caches are root's own: what root writes into a user's cache, that user can't change any more.
    MisuseError for a folder whose name an overlay mount or ssh would read as something else.
    """
    home = Path(env.get("HOME") or "~").expanduser()
    owner = (int(env.get("SUDO_UID") or os.getuid()), int(env.get("SUDO_GID") or os.getgid()))
    caches, uv_cache = env.get("XDG_CACHE_HOME"), env.get("UV_CACHE_DIR")
    if os.geteuid() == 0 and owner[0] != 0:
        root = Path(pwd.getpwuid(0).pw_dir)
        home_of_caller = Path(pwd.getpwuid(owner[0]).pw_dir)
        caches = caches if caches and _owner(Path(caches)) == 0 else str(root / ".cache")
        uv_cache = uv_cache if uv_cache and _owner(Path(uv_cache)) == 0 else None
    else:
        home_of_caller = home
    cache = Path(caches or home / ".cache") / "sglang-fleet"
    found = Settings(
        repo=repo,
        state=Path(env.get("XDG_STATE_HOME") or "/var/lib") / "sglang-fleet-lab",
        cache=cache / "lab",
        runtime=Path("/run/sglang-fleet-lab"),
        uv_cache=Path(uv_cache or cache / "uv"),
        owner=owner,
        home=home_of_caller,
    )
    for name, path in (("XDG_STATE_HOME", found.state), ("XDG_CACHE_HOME", found.cache)):
        if not re.fullmatch(r"/[\w./+-]+", str(path)):
            raise MisuseError(f"{name} gives {str(path)!r}: expected an absolute path of letters, digits and ._+-")
    return found


def _owner(path: Path) -> int:
    """uid that owns a folder, or would own it if it were made: that of the nearest folder above that exists."""
    while not path.exists():
        path = path.parent
    return path.stat().st_uid


@dataclass(frozen=True)
class Names:
    """Every name a lab uses in the kernel. Interface names hold 15 characters, so they carry a hash of the lab's name."""

    lab: str

    @property
    def tag(self) -> str:
        return hashlib.sha256(self.lab.encode()).hexdigest()[:8]

    @property
    def bridge(self) -> str:
        return f"fl{self.tag}"

    @property
    def table(self) -> str:
        return f"fleet_lab_{self.tag}"

    @property
    def netns_prefix(self) -> str:
        return f"fleet-{self.lab}-h"

    def host(self, index: int) -> str:
        return f"{self.lab}-h{index}"

    def netns(self, index: int) -> str:
        return f"{self.netns_prefix}{index}"

    def veth(self, index: int) -> str:
        return f"{self.bridge}-{index}"

    def mac(self, index: int) -> str:
        """Fixed per host (0 is the bridge): with a new one for a known address, neighbours would wait for their caches."""
        return ":".join(["02", *re.findall("..", self.tag), f"{index:02x}"])


def lab_names(lab: str) -> Names:
    """Names of a lab; MisuseError if the name does not fit host names and units."""
    if not _LAB.fullmatch(lab):
        raise MisuseError(
            f"lab name {lab!r}: expected 1 to 30 of a-z, 0-9 and '-', starting with a letter and not ending with '-'"
        )
    return Names(lab)


def host_index(names: Names, word: str) -> int:
    """Index of a host from `h3` or `<lab>-h3`. MisuseError for any other word."""
    found = re.fullmatch(rf"(?:{re.escape(names.lab)}-)?h([1-9][0-9]{{0,2}})", word)
    if not found or int(found[1]) > MAX_HOSTS:
        raise MisuseError(
            f"host {word!r}: lab {names.lab} has hosts {names.host(1)} to {names.host(MAX_HOSTS)} (or h1 to h{MAX_HOSTS}); "
            "name another lab with --lab"
        )
    return int(found[1])


def wanted_hosts(names: Names, words: list[str]) -> list[int]:
    """Indices asked for by `up`: nothing is one host, a number is that many, else names."""
    if len(words) <= 1 and (words or ["1"])[0].isdigit():
        count = int((words or ["1"])[0])
        if not 1 <= count <= MAX_HOSTS:
            raise MisuseError(f"a lab holds 1 to {MAX_HOSTS} hosts, asked for {count}")
        return list(range(1, count + 1))
    return list(dict.fromkeys(host_index(names, w) for w in words))


def size(word: str) -> int:
    """Bytes from `6G`, `512M`, `64K` or plain bytes. MisuseError otherwise."""
    found = re.fullmatch(r"([1-9][0-9]*)([KMGT]?)(?:i?B)?", word.strip(), re.IGNORECASE)
    if not found:
        raise MisuseError(f"size {word!r}: expected a whole number with K, M, G or T, for example 6G")
    return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")


def address(subnet: ipaddress.IPv4Network, index: int) -> str:
    """Address of a host; .1 is the bridge."""
    return str(subnet[10 + index])
