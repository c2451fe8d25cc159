# SPDX-License-Identifier: Apache-2.0
"""One host: disk, boot, stop, crash. Everything here is repeatable and finds its host by name, not by memory."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fleet.lab import cgroups, network
from fleet.lab.machine import Machine
from fleet.lab.settings import MODELS_AT, UV_CACHE_AT, Names, Settings, address
from fleet.lab.shell import LabError, mounts, run, until, write

STOP_SECONDS = 60
BOOT_SECONDS = 120
START_SECONDS = 5


@dataclass(frozen=True)
class Record:
    """What a host was made with, kept as host.json. Sizes in bytes, binds as nspawn words."""

    index: int
    suite: str
    base: str
    memory: int | None = None
    disk: int | None = None
    binds: list[str] = field(default_factory=list)
    cut: bool = False
    partitioned: bool = False


@dataclass(frozen=True)
class Host:
    """A host of a lab by name; `folder` holds its record, disk and console log."""

    settings: Settings
    names: Names
    subnet: ipaddress.IPv4Network
    layout: cgroups.Layout
    index: int

    @property
    def name(self) -> str:
        return self.names.host(self.index)

    @property
    def address(self) -> str:
        return address(self.subnet, self.index)

    @property
    def folder(self) -> Path:
        return self.settings.lab(self.names.lab) / "hosts" / self.name

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    def record(self) -> Record | None:
        try:
            return Record(**json.loads((self.folder / "host.json").read_text()))
        except FileNotFoundError:
            return None

    def save(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / "host.json", json.dumps(asdict(record), indent=1) + "\n")

    def running(self) -> bool:
        lab = self.names.lab
        return cgroups.leader(self.layout, lab, self.name) is not None and cgroups.supervised(
            self.layout, lab, self.name
        )

    def info(self) -> dict[str, Any]:
        """State of the host as `list --json` shows it."""
        record = self.record()
        lab = self.names.lab
        return {
            "name": self.name,
            "address": self.address,
            "state": "running" if self.running() else "stopped",
            "partitioned": bool(record and record.partitioned),
            "cut": bool(record and record.cut),
            "suite": record.suite if record else None,
            "init_pid": cgroups.leader(self.layout, lab, self.name),
            "memory_bytes": cgroups.memory_used(self.layout, lab, self.name),
            "memory_limit_bytes": record.memory if record else None,
            "disk_limit_bytes": record.disk if record else None,
        }


def guest_path(root: Path, path: Path) -> Path:
    """Where a path of the host is on the machine, links of the host followed inside its root and never out of it."""
    here = root
    parts = list(path.parts[1:])
    for _ in range(40 + len(parts)):
        if not parts:
            return here
        part = parts.pop(0)
        if part == "..":
            here = here if here == root else here.parent
            continue
        target = here / part
        if target.is_symlink():
            link = target.readlink()
            here = root if link.is_absolute() else here
            parts = [p for p in link.parts if p != "/"] + parts
        else:
            here = target
    raise LabError(f"{path}: too many links inside {root}")


def put(root: Path, path: str | Path, text: str | bytes, mode: int = 0o644) -> None:
    """Write a file of a host, over whatever link is there."""
    where = guest_path(root, Path(path).parent) / Path(path).name
    for folder in reversed(where.relative_to(root).parents):
        if not (root / folder).exists():
            (root / folder).mkdir(mode=0o755)
    where.unlink(missing_ok=True)
    fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as f:
        os.fchmod(f.fileno(), mode)
        f.write(text.encode() if isinstance(text, str) else text)


def mount(host: Host, record: Record) -> None:
    """Put the host's own writable layer over the base. With a size limit that layer is a tmpfs of that size."""
    disk = host.folder / "disk"
    for folder in (disk, host.root):
        folder.mkdir(parents=True, exist_ok=True)
    if record.disk and disk not in mounts(disk):
        run(["mount", "-t", "tmpfs", "-o", f"size={record.disk},mode=0700", f"lab-{host.name}", disk])
    for name in ("up", "work"):
        (disk / name).mkdir(mode=0o755, exist_ok=True)
    if host.root not in mounts(host.root):
        options = f"lowerdir={record.base},upperdir={disk}/up,workdir={disk}/work"
        try:
            run(["mount", "-t", "overlay", "-o", options, f"lab-{host.name}", host.root])
        except LabError as e:
            raise LabError(
                f"{host.name}: its disk could not be mounted: {e}. The state folder {host.settings.state} has to be on a file "
                "system that carries an overlay (ext4, xfs, btrfs): set XDG_STATE_HOME to a folder on one, or use --disk"
            ) from None


def unmount(host: Host) -> None:
    """Let go of the host's disk, whatever is mounted."""
    for folder in mounts(host.folder):

        def gone(folder: Path = folder) -> bool:
            return run(["umount", folder], check=False).returncode == 0

        if not until(gone, 2, 0.1):
            run(["umount", "-l", folder])


def seed(host: Host, machine: Machine, public_key: str) -> None:
    """Identity, access and the machine's setup, written once into a mounted, stopped host.

    The mark of it lies beside the writable layer, so it is lost with a disk that a reboot of the machine takes along.
    """
    root, mark = host.root, host.folder / "disk/seeded"
    if mark.exists():
        return
    put(root, "/etc/hostname", f"{host.name}\n")
    put(root, "/etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{host.address} {host.name}\n")
    put(root, "/etc/resolv.conf", "".join(f"nameserver {s}\n" for s in machine.nameservers))
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    put(root, "/root/.ssh/authorized_keys", public_key, 0o600)
    key = root / "etc/ssh/ssh_host_ed25519_key"
    if not key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", key])
    for there, here in machine.files.items():
        put(root, there, here.read_bytes(), here.stat().st_mode & 0o755 | 0o400)
    if machine.apt_options:
        put(root, "/etc/apt/apt.conf.d/90machine", "\n".join(machine.apt_options) + "\n")
    # sessions read the first, units the second; both may hold an index's password
    environment = {"LANG": "C.UTF-8", **machine.environment}
    put(root, "/etc/default/locale", "")
    put(root, "/etc/environment", "".join(f'{k}="{v}"\n' for k, v in environment.items()), 0o600)
    put(root, "/etc/systemd/system.conf.d/10-machine.conf", manager_conf(environment), 0o600)
    mark.touch()


def manager_conf(environment: Mapping[str, str]) -> str:
    """systemd manager configuration that gives variables to every unit."""
    lines = ["[Manager]"]
    for key, value in environment.items():
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
        lines.append(f'DefaultEnvironment="{key}={quoted}"')
    return "\n".join(lines) + "\n"


def bind_words(settings: Settings, machine: Machine, extra: list[str]) -> list[str]:
    """nspawn's words for the folders every host sees: models, uv's cache, local package folders, and the caller's."""
    words = [bind_word(settings.uv_cache, UV_CACHE_AT, False)]
    models = settings.repo / "models"
    if models.is_dir():
        words.append(bind_word(models, MODELS_AT, True))
    words += [bind_word(folder, str(folder), True) for folder in machine.binds]
    return [*words, *extra]


def bind_word(source: Path, target: str, read_only: bool) -> str:
    """One bind in nspawn's form; colons in a path are escaped."""
    there = target.replace(":", "\\:")
    here = str(source).replace(":", "\\:")
    return f"--bind{'-ro' if read_only else ''}={here}:{there}"


def parse_bind(word: str) -> str:
    """`SRC:DST[:ro]` of the command line as nspawn's word. LabError when the source is not there."""
    parts = word.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")) or not parts[1].startswith("/"):
        raise LabError(f"--bind {word}: expected SRC:DST, SRC:DST:ro with an absolute DST")
    source = Path(parts[0]).expanduser().absolute()
    if not source.exists():
        raise LabError(f"--bind {word}: {source} does not exist")
    return bind_word(source, parts[1], parts[2:] == ["ro"])


def launch(host: Host, record: Record) -> None:
    """Boot a host whose disk is mounted and whose network is up. Returns at once."""
    cgroups.create(host.layout, host.names.lab, host.name, record.memory)
    groups = host.layout.groups(host.names.lab, host.name)
    nspawn = [
        *("systemd-nspawn", "--quiet", "-D", str(host.root), "-M", host.name, f"--hostname={host.name}"),
        # no machined, no unit: the host lives in the groups made for it
        *("--register=no", "--keep-unit", "--link-journal=no", "--console=pipe"),
        *("--resolv-conf=off", "--timezone=off", f"--network-namespace-path=/run/netns/{host.names.netns(host.index)}"),
        *("--kill-signal=SIGRTMIN+3", *record.binds, "/usr/sbin/lab-init"),
    ]
    # The shell enters every group before it becomes nspawn; the outer one leaves at once, so that init adopts the host.
    enter = (
        'n=$1; shift; while [ $n -gt 0 ]; do echo 0 > "$1/cgroup.procs" || exit 1; shift; n=$((n-1)); done; exec "$@"'
    )
    outer = 'setsid sh -c "$0" sh "$@" &'
    with host.console.open("a") as log:
        subprocess.run(
            ["sh", "-c", outer, enter, str(len(groups)), *map(str, groups), *nspawn],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"},
        )


def boot(host: Host, record: Record, machine: Machine, public_key: str) -> None:
    """From any state to booting, once the network is there: ends leftovers, then disk, identity, launch."""
    cgroups.kill_all(host.layout, host.names.lab, host.name)
    # On v2 the last boot gave controllers to the groups below, and such a group takes no process: begin with a new one.
    cgroups.remove(host.layout, host.names.lab, host.name)
    mount(host, record)
    seed(host, machine, public_key)
    launch(host, record)


def banner(host: Host) -> bool:
    """Whether the host's sshd says who it is."""
    try:
        with socket.create_connection((host.address, 22), timeout=1) as s:
            s.settimeout(2)
            return s.recv(4) == b"SSH-"
    except OSError:
        return False


def wait_ssh(host: Host) -> None:
    """Wait for sshd. LabError with the console's last lines if the host dies or does not answer."""
    seen = time.monotonic()

    def died() -> bool:
        """Whether the host has had no process for a while; a busy machine takes its time to start the first."""
        nonlocal seen
        if cgroups.processes(host.layout, host.names.lab, host.name):
            seen = time.monotonic()
        return time.monotonic() - seen > START_SECONDS

    if not until(lambda: banner(host) or died(), BOOT_SECONDS, 0.05) or died():
        tail = "\n  ".join(host.console.read_text(errors="replace").splitlines()[-8:]) if host.console.exists() else ""
        what = "ended while booting" if died() else f"did not answer SSH within {BOOT_SECONDS} s"
        raise LabError(f"{host.name}: {what}; its console says:\n  {tail or '(nothing)'}")


def stop(host: Host) -> None:
    """Clean power-off; a host that does not end in time is killed. The disk stays."""
    pid = cgroups.leader(host.layout, host.names.lab, host.name)
    if pid is not None and cgroups.supervised(host.layout, host.names.lab, host.name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGRTMIN + 3)
        if until(lambda: not cgroups.processes(host.layout, host.names.lab, host.name), STOP_SECONDS):
            return
    cgroups.kill_all(host.layout, host.names.lab, host.name)


def crash(host: Host) -> None:
    """Kill the host's PID 1: the kernel then ends every process of the host at once. The disk stays as it is."""
    pid = cgroups.leader(host.layout, host.names.lab, host.name)
    if pid is None:
        raise LabError(f"{host.name} is not running; start it with: bin/lab start {host.name} --lab {host.names.lab}")
    os.kill(pid, signal.SIGKILL)
    # nspawn then ends by itself and cleans its own files up; it is killed only if it hangs
    until(lambda: not cgroups.processes(host.layout, host.names.lab, host.name), 5)
    cgroups.kill_all(host.layout, host.names.lab, host.name)


def remove(host: Host) -> list[str]:
    """Take a host away with its disk; returns what could not be removed."""
    pid = cgroups.leader(host.layout, host.names.lab, host.name)
    if pid is not None:
        crash(host)
    cgroups.kill_all(host.layout, host.names.lab, host.name)
    unmount(host)
    network.host_down(host.names, host.index)
    left = [str(p) for p in cgroups.remove(host.layout, host.names.lab, host.name)]
    with contextlib.suppress(OSError):  # nspawn leaves an empty folder
        Path("/run/systemd/nspawn/propagate", host.name).rmdir()
    if host.folder.exists():
        inside = mounts(host.folder)
        if inside:  # never delete through a mount
            return left + [str(m) for m in inside]
        shutil.rmtree(host.folder)
    return left
