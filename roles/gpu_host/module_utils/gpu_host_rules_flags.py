# SPDX-License-Identifier: Apache-2.0
"""Rules about what an instance gives its engine: the tree's size, further flags, environment, secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    TREE_MODES,
    WARN,
    Case,
    Hit,
    args_of,
    flag,
    label,
    rule,
    shown,
    whole,
)
from ansible.module_utils.gpu_host_words import SECRET_FLAGS, kind
from ansible.module_utils.gpu_units_owned import OWNED_ENV, OWNED_FLAGS

SPELLING = re.compile(r"[a-z0-9][a-z0-9-]*")
SECRET_ENV = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL)S?$")


@rule(
    "budget-bad",
    BLOCK,
    "A tree needs at least one node beside its root; auto chooses one of 7, 15, 22 and 31.",
    source="https://arxiv.org/abs/2604.12989",
    needs_host=False,
)
def budget_bad(case: Case) -> Iterator[Hit]:
    """budget is a whole number from 1 up, or auto."""
    for at, instance in enumerate(case.instances):
        if instance.get("budget") != "auto" and (not whole(instance.get("budget")) or instance["budget"] < 1):
            word = isinstance(instance.get("budget"), str) and not instance["budget"].strip().isdigit()
            yield Hit(
                label(instance, at),
                f"budget {shown(instance.get('budget'))}",
                "a whole number of 1 or more, or auto",
                f"Set budget: {'auto' if word else 15} for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "topk-bad",
    BLOCK,
    "The tree takes its branches from the drafter's topk best tokens of each position.",
    source="https://arxiv.org/abs/2604.12989",
    needs_host=False,
)
def topk_bad(case: Case) -> Iterator[Hit]:
    """topk is a whole number from 1 up."""
    for at, instance in enumerate(case.instances):
        if not whole(instance.get("topk")) or instance["topk"] < 1:
            yield Hit(
                label(instance, at),
                f"topk {shown(instance.get('topk'))}",
                "a whole number of 1 or more",
                f"Set topk: 8 for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "spine-bad",
    BLOCK,
    "The spine is the part of the budget that is kept for the greedy chain.",
    source="docs/architecture.md",
    needs_host=False,
)
def spine_bad(case: Case) -> Iterator[Hit]:
    """0 <= spine <= budget."""
    for at, instance in enumerate(case.instances):
        spine, budget = instance.get("spine"), instance.get("budget")
        if not whole(spine) or spine < 0 or (whole(budget) and spine > budget >= 1):
            yield Hit(
                label(instance, at),
                f"spine {shown(spine)} with budget {shown(budget)}",
                "a whole number from 0 to the budget",
                f"Set spine: 0 for it in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "page-size",
    BLOCK,
    "A tree keeps single KV slots of the accepted path and frees the others; with larger pages it would free its neighbours'.",
    source="https://github.com/sgl-project/sglang/pull/29907",
    needs_host=False,
)
def page_size(case: Case) -> Iterator[Hit]:
    """page-size is 1 (or unset) in a tree mode."""
    for at, instance in enumerate(case.instances):
        size = args_of(instance).get("page-size", 1)
        if instance.get("mode") in TREE_MODES and size not in (1, "1"):
            yield Hit(
                label(instance, at),
                f"page-size {shown(size)} in mode {instance['mode']}",
                "page-size 1 in a tree mode",
                f"Remove page-size from args in {case.where}, or use mode: dflash.",
            )


@rule(
    "backend-auto",
    BLOCK,
    "A backend that the engine picks itself may lack kernels for this GPU, and it fails hours later or answers wrongly.",
    source="https://github.com/sgl-project/sglang/issues/12178",
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


@rule(
    "args-malformed",
    BLOCK,
    "args and env are written into files as they are, flag by flag.",
    source="docs/operations.md",
    needs_host=False,
)
def args_malformed(case: Case) -> Iterator[Hit]:
    """args and env are maps of plain values with usable names."""
    for at, instance in enumerate(case.instances):
        for key, pattern in (("args", SPELLING), ("env", re.compile(r"[A-Za-z_][A-Za-z0-9_]*"))):
            values = instance.get(key)
            if not isinstance(values, dict):
                yield Hit(
                    label(instance, at),
                    f"{key} is {kind(values)}: {shown(values)}",
                    "a map, name: value",
                    f"Write it as {key}: {_as_map(values, key)} for it in {case.where} or in gpu_units_defaults.",
                )
                continue
            for name, value in values.items():
                spelling = flag(name) if key == "args" else str(name)
                taken_out = key == "args" and value is None  # null takes a flag of the profile out
                plain = taken_out or (isinstance(value, (str, int, float, bool)) and "\n" not in str(value))
                listed = (
                    key == "args"
                    and isinstance(value, list)
                    and all(isinstance(one, (str, int, float)) for one in value)
                )
                if not pattern.fullmatch(spelling) or not (plain or listed):
                    yield Hit(
                        label(instance, at),
                        f"{key}: {name}: {shown(value, spelling)}",
                        _plain_told(key, value),
                        f"Correct {key} of it in {case.where} or in gpu_units_defaults.",
                    )


def _plain_told(key: str, value: object) -> str:
    if isinstance(value, dict) and key == "args":
        return "a flag with one plain value; a map for the engine is written as JSON in quotes"
    return "a flag with one plain value" if key == "args" else "a variable with one plain value"


def _as_map(given: object, key: str) -> str:
    """Words of a command line or of an env file as the map that they would be; an example for anything else."""
    words = given.split() if isinstance(given, str) else given
    found: list[str] = []
    for word in words if isinstance(words, list) else []:
        name, sign, value = str(word).partition("=")
        if sign or name.startswith("--"):
            secret = flag(name) in SECRET_FLAGS or SECRET_ENV.search(name.upper())
            found.append(f"{flag(name) if key == 'args' else name}: {'..' if secret else value or 'true'}")
        elif found and found[-1].endswith(": true"):
            found[-1] = found[-1].removesuffix("true") + name
    example = "context-length: 8192" if key == "args" else "NCCL_DEBUG: INFO"
    return f"{{{', '.join(found) or example}}}"


@rule(
    "args-owned",
    BLOCK,
    "The flag would contradict the key that the toolkit writes, and the proof would be about the wrong setting.",
    source="docs/operations.md",
    needs_host=False,
)
def args_owned(case: Case) -> Iterator[Hit]:
    """Flags and variables that have a key of their own are not set under args or env."""
    for at, instance in enumerate(case.instances):
        for name in sorted(set(args_of(instance)) - set(SECRET_FLAGS)):
            key = OWNED_FLAGS.get(
                str((case.wanted.get("flags") or {}).get(name, {}).get("flag", name)), OWNED_FLAGS.get(name)
            )
            if key:
                yield Hit(
                    label(instance, at),
                    f"{name} under args",
                    f"the key {key}",
                    f"Set {key} for it in {case.where} and remove {name} from args.",
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
    source="https://man7.org/linux/man-pages/man5/proc_pid_cmdline.5.html",
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
    source="https://systemd.io/CREDENTIALS/",
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
