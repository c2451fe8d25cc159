# SPDX-License-Identifier: Apache-2.0
"""Rules about how instances name their GPUs: in which form, and each one once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, label, rule, shown, whole


@rule(
    "gpus-bad",
    BLOCK,
    "An engine is bound to GPUs by name; without them it would take whichever comes first.",
    source="https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars",
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
                f"gpus {shown(gpus)} with gpu_host_profile: cpu",
                "no gpus on the cpu profile",
                f"Write gpus: [] for it in {case.where}, or set gpu_host_profile: auto.",
            )
        elif gpus in (None, []) and case.facts and not case.gpus:
            continue  # gpu-none, or what hides them, says what to do about the host
        elif not isinstance(gpus, list) or not gpus:
            yield Hit(
                label(instance, at),
                f"gpus {shown(gpus)}",
                "a list of at least one GPU",
                f"Write gpus: {shown(meant_gpus(gpus) or [at])} for it in {case.where}.",
            )
        elif not all(map(names_gpu, gpus)):
            bad, listed = [shown(gpu) for gpu in gpus if not names_gpu(gpu)], meant_gpus(gpus)
            yield Hit(
                label(instance, at),
                f"GPU {', '.join(bad)}",
                "an index in PCI order (0, 1, ...), without quotes and each by itself, or a UUID (GPU-...)",
                f"Write gpus: [{', '.join(map(str, listed))}] for it in {case.where}."
                if listed
                else f"Correct gpus of it in {case.where}; `nvidia-smi -L` on the host lists both.",
            )


def names_gpu(one: Any) -> bool:
    """Whether an entry of gpus has the form of an index or a UUID."""
    return (whole(one) and one >= 0) or (isinstance(one, str) and one.startswith("GPU-"))


def meant_gpus(gpus: Any) -> list[Any]:
    """What a list of GPUs in another form means: quoted indices, `0,1` and spans such as `0-3`; empty where that's not clear."""
    found: list[Any] = []
    for one in gpus if isinstance(gpus, list) else [gpus]:
        for part in [one] if names_gpu(one) else re.split(r"[,\s]+", one.strip()) if isinstance(one, str) else [None]:
            span = re.fullmatch(r"(\d{1,2})-(\d{1,2})", str(part))
            if names_gpu(part):
                found.append(part)
            elif span and int(span[1]) < int(span[2]):
                found += range(int(span[1]), int(span[2]) + 1)
            elif re.fullmatch(r"\d{1,3}", str(part)):
                found.append(int(str(part)))
            else:
                return []
    return list(dict.fromkeys(found))


@rule(
    "gpu-twice",
    BLOCK,
    "Two engines on one GPU fight for its memory, and the second one fails at its start.",
    source="docs/operations.md",
    needs_host=False,
)
def gpu_twice(case: Case) -> Iterator[Hit]:
    """Each GPU is used once; an index and the UUID of the same GPU are told to be one when the host is known."""
    users: dict[str, list[str]] = {}
    lists: dict[str, list[Any]] = {}  # each instance's GPUs, each once
    for at, instance in enumerate(case.instances):
        asked = instance.get("gpus")
        own: dict[str, Any] = {}
        for one in asked if isinstance(asked, list) else []:
            if not names_gpu(one):
                continue
            found = case.gpu(one)
            key = f"GPU {found['index']} ({found['uuid']})" if found else f"GPU {one}"
            users.setdefault(key, []).append(label(instance, at))
            own.setdefault(key, one)
        lists[label(instance, at)] = list(own.values())
    free = [gpu["index"] for gpu in case.gpus if f"GPU {gpu['index']} ({gpu['uuid']})" not in users]
    for gpu, names in sorted(users.items()):
        if len(names) > 1:
            first, *others = dict.fromkeys(names)
            fix = f"Write gpus: [{', '.join(map(str, lists[first]))}] for {first} in {case.where}."
            if others:
                open_to = f", such as gpus: [{free[0]}]," if free else ""
                instead = "" if free or not case.gpus else f", or take it out: {case.host} has no GPU that none names"
                fix = f"Give {' and '.join(others)} a GPU of its own{open_to} in {case.where}{instead}."
            yield Hit(
                " and ".join([first, *others]),
                f"{gpu} {len(names)} times",
                "each GPU in one instance, once",
                fix,
            )
