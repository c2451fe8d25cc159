# SPDX-License-Identifier: Apache-2.0
"""The instances of an inventory: defaults merged, every mistake told at once (`InvalidError.problems`). Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from ansible.module_utils.gpu_units_owned import OWNED_ENV, OWNED_FLAGS

Data = dict[str, Any]

DEFAULTS: Data = {
    "mode": "ddtree",
    "address": "127.0.0.1",
    "budget": 15,
    "topk": 8,
    "spine": 0,
    "gpus": [],
    "args": {},
    "env": {},
    "draft_model_path": None,
    "api_key_file": None,
}
REQUIRED = ("name", "port", "model_path")
KNOWN = frozenset(DEFAULTS) | frozenset(REQUIRED)

AUTO_BUDGET = "auto"
"""The engine chooses the budget from what a step costs and gives."""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # no dot: NAME.baseline is the baseline of NAME
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ADDRESS = re.compile(r"[A-Za-z0-9.:_-]+")
FLAG = re.compile(r"[a-z0-9][a-z0-9-]*")


class InvalidError(ValueError):
    """The inventory can't be served; `problems` has one sentence per mistake, each with what to do."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text is; None for a name."""
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


def url_of(address: str, port: int) -> str:
    """Where the host itself reaches an instance."""
    ip = ip_of(address)
    if ip is not None and ip.is_unspecified:
        address = "::1" if ip.version == 6 else "127.0.0.1"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def flags_of(args: Data) -> Data:
    """Flags by their dashed names, as the engine's help writes them."""
    return {str(flag).lstrip("-").replace("_", "-"): value for flag, value in args.items()}


def _merge(instance: Data, defaults: Data) -> Data:
    merged = {**DEFAULTS, **defaults, **instance}
    for key in ("args", "env"):
        merged[key] = {}
        for layer in (defaults, instance):
            value = layer.get(key) or {}
            merged[key].update(flags_of(value) if key == "args" and isinstance(value, dict) else value)
    return merged


def _type_problems(instance: Data, where: str) -> list[str]:
    """Mistakes of form; the rest is looked at only where there are none."""
    found = []
    unknown = sorted(set(instance) - KNOWN)
    if unknown:
        found.append(f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(sorted(KNOWN))}")
    for key in ("args", "env"):
        if not isinstance(instance.get(key) or {}, dict):
            found.append(f"{where}: {key} is {instance[key]!r}, expected a mapping of name: value")
    if not isinstance(instance.get("gpus") or [], list):
        found.append(f"{where}: gpus is {instance['gpus']!r}, expected a list like [0] or [GPU-...]")
    return found


def _gpu_problems(instance: Data, where: str, profile: Data, gpus: list[Data]) -> tuple[list[str], list[str]]:
    """(problems, UUIDs) of the GPUs that an instance names by index in PCI order or by UUID."""
    wanted = instance["gpus"] or []
    if profile["name"] == "cpu":
        if wanted:
            return [
                f"{where}: gpus is {wanted!r}, but profile cpu has none; take the key out or use a GPU's profile"
            ], []
        return [], []
    if not wanted:
        return [f"{where}: gpus is empty; name at least one GPU, for example gpus: [0]"], []
    by_name = {str(gpu["index"]): gpu["uuid"] for gpu in gpus} | {str(gpu["uuid"]): gpu["uuid"] for gpu in gpus}
    found, uuids = [], []
    for gpu in wanted:
        uuid = None if isinstance(gpu, bool) else by_name.get(str(gpu))
        if uuid is None:
            known = ", ".join(f"{entry['index']} ({entry['uuid']})" for entry in gpus) or "none"
            found.append(f"{where}: GPU {gpu!r} is not on this host; it has {known}")
        elif uuid in uuids:
            found.append(f"{where}: GPU {gpu!r} is named twice; each GPU once")
        else:
            uuids.append(uuid)
    return found, uuids


def _parallel_problems(instance: Data, where: str, count: int) -> list[str]:
    """The sizes that an operator wrote must use exactly the GPUs of the instance."""
    sizes = {key: instance["args"].get(key) for key in ("tp-size", "pp-size", "dp-size")}
    sizes |= {
        key: instance["args"][alias]
        for key, alias in (
            ("tp-size", "tensor-parallel-size"),
            ("pp-size", "pipeline-parallel-size"),
            ("dp-size", "data-parallel-size"),
        )
        if alias in instance["args"]
    }
    given = {key: value for key, value in sizes.items() if value is not None}
    if not given or count == 0:
        return []
    if not all(_is_int(value) and value > 0 for value in given.values()):
        return [f"{where}: {given} must be whole numbers above 0"]
    attention = bool(instance["args"].get("enable-dp-attention"))
    product = 1
    for key, value in given.items():
        product *= 1 if key == "dp-size" and attention else value
    if product != count:
        text = " x ".join(f"{key} {value}" for key, value in given.items())
        return [f"{where}: {text} needs {product} GPUs, but gpus names {count}; make them equal"]
    return []


def _path_problems(instance: Data, where: str, key: str) -> list[str]:
    value = instance[key]
    if not isinstance(value, str) or not value.startswith("/"):
        return [f"{where}: {key} is {value!r}, expected the absolute path of a folder on the host"]
    if value.startswith(("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")):  # noqa: S108
        return [f"{where}: {key} {value} is hidden from the unit (ProtectHome, PrivateTmp); move it below /srv/models"]
    return []


def _mode_problems(instance: Data, where: str, modes: Data, flags: Data) -> list[str]:
    mode = instance["mode"]
    if mode not in modes:
        return [f"{where}: unknown mode {mode!r}; expected one of {', '.join(modes)}"]
    found = []
    needs = modes[mode]["needs"]
    for key, least in (("budget", 1), ("topk", 1), ("spine", 0)):
        value = instance[key]
        if key == "budget" and value == AUTO_BUDGET:
            continue
        if not _is_int(value) or value < least:
            auto = f" or {AUTO_BUDGET}" if key == "budget" else ""
            found.append(f"{where}: {key} is {value!r}, expected a whole number of at least {least}{auto}")
    if not found and instance["budget"] != AUTO_BUDGET and instance["spine"] > instance["budget"]:
        found.append(
            f"{where}: spine {instance['spine']} is above budget {instance['budget']}; it is a part of the budget"
        )
    if "draft_model_path" in needs:
        if instance["draft_model_path"] is None:
            found.append(
                f"{where}: mode {mode} needs draft_model_path, the folder of the drafter; or choose mode baseline"
            )
        else:
            found += _path_problems(instance, where, "draft_model_path")
    if "budget" in needs and flags.get("page-size") not in (None, 1, "1"):
        found.append(f"{where}: page-size {flags['page-size']} can't be used with mode {mode}; set page-size 1")
    return found


def _arg_problems(instance: Data, where: str) -> list[str]:
    found = []
    for flag, value in instance["args"].items():
        if flag in OWNED_FLAGS:
            found.append(f"{where}: args has {flag}; use the instance's key {OWNED_FLAGS[flag]} instead")
        elif not FLAG.fullmatch(flag):
            found.append(
                f"{where}: args has {flag!r}, which is no flag of the engine; write it as in its help, without --"
            )
        elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            found.append(
                f"{where}: args {flag} is a list of lists or mappings; the engine takes a list of plain values"
            )
    for name, value in instance["env"].items():
        if not ENV_NAME.fullmatch(str(name)):
            found.append(f"{where}: env has {name!r}, which is no name of a variable")
        elif name in OWNED_ENV:
            found.append(f"{where}: env has {name}; use the instance's key {OWNED_ENV[name]} instead")
        elif any(sign in str(value) for sign in "\n\r\0"):
            found.append(f"{where}: env {name} has more than one line; the unit's environment file can't hold it")
    return found


def _instance_problems(instance: Data, where: str, modes: Data, profile: Data) -> list[str]:
    found = []
    missing = [key for key in REQUIRED if instance.get(key) is None]
    if missing:
        return [
            f"{where}: {', '.join(missing)} missing; every instance needs name, port and model_path (or a default of it)"
        ]
    if not isinstance(instance["name"], str) or not NAME.fullmatch(instance["name"]):
        found.append(f"{where}: name {instance['name']!r} is not usable; small letters, digits, _ and -, at most 64")
    if not _is_int(instance["port"]) or not 1024 <= instance["port"] <= 65535:
        found.append(f"{where}: port is {instance['port']!r}, expected a number from 1024 to 65535")
    key_file = instance["api_key_file"]
    if key_file is not None and (not isinstance(key_file, str) or not key_file):
        found.append(f"{where}: api_key_file is {key_file!r}, expected the path of a file on the control machine")
    flags = {**flags_of(profile.get("args") or {}), **instance["args"]}
    if (
        not isinstance(instance["address"], str)
        or not instance["address"]
        or not ADDRESS.fullmatch(instance["address"])
    ):
        found.append(
            f"{where}: address is {instance['address']!r}, expected an IP address or name of the host, like 127.0.0.1"
        )
    found += _path_problems(instance, where, "model_path")
    found += _mode_problems(instance, where, modes, flags)
    found += _arg_problems(instance, where)
    return found


def resolve(instances: list[Any], defaults: Data, profile: Data, modes: Data, gpus: list[Data]) -> list[Data]:
    """Instances with defaults merged and `uuids` resolved; raises InvalidError with every mistake of the inventory.

    `gpus` is the host's list of {index, uuid, ...} in PCI order, `profile` is {name, args, env}, `modes` the data of modes.yml.
    """
    problems: list[str] = []
    merged: list[Data] = []
    if not instances:
        problems.append(
            "gpu_units_instances is empty; add at least one, for example {name: gpu0, gpus: [0], port: 30000}"
        )
    problems += _type_problems({**defaults}, "gpu_units_defaults")
    names: set[str] = set()
    ports: dict[int, str] = {}
    owners: dict[str, str] = {}
    for number, raw in enumerate(instances):
        name = raw.get("name") if isinstance(raw, dict) else None
        where = f"instance {name or f'number {number + 1}'}"
        if not isinstance(raw, dict):
            problems.append(
                f"{where}: {raw!r} is not a mapping; expected for example {{name: gpu0, gpus: [0], port: 30000}}"
            )
            continue
        form = _type_problems(raw, where)
        problems += form
        if form or any(problem.startswith("gpu_units_defaults") for problem in problems):
            continue
        instance = _merge(raw, defaults)
        own = _instance_problems(instance, where, modes, profile)
        problems += own
        gpu_problems, instance["uuids"] = _gpu_problems(instance, where, profile, gpus)
        problems += gpu_problems
        if not gpu_problems:
            problems += _parallel_problems(instance, where, len(instance["uuids"]))
        merged.append(instance)
        if instance.get("name") in names:
            problems.append(f"{where}: the name is used twice; names are unique on a host")
        names.add(str(instance.get("name")))
        port = instance.get("port")
        if isinstance(port, int) and port in ports:
            problems.append(f"{where}: port {port} is already used by instance {ports[port]}; give each its own")
        elif isinstance(port, int):
            ports[port] = str(instance.get("name"))
        for uuid in instance["uuids"]:
            if uuid in owners:
                problems.append(f"{where}: GPU {uuid} is already used by instance {owners[uuid]}; one instance per GPU")
            owners.setdefault(uuid, str(instance.get("name")))
    if problems:
        raise InvalidError(problems)
    return merged
