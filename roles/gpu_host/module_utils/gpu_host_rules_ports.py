# SPDX-License-Identifier: Apache-2.0
"""Rules about the ports of instances: their own, and those that an engine binds beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, Map, args_of, label, rule, shown, whole

# sglang 0.5.11, server_args.py: port + 10000 must be a port too.
MAX_PORT = 55535
GRPC_PORT = "SGLANG_GRPC_PORT"


@rule(
    "port-bad",
    BLOCK,
    "An engine listens on one TCP port above the privileged ones, and SGLang wants room for its gRPC port, 10000 above.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/server_args.py",
    needs_host=False,
)
def port_bad(case: Case) -> Iterator[Hit]:
    """port is a whole number that a plain user may bind, with room for gRPC's above it unless that one is named."""
    for at, instance in enumerate(case.instances):
        port, largest = instance.get("port"), 65535 if _env(instance).get(GRPC_PORT) else MAX_PORT
        if not whole(port) or not 1024 <= port <= largest:
            yield Hit(
                label(instance, at),
                f"port {shown(port)}",
                f"a whole number from 1024 to {largest}",
                f"Set port: {30000 + at} for it in {case.where}.",
            )
        grpc = _env(instance).get(GRPC_PORT)
        if str(grpc).lstrip("-").isdecimal() and not 1 <= int(str(grpc)) <= 65535:
            yield Hit(
                label(instance, at),
                f"{GRPC_PORT} {shown(grpc)}",
                "a whole number from 1 to 65535; the engine looks at it although it opens no port for gRPC",
                f"Take {GRPC_PORT} out of env of it in {case.where}.",
            )


def _env(instance: Map) -> Map:
    env = instance.get("env")
    return env if isinstance(env, dict) else {}


def _enabled(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "yes", "y")


def inner_ports(instance: Map) -> dict[int, str]:
    """Further ports that an engine binds, each with what for. One that it picks itself is free, and none of these.

    Source: sglang 0.5.11, server_args.py (PortArgs) and data_parallel_controller.py. gRPC's is not among them: nothing in that
    release starts the server that SGLANG_ENABLE_GRPC asks for, only the two numbers are compared.
    """
    args, port = args_of(instance), instance.get("port")
    found = {args["nccl-port"]: "nccl-port"} if whole(args.get("nccl-port")) else {}
    if not whole(port):
        return found
    if args.get("enable-dp-attention") is True and not {"dist-init-addr", "nccl-init-addr"} & set(args):
        found |= {port + 13: "the handshake of enable-dp-attention"}
        found |= dict.fromkeys(range(port + 233, port + 239), "messages of enable-dp-attention")
    return found


@rule(
    "port-inner",
    BLOCK,
    "An engine binds further ports beside its own; the one that comes second finds its taken and dies at its start.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/server_args.py",
    needs_host=False,
)
def port_inner(case: Case) -> Iterator[Hit]:
    """What an engine binds for itself is no port of another instance, nor its own."""
    bound: dict[int, list[tuple[str, str]]] = {}
    for at, instance in enumerate(case.instances):
        own = {instance["port"]: "port"} if whole(instance.get("port")) else {}
        for number, use in [*own.items(), *inner_ports(instance).items()]:
            bound.setdefault(number, []).append((label(instance, at), use))
        grpc = _env(instance).get(GRPC_PORT)
        if own and str(grpc) == str(instance["port"]) and _enabled(_env(instance).get("SGLANG_ENABLE_GRPC")):
            yield Hit(
                label(instance, at),
                f"{grpc} is port and {GRPC_PORT} of it",
                "each port for one purpose; the engine refuses these",
                f"Take {GRPC_PORT} out of env of it in {case.where}.",
            )
    told = set()
    for number, users in sorted(bound.items()):
        names = " and ".join(dict.fromkeys(name for name, _ in users))
        if len(users) > 1 and any(use != "port" for _, use in users) and names not in told:
            told.add(names)
            yield Hit(
                names,
                f"{number} is " + " and ".join(f"{use} of {name}" for name, use in users),
                "each port for one purpose",
                f"Give {users[-1][0]} a port at least 300 away, or name another one for {users[0][1]}, in {case.where}.",
            )


@rule(
    "port-twice",
    BLOCK,
    "The second engine could not bind the port and would die at its start.",
    source="https://man7.org/linux/man-pages/man2/bind.2.html",
    needs_host=False,
)
def port_twice(case: Case) -> Iterator[Hit]:
    """Each port is used once on a host."""
    ports: dict[int, list[str]] = {}
    for at, instance in enumerate(case.instances):
        if whole(instance.get("port")):
            ports.setdefault(instance["port"], []).append(label(instance, at))
    for port, users in sorted(ports.items()):
        if len(users) > 1:
            free = next(number for number in range(port + 1, port + 2 + len(ports)) if number not in ports)
            yield Hit(
                " and ".join(users),
                f"port {port} for all of them",
                "a port of its own for each",
                f"Set port: {free} for {users[-1]} in {case.where}.",
            )
