# SPDX-License-Identifier: Apache-2.0
"""A lab: its hosts, keys, inventory, and taking all of it away."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.lab import base, cgroups, hosts, machine, network, tools
from fleet.lab.hosts import Host, Record
from fleet.lab.settings import Names, Settings
from fleet.lab.shell import LabError, MisuseError, locked, run, write


@dataclass(frozen=True)
class Wish:
    """What `up` asks for, for hosts that it makes. None: the default."""

    suite: str | None = None
    memory: int | None = None
    disk: int | None = None
    binds: tuple[str, ...] = ()

    def differs(self, record: Record) -> list[str]:
        """What an existing host has otherwise. Only what was asked for counts."""
        found = []
        if self.suite and self.suite != record.suite:
            found.append(f"--suite is {record.suite}")
        if self.memory and self.memory != record.memory:
            found.append(f"--memory is {record.memory or 'unlimited'}")
        if self.disk and self.disk != record.disk:
            found.append(f"--disk is {record.disk or 'unlimited'}")
        found += [f"{b} is not bound" for b in self.binds if b not in record.binds]
        return found


def base_of(settings: Settings, suite: base.Suite, about: machine.Machine, say: Callable[[str], None]) -> Path:
    """The root that hosts of a suite share; built, with what that needs, if it is not there."""
    tools.ensure(suite, say)
    archives = base.mirrors(suite, base.machine_sources(), os.environ.get("FLEET_LAB_MIRROR"))

    def build(work: Path) -> None:
        base.bootstrap(suite, archives, list(about.apt_options), work, say)

    return base.ensure(settings.cache, suite, archives, build, say)


def this_machine(settings: Settings) -> machine.Machine:
    """What hosts need of the machine's own setup."""
    dump = run(["apt-config", "dump"]).stdout if shutil.which("apt-config") else ""
    return machine.look(os.environ, settings.home, dump)


@dataclass(frozen=True)
class Lab:
    """One lab on this machine. `say` gets progress lines."""

    settings: Settings
    names: Names
    say: Callable[[str], None]

    @property
    def folder(self) -> Path:
        return self.settings.lab(self.names.lab)

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def control(self) -> Path:
        """Folder of ssh control sockets: short, and gone with the lab, as addresses are used again with other keys."""
        return self.settings.runtime / "cp" / self.names.tag

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return locked(self.settings.lock(self.names.lab), lambda: self.say("waiting for another call on this lab"))

    def machine_lock(self) -> contextlib.AbstractContextManager[None]:
        """Held while something that all labs share is changed: subnets, /run/netns, forwarding."""
        return locked(self.settings.runtime / "machine.lock")

    # state

    def subnet(self) -> ipaddress.IPv4Network | None:
        try:
            return ipaddress.IPv4Network(json.loads((self.folder / "lab.json").read_text())["subnet"])
        except FileNotFoundError:
            return None

    def _create(self) -> ipaddress.IPv4Network:
        """Folder, subnet and key of the lab. Written down before anything is made in the kernel, so down finds it."""
        found = self.subnet()
        if found is None:
            with self.machine_lock():
                labs = self.settings.state / "labs"
                others = [json.loads(p.read_text()) for p in labs.glob("*/lab.json")]
                for other in others:
                    if Names(other["lab"]).tag == self.names.tag:
                        raise LabError(f"the name {self.names.lab} hashes like {other['lab']}: choose another")
                servers = [ipaddress.IPv4Network(s) for s in this_machine(self.settings).nameservers]
                taken = network.taken_by_machine() + [ipaddress.IPv4Network(o["subnet"]) for o in others]
                found = network.pick_subnet(taken + servers)
                self.folder.mkdir(parents=True, exist_ok=True)
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                about = {"lab": self.names.lab, "subnet": str(found), "created": now}
                write(self.folder / "lab.json", json.dumps(about) + "\n")
        if not self.key.exists():
            new = self.folder / ".key"
            new.unlink(missing_ok=True)
            new.with_name(".key.pub").unlink(missing_ok=True)
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab-{self.names.lab}", "-f", new])
            new.with_name(".key.pub").replace(self.folder / "id_ed25519.pub")
            os.chown(new, *self.settings.owner)
            new.replace(self.key)
        return found

    def host(self, index: int, subnet: ipaddress.IPv4Network | None = None) -> Host:
        """A host by index. LabError if the lab is not up."""
        net = subnet or self.subnet()
        if net is None:
            raise LabError(f"lab {self.names.lab} is not up; start it with: bin/lab up --lab {self.names.lab}")
        return Host(self.settings, self.names, net, cgroups.machine_layout(), index)

    def existing(self, index: int) -> Host:
        """A host that was made. LabError otherwise."""
        host = self.host(index)
        if host.record() is None:
            have = ", ".join(h.name for h in self.hosts()) or "none"
            raise LabError(
                f"lab {self.names.lab} has no host {host.name} (it has: {have}); make it with: bin/lab up h{index}"
            )
        return host

    def hosts(self) -> list[Host]:
        """Hosts with a record, in order."""
        subnet = self.subnet()
        if subnet is None:
            return []
        prefix = f"{self.names.lab}-h"
        found = [p.parent.name.removeprefix(prefix) for p in (self.folder / "hosts").glob("*/host.json")]
        return [self.host(i, subnet) for i in sorted(int(w) for w in found if w.isdigit())]

    # verbs

    def up(self, wanted: list[int], wish: Wish) -> None:
        """Make and boot hosts that are not running; nothing changes for those that are."""
        with self.lock():
            subnet = self._create()
            chosen = [self.host(i, subnet) for i in wanted]
            records = {h.index: h.record() for h in chosen}
            for host in chosen:
                record = records[host.index]
                differs = wish.differs(record) if record else []
                if differs:
                    raise MisuseError(
                        f"{host.name} exists and {', '.join(differs)}; take it down first: "
                        f"bin/lab down {host.name} --lab {self.names.lab}"
                    )
            idle = [h for h in chosen if not h.running()]
            if idle:
                self._boot(idle, wish, subnet)
            for host in chosen:
                self.say(f"{host.name} {host.address} {'booted' if host in idle else 'was running already'}")

    def _boot(self, idle: list[Host], wish: Wish, subnet: ipaddress.IPv4Network) -> None:
        about = this_machine(self.settings)
        for line in about.warnings:
            self.say(f"warning: {line}")
        new = [h for h in idle if h.record() is None]
        for host, made in zip(new, self._records(new, wish, about), strict=True):
            host.save(made)
        with self.machine_lock():
            self._rules(subnet, about)
            for host in idle:
                network.host_up(host.names, host.subnet, host.index, not self._record(host).partitioned)
        public = (self.folder / "id_ed25519.pub").read_text()
        self.settings.uv_cache.mkdir(parents=True, exist_ok=True)
        for host in idle:
            hosts.boot(host, self._record(host), about, public)
        self._write_access()
        apart = [h for h in idle if self._record(h).partitioned]
        for host in apart:
            self.say(
                f"{host.name} is partitioned, so nobody waits for its SSH; end that with: bin/lab heal {host.name}"
            )
        self._await([h for h in idle if h not in apart])

    @staticmethod
    def _record(host: Host) -> Record:
        record = host.record()
        if record is None:
            raise LabError(f"{host.name}: {host.folder / 'host.json'} went away; is another clone at work on this lab?")
        return record

    def _records(self, new: list[Host], wish: Wish, about: machine.Machine) -> list[Record]:
        """Records for new hosts; makes the base they stand on."""
        if not new:
            return []
        os_release = Path("/etc/os-release").read_text()
        suite = base.SUITES[wish.suite or base.default_suite(os_release)]
        root = base_of(self.settings, suite, about, self.say)
        binds = hosts.bind_words(self.settings, about, list(wish.binds))
        return [Record(h.index, suite.name, str(root), wish.memory, wish.disk, binds) for h in new]

    def _rules(self, subnet: ipaddress.IPv4Network, about: machine.Machine) -> None:
        cut = [h.address for h in self.hosts() if (r := h.record()) and r.cut]
        rules = network.ruleset(self.names, subnet, about.nameservers, about.ports, cut)
        network.lab_up(self.names, subnet, rules, self.settings.runtime)

    def _await(self, booted: list[Host]) -> None:
        """Wait until every host answers SSH and has finished booting."""

        def ready(host: Host) -> None:
            hosts.wait_ssh(host)
            done = run(
                [*self.ssh_words(host), "systemctl is-system-running --wait"], check=False, timeout=hosts.BOOT_SECONDS
            )
            state = done.stdout.strip()
            if state == "degraded":
                failed = run([*self.ssh_words(host), "systemctl list-units --failed --plain --no-legend"], check=False)
                units = " ".join(line.split()[0] for line in failed.stdout.splitlines() if line.strip())
                self.say(f"warning: {host.name} runs with failed units: {units}")
            elif state != "running":
                raise LabError(f"{host.name}: expected it to run, its systemd says {state or done.stderr.strip()!r}")

        with ThreadPoolExecutor(max_workers=8) as pool:
            for outcome in [pool.submit(ready, h) for h in booted]:
                outcome.result()

    def down(self, some: list[int] | None = None) -> None:
        """Take hosts away, or the whole lab with everything that carries its name. Nothing there is fine."""
        with self.lock():
            if some:
                for index in some:
                    left = self._remove(self.existing(index))
                    if left:
                        raise LabError(f"left behind: {', '.join(left)}; run down again")
                self._write_access()
                return
            subnet = self.subnet() or network.POOLS[0]
            layout = cgroups.machine_layout()
            prefix = f"{self.names.lab}-h"
            seen = cgroups.hosts_of(layout, self.names.lab) + [p.name for p in (self.folder / "hosts").glob("*")]
            indices = network.hosts_of(self.names) | {
                int(w) for name in seen if (w := name.removeprefix(prefix)).isdigit() and name.startswith(prefix)
            }
            left = [word for i in sorted(indices) for word in self._remove(self.host(i, subnet))]
            left += [str(p) for p in cgroups.remove(layout, self.names.lab)]
            if shutil.which("nft"):
                with self.machine_lock():
                    network.lab_down(self.names, self.settings.runtime)
                    network.drop_netns_mount()
            self._close_control()
            if left:
                raise LabError(f"left behind: {', '.join(left)}; see what holds them, then run down again")
            inventory = self.settings.inventory(self.names.lab)
            if inventory.parent.exists():
                shutil.rmtree(inventory.parent)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.settings.lock(self.names.lab).unlink()

    def _remove(self, host: Host) -> list[str]:
        with self.machine_lock():
            return hosts.remove(host)

    def _close_control(self) -> None:
        """End ssh masters that still hold a connection to a host that is gone."""
        if not self.control.is_dir():
            return
        for path in self.control.iterdir():
            run(["ssh", "-F", "/dev/null", "-o", f"ControlPath={path}", "-O", "exit", "lab"], check=False, timeout=10)
            path.unlink(missing_ok=True)
        self.control.rmdir()

    def start(self, index: int) -> None:
        host = self.existing(index)
        with self.lock():
            if not host.running():
                self._boot([host], Wish(), host.subnet)

    def stop(self, index: int) -> None:
        host = self.existing(index)
        with self.lock():
            hosts.stop(host)
            self._write_access()

    def crash(self, index: int) -> None:
        host = self.existing(index)
        with self.lock():
            hosts.crash(host)

    def partition(self, index: int, apart: bool) -> None:
        """Pull the host's cable, or plug it in again and wait for a running host's SSH."""
        host = self.existing(index)
        with self.lock():
            if not (Path("/sys/class/net") / self.names.veth(index)).exists():
                raise LabError(
                    f"{host.name} has no network; start it with: bin/lab start {host.name} --lab {self.names.lab}"
                )
            host.save(replace(self._record(host), partitioned=apart))
            run(["ip", "link", "set", self.names.veth(index), "down" if apart else "up"])
            if not apart and host.running():
                hosts.wait_ssh(host)

    def cut(self, index: int, cut: bool) -> None:
        """Close or open a host's way out of the lab."""
        host = self.existing(index)
        with self.lock():
            host.save(replace(self._record(host), cut=cut))
            network.cut(self.names, host.address, cut)

    # access

    def ssh_options(self) -> list[str]:
        """ssh words for this lab's hosts: its key, its known hosts, nothing of the caller's own configuration."""
        return [
            *("-F", "/dev/null"),
            *("-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={self.known_hosts}"),
            *("-o", "StrictHostKeyChecking=yes"),
            *("-o", "ServerAliveInterval=5"),
            *("-o", "ServerAliveCountMax=3"),
        ]

    def ssh_words(self, host: Host) -> list[str]:
        quick = ["-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR", "-o", "ControlPath=none"]
        return ["ssh", "-i", str(self.key), *self.ssh_options(), *quick, f"root@{host.address}"]

    def _write_access(self) -> None:
        """known_hosts and the inventory, for every host that was made."""
        made = self.hosts()
        lines = []
        for host in made:
            key = host.folder / "disk/up/etc/ssh/ssh_host_ed25519_key.pub"
            if key.exists():
                lines.append(f"{host.address} {' '.join(key.read_text().split()[:2])}\n")
        write(self.known_hosts, "".join(lines), owner=self.settings.owner)
        self.control.mkdir(parents=True, exist_ok=True, mode=0o755)
        self.control.chmod(0o700)
        os.chown(self.control, *self.settings.owner)
        path = self.settings.inventory(self.names.lab)
        for folder in (path.parent.parent, path.parent):
            if not folder.exists():
                folder.mkdir(parents=True)
                os.chown(folder, *self.settings.owner)
        # Ansible looks for group_vars beside the inventory; the lab's are those of the repository
        link = path.parent / "group_vars"
        if not link.is_symlink():
            link.symlink_to("../../group_vars")
        write(path, self.inventory_text(made), owner=self.settings.owner)

    def inventory_text(self, made: list[Host]) -> str:
        """YAML inventory; strings are written as JSON strings, which are YAML too."""
        common = " ".join(self.ssh_options()) + f" -o ControlPath={self.control}/%C"
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_ssh_common_args": common,
        }
        text = "# Written by bin/lab, removed by bin/lab down.\nlab:\n  hosts:\n"
        text += "".join(f"    {h.name}:\n      ansible_host: {json.dumps(h.address)}\n" for h in made)
        return text + "  vars:\n" + "".join(f"    {k}: {json.dumps(v)}\n" for k, v in variables.items())


def all_labs(settings: Settings) -> Iterator[str]:
    """Names of the labs that have state on this machine."""
    for path in sorted((settings.state / "labs").glob("*/lab.json")):
        yield path.parent.name
