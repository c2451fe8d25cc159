# SPDX-License-Identifier: Apache-2.0
"""The wanted deployment of a host, worked out from the inventory. Pure: no file is read, nothing on the host is asked.

A deployment is plain data, ready for JSON:

    {id, release, profile, files: {path below /: text}, instances: [{name, mode, unit, baseline_unit, url, address, port,
     gpus: [uuid], budget, topk, spine, model_path, draft_model_path, dtype, profile, api_key_file}]}
"""

from __future__ import annotations

import hashlib
import json
import re

from ansible.module_utils import gpu_units_topology as places
from ansible.module_utils.gpu_units_instances import (
    Data,
    flags_of,
    ip_of,
    resolve,
    url_of,
)

HOME = "opt/sglang-fleet"
ETC = "etc/sglang-fleet/instances"
KEYS = "etc/sglang-fleet/keys"
SYSTEMD = "etc/systemd/system"
UNIT = f"{SYSTEMD}/sglang@.service"
LIBEXEC = f"{HOME}/libexec"
CURRENT = f"/{HOME}/current"
HEADER = "# Written by sglang-fleet; the next run replaces changes made here.\n"

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
    "PYTHONUNBUFFERED": "1",  # a dying engine's last lines reach the journal
    "HF_HUB_OFFLINE": "1",  # models are folders of the host; nothing is fetched behind the operator's back
    "TRANSFORMERS_OFFLINE": "1",
}

SPECIAL, ESCAPED = re.compile(r'([\\`$"])'), r"\\\1"


def unit_of(name: str) -> str:
    """Name of the systemd unit of an instance."""
    return f"sglang@{name}.service"


def dropin_of(name: str) -> str:
    """Settings of one unit beside the template's (an instance's, or with NAME.baseline its baseline's), by their path below /."""
    return f"{SYSTEMD}/{unit_of(name)}.d/10-sglang-fleet.conf"


def mode_args(instance: Data, modes: Data, mode: str) -> Data:
    """Flags of a mode with the instance's own values in place of `{key}`."""
    args = {}
    for flag, value in modes[mode]["args"].items():
        placeholder = re.fullmatch(r"\{(\w+)\}", value) if isinstance(value, str) else None
        args[flag] = instance[placeholder.group(1)] if placeholder else value
    return args


def engine_args(instance: Data, profile: Data, modes: Data, mode: str) -> Data:
    """Flag: value of one engine. The instance's own win over the profile's; a null takes a flag of the profile out."""
    args = {**flags_of(profile.get("args") or {}), **instance["args"]}
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
    return {**profile, "args": {**flags_of(profile.get("args") or {}), **row["args"]}, "env": env}


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
        and not ((ip := ip_of(instance["address"])) and ip.is_loopback)
    ]
