# SPDX-License-Identifier: Apache-2.0
"""The wanted deployment of a host, worked out from the inventory. Pure: no file is read, nothing on the host is asked.

A deployment is plain data, ready for JSON:

    {id, release, profile, files: {path below /: text}, instances: [{name, mode, unit, baseline_unit, url, address, port,
     gpus: [uuid], budget, topk, spine, model_path, draft_model_path, dtype, profile, api_key_file}]}

Every mistake of the inventory is collected, so that a person sees all of them at once (`InvalidError.problems`).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from typing import Any

from ansible.module_utils import gpu_units_topology as places
from ansible.module_utils.gpu_units_owned import OWNED_ENV, OWNED_FLAGS

Data = dict[str, Any]

HOME = "opt/sglang-fleet"
ETC = "etc/sglang-fleet/instances"
KEYS = "etc/sglang-fleet/keys"
SYSTEMD = "etc/systemd/system"
UNIT = f"{SYSTEMD}/sglang@.service"
LIBEXEC = f"{HOME}/libexec"
CURRENT = f"/{HOME}/current"
HEADER = "# Written by sglang-fleet; the next run replaces changes made here.\n"

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

# Not in the template: systemd drops a dependency of a template on itself with a longer instance name, without an error.
BASELINE = """\
[Unit]
# An instance and its baseline share GPUs and port: the one that starts ends the other.
Conflicts={unit}
After={unit}

[Service]
# It is started to be recorded; one that fails has to be looked at.
Restart=no
RestartForceExitStatus=
"""

# Device nodes of the NVIDIA driver that a process needs for computing: nvidiactl, nvidia-uvm and nvidia-uvm-tools, and the
# capability nodes of MIG and IMEX. Numbers hold without the node (systemd.resource-control(5)); 195 is NVIDIA's in the kernel's
# Documentation/admin-guide/devices.txt, the other majors are given out at run time and known by name in /proc/devices.
NVIDIA_MAJOR = 195
NVIDIA_SHARED = ("/dev/char/195:255", "char-nvidia-uvm", "char-nvidia-caps", "char-nvidia-caps-imex-channels")
NVIDIA_ALL = ("char-nvidia-frontend", "char-nvidia")  # every GPU, by the name of older and newer drivers
DEVICE_POLICIES = ("closed", "auto")

AUTO_BUDGET = "auto"
"""The engine chooses the budget from what a step costs and gives."""

# Everything that the engine compiles or unpacks stays in the release: a new one starts clean, an old one finds its own.
CACHE_ENV = {
    "HOME": "",
    "XDG_CACHE_HOME": ".cache",
    "PYTHONPYCACHEPREFIX": "pycache",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "",
    "CUDA_CACHE_PATH": "cuda",
}
FIXED_ENV = {
    # The engine and FlashInfer call ninja by name when they build kernels; the release has its own.
    "PATH": f"{CURRENT}/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONUNBUFFERED": "1",  # a dying engine's last lines reach the journal
    "HF_HUB_OFFLINE": "1",  # models are folders of the host; nothing is fetched behind the operator's back
    "TRANSFORMERS_OFFLINE": "1",
}

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # no dot: NAME.baseline is the baseline of NAME
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ADDRESS = re.compile(r"[A-Za-z0-9.:_-]+")
FLAG = re.compile(r"[a-z0-9][a-z0-9-]*")
SPECIAL, ESCAPED = re.compile(r'([\\`$"])'), r"\\\1"


class InvalidError(ValueError):
    """The inventory can't be served; `problems` has one sentence per mistake, each with what to do."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def unit_of(name: str) -> str:
    """Name of the systemd unit of an instance."""
    return f"sglang@{name}.service"


def dropin_of(name: str) -> str:
    """Settings of one unit beside the template's (an instance's, or with NAME.baseline its baseline's), by their path below /."""
    return f"{SYSTEMD}/{unit_of(name)}.d/10-sglang-fleet.conf"


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


def url_of(address: str, port: int) -> str:
    """Where the host itself reaches an instance."""
    ip = _ip(address)
    if ip is not None and ip.is_unspecified:
        address = "::1" if ip.version == 6 else "127.0.0.1"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flags(args: Data) -> Data:
    """Flags by their dashed names, as the engine's help writes them."""
    return {str(flag).lstrip("-").replace("_", "-"): value for flag, value in args.items()}


def _merge(instance: Data, defaults: Data) -> Data:
    merged = {**DEFAULTS, **defaults, **instance}
    for key in ("args", "env"):
        merged[key] = {}
        for layer in (defaults, instance):
            value = layer.get(key) or {}
            merged[key].update(_flags(value) if key == "args" and isinstance(value, dict) else value)
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
    flags = {**_flags(profile.get("args") or {}), **instance["args"]}
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


def mode_args(instance: Data, modes: Data, mode: str) -> Data:
    """Flags of a mode with the instance's own values in place of `{key}`."""
    args = {}
    for flag, value in modes[mode]["args"].items():
        placeholder = re.fullmatch(r"\{(\w+)\}", value) if isinstance(value, str) else None
        args[flag] = instance[placeholder.group(1)] if placeholder else value
    return args


def engine_args(instance: Data, profile: Data, modes: Data, mode: str) -> Data:
    """Flag: value of one engine. The instance's own win over the profile's; a null takes a flag of the profile out."""
    args = {**_flags(profile.get("args") or {}), **instance["args"]}
    if mode == "baseline":
        args = {flag: value for flag, value in args.items() if not flag.startswith("speculative-")}
    args |= mode_args(instance, modes, mode)
    args |= {"model-path": instance["model_path"], "host": instance["address"], "port": instance["port"]}
    parallel = {"tp-size", "pp-size", "dp-size", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"}
    if len(instance["uuids"]) > 1 and not parallel & set(instance["args"]):
        args["tp-size"] = len(instance["uuids"])
    return {flag: args[flag] for flag in sorted(args) if args[flag] is not None}


def engine_env(instance: Data, profile: Data, start_timeout: int) -> Data:
    """Environment of one engine; `{release}` in a profile's value is the release that is live."""
    env = {name: f"{CURRENT}/cache/{folder}".rstrip("/") for name, folder in CACHE_ENV.items()} | FIXED_ENV
    env |= {name: str(value).replace("{release}", CURRENT) for name, value in (profile.get("env") or {}).items()}
    env |= {name: str(value) for name, value in instance["env"].items()}
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env["CUDA_VISIBLE_DEVICES"] = ",".join(instance["uuids"])
    env["FLEET_URL"] = url_of(instance["address"], instance["port"])
    env["FLEET_START_TIMEOUT"] = str(start_timeout)
    env["FLEET_MODELS"] = ":".join(path for path in (instance["model_path"], instance["draft_model_path"]) if path)
    return dict(sorted(env.items()))


def device_lines(instance: Data, gpus: list[Data], policy: str) -> list[str]:
    """Directives that hide every device but the instance's own GPUs; none with policy `auto`.

    A GPU whose node number is unknown opens all of them: too wide serves, too narrow does not.
    """
    if policy != "closed":
        return []
    numbers = [next((gpu.get("minor") for gpu in gpus if gpu["uuid"] == uuid), None) for uuid in instance["uuids"]]
    own = [f"/dev/char/{NVIDIA_MAJOR}:{number}" for number in numbers if number is not None]
    allowed = [*NVIDIA_SHARED, *(NVIDIA_ALL if None in numbers else own)] if numbers else []
    # ProtectClock allows the clock's device to be read, which alone would close all others: it belongs to the policy.
    return ["DevicePolicy=closed", *(f"DeviceAllow={device} rw" for device in allowed), "ProtectClock=yes"]


def credential_lines(instance: Data) -> list[str]:
    """The API key as a credential: systemd reads root's file and shows it to this unit alone."""
    return [] if instance["api_key_file"] is None else [f"LoadCredential=api_key:/{KEYS}/{instance['name']}"]


def service_lines(instance: Data, gpus: list[Data], policy: str, nodes: dict[int, str]) -> list[str]:
    """Directives of [Service] that differ from instance to instance; what depends on the host's build joins here."""
    return (
        device_lines(instance, gpus, policy) + credential_lines(instance) + places.placement(instance, gpus, nodes)[0]
    )


def with_exchange(profile: Data, row: Data | None) -> Data:
    """A profile with what the way between an instance's GPUs asks for (a row of nccl.yml); the instance's own still win."""
    if row is None:
        return profile
    env = {**(profile.get("env") or {}), **row["env"], "FLEET_NCCL": row["id"]}
    return {**profile, "args": {**_flags(profile.get("args") or {}), **row["args"]}, "env": env}


def dropins(instance: Data, lines: list[str]) -> dict[str, str]:
    """The settings of an instance's unit and of its baseline's, by path."""
    name, own = instance["name"], "".join(f"{line}\n" for line in lines)
    return {
        **({dropin_of(name): f"{HEADER}[Service]\n{own}"} if own else {}),
        dropin_of(f"{name}.baseline"): HEADER + BASELINE.format(unit=unit_of(name)) + own,
    }


def to_yaml(args: Data) -> str:
    """Flags as YAML, one a line; values are JSON, which YAML reads as it is. A mapping becomes a text, as on a command line."""
    lines = [f"{flag}: {json.dumps(json.dumps(v) if isinstance(v, dict) else v)}\n" for flag, v in args.items()]
    return HEADER + "".join(lines)


def to_env(env: Data) -> str:
    """An EnvironmentFile of systemd: values in double quotes, with the four signs escaped that it treats as special there."""
    return HEADER + "".join(f'{name}="{SPECIAL.sub(ESCAPED, value)}"\n' for name, value in env.items())


def render(
    *,
    instances: list[Data],
    defaults: Data,
    profile: Data,
    modes: Data,
    gpus: list[Data],
    release: str | None,
    common: dict[str, str],
    start_timeout: int,
    device_policy: str = "closed",
    topology: Data | None = None,
    nodes: dict[int, str] | None = None,
    exchange: list[Data] | None = None,
) -> Data:
    """The wanted deployment (shape above). `common` are files that all instances share, by their path below /.

    A GPU of `gpus` may have a `minor`, the number of its device node. `topology` and `exchange` (nccl.yml) are those of
    gpu_units_topology, `nodes` the NUMA nodes that units may be bound to, with their CPUs.
    """
    files = dict(common)
    published = []
    for instance in resolve(instances, defaults, profile, modes, gpus):
        name, mode = instance["name"], instance["mode"]
        own = with_exchange(profile, places.exchange(instance, gpus, topology or {}, exchange or []))
        env = to_env(engine_env(instance, own, start_timeout))
        flags = engine_args(instance, own, modes, mode)
        files |= dropins(instance, service_lines(instance, gpus, device_policy, nodes or {}))
        for config, of in ((name, mode), (f"{name}.baseline", "baseline")):
            files[f"{ETC}/{config}.yaml"] = to_yaml(engine_args(instance, own, modes, of))
            files[f"{ETC}/{config}.env"] = env
        published.append(
            {
                "name": name,
                "mode": mode,
                "unit": unit_of(name),
                "baseline_unit": unit_of(f"{name}.baseline"),
                "url": url_of(instance["address"], instance["port"]),
                "address": instance["address"],
                "port": instance["port"],
                "gpus": instance["uuids"],
                "budget": instance["budget"],
                "topk": instance["topk"],
                "spine": instance["spine"],
                "model_path": instance["model_path"],
                "draft_model_path": instance["draft_model_path"],
                "dtype": str(flags.get("dtype", "auto")),
                "profile": profile["name"],
                "api_key_file": f"/{KEYS}/{name}" if instance["api_key_file"] is not None else None,
            }
        )
    wanted = {"release": release, "profile": profile["name"], "files": files, "instances": published}
    return {"id": deployment_id(wanted), **wanted}


def deployment_id(deployment: Data) -> str:
    """Same release, files and instances, same id."""
    inputs = {key: deployment[key] for key in ("release", "profile", "files", "instances")}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]


def files_of(name: str) -> list[str]:
    """Files that belong to one instance alone."""
    configs = [f"{ETC}/{config}.{end}" for config in (name, f"{name}.baseline") for end in ("yaml", "env")]
    return [*configs, dropin_of(name), dropin_of(f"{name}.baseline")]


def common_files(deployment: Data) -> dict[str, str]:
    """Files that all instances of a deployment share."""
    own = {path for instance in deployment["instances"] for path in files_of(instance["name"])}
    return {path: text for path, text in deployment["files"].items() if path not in own}


def switched(current: Data, rendered: Data, name: str) -> Data:
    """`current` with one instance as `rendered` has it. It is marked: the inventory knows nothing of it."""
    own = files_of(name)
    files = {path: text for path, text in current["files"].items() if path not in own}
    files |= {path: rendered["files"][path] for path in own if path in rendered["files"]}
    new = {instance["name"]: instance for instance in rendered["instances"]}
    instances = [new[name] if instance["name"] == name else instance for instance in current["instances"]]
    wanted = {"release": current["release"], "profile": current["profile"], "files": files, "instances": instances}
    return {"id": deployment_id(wanted), **wanted, "switched": True}


def changed_instances(old: Data | None, new: Data | None) -> list[Data]:
    """Instances of `old` that can't go on as they run: other release, common files or own files, or gone in `new`."""
    if old is None:
        return []
    if new is None or old["release"] != new["release"]:
        return list(old["instances"])
    if common_files(old) != common_files(new):
        return list(old["instances"])
    kept = {instance["name"] for instance in new["instances"]}
    return [
        instance
        for instance in old["instances"]
        if instance["name"] not in kept
        or any(old["files"].get(path) != new["files"].get(path) for path in files_of(instance["name"]))
    ]


def exposed(deployment: Data) -> list[str]:
    """Notes on instances that other machines can reach without a key."""
    return [
        f"instance {instance['name']} listens on {instance['address']}:{instance['port']} without an API key"
        for instance in deployment["instances"]
        if instance["api_key_file"] is None
        and instance["address"] != "localhost"
        and not ((ip := _ip(instance["address"])) and ip.is_loopback)
    ]
