# SPDX-License-Identifier: Apache-2.0
"""Findings that several instances share, as one wrong default brings them, told once. Pure."""

from __future__ import annotations

import re
from typing import Any

from ansible.module_utils.gpu_host_rules import UNIT_PREFIX, Map, label

DEFAULTS = "gpu_units_defaults"


def grouped(findings: list[Map], instances: list[Map]) -> list[Map]:
    """The findings with one for each fault: that of the first instance, `also` names the others and the fix is for all of them.

    Only what differs in nothing but the instance, and in the fix's own words for it, is one fault.
    """
    labels = {label(instance, at): instance for at, instance in enumerate(instances)}
    faults: dict[tuple[Any, ...], list[Map]] = {}
    for at, finding in enumerate(findings):
        name = labels.get(finding["thing"], {}).get("name")
        own = finding["thing"] in labels
        told = (_neutral(finding[key], finding["thing"], name) for key in ("observed", "expected"))
        key = (finding["id"], finding["severity"], *told) if own else (at,)
        same = faults.setdefault(key, [])
        if all(one["thing"] != finding["thing"] or one["fix"] != finding["fix"] for one in same):
            same.append(finding)
    return [_one(same, labels) for same in faults.values()]


def _one(same: list[Map], labels: Map) -> Map:
    first = same[0]
    also = [thing for thing in dict.fromkeys(one["thing"] for one in same) if thing != first["thing"]]
    if not also:
        return first
    fixes: dict[str, list[Map]] = {}
    for one in same:
        fixes.setdefault(_neutral(one["fix"], one["thing"], labels[one["thing"]].get("name")), []).append(one)
    if len(fixes) == 1:
        once = "" if DEFAULTS in first["fix"] else f", or once under {DEFAULTS} if it stands there"
        fix = f"{first['fix']} The same for {', '.join(map(_short, also))}{once}."
    else:
        fix = " ".join(
            f"{', '.join(_short(one['thing']) for one in ones)}: {ones[0]['fix']}" for ones in fixes.values()
        )
    return {**first, "thing": f"{first['thing']} and {len(also)} more", "fix": fix, "also": also}


def _short(thing: str) -> str:
    return thing.removeprefix("instance ")


def _neutral(text: str, thing: str, name: Any) -> str:
    """A text without the words for its instance."""
    words = [thing, *([f"{UNIT_PREFIX}{name}"] if name else [])]
    return re.sub("|".join(rf"{re.escape(word)}(?![\w-])" for word in words), "\0", str(text))
