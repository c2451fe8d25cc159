# SPDX-License-Identifier: Apache-2.0
"""Flags of an engine as data, read from the engine's own parser, and names of its variables, from its source.

    PYTHON -m fleet.flags > engines/sglang-0.5.11/flags.yml
    PYTHON -m fleet.flags envs > engines/sglang-0.5.11/envs.yml

PYTHON is that of the patched engine, such as /opt/sglang-fleet/current/venv/bin/python. `tests/engine/test_units_launch.py` holds
the file against the parser. Instances give flags in a config file: this says what such a file may hold, not a command line.

A flag is one row, under its longest name: `type` is switch (true or false), int, float, size (an int, or 8k, 1Mi), json, text,
or command-line (refused in a config file). `also` are its other names, `choices` all values it takes; `many`: a list is taken.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HEAD = """\
---
# SPDX-License-Identifier: Apache-2.0
# Flags that the patched engine takes from an instance's config file.
# Written by `PYTHON -m fleet.flags`, see fleet/flags.py.
# Source: the engine's own parser, sglang/srt/server_args.py and server_args_config_parser.py.
"""
HEAD_ENVS = """\
---
# SPDX-License-Identifier: Apache-2.0
# Variables of the environment that the patched engine knows.
# Written by `PYTHON -m fleet.flags envs`, see fleet/flags.py.
# Source: the engine's own code; most are declared in sglang/srt/environ.py.
"""
# A name in quotes, as os.environ takes it, or one that environ.py declares.
VARIABLE = re.compile(r"""["'](SGL(?:ANG)?_[A-Z0-9_]+)["']|^ +(SGL(?:ANG)?_[A-Z0-9_]+) *= *Env""", re.M)
# What a converter of the parser takes, by its name; `_budget` refuses by itself, and is a key of the instance anyway.
TYPES = {
    "int": "int",
    "float": "float",
    "str": "text",
    "nullable_str": "text",
    "_budget": "text",
    "human_readable_int": "size",
    "loads": "json",
    "json_list_type": "json",
}

PLAIN = re.compile(r"[A-Za-z][\w.-]*")
WIDTH = 120
NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")


def row(action: argparse.Action) -> dict[str, Any]:
    """One flag. Raises KeyError for a converter that TYPES does not know."""
    if type(action) is argparse._StoreTrueAction:
        return {"type": "switch"}
    if type(action) is not argparse._StoreAction:
        return {"type": "command-line"}
    kind = "text" if action.type is None else TYPES[getattr(action.type, "__name__", str(action.type))]
    found: dict[str, Any] = {"type": kind}
    if action.choices is not None:
        found["choices"] = sorted(action.choices)  # some of the engine's are sets
    if action.nargs in ("+", "*"):
        found["many"] = True
    return found


def described(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """All flags of a parser but its help, by their longest name."""
    flags = {}
    for action in parser._actions:
        names = sorted((name.removeprefix("--") for name in action.option_strings), key=lambda name: (-len(name), name))
        if not names or isinstance(action, argparse._HelpAction):
            continue
        found = row(action)
        flags[names[0]] = found | ({"also": names[1:]} if len(names) > 1 else {})
    return dict(sorted(flags.items()))


def _word(found: Any) -> str:
    """A value as YAML writes it, plain where that is read back as the same text."""
    if isinstance(found, list):
        return f"[{', '.join(map(_word, found))}]"
    plain = isinstance(found, str) and PLAIN.fullmatch(found) and found.lower() not in NOT_TEXT
    return str(found) if plain else json.dumps(found)


def text(flags: dict[str, dict[str, Any]]) -> str:
    """The file: one line a flag, more for long lists."""
    lines = []
    for name, one in flags.items():
        line = f"{name}: {{{', '.join(f'{key}: {_word(found)}' for key, found in one.items())}}}"
        if len(line) <= WIDTH:
            lines.append(line)
            continue
        lines.append(f"{name}:")
        for key, found in one.items():
            begin = f"  {key}: "
            lines += textwrap.wrap(
                f"{begin}{_word(found)}", WIDTH, subsequent_indent=" " * (len(begin) + 1), break_on_hyphens=False
            )
    return HEAD + "".join(f"{line}\n" for line in lines)


def variables(folders: Iterable[Path]) -> list[str]:
    """Names of variables in the Python files below folders."""
    texts = (path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    return sorted({name for text in texts for pair in VARIABLE.findall(text) for name in pair if name})


def main() -> None:
    """Print a file of the engine that this Python has."""
    if sys.argv[1:] == ["envs"]:
        spec = find_spec("sglang")
        if spec is None:
            raise SystemExit("this Python has no sglang")
        found = variables(map(Path, spec.submodule_search_locations or ()))
        sys.stdout.write(HEAD_ENVS + "".join(f"- {name}\n" for name in found))
        return
    parser = argparse.ArgumentParser()
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    sys.stdout.write(text(described(parser)))


if __name__ == "__main__":
    main()
