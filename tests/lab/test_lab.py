# SPDX-License-Identifier: Apache-2.0
"""The lab itself: what it promises its hosts, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.lab import cgroups, machine, network
from fleet.lab.client import LabClient, LabHost
from fleet.lab.settings import lab_names, settings
from fleet.lab.shell import LabError, mounts, until

MakeLab = Callable[[str], LabClient]
RUNTIME = Path("/run/sglang-fleet-lab")


@pytest.fixture(scope="module")
def pair(lab: LabClient) -> list[LabHost]:
    """Two hosts that the tests of this module share; every test leaves them running."""
    return lab.fresh(2)


def traces(lab: LabClient) -> dict[str, list[str]]:
    """Everything on this machine that carries the lab's name, by kind."""
    names, where = lab_names(lab.name), settings(os.environ, lab.repo)
    layout = cgroups.machine_layout()
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if b"systemd-nspawn" in words[0] and any(w.startswith(lab.name.encode() + b"-h") for w in words):
            processes.append(path.parent.name)
    rules = subprocess.run(["nft", "list", "ruleset"], check=True, capture_output=True, text=True).stdout
    files = [
        where.lab(lab.name),
        lab.inventory,
        where.lock(lab.name),
        RUNTIME / "cp" / names.tag,
        RUNTIME / "active" / lab.name,
    ]
    return {
        "mounts": [str(m) for m in mounts(where.lab(lab.name))]
        + [str(m) for m in mounts(Path("/run/netns")) if names.netns_prefix in str(m)],
        "namespaces": [p.name for p in Path("/run/netns").glob(f"{names.netns_prefix}*")],
        "links": [p.name for p in Path("/sys/class/net").glob(f"{names.bridge}*")],
        "rules": [line for line in rules.splitlines() if names.tag in line],
        "groups": [
            str(root / cgroups.PARENT / lab.name)
            for root in layout.roots
            if (root / cgroups.PARENT / lab.name).exists()
        ],
        "processes": processes,
        "files": [str(f) for f in files if f.exists()],
    }


def machine_state() -> dict[str, object]:
    """What labs change of the machine itself, as long as one is up."""
    return {
        "ip_forward": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "netns_mounted": bool(mounts(Path("/run/netns"))),
        "groups": [str(r / cgroups.PARENT) for r in cgroups.machine_layout().roots if (r / cgroups.PARENT).exists()],
    }


def archive(host: LabHost) -> str:
    """URL of a small file in the registry that the host's apt uses, which is the machine's."""
    line = host.ssh("grep -m1 ^deb /etc/apt/sources.list").stdout.split()
    uri, suite = [w for w in line if "://" in w or re.fullmatch(r"[a-z]+", w)][1:3]
    return f"{uri}/dists/{suite}/Release"


def test_hosts_are_real(pair: list[LabHost]) -> None:
    ids = set()
    for host in pair:
        said = host.ssh(
            "cat /proc/1/comm; systemctl is-system-running; hostname; cat /etc/machine-id"
        ).stdout.splitlines()
        assert said[:3] == ["systemd", "running", host.name]
        ids.add(said[3])
    assert len(ids) == 2
    host = pair[0]
    tools = "gcc --version; numactl --show; rsync --version; sudo -n true; curl --version; command -v ip ps"
    host.ssh(f"set -e; {tools}; ls /lib/*/libnuma.so.1 /usr/include/stdio.h /var/log/journal/*/system.journal")
    host.ssh("python3 -c 'import sys, venv, ensurepip, apt; assert sys.version_info >= (3, 11)'")
    host.ssh(f"ping -c1 -W2 {pair[1].address}")


def test_ansible_reaches_them_with_host_keys_checked(pair: list[LabHost]) -> None:
    argv = [
        str(Path(sys.executable).with_name("ansible")),
        "-i",
        str(pair[0].inventory),
        ",".join(h.name for h in pair),
        "-m",
        "ansible.builtin.ping",
        "-o",
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == 2
    assert "StrictHostKeyChecking=yes" in pair[0].inventory.read_text()
    # the check is real: with another host's key nothing connects
    known = pair[0].lab.inventory.parent / "wrong_known_hosts"
    right = next(w for w in pair[0].lab.ssh_words(pair[0].name) if w.startswith("UserKnownHostsFile=")).split("=")[1]
    keys = dict(line.split(" ", 1) for line in Path(right).read_text().splitlines())
    known.write_text(f"{pair[0].address} {keys[pair[1].address]}\n")
    words = [w.replace(right, str(known)) for w in pair[0].lab.ssh_words(pair[0].name)]
    refused = subprocess.run([*words, "true"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    known.unlink()
    assert refused.returncode == 255
    assert "verification failed" in refused.stderr


def test_machine_setup_reaches_sessions_and_units(pair: list[LabHost]) -> None:
    host = pair[0]
    want = {}
    for line in host.ssh("cat /etc/environment").stdout.splitlines():
        name, _, value = line.partition("=")
        want[name] = value.strip('"')
    assert want.keys() >= machine.pick_environment(os.environ).keys()
    for where in ("env", "systemd-run --wait --pipe -q env"):
        have = dict(line.split("=", 1) for line in host.ssh(where).stdout.splitlines() if "=" in line)
        assert {k: have.get(k) for k in want} == want, where
    host.ssh("test -e " + " -a -e ".join(["/etc", *(v for v in want.values() if v.startswith("/"))]))
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        assert host.ssh(f"cat {bundle}").stdout == bundle.read_text()
    host.ssh(f"curl -fsS -o /dev/null --max-time 30 {archive(host)}")
    host.ssh("test -f /srv/sglang-fleet-models/nano/README.md || test -d /srv/sglang-fleet-models/nano")
    assert host.ssh("touch /srv/sglang-fleet-models/x", check=False).returncode != 0
    host.ssh("f=/var/cache/sglang-fleet-uv/.lab-test-$$; touch $f; rm $f")


def test_second_up_changes_nothing(lab: LabClient, pair: list[LabHost]) -> None:
    before = [(r["name"], r["init_pid"], r["state"]) for r in lab.rows()]
    written = lab.inventory.stat().st_mtime_ns
    done = lab.call("up", *(h.name for h in pair))
    assert done.stderr.count("was running already") == 2
    assert "booted" not in done.stderr
    assert done.stdout.strip() == str(lab.inventory)
    assert [(r["name"], r["init_pid"], r["state"]) for r in lab.rows()] == before
    assert lab.inventory.stat().st_mtime_ns == written
    refused = lab.call("up", pair[0].name, "--memory", "1G", check=False)
    assert refused.returncode == 2
    assert "take it down first" in refused.stderr


def test_crash_keeps_the_disk(pair: list[LabHost]) -> None:
    host = pair[0]
    host.ssh("echo kept > /root/file; logger -t lab before-the-crash; journalctl --sync")
    machine_id = host.ssh("cat /etc/machine-id").stdout
    first = host.info()["init_pid"]
    host.crash()
    assert host.info()["state"] == "stopped"
    again = host.lab.call("crash", host.name, check=False)
    assert again.returncode == 1
    assert "is not running" in again.stderr
    host.start()
    assert host.info()["init_pid"] != first
    assert host.ssh("cat /root/file").stdout.strip() == "kept"
    assert host.ssh("cat /etc/machine-id").stdout == machine_id
    assert "before-the-crash" in host.ssh("journalctl -t lab -o cat").stdout
    assert len(json.loads(host.ssh("journalctl --list-boots -o json").stdout)) >= 2


def ended(pid: int) -> bool:
    """Gone, or dead and waiting to be reaped by the machine's own process 1, which takes its time."""
    try:
        return bool(re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_killed_supervisor_is_no_running_host(pair: list[LabHost]) -> None:
    host = pair[0]
    init = host.info()["init_pid"]
    status = Path(f"/proc/{init}/status").read_text()
    supervisor = int(re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
    assert Path(f"/proc/{supervisor}/comm").read_text().strip() == "systemd-nspawn"
    os.kill(supervisor, signal.SIGKILL)
    assert until(lambda: host.info()["state"] == "stopped", 10)
    host.lab.call("up", host.name)
    assert host.info()["init_pid"] not in (None, init)
    assert until(lambda: ended(init), 10)
    host.ssh("true")


def test_partition_and_heal(pair: list[LabHost]) -> None:
    one, other = pair
    one.partition()
    assert one.info()["partitioned"]
    words = [*one.lab.ssh_words(one.name)]
    words[1:1] = ["-o", "ConnectTimeout=2"]
    assert subprocess.run([*words, "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 255
    assert other.ssh(f"ping -c1 -W1 {one.address}", check=False).returncode != 0
    one.heal()
    assert not one.info()["partitioned"]
    one.ssh("true")
    other.ssh(f"ping -c1 -W2 {one.address}")


def test_cut_closes_the_registry_but_not_ssh(pair: list[LabHost]) -> None:
    host, other = pair
    url = archive(host)
    fetch = f"curl -fsS -o /dev/null --max-time 20 {url}"
    host.ssh(fetch)
    host.cut()
    assert host.ssh(fetch, check=False).returncode in (6, 7, 28)  # no name, no connection
    assert (
        host.ssh(
            "curl -sS --max-time 3 http://$(ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p')", check=False
        ).returncode
        == 7
    )
    host.ssh(f"ping -c1 -W2 {other.address}")
    other.ssh(fetch)
    host.uncut()
    host.ssh(fetch)


def test_only_registry_ports_leave(pair: list[LabHost]) -> None:
    # a port nobody uses on the name server, which is outside the lab: refused by the lab itself, at once
    server = pair[0].ssh("sed -n 's/^nameserver //p' /etc/resolv.conf | head -1").stdout.strip()
    if not server:  # then hosts resolve nothing, and there is no address outside to try
        pytest.skip("the machine has no name server that hosts can reach")
    done = pair[0].ssh(f"curl -sS --max-time 5 http://{server}:5999", check=False)
    assert done.returncode == 7, done.stderr


def test_limits_are_real(fresh_hosts: Callable[..., list[LabHost]]) -> None:
    host = fresh_hosts(1, memory="400M", disk="64M")[0]
    unit = "systemd-run --wait -q -p MemoryMax=64M python3 -c 'bytearray(200 << 20)'; echo rc=$?"
    assert "rc=0" not in host.ssh(unit).stdout, "MemoryMax= of a unit is not enforced"
    assert "rc=0" in host.ssh(unit.replace("MemoryMax=64M", "MemoryMax=300M")).stdout
    assert host.ssh("python3 -c 'bytearray(900 << 20)'; echo rc=$?").stdout.strip() != "rc=0", (
        "--memory is not enforced"
    )
    assert host.ssh("cat /proc/1/comm").stdout.strip() == "systemd"
    full = host.ssh("dd if=/dev/zero of=/root/big bs=1M count=200", check=False)
    assert full.returncode == 1
    assert "No space left on device" in full.stderr
    assert 0 < int(host.ssh("stat -c %s /root/big").stdout) <= 64 << 20
    host.ssh("rm /root/big; echo small > /root/small")
    host.stop()
    assert host.info()["state"] == "stopped"
    host.start()
    assert host.ssh("cat /root/small").stdout.strip() == "small"
    row = host.info()
    assert (row["memory_limit_bytes"], row["disk_limit_bytes"]) == (400 << 20, 64 << 20)


def test_a_host_that_can_not_boot_shows_its_console(fresh_host: LabHost) -> None:
    fresh_host.ssh("printf '#!/bin/sh\\necho out of order\\nexit 1\\n' > /usr/sbin/lab-init")
    fresh_host.stop()
    failed = fresh_host.lab.call("start", fresh_host.name, check=False)
    assert failed.returncode == 1
    assert f"{fresh_host.name}: ended while booting" in failed.stderr
    assert "out of order" in failed.stderr
    assert "out of order" in fresh_host.lab.call("console", fresh_host.name).stdout


def test_binds(fresh_hosts: Callable[..., list[LabHost]], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_text("seen")
    host = fresh_hosts(1, binds=[f"{tmp_path}/in:/srv/in:ro", f"{tmp_path}:/srv/out"])[0]
    assert host.ssh("cat /srv/in/file").stdout == "seen"
    assert host.ssh("touch /srv/in/new", check=False).returncode != 0
    host.ssh("echo back > /srv/out/new")
    assert (tmp_path / "new").read_text() == "back\n"


def test_labs_side_by_side_and_down_leaves_nothing(make_lab: MakeLab, pair: list[LabHost]) -> None:
    side = make_lab("side")
    argv = [str(side.repo / "bin/lab"), "up", "1", "--lab", side.name]
    calls = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [call.communicate()[1] for call in calls]
    try:
        # two calls at once: one boots the host, the other waits and finds it running
        assert [call.returncode for call in calls] == [0, 0], said
        assert sum("booted" in text for text in said) == sum("was running already" in text for text in said) == 1
        [host] = side.hosts()
        assert host.address.rsplit(".", 1)[0] != pair[0].address.rsplit(".", 1)[0]
        pair[0].ssh("true")
        assert host.ssh(f"curl -sS --max-time 3 http://{pair[0].address}:80", check=False).returncode in (7, 28)
        seen = {kind: found for kind, found in traces(side).items() if not found}
        assert not seen, f"the test does not find what is there: {seen}"
        neighbour = traces(pair[0].lab)
    finally:
        side.down()
    assert not any(traces(side).values()), traces(side)
    assert traces(pair[0].lab) == neighbour
    pair[0].ssh("true")
    side.down()  # nothing there is fine


ALONE = """set -e
if mountpoint -q /run/netns; then umount -R /run/netns; fi
mount -t tmpfs none /run; mkdir /run/groups
mount --rbind /sys/fs/cgroup /run/groups; mount -t sysfs none /sys; mount --rbind /run/groups /sys/fs/cgroup
echo 0 > /proc/sys/net/ipv4/ip_forward
ip link set lo up; ip link add up0 mtu 1300 type veth peer name up1; ip link set up1 up
ip addr add 198.51.100.2/24 dev up0; ip link set up0 up; ip route add default via 198.51.100.1
nft -f - <<END
table ip other {
  chain closed { type filter hook forward priority 0; policy drop; }
}
END
state() { cat /proc/sys/net/ipv4/ip_forward; ip -br link; nft list ruleset; if [ -d /run/netns ]; then ls /run/netns; fi; }
state > "$OUT/before"
"$LAB_DOOR" up 1 --lab "$LAB_NAME"
{ nft list chain ip other closed; ip link; cat /proc/sys/net/ipv4/ip_forward; } > "$OUT/up"
"$LAB_DOOR" down --lab "$LAB_NAME"
state > "$OUT/after"
"""


def test_the_last_lab_restores_the_machine(make_lab: MakeLab, tmp_path: Path) -> None:
    """In an own network and mount view, so that other labs of this machine don't blur what is compared."""
    lab = make_lab("alone")
    own = {"XDG_STATE_HOME": f"{tmp_path}/state", "OUT": str(tmp_path), "LAB_NAME": lab.name}
    env = {**os.environ, **own, "LAB_DOOR": str(lab.repo / "bin/lab")}
    argv = ["unshare", "--mount", "--net", "sh", "-c", ALONE]
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    up = (tmp_path / "up").read_text()
    bridge = lab_names(lab.name).bridge
    assert up.count(f'"{bridge}" accept') == 2, "another owner's chain that drops by default was not opened"
    assert re.search(rf"{bridge}: .* mtu 1300 ", up), "the uplink's MTU was not taken over"
    assert up.splitlines()[-1] == "1"
    before = (tmp_path / "before").read_text()
    assert before.splitlines()[0] == "0"
    assert (tmp_path / "after").read_text() == before


def test_machine_with_version_2_groups_only(make_lab: MakeLab) -> None:
    """What a usual Debian or Ubuntu has. Controllers stay with the other hierarchies here, so limits are not shown."""
    if cgroups.machine_layout().unified:  # this test makes by hand what such a machine has anyway
        pytest.skip("this machine has version 2 only: every test shows it")
    lab = make_lab("two")
    door = f"{lab.repo}/bin/lab"
    steps = [["up", "1"], ["crash", "h1"], ["start", "h1"], ["stop", "h1"], ["start", "h1"]]
    script = "set -e; umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup\n"
    script += "".join(f"{door} {words[0]} --lab {lab.name} {words[1]}\n" for words in steps)
    script += f"{door} ssh --lab {lab.name} h1 'systemctl is-system-running; grep cgroup /proc/mounts'\n"
    script += f"! {door} up h2 --memory 1G --lab {lab.name}; {door} down --lab {lab.name}"
    argv = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "running\ncgroup /sys/fs/cgroup cgroup2 rw" in done.stdout
    assert "--memory needs the memory controller" in done.stderr
    assert not any(traces(lab).values()), traces(lab)


def test_interrupted_up_can_be_repeated_and_taken_down(make_lab: MakeLab) -> None:
    lab = make_lab("broken")
    names = lab_names(lab.name)
    argv = [str(lab.repo / "bin/lab"), "up", "2", "--lab", lab.name]
    for kill in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
            assert until(lambda: network.hosts_of(names) != set(), 60, 0.001)
            up.send_signal(kill)
            _, said = up.communicate(timeout=60)
        assert up.returncode in (-kill, 130), said
        if kill == signal.SIGKILL:
            lab.down()
            assert not any(traces(lab).values())
    assert len(lab.up(["2"])) == 2
    for host in lab.hosts():
        host.ssh("true")
    lab.down()
    assert not any(traces(lab).values())


def test_errors_name_the_thing_and_the_next_step(lab: LabClient, pair: list[LabHost], make_lab: MakeLab) -> None:
    for words, code, said in (
        (("start", "h77"), 1, f"no host {lab.name}-h77"),
        (("crash", "web1"), 2, "name another lab with --lab"),
        (("up", "0"), 2, "1 to 200 hosts"),
        (("up", "h50", "--memory", "lots"), 2, "for example 6G"),
        (("up", "h50", "--bind", "/nowhere:/srv/x"), 1, "/nowhere does not exist"),
    ):
        done = lab.call(*words, check=False)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    absent = make_lab("absent").call("ssh", "h1", "true", check=False)
    assert absent.returncode == 1
    assert "is not up" in absent.stderr
    with pytest.raises(LabError, match="exited 3"):
        pair[0].ssh("exit 3")
