# SPDX-License-Identifier: Apache-2.0
"""What an instance would have to say so that its memory is enough: changes of the inventory, each planned again. Pure.

A way is offered only if the plan with it is clean; where none is, one that at least starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from ansible.module_utils.gpu_host_memory import PRESETS, Plan
from ansible.module_utils.gpu_host_rules import Map, args_of
from ansible.module_utils.gpu_host_rules_ranks import divides

Again = Callable[[Map, int], Plan | None]
Judge = Callable[[Plan], bool]
MORE = (2, 4, 8, 16)
SHORTEST = 1024  # a context that is worth an offer


def starts(found: Plan) -> bool:
    """Whether nothing that the engine counts forbids a start."""
    return not found.impossible()


def clean(found: Plan) -> bool:
    """Whether a start fits by the estimates as well."""
    return not found.impossible() and not found.short()


def ways(instance: Map, found: Plan, again: Again, cards: int, models: tuple[Map | None, ...]) -> list[str]:
    """Lines for an instance, each of which makes its plan fit, with what they are about; empty if nothing does.

    found: its plan. again: the plan of a changed instance on so many times its GPUs. cards: times that the host could give them.
    models: facts of target and drafter.
    """
    for good in (clean, starts) if found.impossible() else (clean,):
        told = [*_single(instance, found, again, good)]
        told = told or [*_double(instance, found, again, good)]
        told += _larger(instance, again, cards, models, good)
        if told:
            return told
    return []


def _single(instance: Map, found: Plan, again: Again, good: Judge) -> Iterator[str]:
    """One change."""
    fraction = _fraction(found)
    if fraction and _good(again, _with(instance, **fraction), good):
        yield _line(fraction)
    if found.state and found.slots and (budget := _budget(instance, again, good)):
        yield f"`budget: {budget}`, the largest that fits {found.requests} running requests"
    if requests := _requests(instance, found, again, good):
        yield f"{_line({'max-running-requests': requests})}, the most that fit"
    if length := _length(instance, found, again, good):
        yield _line(length)


def _double(instance: Map, found: Plan, again: Again, good: Judge) -> Iterator[str]:
    """What no single change mends: fewer requests, with the fraction and the length of texts that fit them."""
    most = _largest(found.requests - 1, lambda n: _suited(instance, n, again, good) is not None)
    if most and (args := _suited(instance, most, again, good)):
        yield _line(args)


def _suited(instance: Map, requests: int, again: Again, good: Judge) -> Map | None:
    """args with so many requests and what suits them, if that fits."""
    args: Map = {"max-running-requests": requests}
    for more in (_fraction, _lengths):
        plan = again(_with(instance, **args), 1)
        if plan and not good(plan):
            args |= more(plan)
    return args if _good(again, _with(instance, **args), good) else None


def _larger(instance: Map, again: Again, cards: int, models: tuple[Map | None, ...], good: Judge) -> Iterator[str]:
    """The same on more of the host's GPUs, by tensor parallelism."""
    args, now = args_of(instance), len(instance.get("gpus") or [])
    if any(
        args.get(name) not in (None, 1) for name in ("dp-size", "data-parallel-size", "ep-size", "expert-parallel-size")
    ):
        return
    for times in MORE:
        tp = now * times
        if times > cards or not all(divides(model, tp) for model in models if model):
            continue
        plan = again(_with(instance, **{"tensor-parallel-size": None, "tp-size": tp}), times)
        if plan and good(plan):
            yield f"{_line({'tp-size': tp})} on {tp} such GPUs"
            return


def _fraction(found: Plan) -> Map:
    """args with the fraction that leaves what a start takes beside it; empty without one that is another."""
    fraction = found.recommended()
    if fraction is None or fraction == found.fraction:
        return {}
    return {"mem-fraction-static": fraction, **({"cuda-graph-max-bs": found.graph} if found.graph else {})}


def _budget(instance: Map, again: Again, good: Judge) -> int:
    """The largest budget below its own that fits; 0 for none. Smaller ones than the drafter's block may save nothing."""
    if instance.get("mode") != "ddtree":
        return 0
    own = instance.get("budget")
    top = PRESETS if own == "auto" else int(own or 0) - 1
    found = _largest(top, lambda budget: _good(again, {**instance, "budget": budget}, good))
    return found if found >= (instance.get("spine") or 0) else 0


def _requests(instance: Map, found: Plan, again: Again, good: Judge) -> int:
    """The most requests below its own that fit; 0 for none."""
    return _largest(
        found.requests - 1, lambda most: _good(again, _with(instance, **{"max-running-requests": most}), good)
    )


def _length(instance: Map, found: Plan, again: Again, good: Judge) -> Map:
    """args with texts that fit; empty for none."""
    args = _lengths(found)
    return args if args and _good(again, _with(instance, **args), good) else {}


def _lengths(found: Plan) -> Map:
    """args with as many tokens as fit, a whole tree beside them; empty where that is no fewer, or too few to serve with."""
    least = max(SHORTEST, found.slots + 1)
    if found.tokens is None or not least <= found.fitting < found.tokens:
        return {}
    return {"context-length": min(found.fitting, found.positions or found.fitting), "max-total-tokens": found.fitting}


def _with(instance: Map, **args: object) -> Map:
    return {**instance, "args": {**args_of(instance), **args}}


def _good(again: Again, changed: Map, good: Judge) -> bool:
    plan = again(changed, 1)
    return plan is not None and good(plan)


def _largest(top: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to `top` that fits, by halving: what fits stays so for every smaller one. 0 for none."""
    low, high = 0, max(0, top)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _line(args: Map) -> str:
    return f"`args: {json.dumps(args).replace(chr(34), '')}`"
