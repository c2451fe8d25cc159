# SPDX-License-Identifier: Apache-2.0
"""A bridge per lab, a network namespace per host, and what may leave them."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fleet.lab.settings import Names, address
from fleet.lab.shell import LabError, mounts, run

# Pools are tried in this order: one of them is free even on a machine whose VPN takes a whole private range.
POOLS = tuple(ipaddress.IPv4Network(p) for p in ("10.213.0.0/16", "172.29.0.0/16", "192.168.192.0/18"))
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_NET = Path("/sys/class/net")


def pick_subnet(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """First free /24 of the pools. LabError when every one overlaps something."""
    busy = list(taken)
    for pool in POOLS:
        for net in pool.subnets(new_prefix=24):
            if not any(net.overlaps(b) for b in busy):
                return net
    pools = ", ".join(map(str, POOLS))
    raise LabError(f"no free /24 in {pools}: this machine routes all of them; take a lab down or drop a route")


def taken_by_machine() -> list[ipaddress.IPv4Network]:
    """Networks this machine has routes or addresses for, default routes apart."""
    nets = []
    for route in _ip("route", "show", "table", "all"):
        if route["dst"] != "default":
            nets.append(ipaddress.IPv4Network(route["dst"], strict=False))
    for link in _ip("addr", "show"):
        nets += [
            ipaddress.IPv4Network(f"{a['local']}/{a['prefixlen']}", strict=False) for a in link.get("addr_info", [])
        ]
    return [n for n in nets if n.prefixlen]


def _ip(*words: str) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(run(["ip", "-4", "-j", *words]).stdout or "[]")
    return [entry for entry in parsed if entry]


def uplink_mtu() -> int:
    """MTU of the interface that the default route uses; tunnels and clouds have less than 1500."""
    for route in _ip("route", "show", "default"):
        with contextlib.suppress(FileNotFoundError):
            return min(1500, int((_NET / route["dev"] / "mtu").read_text()))
    return 1500


def ruleset(
    names: Names,
    subnet: ipaddress.IPv4Network,
    nameservers: Iterable[str],
    ports: Iterable[int],
    closed: Iterable[str],
) -> str:
    """nft text that replaces the lab's table in one step.

    Only name look-ups and the ports that registries and proxies use leave the bridge, so that nothing a test does can
    reach the outside; labs don't reach one another. Hosts in `closed` reach other hosts of the lab only, and answer the
    machine.
    """
    bridge, table = names.bridge, names.table
    servers, banned = ", ".join(nameservers), ", ".join(closed)
    allowed = ", ".join(str(p) for p in sorted({53, 80, 443, *ports}))
    dns = f'iifname "{bridge}" ip daddr {{ {servers} }} udp dport 53 accept' if servers else ""
    elements = f"elements = {{ {banned} }}" if banned else ""
    return f"""
table ip {table} {{}}
delete table ip {table}
table ip {table} {{
  set cut {{ type ipv4_addr; {elements} }}
  chain lab_in {{
    type filter hook input priority 0;
    iifname "{bridge}" ip saddr @cut ct state new reject
  }}
  chain lab_forward {{
    type filter hook forward priority 0;
    iifname "{bridge}" oifname "{bridge}" accept
    iifname "{bridge}" ip saddr @cut reject
    oifname "{bridge}" ip daddr @cut drop
    oifname "{bridge}" ct state established,related accept
    oifname "{bridge}" drop
    iifname "{bridge}" tcp flags syn tcp option maxseg size set rt mtu
    {dns}
    iifname "{bridge}" tcp dport {{ {allowed} }} accept
    iifname "{bridge}" reject
  }}
  chain lab_nat {{
    type nat hook postrouting priority 100;
    ip saddr {subnet} oifname != "{bridge}" masquerade
  }}
}}
"""


def cut(names: Names, address: str, closed: bool) -> None:
    """Put an address into the lab's cut set, or take it out; both are repeatable. Open connections end too."""
    load_rules(
        f"add element ip {names.table} cut {{ {address} }}\n"
        + ("" if closed else f"delete element ip {names.table} cut {{ {address} }}\n")
    )


def load_rules(text: str) -> None:
    run(["nft", "-f", "-"], stdin=text)


def closed_chains(nft_json: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(family, table, chain) of other owners' forward chains that drop what they don't know, as Docker and ufw set up."""
    return [
        (c["family"], c["table"], c["name"])
        for item in nft_json.get("nftables", [])
        if (c := item.get("chain"))
        and c.get("hook") == "forward"
        and c.get("policy") == "drop"
        and c["family"] in ("ip", "inet")
    ]


def own_rules(nft_json: dict[str, Any], names: Names) -> Iterator[tuple[str, str, str, int]]:
    """(family, table, chain, handle) of rules this lab put into other owners' chains, known by their comment."""
    for item in nft_json.get("nftables", []):
        rule = item.get("rule")
        if rule and rule.get("comment") == names.table and rule["table"] != names.table:
            yield rule["family"], rule["table"], rule["chain"], rule["handle"]


def _nft_json() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(["nft", "-j", "-a", "list", "ruleset"]).stdout)
    return parsed


def _pass_closed_chains(names: Names) -> None:
    """A packet has to pass every base chain, so an own accept is not enough where another chain drops by default."""
    have = _nft_json()
    done = {(f, t, c) for f, t, c, _ in own_rules(have, names)}
    text = ""
    for chain in closed_chains(have):
        if chain not in done:
            for side in ("iifname", "oifname"):
                text += f'insert rule {" ".join(chain)} {side} "{names.bridge}" accept comment "{names.table}"\n'
    if text:
        load_rules(text)


def lab_up(names: Names, subnet: ipaddress.IPv4Network, rules: str, runtime: Path) -> None:
    """Bridge, rules and forwarding of a lab, repeatable. The caller holds the machine's lock."""
    if not (_NET / names.bridge).exists():
        run(["ip", "link", "add", names.bridge, "address", names.mac(0), "type", "bridge"])
    run(["ip", "addr", "replace", f"{subnet[1]}/24", "dev", names.bridge])
    run(["ip", "link", "set", names.bridge, "mtu", str(uplink_mtu()), "up"])
    load_rules(rules)
    _pass_closed_chains(names)
    active = runtime / "active"
    active.mkdir(parents=True, exist_ok=True)
    before = runtime / "ip_forward.was"
    if not before.exists():
        before.write_text(_FORWARD.read_text())
    (active / names.lab).touch()
    _FORWARD.write_text("1")


def lab_down(names: Names, runtime: Path) -> None:
    """Take away what `lab_up` made; the last lab restores forwarding. The caller holds the machine's lock."""
    if (_NET / names.bridge).exists():
        run(["ip", "link", "del", names.bridge])
    have = _nft_json()
    text = "".join(f"delete rule {f} {t} {c} handle {h}\n" for f, t, c, h in own_rules(have, names))
    load_rules(f"{text}table ip {names.table} {{}}\ndelete table ip {names.table}\n")
    active, before = runtime / "active", runtime / "ip_forward.was"
    (active / names.lab).unlink(missing_ok=True)
    if before.exists() and not any(active.iterdir()):
        _FORWARD.write_text(before.read_text())
        before.unlink()


def host_up(names: Names, subnet: ipaddress.IPv4Network, index: int, plugged: bool) -> None:
    """Namespace and cable of a host, repeatable. Address and route are set from outside, so no network manager runs in it."""
    ns, veth, mtu = names.netns(index), names.veth(index), (_NET / names.bridge / "mtu").read_text().strip()
    if not ((_NET / veth).exists() and (Path("/run/netns") / ns).exists()):
        host_down(names, index)
        run(["ip", "netns", "add", ns])
        inside = ["name", "eth0", "mtu", mtu, "address", names.mac(index), "netns", ns]
        run(["ip", "link", "add", veth, "mtu", mtu, "type", "veth", "peer", *inside])
    run(["ip", "link", "set", veth, "master", names.bridge, "up" if plugged else "down"])
    run(
        ["ip", "-n", ns, "-batch", "-"],
        stdin=f"link set lo up\naddr replace {address(subnet, index)}/24 dev eth0\nlink set eth0 up\n"
        f"route replace default via {subnet[1]}\n",
    )


def host_down(names: Names, index: int) -> None:
    """Remove cable and namespace of a host, whichever of them is there."""
    if (_NET / names.veth(index)).exists():
        run(["ip", "link", "del", names.veth(index)])
    if (Path("/run/netns") / names.netns(index)).exists():
        run(["ip", "netns", "del", names.netns(index)])


def hosts_of(names: Names) -> set[int]:
    """Indices of hosts that have a namespace or a cable."""
    links = [p.name.removeprefix(f"{names.bridge}-") for p in _NET.glob(f"{names.bridge}-*")]
    spaces = [p.name.removeprefix(names.netns_prefix) for p in Path("/run/netns").glob(f"{names.netns_prefix}*")]
    return {int(word) for word in links + spaces if word.isdigit()}


def drop_netns_mount() -> None:
    """`ip netns add` mounts /run/netns onto itself and leaves that behind; take it away when nobody has a namespace."""
    folder = Path("/run/netns")
    if folder.is_dir() and not any(folder.iterdir()):
        for _ in [m for m in mounts(folder) if m == folder]:
            run(["umount", folder])
