# SPDX-License-Identifier: Apache-2.0
"""Rules about ports and addresses of the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_owners import owner
from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, Map, label, ours, rule
from ansible.module_utils.gpu_host_rules_instances import binds


@rule(
    "port-busy",
    BLOCK,
    "The engine could not bind the port and would die at its start.",
    source="https://man7.org/linux/man-pages/man2/bind.2.html",
)
def port_busy(case: Case) -> Iterator[Hit]:
    """No process outside of our units listens on an instance's port."""
    for at, instance in enumerate(case.instances):
        for listener in case.facts["ports"]:
            if (
                listener["port"] == instance.get("port")
                and not ours(listener)
                and _meets(listener["address"], instance.get("address"))
            ):
                who = (
                    f"process {listener['pid']} ({listener['process']})"
                    if listener["pid"]
                    else "a process that is not visible"
                )
                name = owner(listener).name if listener["pid"] else listener.get("unit")
                unit = f" of {name}" if name else ""
                yield Hit(
                    label(instance, at),
                    f"port {listener['port']} is held by {who}{unit} on {listener['address']}",
                    "a free port",
                    f"{_end(listener)}, or set another port for it in {case.where}.",
                )
                break


def _end(listener: Map) -> str:
    if listener["process"] == "docker-proxy":  # Docker would start it again
        return f"Stop its container (`docker stop $(docker ps -q --filter publish={listener['port']})`)"
    if listener["pid"]:
        return f"End it on the host ({owner(listener).end})"
    return f"Find it as root (`ss -ltnp 'sport = :{listener['port']}'`) and end it"


def _meets(listening: str, asked: Any) -> bool:
    """Whether two binds of one port collide: the same address, or either of them is every address."""
    every = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    names = {"localhost": "127.0.0.1"}
    return listening == names.get(str(asked), asked) or listening in every or asked in every


@rule(
    "address-foreign",
    BLOCK,
    "A server can bind only addresses that the host has.",
    source="https://man7.org/linux/man-pages/man2/bind.2.html",
)
def address_foreign(case: Case) -> Iterator[Hit]:
    """Every address of an instance can be bound."""
    for at, instance in enumerate(case.instances):
        reason = case.facts["bind"].get(str(instance.get("address")))
        if reason and binds(instance.get("address")):  # what is no address has its own rule
            yield Hit(
                label(instance, at),
                f"address {instance['address']}: {reason}",
                "an address of this host",
                f"Set address for it in {case.where}; `ip -brief address` on the host lists them.",
            )
