# SPDX-License-Identifier: Apache-2.0
"""Rules about single instances and how they share a host: names, modes, GPUs, addresses."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    KEYS,
    MODES,
    SIZES,
    Case,
    Hit,
    Map,
    label,
    rule,
    shown,
    spelled,
    whole,
)
from ansible.module_utils.gpu_host_rules_inventory import unknown_key
from ansible.module_utils.gpu_host_words import meant, near

PARALLEL = {size: (size, SIZES[size]) for size in ("tp-size", "pp-size", "dp-size")}
# A unit's instance name without escapes; no dot, since NAME.baseline is the baseline of NAME.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\Z")
HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*\Z"
)


@rule(
    "instance-key-unknown",
    BLOCK,
    "A misspelt key would be dropped without a word and the engine would run with a default.",
    source="docs/operations.md",
    needs_host=False,
)
def instance_key_unknown(case: Case) -> Iterator[Hit]:
    """Every key of an instance is known."""
    defaults = case.wanted.get("defaults")
    known = set(KEYS) | (set(map(str, defaults)) if isinstance(defaults, dict) else set())
    for at, instance in enumerate(case.instances):
        for key in sorted(set(map(str, instance)) - known):
            yield unknown_key(case, label(instance, at), key)


@rule(
    "instance-name",
    BLOCK,
    "The name becomes part of a systemd unit and of file names.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemd.unit.html",
    needs_host=False,
)
def instance_name(case: Case) -> Iterator[Hit]:
    """Names fit a unit name without escaping."""
    for at, instance in enumerate(case.instances):
        name = instance.get("name")
        if not isinstance(name, str) or not NAME.match(name):
            expected = "small letters, digits, '_' and '-', at most 64, first a letter or digit"
            yield Hit(
                f"instance number {at + 1}",
                f"name {shown(name)}",
                expected,
                f"Give it a name such as gpu{at} in {case.where}.",
            )


@rule(
    "instance-name-twice",
    BLOCK,
    "Two instances of one name would be one unit.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemd.unit.html",
    needs_host=False,
)
def instance_name_twice(case: Case) -> Iterator[Hit]:
    """Names differ."""
    names = [str(instance.get("name")) for instance in case.instances if instance.get("name") is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Hit(
            f"instance {name}",
            f"{names.count(name)} instances of this name",
            "each name once",
            f"Rename all but one in {case.where}.",
        )


@rule(
    "mode-unknown",
    BLOCK,
    "A mode is a set of flags and the proof that goes with it; there is none for another word.",
    source="docs/architecture.md",
    needs_host=False,
)
def mode_unknown(case: Case) -> Iterator[Hit]:
    """mode is one of the four."""
    for at, instance in enumerate(case.instances):
        if instance.get("mode") not in MODES:
            names = near(str(instance.get("mode")), MODES, 1)
            yield Hit(
                label(instance, at),
                f"mode {shown(instance.get('mode'))}",
                "one of " + ", ".join(MODES) + meant(names),
                f"Set mode: {(names or ['ddtree'])[0]}, or another of these, for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "parallel-size",
    BLOCK,
    "The engine uses exactly as many GPUs as its parallel sizes multiply to; more or fewer fail at its start.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/server_args.py",
    needs_host=False,
)
def parallel_size(case: Case) -> Iterator[Hit]:
    """tp-size x pp-size (x dp-size) written under args is the number of GPUs."""
    for at, instance in enumerate(case.instances):
        args, gpus = spelled(case, instance), instance.get("gpus")
        given = {
            size: args[SIZES[size]]
            for size in PARALLEL
            if SIZES[size] in args and not (size == "dp-size" and args.get("enable-dp-attention"))
        }
        if not isinstance(gpus, list) or not gpus:
            continue
        yield from _experts(case, at, instance, args, given.get("tp-size", 1 if given else len(gpus)))
        if not given:
            continue
        told = " x ".join(f"{size} {value}" for size, value in given.items())
        if not all(whole(value) and value > 0 for value in given.values()) or math.prod(given.values()) != len(gpus):
            yield Hit(
                label(instance, at),
                f"{told} on {len(gpus)} GPUs",
                "sizes that multiply to the number of GPUs",
                f"Make args and gpus of it agree in {case.where}.",
            )


def _experts(case: Case, at: int, instance: Map, args: Map, tp: object) -> Iterator[Hit]:
    """Groups of experts are cut from the tensor-parallel ranks: what does not divide them leaves a rank without a group."""
    ep, copies = args.get(SIZES["ep-size"], 1), args.get("moe-data-parallel-size", 1)
    own = args.get("moe-a2a-backend") in (None, "none")  # the others make it the number of ranks
    if not own or not (whole(ep) and whole(copies) and whole(tp)) or (ep == 1 and copies == 1):
        return
    if ep < 1 or copies < 1 or tp % (ep * copies):
        yield Hit(
            label(instance, at),
            f"ep-size {ep}" + (f" x moe-dp-size {copies}" if copies != 1 else "") + f" of tp-size {tp}",
            "a number that divides tp-size (ep_size * moe_dp_size must be less than or equal to tp_size)",
            f"Remove it from args of it in {case.where} or in gpu_units_defaults, or give it as many gpus and that tp-size.",
        )


@rule(
    "address-bad",
    BLOCK,
    "The engine binds exactly this address.",
    source="https://man7.org/linux/man-pages/man2/bind.2.html",
    needs_host=False,
)
def address_bad(case: Case) -> Iterator[Hit]:
    """address is an IP address or a host name."""
    for at, instance in enumerate(case.instances):
        address = instance.get("address")
        if not binds(address):
            port = re.search(r":\d+\Z", str(address))
            host = str(address)[: port.start()] if port and binds(str(address)[: port.start()]) else "127.0.0.1"
            own = ", and the port as its key port," if port else ""
            yield Hit(
                label(instance, at),
                f"address {shown(address)}",
                "an IP address or a host name",
                f"Set address: {host}{own} for it in {case.where}.",
            )


def binds(address: Any) -> bool:
    """Whether it has the form of something to bind: an IP address or a host name."""
    if not isinstance(address, str):
        return False
    return _ip(address) is not None or bool(HOST_NAME.match(address) and not re.fullmatch(r"[\d.]+", address))


@rule(
    "address-open",
    BLOCK,
    "The engine's port has no password by default: on every address it is open to whoever reaches the host.",
    source="https://docs.sglang.ai/advanced_features/server_arguments.html",
    needs_host=False,
)
def address_open(case: Case) -> Iterator[Hit]:
    """Loopback or a named address, unless open is asked for."""
    if case.wanted.get("allow_any_address") is True:
        return
    for at, instance in enumerate(case.instances):
        address = _ip(instance.get("address"))
        if address is not None and address.is_unspecified:
            yield Hit(
                label(instance, at),
                f"address {address}",
                "127.0.0.1, ::1 or one named address of the host",
                f"Set address for it in {case.where}, or gpu_host_allow_any_address: true if a firewall stands before it.",
            )


def _ip(address: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address) if isinstance(address, str) else None
    except ValueError:
        return None
