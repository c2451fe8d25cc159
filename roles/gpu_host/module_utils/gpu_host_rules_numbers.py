# SPDX-License-Identifier: Apache-2.0
"""Rules about numbers under `args` that the engine's parser takes and its code refuses, and about what is said twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    WARN,
    Case,
    Hit,
    Map,
    args_of,
    env_of,
    flag,
    label,
    on,
    rule,
    spelled,
)

ENGINE = "https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt"
WORKER = "max_req_len and max_req_input_len: Memory pool size is too small"
# The least that the engine's code takes, with its own words. Sources: managers/tp_worker.py, server_args.py (check_server_args).
LEAST: dict[str, tuple[float, str]] = {
    "max-running-requests": (1, "max_running_request is zero"),
    "max-queued-requests": (1, "max_queued_requests must be at least 1 for any work to be scheduled"),
    "max-total-tokens": (7, WORKER),
    "context-length": (7, WORKER),
    "pp-max-micro-batch-size": (1, "pp_max_micro_batch_size must be a positive integer or None"),
    "gpu-id-step": (1, "gpu_id_step must be positive"),
    "tokenizer-worker-num": (1, "Tokenizer worker num must >= 1"),
    "schedule-conservativeness": (0, "schedule_conservativeness must be non-negative"),
}
FRACTION = "mem-fraction-static"
SUFFIXES = {
    "": 1,
    **{f"{name}{i}": base**n for i, base in (("", 1000), ("i", 1024)) for n, name in enumerate("kMGT", 1)},
}
SUFFIXES |= {"Ki": 1024}
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def number(value: Any) -> float | None:
    """A number as the engine's parser reads it, `8k` and `1Mi` too; None for what is none, which flag-value tells."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    found = re.fullmatch(r"(-?\d*\.?\d+(?:[eE]-?\d+)?)([kMGT]?i?)", str(value).strip())
    known = found and not isinstance(value, bool) and found[2] in SUFFIXES
    return float(found[1]) * SUFFIXES[found[2]] if found and known else None


def _numbers(case: Case) -> Iterator[tuple[str, Map, dict[str, float]]]:
    """(instance in messages, instance, its flags that hold a number)."""
    for at, instance in enumerate(case.instances):
        read = {name: number(value) for name, value in spelled(case, instance).items()}
        yield label(instance, at), instance, {name: value for name, value in read.items() if value is not None}


@rule(
    "flag-range",
    BLOCK,
    "The engine's parser takes the number and its code refuses it, after all imports or once the model is loaded.",
    source=f"{ENGINE}/managers/tp_worker.py",
    needs_host=False,
)
def flag_range(case: Case) -> Iterator[Hit]:
    """Numbers lie where the engine's code wants them."""
    for thing, _, numbers in _numbers(case):
        for name, (least, words) in LEAST.items():
            given = numbers.get(name, least)
            if given < least:
                yield Hit(
                    thing,
                    f"{name}: {given:g}",
                    f"{least:g} or more ({words})",
                    f"Remove {name} under args in {case.where} or in gpu_units_defaults, for the engine's own choice.",
                )
        fraction = numbers.get(FRACTION, 0.5)
        if fraction <= 0 or (fraction >= 1 and not _bounded(case, numbers)):
            words = "Not enough memory. Please try to increase it" if fraction <= 0 else "out of memory"
            yield Hit(
                thing,
                f"{FRACTION}: {fraction:g}",
                f"a part of the memory between 0 and 1 ({words})",
                _part(case, fraction),
            )


def _bounded(case: Case, numbers: dict[str, float]) -> bool:
    """Whether something else keeps the KV cache smaller than the memory: a number of tokens; a CPU gives pages when used."""
    return case.wanted.get("profile") == "cpu" or "max-total-tokens" in numbers


def _part(case: Case, fraction: float) -> str:
    where = f"under args in {case.where} or in gpu_units_defaults"
    if 1 < fraction < 100:
        return f"Write {FRACTION}: {fraction / 100:g} {where} if percent were meant; or remove it, for the engine's own choice."
    return f"Remove {FRACTION} {where}, for the engine's own choice."


@rule(
    "fraction-whole",
    WARN,
    "It is the part of the memory that weights and KV cache may take: with all of it, or more, only another limit keeps the "
    "engine from running out of memory.",
    source=f"{ENGINE}/model_executor/model_runner_kv_cache_mixin.py",
    needs_host=False,
)
def fraction_whole(case: Case) -> Iterator[Hit]:
    """mem-fraction-static is a fraction also where the number of tokens is bounded."""
    for thing, _, numbers in _numbers(case):
        fraction = numbers.get(FRACTION, 0.5)
        if fraction >= 1 and _bounded(case, numbers):
            yield Hit(thing, f"{FRACTION}: {fraction:g}", "a part of the memory between 0 and 1", _part(case, fraction))


@rule(
    "context-long",
    BLOCK,
    "The engine ends at a context that is longer than the model's own (is greater than the derived context_length), and gives "
    "the drafter the target's.",
    source=f"{ENGINE}/configs/model_config.py",
)
def context_long(case: Case) -> Iterator[Hit]:
    """What is served is no longer than target and drafter were made for."""
    for thing, instance, numbers in _numbers(case):
        env, target = env_of(instance), _longest(case, instance, "model_path")
        if on(env.get(LONGER)) or on(env.get("SGLANG_IS_IN_CI")) or "json-model-override-args" in args_of(instance):
            continue
        drafter = _longest(case, instance, "draft_model_path") if instance.get("mode") != "baseline" else None
        given = numbers.get("context-length")
        if given and target and given > target[1]:
            yield _long(case, thing, f"context-length {given:g}", f"at most {target[1]}, the target's own", target[1])
        elif drafter and (served := given or (target[0] if target else 0)) > drafter[1]:
            yield _long(
                case,
                thing,
                f"a context of {served:g} tokens and a drafter of {drafter[1]} (draft_model_path "
                f"{instance.get('draft_model_path')})",
                f"at most {drafter[1]}, the drafter's own",
                drafter[1],
            )


def _long(case: Case, thing: str, observed: str, expected: str, longest: int) -> Hit:
    return Hit(
        thing,
        observed,
        expected,
        f"Write context-length: {longest} under args in {case.where} or in gpu_units_defaults; or, where the model is known to "
        f"stay right beyond, env: {{{LONGER}: 1}}.",
    )


def _longest(case: Case, instance: Map, key: str) -> tuple[int, int] | None:
    """Bounds of the context that the engine derives from a config.json; None where that does not tell."""
    found = ((case.model(instance.get(key)) or {}).get("shape") or {}).get("context")
    return (found[0], found[1]) if found else None


@rule(
    "flag-twice",
    WARN,
    "Both spellings are one flag: one of the two values is dropped without a word.",
    source="docs/operations.md",
    needs_host=False,
)
def flag_twice(case: Case) -> Iterator[Hit]:
    """Every flag is given once."""
    raw, known = case.wanted.get("instances"), case.wanted.get("flags") or {}
    own = [one for one in raw if isinstance(one, dict)] if isinstance(raw, list) else []
    layers = [("gpu_units_defaults", case.wanted.get("defaults"))]
    layers += [(label(one, at), one) for at, one in enumerate(own)]
    for thing, layer in layers:
        args = layer.get("args") if isinstance(layer, dict) else None
        names: dict[str, list[str]] = {}
        for name in map(str, args) if isinstance(args, dict) else ():
            names.setdefault(str(known.get(flag(name), {}).get("flag") or flag(name)), []).append(name)
        for full, spellings in sorted(names.items()):
            if len(spellings) > 1:
                yield Hit(
                    thing,
                    f"{' and '.join(spellings)} under args",
                    f"{full} once",
                    f"Remove all but one of them under args in {case.where} or in gpu_units_defaults.",
                )


@rule(
    "env-unknown",
    WARN,
    "The engine reads no variable of this name, so what is meant by it is not done. One that begins with SGL_ it writes over "
    "that with SGLANG_, whatever the profile set there.",
    source=f"{ENGINE}/environ.py",
    needs_host=False,
)
def env_unknown(case: Case) -> Iterator[Hit]:
    """SGLANG_ variables under env are some of the patched engine's."""
    known, engine = case.wanted.get("envs") or {}, case.wanted.get("engine")
    for at, instance in enumerate(case.instances):
        env = instance.get("env")
        for name in sorted(map(str, env)) if isinstance(env, dict) else ():
            if name in known:
                near = known[name]
                fix = f"Write {near[0]} instead of {name}" if near else f"Remove {name}"
                yield Hit(
                    label(instance, at),
                    f"{name} under env",
                    f"a variable of {engine}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
                    f"{fix} under env in {case.where} or in gpu_units_defaults; `less engines/{engine}/envs.yml` lists them all.",
                )
