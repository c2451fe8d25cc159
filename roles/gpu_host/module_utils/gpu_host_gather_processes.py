# SPDX-License-Identifier: Apache-2.0
"""Processes and ports: who holds a GPU, who listens, which systemd unit a process belongs to."""

from __future__ import annotations

import pwd
import re
import socket
import sys
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts, read, run


def unit_from_cgroup(text: str) -> str | None:
    """The systemd service in the text of /proc/PID/cgroup (both cgroup versions), None outside of one."""
    services = re.findall(r"/([^/\s]+\.service)", text)
    return services[-1] if services else None


def path_from_cgroup(text: str) -> str | None:
    """The path that systemd, or what runs containers, put a process under: of both versions the one that says more."""
    paths = re.findall(r"^\d+:(?:name=systemd)?:(/\S*)$", text, re.MULTILINE)
    return max(paths, key=len) if paths else None


def belongs(pid: int | None) -> Facts:
    """`{unit, cgroup}`: the systemd service that a process belongs to, and its control group's path."""
    text = (None if pid is None else read(f"/proc/{pid}/cgroup")) or ""
    return {"unit": unit_from_cgroup(text), "cgroup": path_from_cgroup(text)}


def parent_from_stat(text: str) -> int:
    """Parent in the text of /proc/PID/stat; the name in brackets before it may hold anything."""
    return int(text.rpartition(")")[2].split()[1])


def is_orphan(parent: int | None, first: str | None, pid: int, main_pid: int | None) -> bool | None:
    """Whether a process outlived the one that started it: PID 1 took it over and it's no unit's main process.

    `first` is the name of PID 1. In a container without an init every top process is a child of PID 1: not known.
    """
    if parent is None or (parent == 1 and first not in ("systemd", "init")):
        return None
    return parent == 1 and pid != main_pid


def describe_process(pid: int | None) -> Facts:
    """`{name, unit, cgroup, user, orphan}` of a process; all None when it is gone or not ours to see."""
    facts: Facts = {"name": None, **belongs(pid), "user": None, "orphan": None}
    if pid is None:
        return facts
    facts["name"] = read(f"/proc/{pid}/comm")
    facts["user"] = _user(pid)
    stat = read(f"/proc/{pid}/stat")
    parent = parent_from_stat(stat) if stat else None
    main_pid = None
    if parent == 1 and facts["unit"]:
        out = run(["systemctl", "show", facts["unit"], "--property=MainPID", "--value"])[1].strip()
        main_pid = int(out) if out.isdigit() else None
    facts["orphan"] = is_orphan(parent, read("/proc/1/comm"), pid, main_pid)
    return facts


def _user(pid: int) -> str | None:
    """Name of a process's user, or the number of one without a name."""
    try:
        number = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def parse_proc_net_tcp(text: str) -> list[tuple[str, int, int]]:
    """(address, port, inode) of the listening sockets in /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        cells = line.split()
        if len(cells) < 10 or cells[3] != "0A":
            continue
        raw, port = cells[1].split(":")
        # The kernel prints each 32-bit word in the machine's own byte order.
        words = [int(raw[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(raw), 8)]
        packed = b"".join(words)
        family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
        found.append((socket.inet_ntop(family, packed), int(port, 16), int(cells[9])))
    return found


def _sockets_of_processes() -> dict[int, int]:
    owner: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = list(folder.iterdir())
        except OSError:
            continue  # ended meanwhile, or not ours to see
        for link in links:
            try:
                target = str(link.readlink())
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                owner[int(target[8:-1])] = int(folder.parent.name)
    return owner


def gather_ports() -> list[Facts]:
    """Listening TCP ports: `[{address, port, pid, process, unit, cgroup}]`; pid is None without the right to see it."""
    sockets: list[tuple[str, int, int]] = []
    for name in ("tcp", "tcp6"):
        text = read(f"/proc/net/{name}")
        sockets += parse_proc_net_tcp(text) if text else []
    owner = _sockets_of_processes() if sockets else {}
    ports = []
    for address, port, inode in sorted(sockets, key=lambda row: (row[1], row[0])):
        pid = owner.get(inode)
        process = None if pid is None else read(f"/proc/{pid}/comm")
        ports.append({"address": address, "port": port, "pid": pid, "process": process, **belongs(pid)})
    return ports


def bindable(addresses: list[str]) -> dict[str, str | None]:
    """For each address None when a server can bind it on this host, else the reason why not."""
    answers: dict[str, str | None] = {}
    for address in addresses:
        try:
            family, kind, proto, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, proto) as probe:
                probe.bind(where)
            answers[address] = None
        except OSError as error:
            answers[address] = error.strerror or str(error)
    return answers
