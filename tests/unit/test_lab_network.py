# SPDX-License-Identifier: Apache-2.0
"""Subnets and firewall text of a lab."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from fleet.lab import network
from fleet.lab.settings import lab_names
from fleet.lab.shell import LabError

NAMES = lab_names("lab")
NET = IPv4Network("10.213.0.0/24")


def nets(*words: str) -> list[IPv4Network]:
    return [IPv4Network(w) for w in words]


def test_first_free_subnet() -> None:
    assert network.pick_subnet([]) == NET
    assert network.pick_subnet(nets("10.213.0.0/24", "10.213.2.0/24", "192.0.2.0/24")) == IPv4Network("10.213.1.0/24")
    # a single address in the way, or a larger route
    assert network.pick_subnet(nets("10.213.0.77/32")) == IPv4Network("10.213.1.0/24")
    assert network.pick_subnet(nets("10.213.0.0/17")) == IPv4Network("10.213.128.0/24")


def test_a_vpn_over_a_whole_private_range_leaves_others() -> None:
    assert network.pick_subnet(nets("10.0.0.0/8")) == IPv4Network("172.29.0.0/24")
    assert network.pick_subnet(nets("10.0.0.0/8", "172.16.0.0/12")) == IPv4Network("192.168.192.0/24")
    with pytest.raises(LabError, match="no free /24"):
        network.pick_subnet(nets("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))


def test_rules() -> None:
    text = network.ruleset(NAMES, NET, ["192.0.2.53", "192.0.2.54"], [3128, 443], ["10.213.0.11"])
    assert "ip daddr { 192.0.2.53, 192.0.2.54 } udp dport 53 accept" in text
    assert "tcp dport { 53, 80, 443, 3128 } accept" in text
    assert "elements = { 10.213.0.11 }" in text
    assert f'ip saddr {NET} oifname != "{NAMES.bridge}" masquerade' in text
    # what is cut is refused before anything lets it pass, but its lab can still be reached
    order = [
        text.index(w) for w in (f'oifname "{NAMES.bridge}" accept', "saddr @cut reject", "established", "udp dport 53")
    ]
    assert order == sorted(order)


def test_rules_without_name_servers_and_cuts_are_still_valid_text() -> None:
    text = network.ruleset(NAMES, NET, [], [], [])
    assert "udp" not in text
    assert "elements" not in text
    assert "{  }" not in text


def nft(*items: dict[str, object]) -> dict[str, object]:
    return {"nftables": [{"metainfo": {}}, *items]}


def chain(**more: object) -> dict[str, object]:
    return {
        "chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop", **more}
    }


def test_only_forward_chains_that_drop_are_opened() -> None:
    assert network.closed_chains(nft(chain())) == [("ip", "filter", "FORWARD")]
    others = (
        chain(policy="accept"),
        chain(hook="input"),
        chain(family="ip6"),
        {"chain": {"family": "ip", "table": "t", "name": "c"}},
    )
    assert network.closed_chains(nft(*others)) == []


def test_own_rules_are_known_by_their_comment() -> None:
    def rule(comment: str | None, table: str = "filter", handle: int = 7) -> dict[str, object]:
        return {"rule": {"family": "ip", "table": table, "chain": "FORWARD", "handle": handle, "comment": comment}}

    listing = nft(rule(NAMES.table), rule("of somebody else"), rule(None), rule(NAMES.table, table=NAMES.table))
    assert list(network.own_rules(listing, NAMES)) == [("ip", "filter", "FORWARD", 7)]
