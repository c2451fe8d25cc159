# SPDX-License-Identifier: Apache-2.0
"""What a finding is, how a rule is written down, and what every rule may look at. Pure: no file, no process, no clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from ansible.module_utils import gpu_host_words as words

Map = dict[str, Any]
shown = words.shown

BLOCK, WARN, INFO = "block", "warn", "info"

MODES = ("baseline", "dflash", "ddtree-shadow", "ddtree")
TREE_MODES = ("ddtree-shadow", "ddtree")
PROFILES = ("sm90", "sm100", "sm120", "cpu")
# Compute capability to profile. Source: CUDA GPU list of the vendor, 2026-11.
CAPABILITIES = {"9.0": "sm90", "10.0": "sm100", "10.3": "sm100", "12.0": "sm120", "12.1": "sm120"}
GIB = 1 << 30
# The templated unit of every instance: its processes may hold the instance's GPUs and ports.
UNIT_PREFIX = "sglang@"

# Keys of an instance.
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
BUILT_IN: Map = {"address": "127.0.0.1", "budget": 15, "topk": 8, "spine": 0, "args": {}, "env": {}}


class Hit(NamedTuple):
    """One place where a rule does not hold."""

    thing: str
    observed: str
    expected: str
    fix: str


class Rule(NamedTuple):
    """A check: its id is the name that people look up, `why` holds for every hit.

    source: what says so, a public page or a file of this repository.
    """

    id: str
    severity: str
    why: str
    source: str
    needs_host: bool
    check: Callable[[Case], Iterator[Hit]]


@dataclass(frozen=True)
class Case:
    """Everything a rule looks at.

    wanted: the inventory's side, as `gpu_host_preflight` takes it.
    facts: `gpu_host_gather.gather`, or None when only the inventory is judged.
    instances: gpu_units_instances with the defaults merged under each; only well-formed maps.
    """

    host: str
    wanted: Map
    facts: Map = field(default_factory=dict)
    instances: list[Map] = field(default_factory=list)
    profile: str | None = None

    @property
    def where(self) -> str:
        """The file that a person edits for this host: the caller knows its folder."""
        return str(self.wanted.get("where") or f"host_vars/{self.host}.yml (beside the inventory in use)")

    @property
    def gpus(self) -> list[Map]:
        """GPUs of the host in PCI order."""
        return list(self.facts.get("gpu", {}).get("gpus", []))

    def gpu(self, asked: Any) -> Map | None:
        """The GPU that an inventory's index or UUID means."""
        for gpu in self.gpus:
            if asked in (gpu["index"], gpu["uuid"]) and not isinstance(asked, bool):
                return gpu
        return None

    def model(self, path: Any) -> Map | None:
        """Facts of a model folder, None where the path was not looked at."""
        found: Map | None = self.facts.get("models", {}).get(path) if isinstance(path, str) else None
        return found


RULES: list[Rule] = []


def rule(
    rule_id: str, severity: str, why: str, *, source: str, needs_host: bool = True
) -> Callable[[Callable[[Case], Iterator[Hit]]], Callable[[Case], Iterator[Hit]]]:
    """Register a check under an id that is used once."""
    if any(known.id == rule_id for known in RULES):
        raise ValueError(f"rule {rule_id} is written twice")

    def register(check: Callable[[Case], Iterator[Hit]]) -> Callable[[Case], Iterator[Hit]]:
        RULES.append(Rule(rule_id, severity, why, source, needs_host, check))
        return check

    return register


def label(instance: Map, at: int = 0) -> str:
    """How messages name an instance."""
    name = instance.get("name")
    return f"instance {name}" if name not in (None, "") else f"instance number {at + 1}"


def flag(name: Any) -> str:
    """A flag's one spelling: `page_size`, `page-size` and `--page-size` are the same."""
    return str(name).strip().lstrip("-").replace("_", "-")


def merge(defaults: Any, instance: Map) -> Map:
    """An instance with the inventory's defaults and the built-in ones under it; args and env are merged, not replaced."""
    merged: Map = {**BUILT_IN, **(defaults if isinstance(defaults, dict) else {}), **instance}
    for key in ("args", "env"):
        layers = [layer.get(key) for layer in (BUILT_IN, defaults, instance) if isinstance(layer, dict)]
        if all(isinstance(layer, dict) or layer is None for layer in layers):
            merged[key] = {name: value for layer in layers for name, value in (layer or {}).items()}
    return merged


def args_of(instance: Map) -> Map:
    """Further flags of an instance in their one spelling."""
    args = instance.get("args")
    return {flag(name): value for name, value in args.items()} if isinstance(args, dict) else {}


# The parallel sizes by the longest names of their flags, which is what the engine's parser makes of every other spelling.
SIZES = {
    "tp-size": "tensor-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "dp-size": "data-parallel-size",
    "ep-size": "expert-parallel-size",
}


def spelled(case: Case, instance: Map) -> Map:
    """Further flags of an instance by their longest names: other names and abbreviations are the same to the engine."""
    known = case.wanted.get("flags") or {}
    return {
        str(known.get(name, {}).get("flag") or SIZES.get(name, name)): value
        for name, value in args_of(instance).items()
    }


def env_of(instance: Map) -> Map:
    """Variables of an instance as the engine sees them: it writes SGL_X over SGLANG_X (environ.py of SGLang 0.5.11)."""
    env = instance.get("env")
    found = {str(name): value for name, value in env.items()} if isinstance(env, dict) else {}
    return found | {
        f"SGLANG_{name.removeprefix('SGL_')}": value for name, value in found.items() if name.startswith("SGL_")
    }


def on(value: Any) -> bool | None:
    """A variable as the engine reads true and false; None for neither."""
    word = str(value).lower()
    return True if word in ("true", "1", "yes", "y") else False if word in ("false", "0", "no", "n") else None


def version(text: Any) -> tuple[int, ...]:
    """`580.95.05` as (580, 95, 5); words count as nothing."""
    return tuple(int(part) for part in re.findall(r"\d+", str(text)))


def whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number; YAML's true is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def on_gpus(case: Case) -> bool:
    """Whether GPU rules apply: not on the cpu profile, and only where GPUs were found."""
    return case.wanted.get("profile") != "cpu" and bool(case.gpus)


def ours(process: Map) -> bool:
    """Whether a process belongs to a unit of an instance."""
    return str(process.get("unit") or "").startswith(UNIT_PREFIX)


def gpus_of(case: Case, instance: Map) -> list[Map]:
    """The GPUs that an instance names and the host has, each once, in PCI order; none on the cpu profile."""
    asked = instance.get("gpus") if on_gpus(case) else None
    found = [case.gpu(one) for one in asked] if isinstance(asked, list) else []
    named = {gpu["uuid"]: gpu for gpu in found if gpu}
    return sorted(named.values(), key=lambda gpu: int(gpu["index"]))


def wanted_gpus(case: Case) -> list[Map]:
    """The GPUs that instances name, each once, in PCI order; none on the cpu profile."""
    named = {gpu["uuid"]: gpu for instance in case.instances for gpu in gpus_of(case, instance)}
    return sorted(named.values(), key=lambda gpu: int(gpu["index"]))


def spans(case: Case) -> Iterator[tuple[int, Map, list[Map]]]:
    """Instances on more than one GPU: (position, instance, its GPUs)."""
    for at, instance in enumerate(case.instances):
        gpus = gpus_of(case, instance)
        if len(gpus) > 1:
            yield at, instance, gpus


def called(gpu: Map) -> str:
    """How messages name a GPU."""
    return f"GPU {gpu['index']} ({gpu['name'] or gpu['uuid']})"


def inside(case: Case) -> str | None:
    """`container` or `vm` where the host is one of these: hardware, and in a container the kernel, are out of its reach."""
    virt = (case.facts.get("kernel") or {}).get("virt")
    return virt if virt in ("container", "vm") else None


def on_kernel(case: Case, fix: str) -> str:
    """A fix that needs the kernel: a container's belongs to the machine that runs it."""
    return f"On the machine that runs this container: {_small(fix)}" if inside(case) == "container" else fix


def on_metal(case: Case, fix: str) -> str:
    """A fix that needs the hardware or its firmware."""
    kind = inside(case)
    return f"On the machine that runs this {'VM' if kind == 'vm' else kind}: {_small(fix)}" if kind else fix


def boot_with(parameter: str) -> str:
    """The command that adds a boot parameter and boots with it, where GRUB is the loader (Debian, Ubuntu)."""
    edit = f"sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{parameter} /' /etc/default/grub"
    return f"`{edit} && update-grub && systemctl reboot`"


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]


def kernel(case: Case) -> Map:
    """Facts of the kernel; empty where they were not recorded."""
    return dict(case.facts.get("kernel") or {})
