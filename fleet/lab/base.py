# SPDX-License-Identifier: Apache-2.0
"""The read-only root that all hosts of a suite share: built once, kept by its recipe's hash."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fleet.lab.shell import LabError, MisuseError, locked, run

# An operating system that boots, answers SSH and can be managed; and what a GPU host has too: a C compiler for Triton and
# the cpu profile's stub, NUMA.
_PACKAGES = """
systemd systemd-sysv dbus libpam-systemd openssh-server python3 python3-venv python3-apt sudo iproute2 iputils-ping
ca-certificates procps util-linux curl less acl rsync apt
gcc libc6-dev libnuma1 numactl
"""
PACKAGES = tuple(_PACKAGES.split())

# Units that need hardware, a terminal, the clock or an own network setup.
_MASKED = """
systemd-timesyncd.service systemd-udevd.service systemd-networkd.service systemd-networkd-wait-online.service
systemd-networkd.socket systemd-resolved.service systemd-modules-load.service getty.target console-getty.service
apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer motd-news.timer
"""
MASKED = tuple(_MASKED.split())

# nspawn mounts version 1 controllers read-only; without this, MemoryMax= and CPUQuota= are silently ignored.
INIT = """#!/bin/sh
for c in memory cpu cpuacct cpuset pids devices freezer blkio; do
  [ ! -d /sys/fs/cgroup/$c ] || mount -o remount,rw,bind /sys/fs/cgroup/$c 2>/dev/null
done
exec /lib/systemd/systemd "$@"
"""


@dataclass(frozen=True)
class Suite:
    name: str
    distro: str
    components: tuple[str, ...]

    @property
    def keyring(self) -> Path:
        return Path(f"/usr/share/keyrings/{self.distro}-archive-keyring.gpg")

    @property
    def keyring_package(self) -> str:
        return "debian-archive-keyring" if self.distro == "debian" else "ubuntu-keyring"


SUITES = {
    s.name: s
    for s in (
        Suite("bookworm", "debian", ("main",)),
        Suite("trixie", "debian", ("main",)),
        Suite("noble", "ubuntu", ("main", "universe")),
    )
}


@dataclass(frozen=True)
class Source:
    """One archive of the machine's apt: `uri`, the suites and the components it is used for."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


def default_suite(os_release: str) -> str:
    """The machine's own suite where hosts can have it, else bookworm."""
    found = re.search(r"^VERSION_CODENAME=\"?([a-z]+)", os_release, re.MULTILINE)
    return found[1] if found and found[1] in SUITES else "bookworm"


def parse_sources(text: str, deb822: bool) -> list[Source]:
    """Binary archives of one apt source file, in the old one-line or the newer field format; switched off ones apart."""
    found = []
    if not deb822:
        for line in text.splitlines():
            match = re.match(r"\s*deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
            if match:
                found.append(Source(match[1], (match[2],), tuple(match[3].split())))
        return found
    for part in re.split(r"\n\s*\n", text):
        lines = "\n".join(line for line in part.splitlines() if not line.startswith("#"))
        fields = {k.lower(): v.split() for k, v in re.findall(r"^([\w-]+):((?:.*)(?:\n[ \t].*)*)", lines, re.MULTILINE)}
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            suites, components = tuple(fields.get("suites", [])), tuple(fields.get("components", []))
            found += [Source(uri, suites, components) for uri in fields.get("uris", [])]
    return found


def machine_sources(etc: Path = Path("/etc/apt")) -> list[Source]:
    """Archives that the machine's own apt uses."""
    found = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if path.suffix in (".list", ".sources") and path.is_file():
            found += parse_sources(path.read_text(), path.suffix == ".sources")
    return found


def mirrors(suite: Suite, sources: list[Source], override: str | None = None) -> list[str]:
    """Archive lines (`URI SUITE COMPONENTS`) for a suite, from where the machine's apt takes the same distribution.

    `override` is an archive URI that is used for all. LabError if the machine has no such archive.
    """

    def archive(pocket: str) -> str | None:
        """Best archive for `-updates` or another pocket: of the right distribution by path, else by suite and component."""
        fit = [
            s
            for s in sources
            if any(re.fullmatch(rf"[a-z]+{pocket}", name) for name in s.suites) and suite.components[0] in s.components
        ]
        security = f"{suite.distro}-security" if pocket == "-security" and suite.distro == "debian" else suite.distro
        for s in fit:
            if urlsplit(s.uri).path.rstrip("/").rsplit("/", 1)[-1] in (security, f"{suite.distro}-ports"):
                return _resolve(s.uri)
        return next((_resolve(s.uri) for s in fit if suite.name + pocket in s.suites), None)

    if override:
        return [f"{override} {suite.name} {' '.join(suite.components)}"]
    main = archive("")
    if not main:
        raise LabError(
            f"suite {suite.name}: the apt sources of this machine name no {suite.distro} archive; choose another --suite or "
            f"set FLEET_LAB_MIRROR to the URI of one"
        )
    pockets = (("", main), ("-updates", archive("-updates")), ("-security", archive("-security")))
    return [f"{uri} {suite.name}{pocket} {' '.join(suite.components)}" for pocket, uri in pockets if uri]


def _resolve(uri: str) -> str:
    """A `mirror+file:` list means nothing inside a host: take its first archive."""
    if not uri.startswith("mirror+file:"):
        return uri.rstrip("/")
    path = Path("/" + uri.removeprefix("mirror+file:").lstrip("/"))
    lines = path.read_text().split("\n")
    return next(line.split()[0] for line in lines if line.strip() and not line.startswith("#")).rstrip("/")


def recipe(suite: Suite, archives: list[str]) -> str:
    """All that decides what a base holds, as text."""
    return json.dumps([suite.name, archives, PACKAGES, MASKED, INIT, SETTINGS, str(suite.keyring)], sort_keys=True)


SETTINGS: Mapping[str, str] = {
    "etc/machine-id": "",  # empty: systemd makes one per host at its first boot
    "etc/ssh/sshd_config.d/10-lab.conf": "UseDNS no\nPasswordAuthentication no\n",
    "etc/systemd/journald.conf.d/10-lab.conf": "[Journal]\nStorage=persistent\nSystemMaxUse=200M\n",
}


def folder(cache: Path, suite: Suite, archives: list[str]) -> Path:
    return cache / f"base-{suite.name}-{hashlib.sha256(recipe(suite, archives).encode()).hexdigest()[:12]}"


def ensure(
    cache: Path, suite: Suite, archives: list[str], build: Callable[[Path], None], say: Callable[[str], None]
) -> Path:
    """The base of a suite; built by `build(FOLDER)` if it is not there.

    It is built in a hidden folder and renamed when it is whole. A hidden folder found under the lock is what an
    interrupted build left, and is thrown away.
    """
    done = folder(cache, suite, archives)
    if done.is_dir():
        return done
    with locked(cache / ".lock", lambda: say("waiting for another build of the base")):
        if done.is_dir():
            return done
        for left in cache.glob(".build-*"):
            shutil.rmtree(left)
        work = Path(tempfile.mkdtemp(prefix=f".build-{suite.name}-", dir=cache))
        work.chmod(0o755)
        say(f"building the base of {suite.name} (once, one to three minutes)")
        try:
            build(work)
            work.rename(done)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return done


def bootstrap(
    suite: Suite, archives: list[str], apt_options: list[str], work: Path, say: Callable[[str], None]
) -> None:
    """Fill a folder by mmdebstrap and make it a base: no identity, nothing that waits for hardware.

    Runs in own mount and process namespaces that die with this process, so a kill leaves neither mounts nor processes.
    """
    if not suite.keyring.exists():
        raise MisuseError(f"suite {suite.name}: {suite.keyring} is missing; install {suite.keyring_package}")
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    command += ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--keyring={suite.keyring}"]
    command += [f"--aptopt={o}" for o in apt_options] + [f"--include={','.join(PACKAGES)}", suite.name, str(work)]
    run(
        [*command, *(f"deb {a}" for a in archives)], beat=lambda s: say(f"building the base of {suite.name}: {s:.0f} s")
    )
    for key in (work / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (work / "etc/hostname").unlink(missing_ok=True)  # it would beat the name given per host
    for name, text in SETTINGS.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sources = work / "etc/apt/sources.list"
    sources.write_text("".join(f"deb [signed-by={suite.keyring}] {a}\n" for a in archives))
    (work / "var/log/journal").mkdir(parents=True, exist_ok=True)
    (work / "usr/sbin/lab-init").write_text(INIT)
    (work / "usr/sbin/lab-init").chmod(0o755)
    for unit in MASKED:
        link = work / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
