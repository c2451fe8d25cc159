# SPDX-License-Identifier: Apache-2.0
"""Rules that need the inventory alone: they hold or fail before the host is asked anything."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    MODES,
    PROFILES,
    TREE_MODES,
    WARN,
    Case,
    Hit,
    args_of,
    flag,
    label,
    rule,
)

KEYS = (
    "name",
    "gpus",
    "port",
    "mode",
    "model_path",
    "draft_model_path",
    "address",
    "budget",
    "topk",
    "spine",
    "args",
    "env",
    "api_key_file",
)
# Flags that the toolkit writes itself, and the key that says the same.
OWNED_FLAGS = {
    "host": "address",
    "port": "port",
    "model": "model_path",
    "model-path": "model_path",
    "config": "args",
    "base-gpu-id": "gpus",
    "speculative-algorithm": "mode",
    "speculative-draft-model-path": "draft_model_path",
    "speculative-draft-model": "draft_model_path",
    "speculative-ddtree-budget": "budget",
    "speculative-ddtree-topk": "topk",
    "speculative-ddtree-spine": "spine",
    "speculative-ddtree-shadow-linear": "mode",
}
PARALLEL = {
    "tp-size": ("tp-size", "tensor-parallel-size"),
    "pp-size": ("pp-size", "pipeline-parallel-size"),
    "dp-size": ("dp-size", "data-parallel-size"),
}
# sglang 0.5.11, server_args.py: port + 10000 must be a port too.
MAX_PORT = 55535
HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - refused, not used
OWNED_ENV = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
SECRET_FLAGS = ("api-key", "admin-api-key", "ssl-keyfile-password")
SECRET_ENV = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL)S?$")
# A unit's instance name without escapes; no dot, since NAME.baseline is the baseline of NAME.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\Z")
HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*\Z"
)


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)


@rule(
    "engine-unknown", BLOCK, "A release is built from the lock and the series of a named engine only.", needs_host=False
)
def engine_unknown(case: Case) -> Iterator[Hit]:
    """fleet_engine names a folder under engines/."""
    engines, engine = case.wanted.get("engines") or [], case.wanted.get("engine")
    if engine not in engines:
        yield Hit(
            "fleet_engine",
            _shown(engine),
            "one of " + ", ".join(engines),
            f"Set fleet_engine in {case.where} or its group.",
        )


@rule(
    "profile-unknown", BLOCK, "Backends are written down per profile; there is none for another word.", needs_host=False
)
def profile_unknown(case: Case) -> Iterator[Hit]:
    """gpu_host_profile is auto or a profile."""
    profile = case.wanted.get("profile")
    if profile != "auto" and profile not in PROFILES:
        allowed = ", ".join(("auto", *PROFILES))
        yield Hit(
            "gpu_host_profile", _shown(profile), f"one of {allowed}", f"Set gpu_host_profile: auto in {case.where}."
        )


@rule(
    "defaults-malformed",
    BLOCK,
    "The defaults are merged under every instance, so they have to be a map of the same keys.",
    needs_host=False,
)
def defaults_malformed(case: Case) -> Iterator[Hit]:
    """gpu_units_defaults is a map of known keys."""
    defaults = case.wanted.get("defaults")
    if defaults is None:
        return
    if not isinstance(defaults, dict):
        yield Hit(
            "gpu_units_defaults",
            type(defaults).__name__,
            "a map of keys and values",
            f"Write it as a map in {case.where} or its group.",
        )
        return
    for key in sorted(set(map(str, defaults)) - set(KEYS)):
        yield Hit(
            "gpu_units_defaults",
            f"key {key!r}",
            "only " + ", ".join(KEYS),
            f"Remove or rename {key}; engine flags go under args.",
        )


@rule("instances-malformed", BLOCK, "Without a list of instances there is nothing to serve.", needs_host=False)
def instances_malformed(case: Case) -> Iterator[Hit]:
    """gpu_units_instances is a list of maps with at least one entry."""
    example = "- {name: gpu0, gpus: [0], port: 30000}"
    instances = case.wanted.get("instances")
    if not isinstance(instances, list) or not instances:
        observed = "no instance" if instances in (None, [], {}, "") else type(instances).__name__
        yield Hit(
            "gpu_units_instances",
            observed,
            "a list with at least one instance",
            f"Add one in {case.where}, for example: {example}",
        )
        return
    for at, instance in enumerate(instances):
        if not isinstance(instance, dict):
            yield Hit(
                f"gpu_units_instances, entry {at + 1}",
                _shown(instance),
                "a map",
                f"Write it in {case.where} as: {example}",
            )


@rule(
    "instance-key-unknown",
    BLOCK,
    "A misspelt key would be dropped without a word and the engine would run with a default.",
    needs_host=False,
)
def instance_key_unknown(case: Case) -> Iterator[Hit]:
    """Every key of an instance is known."""
    defaults = case.wanted.get("defaults")
    known = set(KEYS) | (set(map(str, defaults)) if isinstance(defaults, dict) else set())
    for at, instance in enumerate(case.instances):
        for key in sorted(set(map(str, instance)) - known):
            yield Hit(
                label(instance, at),
                f"key {key!r}",
                "only " + ", ".join(KEYS),
                f"Remove or rename {key} in {case.where}; engine flags go under args.",
            )


@rule("instance-name", BLOCK, "The name becomes part of a systemd unit and of file names.", needs_host=False)
def instance_name(case: Case) -> Iterator[Hit]:
    """Names fit a unit name without escaping."""
    for at, instance in enumerate(case.instances):
        name = instance.get("name")
        if not isinstance(name, str) or not NAME.match(name):
            expected = "small letters, digits, '_' and '-', at most 64, first a letter or digit"
            yield Hit(
                f"instance number {at + 1}",
                f"name {_shown(name)}",
                expected,
                f"Give it a name such as gpu{at} in {case.where}.",
            )


@rule("instance-name-twice", BLOCK, "Two instances of one name would be one unit.", needs_host=False)
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
    needs_host=False,
)
def mode_unknown(case: Case) -> Iterator[Hit]:
    """mode is one of the four."""
    for at, instance in enumerate(case.instances):
        if instance.get("mode") not in MODES:
            yield Hit(
                label(instance, at),
                f"mode {_shown(instance.get('mode'))}",
                "one of " + ", ".join(MODES),
                f"Set mode for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "port-bad",
    BLOCK,
    "An engine listens on one TCP port above the privileged ones, and SGLang keeps the port 10000 above it for gRPC.",
    needs_host=False,
)
def port_bad(case: Case) -> Iterator[Hit]:
    """port is a whole number that a plain user may bind, with room for gRPC's above it."""
    for at, instance in enumerate(case.instances):
        port = instance.get("port")
        if not _whole(port) or not 1024 <= port <= MAX_PORT:
            yield Hit(
                label(instance, at),
                f"port {_shown(port)}",
                f"a whole number from 1024 to {MAX_PORT}",
                f"Set port: {30000 + at} for it in {case.where}.",
            )


@rule("port-twice", BLOCK, "The second engine could not bind the port and would die at its start.", needs_host=False)
def port_twice(case: Case) -> Iterator[Hit]:
    """Each port is used once on a host."""
    ports: dict[int, list[str]] = {}
    for at, instance in enumerate(case.instances):
        if _whole(instance.get("port")):
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


@rule(
    "gpus-bad",
    BLOCK,
    "An engine is bound to GPUs by name; without them it would take whichever comes first.",
    needs_host=False,
)
def gpus_bad(case: Case) -> Iterator[Hit]:
    """gpus is a list of indices or UUIDs, empty on the cpu profile only."""
    cpu = case.wanted.get("profile") == "cpu"
    for at, instance in enumerate(case.instances):
        gpus = instance.get("gpus")
        if cpu and gpus in (None, []):
            continue
        if cpu:
            yield Hit(
                label(instance, at),
                f"gpus {_shown(gpus)} with gpu_host_profile: cpu",
                "no gpus on the cpu profile",
                f"Write gpus: [] for it in {case.where}, or set gpu_host_profile: auto.",
            )
        elif not isinstance(gpus, list) or not gpus:
            yield Hit(
                label(instance, at),
                f"gpus {_shown(gpus)}",
                "a list of at least one GPU",
                f"Write gpus: [{at}] for it in {case.where}.",
            )
        else:
            for gpu in gpus:
                index = _whole(gpu) and gpu >= 0
                uuid = isinstance(gpu, str) and gpu.startswith("GPU-")
                if not index and not uuid:
                    yield Hit(
                        label(instance, at),
                        f"GPU {_shown(gpu)}",
                        "an index in PCI order (0, 1, ...) or a UUID (GPU-...)",
                        f"Correct gpus of it in {case.where}; `nvidia-smi -L` on the host lists both.",
                    )


@rule(
    "gpu-twice",
    BLOCK,
    "Two engines on one GPU fight for its memory, and the second one fails at its start.",
    needs_host=False,
)
def gpu_twice(case: Case) -> Iterator[Hit]:
    """Each GPU is used once; an index and the UUID of the same GPU are told to be one when the host is known."""
    users: dict[str, list[str]] = {}
    for at, instance in enumerate(case.instances):
        asked = instance.get("gpus")
        for one in asked if isinstance(asked, list) else []:
            found = case.gpu(one)
            key = f"GPU {found['index']} ({found['uuid']})" if found else f"GPU {one}"
            users.setdefault(key, []).append(label(instance, at))
    for gpu, names in sorted(users.items()):
        if len(names) > 1:
            yield Hit(
                " and ".join(dict.fromkeys(names)),
                f"{gpu} {len(names)} times",
                "each GPU in one instance, once",
                f"Give {names[-1]} a GPU of its own in {case.where}.",
            )


@rule("address-bad", BLOCK, "The engine binds exactly this address.", needs_host=False)
def address_bad(case: Case) -> Iterator[Hit]:
    """address is an IP address or a host name."""
    for at, instance in enumerate(case.instances):
        address = instance.get("address")
        if _ip(address) is None and not (
            isinstance(address, str) and HOST_NAME.match(address) and not re.fullmatch(r"[\d.]+", address)
        ):
            yield Hit(
                label(instance, at),
                f"address {_shown(address)}",
                "an IP address or a host name",
                f"Set address: 127.0.0.1 for it in {case.where}.",
            )


@rule(
    "address-open",
    BLOCK,
    "The engine's port has no password by default: on every address it is open to whoever reaches the host.",
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


@rule("budget-bad", BLOCK, "A tree needs at least one node beside its root.", needs_host=False)
def budget_bad(case: Case) -> Iterator[Hit]:
    """budget is a whole number from 1 up, or auto."""
    for at, instance in enumerate(case.instances):
        if instance.get("budget") != "auto" and (not _whole(instance.get("budget")) or instance["budget"] < 1):
            yield Hit(
                label(instance, at),
                f"budget {_shown(instance.get('budget'))}",
                "a whole number of 1 or more, or auto",
                f"Set budget: 15 for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "topk-bad",
    BLOCK,
    "The tree takes its branches from the drafter's topk best tokens of each position.",
    needs_host=False,
)
def topk_bad(case: Case) -> Iterator[Hit]:
    """topk is a whole number from 1 up."""
    for at, instance in enumerate(case.instances):
        if not _whole(instance.get("topk")) or instance["topk"] < 1:
            yield Hit(
                label(instance, at),
                f"topk {_shown(instance.get('topk'))}",
                "a whole number of 1 or more",
                f"Set topk: 8 for it in {case.where} or in gpu_units_defaults.",
            )


@rule("spine-bad", BLOCK, "The spine is the part of the budget that is kept for the greedy chain.", needs_host=False)
def spine_bad(case: Case) -> Iterator[Hit]:
    """0 <= spine <= budget."""
    for at, instance in enumerate(case.instances):
        spine, budget = instance.get("spine"), instance.get("budget")
        if not _whole(spine) or spine < 0 or (_whole(budget) and spine > budget >= 1):
            yield Hit(
                label(instance, at),
                f"spine {_shown(spine)} with budget {_shown(budget)}",
                "a whole number from 0 to the budget",
                f"Set spine: 0 for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "page-size",
    BLOCK,
    "A tree keeps single KV slots of the accepted path and frees the others; with larger pages it would free its neighbours'.",
    needs_host=False,
)
def page_size(case: Case) -> Iterator[Hit]:
    """page-size is 1 (or unset) in a tree mode."""
    for at, instance in enumerate(case.instances):
        size = args_of(instance).get("page-size", 1)
        if instance.get("mode") in TREE_MODES and size not in (1, "1"):
            yield Hit(
                label(instance, at),
                f"page-size {_shown(size)} in mode {instance['mode']}",
                "page-size 1 in a tree mode",
                f"Remove page-size from args in {case.where}, or use mode: dflash.",
            )


@rule(
    "backend-auto",
    BLOCK,
    "A backend that the engine picks itself may lack kernels for this GPU, and it fails hours later or answers wrongly.",
    needs_host=False,
)
def backend_auto(case: Case) -> Iterator[Hit]:
    """No backend flag is `auto`; leaving it out gives the profile's."""
    for at, instance in enumerate(case.instances):
        for name, value in sorted(args_of(instance).items()):
            if name.endswith("-backend") and str(value).lower() == "auto":
                yield Hit(
                    label(instance, at),
                    f"{name}: {value}",
                    "a named backend, or the profile's by leaving it out",
                    f"Remove {name} from args in {case.where}.",
                )


@rule("args-malformed", BLOCK, "args and env are written into files as they are, flag by flag.", needs_host=False)
def args_malformed(case: Case) -> Iterator[Hit]:
    """args and env are maps of plain values with usable names."""
    for at, instance in enumerate(case.instances):
        for key, pattern in (("args", r"[a-z0-9][a-z0-9-]*"), ("env", r"[A-Za-z_][A-Za-z0-9_]*")):
            values = instance.get(key)
            if not isinstance(values, dict):
                yield Hit(
                    label(instance, at),
                    f"{key} is {_shown(values)}",
                    "a map",
                    f"Write {key}: {{}} for it in {case.where}.",
                )
                continue
            for name, value in values.items():
                spelling = flag(name) if key == "args" else str(name)
                plain = isinstance(value, (str, int, float, bool)) and "\n" not in str(value)
                listed = (
                    key == "args"
                    and isinstance(value, list)
                    and all(isinstance(one, (str, int, float)) for one in value)
                )
                if not re.fullmatch(pattern, spelling) or not (plain or listed):
                    yield Hit(
                        label(instance, at),
                        f"{key}: {name}: {_shown(value)}",
                        "a flag with one plain value" if key == "args" else "a variable with one plain value",
                        f"Correct it in {case.where}.",
                    )


@rule(
    "args-owned",
    BLOCK,
    "The flag would contradict the key that the toolkit writes, and the proof would be about the wrong setting.",
    needs_host=False,
)
def args_owned(case: Case) -> Iterator[Hit]:
    """Flags and variables that have a key of their own are not set under args or env."""
    for at, instance in enumerate(case.instances):
        for name in sorted(set(args_of(instance)) & set(OWNED_FLAGS)):
            yield Hit(
                label(instance, at),
                f"{name} under args",
                f"the key {OWNED_FLAGS[name]}",
                f"Set {OWNED_FLAGS[name]} for it in {case.where} and remove {name} from args.",
            )
        env = instance.get("env")
        for name in sorted(set(env if isinstance(env, dict) else {}) & set(OWNED_ENV)):
            yield Hit(
                label(instance, at),
                f"{name} under env",
                "the key gpus",
                f"Set gpus for it in {case.where} and remove {name} from env.",
            )


@rule(
    "secret-in-args",
    BLOCK,
    "Arguments are shown to every user of the host by `ps` and are written to the log.",
    needs_host=False,
)
def secret_in_args(case: Case) -> Iterator[Hit]:
    """No secret among the flags; the value is not repeated in the message."""
    for at, instance in enumerate(case.instances):
        for name in sorted(set(args_of(instance)) & set(SECRET_FLAGS)):
            yield Hit(
                label(instance, at),
                f"{name} under args",
                "no secret in a command line",
                f"Remove {name} from args in {case.where}; write the key into a file and name it as api_key_file.",
            )


@rule(
    "secret-in-env",
    WARN,
    "A unit's environment can be read by the engine's user and lands in reports.",
    needs_host=False,
)
def secret_in_env(case: Case) -> Iterator[Hit]:
    """Names that look like secrets under env; the value is not repeated in the message."""
    for at, instance in enumerate(case.instances):
        env = instance.get("env")
        for name in sorted(map(str, env if isinstance(env, dict) else {})):
            if SECRET_ENV.search(name.upper()):
                yield Hit(
                    label(instance, at),
                    f"{name} under env",
                    "no secret in the environment",
                    f"Remove {name} from env in {case.where}; use a drop-in with LoadCredential=.",
                )


@rule(
    "model-path-bad",
    BLOCK,
    "An engine serves a folder of the host; nothing is fetched by name at its start.",
    needs_host=False,
)
def model_path_bad(case: Case) -> Iterator[Hit]:
    """Absolute paths for the target, and for the drafter in every speculating mode."""
    for at, instance in enumerate(case.instances):
        mode = instance.get("mode")
        for key in ("model_path", "draft_model_path"):
            path = instance.get(key)
            if key == "draft_model_path" and (mode == "baseline" or mode not in MODES) and path is None:
                continue
            if not isinstance(path, str) or not path.startswith("/"):
                yield Hit(
                    label(instance, at),
                    f"{key} {_shown(path)}",
                    "the absolute path of a folder on the host",
                    f"Set {key} for it in {case.where} or in gpu_units_defaults.",
                )


@rule(
    "path-hidden",
    BLOCK,
    "The unit sees no home folder and has its own /tmp (ProtectHome, PrivateTmp), so the engine would not find it.",
    needs_host=False,
)
def path_hidden(case: Case) -> Iterator[Hit]:
    """Models lie where a hardened unit can read them."""
    for at, instance in enumerate(case.instances):
        for key in ("model_path", "draft_model_path"):
            path = instance.get(key)
            if isinstance(path, str) and path.startswith(HIDDEN):
                yield Hit(
                    label(instance, at),
                    f"{key} {path}",
                    "a folder outside of home folders and /tmp, such as /srv/models",
                    f"Move it on the host and correct {key} in {case.where}.",
                )


@rule(
    "parallel-size",
    BLOCK,
    "The engine uses exactly as many GPUs as its parallel sizes multiply to; more or fewer fail at its start.",
    needs_host=False,
)
def parallel_size(case: Case) -> Iterator[Hit]:
    """tp-size x pp-size (x dp-size) written under args is the number of GPUs."""
    for at, instance in enumerate(case.instances):
        args, gpus = args_of(instance), instance.get("gpus")
        given = {
            size: args[name]
            for size, names in PARALLEL.items()
            for name in names
            if name in args and not (size == "dp-size" and args.get("enable-dp-attention"))
        }
        if not given or not isinstance(gpus, list) or not gpus:
            continue
        told = " x ".join(f"{size} {value}" for size, value in given.items())
        if not all(_whole(value) and value > 0 for value in given.values()) or math.prod(given.values()) != len(gpus):
            yield Hit(
                label(instance, at),
                f"{told} on {len(gpus)} GPUs",
                "sizes that multiply to the number of GPUs",
                f"Make args and gpus of it agree in {case.where}.",
            )


@rule("waiver-unknown", BLOCK, "A waiver that names no check hides nothing and would be forgotten.", needs_host=False)
def waiver_unknown(case: Case) -> Iterator[Hit]:
    """gpu_host_waivers names known checks of the host and gives a reason for each."""
    waivers = case.wanted.get("waivers") or {}
    known = case.wanted.get("waivable") or ()
    for name, reason in sorted(waivers.items()):
        if name not in known:
            yield Hit(
                "gpu_host_waivers",
                str(name),
                "one of " + ", ".join(sorted(known)),
                f"Remove {name} from gpu_host_waivers in {case.where}.",
            )
        elif not isinstance(reason, str) or not reason.strip():
            yield Hit(
                "gpu_host_waivers",
                f"{name} without a reason",
                "one sentence that says why",
                f"Write {name}: <reason> in {case.where}.",
            )
