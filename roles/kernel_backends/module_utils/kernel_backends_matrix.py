# SPDX-License-Identifier: Apache-2.0
"""The matrix of backends: which an engine may run on which GPU, with which model, and why not the others. Pure, given its data.

A claim is `{why, source, date, nvcc?}`. A row of the checked matrix:

    {id, profile, sm: ["12.0"], families: [dense, ..], engines: {from, below}, env: {NAME: {value, ..claim}},
     backends: {topic: {use: {flag: value}, allowed: {value: claim}, forbidden: {value: claim}}}}

Python 3.11+, standard library only. Data and its meaning: files/matrix.yml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Data = dict[str, Any]

FAMILIES = ("dense", "moe", "hybrid-gdn", "hybrid-gdn-moe")
UNSET = "auto"  # what a flag means that is null: the engine chooses

_KEYS = {"topics", "claims", "common", "modes", "rows"}
_ROW = {"id", "profile", "sm", "families", "engines", "backends", "env"}
_TOPIC = {"use", "allowed", "forbidden"}
_CLAIM = {"why", "source", "date"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d\Z")
_VERSION = re.compile(r"\d+(\.\d+)*\Z")
_SM = re.compile(r"\d+\.\d\Z|cpu\Z")


class MatrixError(ValueError):
    """A matrix that breaks its schema, or has no row for what is asked; the text names the place."""


def version(text: str) -> tuple[int, ...]:
    """`0.5.11` as numbers. Raises MatrixError for anything else."""
    if not _VERSION.match(str(text)):
        raise MatrixError(f"{text!r} is no version like 0.5.11")
    return tuple(map(int, str(text).split(".")))


# -- schema ------------------------------------------------------------------------------------------------------------


def _need(condition: object, where: str, problem: str) -> None:
    if not condition:
        raise MatrixError(f"matrix.yml: {where}: {problem}")


def _check_claim(claim: Any, where: str, extra: frozenset[str] = frozenset()) -> None:
    _need(isinstance(claim, dict), where, "must be a claim with why, source and date")
    keys = set(claim)
    _need(
        _CLAIM | extra <= keys <= _CLAIM | extra | {"nvcc"},
        where,
        "needs why, source, date and at most nvcc beside them",
    )
    _need(str(claim["source"]).startswith("https://"), where, "needs a source (https link)")
    _need(_DATE.match(str(claim["date"])), where, "needs a date (YYYY-MM-DD)")
    _need(str(claim["why"]).strip().endswith("."), where, "why must be a sentence")
    if "nvcc" in claim:
        _need(_VERSION.match(str(claim["nvcc"])), where, "nvcc must be a version (quote it)")


def _check_topic(topic: Data, names: Data, where: str) -> None:
    _need(isinstance(topic, dict) and set(topic) == _TOPIC, where, f"needs exactly {', '.join(sorted(_TOPIC))}")
    for verdict in ("allowed", "forbidden"):
        for value, claim in topic[verdict].items():
            _check_claim(claim, f"{where}: {verdict}: {value}")
            switches = names.get("switches")
            _need(switches is None or value in switches, f"{where}: {verdict}: {value}", "is no switch of the topic")
    both = sorted(set(topic["allowed"]) & set(topic["forbidden"]))
    _need(not both, where, f"{', '.join(both)} both allowed and forbidden")
    _need(topic["allowed"], where, "allows nothing")
    for flag, value in topic["use"].items():
        _need(flag in (names.get("flags") or names["switches"]), f"{where}: use: {flag}", "is no flag of the topic")
        _need(str(value) != UNSET, f"{where}: use: {flag}", f"is {UNSET}; a profile names its choice")
        chosen = value if "flags" in names else flag
        _need(chosen in topic["allowed"], f"{where}: use: {flag}", f"{chosen} is not allowed here")


def _check_row(row: Any, topics: Data, where: str) -> None:
    _need(isinstance(row, dict) and set(row) == _ROW, where, f"needs exactly {', '.join(sorted(_ROW))}")
    _need(
        row["sm"] and all(isinstance(sm, str) and _SM.match(sm) for sm in row["sm"]), where, "sm must be like ['12.0']"
    )
    unknown = sorted(set(row["families"]) - set(FAMILIES))
    _need(row["families"] and not unknown, where, f"unknown families {unknown}; known: {', '.join(FAMILIES)}")
    bounds = row["engines"]
    _need(set(bounds) == {"from", "below"}, where, "engines needs from and below")
    _need(version(bounds["from"]) < version(bounds["below"]), where, "engines: from must be less than below")
    for name, topic in row["backends"].items():
        _need(name in topics, f"{where}: {name}", f"is no topic; known: {', '.join(topics)}")
        _check_topic(topic, topics[name], f"{where}: {name}")
    for name, entry in row["env"].items():
        _check_claim(entry, f"{where}: env: {name}", frozenset({"value"}))
        _need(isinstance(entry["value"], str), f"{where}: env: {name}", "value must be a string (quote it)")


def check(data: Any) -> Data:
    """The matrix, if it is sound. Raises MatrixError at the first place that is not."""
    _need(isinstance(data, dict) and set(data) == _KEYS, "the file", f"needs exactly {', '.join(sorted(_KEYS))}")
    for name, topic in data["topics"].items():
        _need(set(topic) in ({"flags"}, {"switches"}), f"topics: {name}", "needs flags or switches")
    for name, claim in data["claims"].items():
        _check_claim(claim, f"claims: {name}")
    for mode, narrowed in data["modes"].items():
        for name, values in narrowed.items():
            _need(name in data["topics"] and values, f"modes: {mode}: {name}", "is no topic, or allows nothing")
            for value, claim in values.items():
                _check_claim(claim, f"modes: {mode}: {name}: {value}")
    places: dict[tuple[str, str], list[Data]] = {}
    for number, row in enumerate(data["rows"]):
        where = f"row {row.get('id') if isinstance(row, dict) else None or number + 1}"
        _check_row(row, data["topics"], where)
        for place in ((sm, family) for sm in row["sm"] for family in row["families"]):
            for other in places.setdefault(place, []):
                _need(
                    not _overlap(row, other),
                    where,
                    f"says again what row {other['id']} says of SM {place[0]}, {place[1]}",
                )
            places[place].append(row)
    ids = [row["id"] for row in data["rows"]]
    _need(len(ids) == len(set(ids)), "rows", "an id is used twice")
    order = list(data["topics"])  # merged parts of a row come first in its file
    return {
        **data,
        "rows": [
            {**row, "backends": {t: row["backends"][t] for t in order if t in row["backends"]}} for row in data["rows"]
        ],
    }


def _overlap(one: Data, other: Data) -> bool:
    a, b = one["engines"], other["engines"]
    return version(a["from"]) < version(b["below"]) and version(b["from"]) < version(a["below"])


# -- choice ------------------------------------------------------------------------------------------------------------


def rows_for(data: Data, profile: str, engine: str) -> list[Data]:
    """Rows of a profile and an engine such as `sglang-0.5.11`. Raises MatrixError where there is none."""
    number = version(engine.removeprefix("sglang-"))
    mine = [row for row in data["rows"] if row["profile"] == profile]
    found = [row for row in mine if version(row["engines"]["from"]) <= number < version(row["engines"]["below"])]
    if not found:
        known = sorted({f"{r['engines']['from']} to below {r['engines']['below']}" for r in mine}) or ["no engine"]
        raise MatrixError(
            f"no row for profile {profile} and engine {engine}; rows of {profile} are for {', '.join(known)}. Add a row to "
            "roles/kernel_backends/files/matrix.yml, with a source for every value, or take another fleet_engine"
        )
    return found


def rows_of(rows: list[Data], capabilities: Iterable[str]) -> list[Data]:
    """Those rows that are for any of these compute capabilities (`12.0`); all of them where none is known."""
    known = set(capabilities)
    return [row for row in rows if known & set(row["sm"])] or rows


def profile_parts(rows: Iterable[Data]) -> tuple[Data, dict[str, str]]:
    """(flags, environment) that a profile takes from its rows. Raises MatrixError where rows of one profile disagree."""
    flags: Data = {}
    env: dict[str, str] = {}
    for row in rows:
        used = {flag: value for topic in row["backends"].values() for flag, value in topic["use"].items()}
        required = {name: entry["value"] for name, entry in row["env"].items()}
        for table, more in ((flags, used), (env, required)):
            for name, value in more.items():
                if table.setdefault(name, value) != value:
                    raise MatrixError(
                        f"row {row['id']}: {name} is {value}, another row of its profile says {table[name]}"
                    )
    return flags, env


def published(rows: Iterable[Data]) -> list[Data]:
    """Rows as later roles and the manifest keep them: claims shrink to their source."""
    return [
        {
            **{key: row[key] for key in ("id", "sm", "families", "engines")},
            "env": {name: entry["value"] for name, entry in row["env"].items()},
            "backends": {
                name: {
                    "use": topic["use"],
                    **{
                        v: {value: claim["source"] for value, claim in topic[v].items()}
                        for v in ("allowed", "forbidden")
                    },
                }
                for name, topic in row["backends"].items()
            },
        }
        for row in rows
    ]


def summary(rows: Iterable[Data]) -> str:
    """The chosen rows in one line."""
    chosen = list(rows)
    flags, env = profile_parts(chosen)
    said = ", ".join(f"{flag} {value}".removesuffix(" True") for flag, value in flags.items())
    return f"{' or '.join(row['id'] for row in chosen)}: {said}" + "".join(f", {k}={v}" for k, v in env.items())


# -- judgement ---------------------------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A flag or variable that can't be served: `observed` says who refuses it and why, `allowed` what may be asked for."""

    name: str
    observed: str
    allowed: tuple[str, ...]


def narrowed(data: Data, engine: str, layers: Iterable[Any]) -> Data:
    """As much of the matrix as can judge what an inventory asks for: `{topics, modes, rows}`, small enough to travel to a host.

    `layers` are the instances and their defaults; anything malformed among them is left to other rules. Rows are those of the
    engine, none for one without a version. Claims are kept where they can be told.
    """
    asked: dict[str, set[str]] = {}
    variables: set[str] = set()
    for layer in layers:
        args, env = (layer.get(key) for key in ("args", "env")) if isinstance(layer, dict) else (None, None)
        for topic in data["topics"].values():
            for flag, value in _asked(topic, dashed(args)):
                asked.setdefault(flag, set()).add(value)
        names = set(map(str, env)) if isinstance(env, dict) else set()
        # The engine writes what begins with SGL_ over the same name with SGLANG_.
        variables |= names | {f"SGLANG_{name.removeprefix('SGL_')}" for name in names if name.startswith("SGL_")}
    topics = {
        name: topic
        for name, topic in data["topics"].items()
        if set(topic.get("flags") or topic["switches"]) & set(asked)
    }
    values = {value for some in asked.values() for value in some}
    try:
        number = version(engine.removeprefix("sglang-"))
    except MatrixError:
        number = ()
    return {
        "topics": topics,
        "modes": {m: {t: v for t, v in narrow.items() if t in topics} for m, narrow in data["modes"].items()},
        "rows": [
            {
                **{key: row[key] for key in ("id", "profile", "sm", "families")},
                "env": {name: entry for name, entry in row["env"].items() if name in variables},
                "backends": {
                    name: {
                        "allowed": dict.fromkeys(topic["allowed"]),
                        "forbidden": {value: claim for value, claim in topic["forbidden"].items() if value in values},
                    }
                    for name, topic in row["backends"].items()
                    if name in topics
                },
            }
            for row in data["rows"]
            if version(row["engines"]["from"]) <= number < version(row["engines"]["below"])
        ],
    }


def dashed(args: Any) -> Data:
    """Flags in their one spelling: `page_size`, `page-size` and `--page-size` are the same. {} for anything but a map."""
    return (
        {str(flag).strip().lstrip("-").replace("_", "-"): v for flag, v in args.items()}
        if isinstance(args, dict)
        else {}
    )


def refusals(data: Data, rows: list[Data], instance: Mapping[str, Any]) -> list[Refusal]:
    """Why an instance `{mode, args, env}` can't be served on the GPUs and with the model that these rows are for.

    A value is refused if every row that speaks of its topic refuses it, or the mode does. `data` may be narrowed.
    """
    found = []
    mode = str(instance.get("mode"))
    for name, names in data["topics"].items():
        speaking = [(row, row["backends"][name]) for row in rows if name in row["backends"]]
        narrow = data["modes"].get(mode, {}).get(name)
        for flag, value in _asked(names, dashed(instance.get("args"))):
            verdicts = [_refused(row, topic, value) for row, topic in speaking]
            allowed = list(
                dict.fromkeys(v for _, topic in speaking for v in topic["allowed"] if narrow is None or v in narrow)
            )
            said = "null (the engine's own choice)" if value == UNSET else "true" if value == flag else value
            if verdicts and all(verdicts):
                found.append(Refusal(flag, f"{said}, refused by {verdicts[0]}", tuple(allowed)))
            elif narrow is not None and value not in narrow:
                because = _because(next(iter(narrow.values())))
                found.append(Refusal(flag, f"{said}, refused in mode {mode}: {because}", tuple(allowed)))
    env = instance.get("env")
    for variable, value in env.items() if isinstance(env, dict) else ():
        against = [(row, row["env"][variable]) for row in rows if variable in row["env"]]
        if against and len(against) == len(rows) and all(str(value) != entry["value"] for _, entry in against):
            row, entry = against[0]
            found.append(Refusal(variable, f"{value}, refused by {_told(row)}: {_because(entry)}", (entry["value"],)))
    return found


def _asked(names: Data, args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(flag, value) of a topic that an instance asks for; for a switch that is on, its name is the value."""
    for flag in names.get("flags") or names["switches"]:
        if flag in args:
            if "flags" in names:
                yield flag, UNSET if args[flag] is None else str(args[flag])
            elif args[flag] is True or str(args[flag]).lower() == "true":
                yield flag, flag


def _refused(row: Data, topic: Data, value: str) -> str:
    """Which row refuses a value and why; empty where it is allowed."""
    if value in topic["allowed"]:
        return ""
    claim = topic["forbidden"].get(value)
    return f"{_told(row)}: {_because(claim) if claim else 'it is not in the matrix, so nobody has looked at it'}"


def _told(row: Data) -> str:
    return f"row {row['id']} (SM {', '.join(row['sm'])})"


def _because(claim: Mapping[str, Any]) -> str:
    return f"{str(claim['why']).rstrip('.')} ({claim['source']}, {claim['date']})"
