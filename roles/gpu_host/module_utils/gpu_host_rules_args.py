# SPDX-License-Identifier: Apache-2.0
"""Rules about an instance's `args` as the engine's own parser reads them. What it knows stands in engines/<engine>/flags.yml.

`wanted.flags` holds the rows of the flags that the inventory names: `{name: {flag, type, choices?, many?, short?}}` with `flag`
its longest name and `short` for an abbreviation, or `{name: {near: [..]}}` for a name that the engine lacks. None without a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from ansible.module_utils.gpu_host_rules import BLOCK, WARN, Case, Hit, Map, args_of, label, rule, shown
from ansible.module_utils.gpu_host_rules_flags import SPELLING
from ansible.module_utils.gpu_host_rules_instances import PARALLEL
from ansible.module_utils.gpu_host_words import meant, near
from ansible.module_utils.gpu_units_owned import OWNED_FLAGS

PARSER = "https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/server_args_config_parser.py"
SIZES = [name for names in PARALLEL.values() for name in names]
NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
SIZE = re.compile(r"\d+(\.\d+)?[kMGT]|\d+[KMGT]i")


def _size(word: str) -> Any:
    return word if SIZE.fullmatch(word.strip().replace("Ki", "Mi")) else int(word)


# How the engine reads one word; each raises ValueError for a word that is none.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "size": (_size, "a whole number, or one like 8k or 1Mi"),
    "json": (json.loads, "a text with JSON in it"),
    "text": (str, "a text"),
}


def expected(row: Map, value: Any) -> str | None:
    """What a flag takes instead of a value, None if the engine accepts it. Null takes a flag out, an empty list gives none."""
    if value is None or value == []:
        return None
    kind = row["type"]
    if kind == "command-line":
        return "no such flag: the engine takes it on a command line only, and instances give theirs in a config file"
    if kind == "switch":
        return None if isinstance(value, bool) else "true or false, without quotes"
    if isinstance(value, dict):  # written as JSON, in one word
        return None if kind in ("json", "text") and not row.get("choices") else "no map"
    if isinstance(value, list) and len(value) > 1 and not row.get("many"):
        return "one value, no list"
    read, told = READERS[kind]
    choices = row.get("choices") or []
    if choices:
        told = "one of " + ", ".join(map(str, choices))
        quoted = [word for word in ("on", "off", "yes", "no") if word in choices]
        if isinstance(value, bool) and quoted:
            told += f"; YAML reads the bare word as true or false: write {' or '.join(map(repr, quoted))} in quotes"
    for one in value if isinstance(value, list) else [value]:
        word = str(one).lower() if isinstance(one, bool) else str(one)
        if word.startswith("-") and len(word) > 1 and " " not in word and not NEGATIVE.fullmatch(word):
            return "a value; one that begins with - is taken for another flag"
        try:
            found = read(word)
        except ValueError:
            return told
        if choices and found not in choices:
            return told
    return None


def meant_value(row: Map, value: Any) -> str | None:
    """What was probably meant by a value that the engine refuses, as YAML; None without a guess."""
    word, choices = str(value).lower(), list(map(str, row.get("choices") or []))
    if row["type"] == "switch":
        return {**dict.fromkeys(("yes", "on", "1"), "true"), **dict.fromkeys(("no", "off", "0"), "false")}.get(
            word, word if word in ("true", "false") else None
        )
    if isinstance(value, bool):
        words = [one for one in (("on", "yes") if value else ("off", "no")) if one in choices]
        return json.dumps(words[0]) if words else None
    if choices:
        found = [one for one in choices if re.sub("[-_]", "", one.lower()) == re.sub("[-_]", "", word)]
        found = found or [one for one in choices if word in one.lower()] or near(word, choices)
        return found[0] if len(found) == 1 else None  # of several nobody knows which
    number = re.match(r"\d+", word) if row["type"] in ("int", "size") and not isinstance(value, list) else None
    return number[0] if number else None


def _rows(case: Case) -> Iterator[tuple[str, str, Any, Map]]:
    """(instance, flag as it is written, value, what the engine knows of it); what another rule tells is left to it."""
    known = case.wanted.get("flags") or {}
    for at, instance in enumerate(case.instances):
        for name, value in sorted(args_of(instance).items()):
            owned = {name, known.get(name, {}).get("flag")} & set(OWNED_FLAGS)
            automatic = name.endswith("-backend") and str(value).lower() == "auto"
            if name in known and SPELLING.fullmatch(name) and not owned and not automatic and name not in SIZES:
                yield label(instance, at), name, value, known[name]


@rule(
    "flag-unknown",
    BLOCK,
    "The engine ends at a flag that it does not know, after all of its imports and again at every restart.",
    source=PARSER,
    needs_host=False,
)
def flag_unknown(case: Case) -> Iterator[Hit]:
    """Every flag under args is one of the patched engine."""
    engine = case.wanted.get("engine")
    for thing, name, _, row in _rows(case):
        if "near" in row:
            fix = f"Write {row['near'][0]} instead of {name}" if row["near"] else f"Remove {name}"
            if row.get("opposite"):
                fix = f"Remove {name}, which is so unless {row['opposite']} is given,"
            yield Hit(
                thing,
                f"{name} under args",
                f"a flag of {engine}{meant(row['near'])}",
                f"{fix} under args in {case.where} or in gpu_units_defaults; `less engines/{engine}/flags.yml` lists them all.",
            )


@rule(
    "flag-value",
    BLOCK,
    "The engine's parser refuses the value, so the engine ends after all of its imports and again at every restart.",
    source=PARSER,
    needs_host=False,
)
def flag_value(case: Case) -> Iterator[Hit]:
    """Every value under args is one that the flag takes."""
    for thing, name, value, row in _rows(case):
        if "near" not in row and (wanted := expected(row, value)):
            guess = None if row["type"] == "command-line" else meant_value(row, value)
            way = f"Write {name}: {guess}" if guess else f"Remove {name}, or give it such a value,"
            if not guess and (some := [one for one in map(str, row.get("choices") or []) if str(value).lower() in one]):
                way = f"Write {name}: with that of {', '.join(some)} which is meant,"
            yield Hit(
                thing,
                f"{name}: {shown(value, name)}",
                wanted,
                f"{way} under args in {case.where} or in gpu_units_defaults.",
            )


@rule(
    "flag-short",
    WARN,
    "The engine takes an abbreviation for the flag, the profile and the rules here do not: both may end up in one config.",
    source="https://docs.python.org/3/library/argparse.html#allow-abbrev",
    needs_host=False,
)
def flag_short(case: Case) -> Iterator[Hit]:
    """Flags are written out."""
    for thing, name, _, row in _rows(case):
        if row.get("short"):
            yield Hit(
                thing,
                f"{name} under args",
                f"{row['flag']}, written out",
                f"Write {row['flag']} instead of {name} under args in {case.where} or in gpu_units_defaults.",
            )
