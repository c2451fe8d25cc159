# SPDX-License-Identifier: Apache-2.0
"""Arms: what is compared. The table is arms.yml, the flags of a mode are those that hosts are served with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("arms.yml")
MODES = ROOT / "roles/gpu_units/files/modes.yml"
DEFAULTS = {"budget": "15", "topk": "8", "spine": "0"}  # as an instance that names none
SPEC = re.compile(r"(?P<kind>[a-z][a-z-]*)(?::(?P<number>[0-9]+|auto))?(?:@(?P<label>[\w.-]+))?")

Flags = dict[str, list[str]]  # flag without dashes: its words, none for a switch


class Misuse(Exception):
    """The call cannot be meant like this; exit code 2."""


@dataclass(frozen=True)
class Arm:
    """One way to serve. `name` is as it was asked for; `mode` is the product's mode, None where it has none."""

    name: str
    kind: str
    mode: str | None
    flags: Flags

    @property
    def speculates(self) -> bool:
        return "speculative-algorithm" in self.flags

    @property
    def drafts(self) -> bool:
        """Whether a drafter model is used: such an engine refuses log-probabilities (0.5.11)."""
        return self.flags.get("speculative-algorithm") in (["DFLASH"], ["DDTREE"])

    @property
    def slug(self) -> str:
        """The name as part of a file name; `@` stays, or `dflash@8` would take the log of `dflash:8`."""
        return re.sub(r"[^\w.@-]", "-", self.name)


def parse_flags(words: Sequence[str]) -> Flags:
    """`--a 1 --b --c=2` as {a: [1], b: [], c: [2]}; a flag given twice counts as given last. Raises Misuse."""
    flags: Flags = {}
    name = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
        elif name is None:
            raise Misuse(f"{word!r} comes before any --flag in {shlex.join(words)!r}")
        else:
            flags[name].append(word)
    return flags


def split(text: str) -> list[str]:
    """Words of a shell's line. Raises Misuse."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Misuse(f"flags {text!r}: {error}") from error


def words(flags: Mapping[str, Sequence[str]]) -> list[str]:
    """The command line of flags."""
    return [word for name, values in flags.items() for word in (f"--{name}", *values)]


def flags_of(args: Mapping[str, Any]) -> Flags:
    """Flags of data: true is a switch, false and null leave a flag out."""
    chosen = {name: value for name, value in args.items() if value is not None and value is not False}
    return {name: [] if value is True else [str(value)] for name, value in chosen.items()}


def table() -> dict[str, dict[str, Any]]:
    """The rows of arms.yml."""
    return dict(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def arm(text: str, draft: Path | None) -> Arm:
    """An arm from `KIND[:NUMBER][@LABEL][=FLAGS]`, for example `ddtree:22@deep=--speculative-ddtree-topk 4`.

    Raises Misuse for an unknown kind, a number that the kind has no use for, or a drafter that is missing.
    """
    spec, _, extra = text.partition("=")
    rows, match = table(), SPEC.fullmatch(spec.strip())
    if match is None or match["kind"] not in rows:
        raise Misuse(f"unknown arm {spec.strip()!r}; known: {', '.join(rows)}, each with :NUMBER where it has one")
    row = rows[match["kind"]]
    number, takes = match["number"], row.get("number")
    if number and not takes:
        raise Misuse(f"arm {match['kind']} has no number, got {spec.strip()!r}")
    if number == "auto" and takes and takes.get("key") != "budget":
        raise Misuse(f"arm {match['kind']} takes a number, not auto")
    values = dict(DEFAULTS)
    if number and takes and "key" in takes:
        values[takes["key"]] = number
    mode = row.get("mode")
    args: dict[str, Any] = {}
    if mode is not None:
        recipe = yaml.safe_load(MODES.read_text(encoding="utf-8"))[mode]
        if "draft_model_path" in recipe["needs"]:
            if draft is None:
                raise Misuse(f"arm {spec.strip()!r} needs a drafter; name the pair with --pair or it with --draft")
            values["draft_model_path"] = str(draft)
        args |= {
            flag: value.format_map(values) if isinstance(value, str) else value
            for flag, value in recipe["args"].items()
        }
    args |= row.get("args") or {}
    if number and takes and "flag" in takes:
        args[takes["flag"]] = number
    return Arm(spec.strip(), match["kind"], mode, flags_of(args) | parse_flags(split(extra)))


def arms(names: Iterable[str], draft: Path | None) -> list[Arm]:
    """Several arms; raises Misuse if two have one name or there is none."""
    found = [arm(name, draft) for name in names]
    if not found:
        raise Misuse("no arm to measure")
    seen: set[str] = set()
    for one in found:
        if one.name in seen:
            raise Misuse(f"two arms are named {one.name}; tell them apart with a label, as in {one.name}@second=FLAGS")
        seen.add(one.name)
    return found
