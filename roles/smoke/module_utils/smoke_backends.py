# SPDX-License-Identifier: Apache-2.0
"""Whether an engine runs the backends it was asked for: its own word, taken after the start, against the instance's file.

A flag proves nothing: the engine replaces what does not suit it and serves on. Its scheduler's arguments and two lines at
start say what became of a flag. Python 3.11+, standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.module_utils import smoke_judge as judge

FIX_REPORT = (
    "`systemctl restart {unit}` on the host: its key or its flags are newer than the engine; without a file of the instance "
    "`{site} --tags activate`"
)


def fields_of(hooks: Mapping[str, Any]) -> list[str]:
    """The fields of the scheduler's arguments that the checks need; nothing else is kept of them (they hold keys)."""
    return sorted({row["field"] for entry in hooks["backends"].values() for row in entry.get("fields") or []})


def flags_of(text: str) -> dict[str, Any]:
    """Flags of an instance's flat file (`flag: JSON`, one a line), in their dashed spelling."""
    flags: dict[str, Any] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not colon or line.startswith(("#", "---")):
            continue
        try:
            flags[name.strip().replace("_", "-")] = json.loads(value)
        except ValueError:
            flags[name.strip().replace("_", "-")] = value.strip()
    return flags


def _asked(row: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
    return next((flags[flag] for flag in row["asked"] if flags.get(flag) is not None), row.get("unset"))


def _allowed(topic: str, rows: Iterable[Mapping[str, Any]]) -> tuple[set[str], str]:
    """(values that the release's rows allow, ids of the rows); the set is empty where no row speaks of the topic."""
    speaking = [row for row in rows if topic in row["backends"]]
    values = {value for row in speaking for value in row["backends"][topic]["allowed"]}
    return values, " or ".join(row["id"] for row in speaking)


def _pairs(
    entry: Mapping[str, Any], flags: Mapping[str, Any], states: Sequence[Mapping[str, Any]], line: str | None
) -> list[tuple[str, Any, Any]]:
    """(what, observed, asked) of everything that a check compares; asked in the words of what was observed."""
    found: list[tuple[str, Any, Any]] = []
    for row in entry.get("fields") or []:
        for state in states:
            found.append((row["field"], state.get(row["field"], "not reported"), _asked(row, flags)))
    kernels = entry.get("kernels") or {}
    match = re.search(entry["line"], line) if line and "line" in entry else None
    for name, row in (entry.get("groups") or {}).items() if match else ():
        asked = _asked(row, flags)
        found.append((f"{name} (journal)", match[name] if match else None, kernels.get(asked, asked)))
    return found


def judge_backends(
    hooks: Mapping[str, Any],
    mode: str,
    flags: Mapping[str, Any] | None,
    states: Sequence[Mapping[str, Any]] | str,
    lines: Mapping[str, str] | None,
    rows: Sequence[Mapping[str, Any]],
    instance: str,
) -> list[judge.Check]:
    """One check per backend.

    Args:
        hooks: the role's data; `backends` is used.
        mode: mode of the instance.
        flags: what the instance's file asks for, None where there is no file.
        states: arguments of every scheduler, or why they could not be had.
        lines: lines of the journal by check id, as JournalScan found them; None where the journal has no line at all, and
            a check of nothing else is left out.
        rows: rows of the matrix out of the release's manifest; [] for a release from before there were any.
        instance: name for the checks.
    """
    told = f"no answer: {states}" if isinstance(states, str) else f"arguments of {len(states)} schedulers"
    if flags is None:
        told += ", but no file of the instance in /etc/sglang-fleet/instances"
    known = not isinstance(states, str) and bool(states) and flags is not None
    checks = [
        judge.check(
            "backend.reported", known, told, "the scheduler's arguments from /server_info, and the instance's file",
            "without both nothing can be said about what the engine runs", FIX_REPORT, instance,
        )
    ]  # fmt: skip
    if isinstance(states, str) or flags is None or not states:
        return checks
    for ident, entry in hooks["backends"].items():
        if entry.get("speculative") and not hooks["modes"][mode]["speculative"]:
            continue
        if lines is None and not entry.get("fields"):
            continue
        pairs = _pairs(entry, flags, states, (lines or {}).get(ident))
        allowed, names = _allowed(entry["topic"], rows)
        wrong = [what for what, observed, asked in pairs if observed != asked]
        foreign = [
            row["field"]
            for row in entry.get("fields") or []
            for state in states
            if allowed and isinstance(state.get(row["field"]), str) and state[row["field"]] not in allowed
        ]
        observed = ", ".join(f"{what} {value}" for what, value, _ in pairs) or "no such line in the journal"
        expected = ", ".join(f"{what} {value}" for what, _, value in pairs) or f"a line like /{entry.get('line')}/"
        if names and not all(value in (True, False) for _, value, _ in pairs):
            expected += f"; {names} of the matrix allows {', '.join(sorted(allowed))}"
        ok = bool(pairs) and not wrong and not foreign
        checks.append(judge.check(ident, ok, observed, expected, entry["why"], entry["fix"], instance))
    return checks
