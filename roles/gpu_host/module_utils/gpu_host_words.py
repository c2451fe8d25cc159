# SPDX-License-Identifier: Apache-2.0
"""Words of messages: values of the inventory as a person wrote them, never a secret, and the name that was probably meant."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

SECRET_FLAGS = ("api-key", "admin-api-key", "ssl-keyfile-password")
HIDDEN = "(hidden)"
LONGEST = 120
_SECRET = re.compile(r"(token|secrets?|passwords?|api[-_]?keys?|credentials?)$", re.I)
_SECRET_IN_TEXT = re.compile(
    r"((?:token|secret|password|api[-_]?key|credential)\w*['\"]?\s*[=:\s]\s*)\S.*", re.I | re.S
)


def shown(value: Any, name: Any = "") -> str:
    """A value as JSON, which YAML reads as well; shortened, and without what `name` or a name inside of it calls secret."""
    plain = _plain(value, str(name))
    if isinstance(plain, str):
        text = HIDDEN if plain == HIDDEN else repr(plain)
    else:
        text = "nothing" if plain is None else json.dumps(plain, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _plain(value: Any, name: str) -> Any:
    """Ansible's own kinds of map, list and text as plain ones."""
    if name in SECRET_FLAGS or _SECRET.search(name):
        return HIDDEN
    if isinstance(value, dict):
        return {str(key): _plain(one, str(key).lstrip("-")) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        before = ["", *(str(one).lstrip("-") for one in value)]  # [--api-key, hush] is a flag and its value
        return [_plain(one, flag if " " not in flag else "") for flag, one in zip(before, value, strict=False)]
    if isinstance(value, str):
        return _SECRET_IN_TEXT.sub(rf"\1{HIDDEN}", str(value))
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def kind(value: Any) -> str:
    """What a value is, in the words of YAML."""
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "a text"), (list, "a list"), (dict, "a map"))
    return next((word for types, word in kinds if isinstance(value, types)), "nothing")


def near(word: str, known: Iterable[str], count: int = 3, least: float = 0.75) -> list[str]:
    """Known names that look like a word, the most similar first; one that alone has it between its dashes comes before them."""
    names = [name for name in sorted(known) if not opposite(word, name)]
    whole = [name for name in names if word and word in re.split("[-_]", name)]
    return list(
        dict.fromkeys([*(whole if len(whole) == 1 else []), *difflib.get_close_matches(word, names, count, least)])
    )[:count]


def opposite(word: str, name: str) -> bool:
    """Whether a name says the contrary of a word: disable-x of enable-x."""
    here, there = (flag.replace("_", "-").partition("-") for flag in (word.lower(), name.lower()))
    return here[2] == there[2] and {here[0], there[0]} == {"enable", "disable"}


def meant(names: Iterable[str]) -> str:
    """`; did you mean A or B?` for an expectation, nothing without names."""
    found = " or ".join(names)
    return f"; did you mean {found}?" if found else ""
