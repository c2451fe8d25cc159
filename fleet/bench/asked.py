# SPDX-License-Identifier: Apache-2.0
"""What a command line names: lists of numbers, numbers by concurrency, a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fleet.bench.arms import Misuse


def numbers(text: str, what: str) -> list[int]:
    """`1,4,8` as numbers from 1 on."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise Misuse(f"{what} {text!r} is no list of numbers like 1,4,8") from None
    if min(found) < 1 or len(set(found)) != len(found):
        raise Misuse(f"{what} {text!r}: numbers from 1 on, each once")
    return found


def by_concurrency(text: str, concurrencies: Sequence[int], what: str) -> dict[int, int]:
    """`10`, or `1:10,8:5`, as {concurrency: number}."""
    try:
        if ":" not in text:
            found = dict.fromkeys(concurrencies, int(text))
        else:
            found = {int(c): int(n) for c, n in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise Misuse(f"{what} {text!r} is neither a number nor like 1:10,8:5") from None
    if set(found) != set(concurrencies) or min(found.values()) < 1:
        raise Misuse(f"{what} {text!r} has to give a number from 1 on for each of {','.join(map(str, concurrencies))}")
    return {concurrency: found[concurrency] for concurrency in concurrencies}


def prompts(path: Path, count: int | None) -> list[dict[str, str]]:
    """Rows with id and prompt. Raises Misuse."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Misuse(f"prompts {path}: {error!r}; it has to be JSON lines with id and prompt") from error
    found: list[dict[str, str]] = []
    known: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = str(row["id"]), row["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise Misuse(f"prompts {path}, line {number}: {error!r}; it has to be JSON with id and prompt") from error
        if not isinstance(text, str) or not text or name in known:
            raise Misuse(f"prompts {path}, line {number}: its prompt has to be a text, and its id {name!r} its own")
        known.add(name)
        found.append({"id": name, "prompt": text})
    if not found:
        raise Misuse(f"prompts {path}: none in it")
    return found[:count]
