# SPDX-License-Identifier: Apache-2.0
"""A served instance as the base of a benchmark: what its files in /etc/sglang-fleet/instances say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from fleet.bench.arms import Flags, Misuse, flags_of

# The arms' own, the harness's own, and secrets.
LEFT_OUT = re.compile(r"speculative-.*|host|port|nccl-port|model-path|api-key|admin-api-key|max-running-requests|max-total-tokens"
                      r"|mem-fraction-static|cuda-graph-max-bs|cuda-graph-bs")  # fmt: skip
OURS = ("FLEET_",)  # of the unit's launcher


@dataclass(frozen=True)
class Served:
    """Models, flags and environment of an instance."""

    target: Path
    draft: Path | None
    flags: Flags
    env: dict[str, str]


def load(path: Path) -> Served:
    """Read NAME.yaml and NAME.env. Raises Misuse."""
    try:
        args = yaml.safe_load(path.read_text(encoding="utf-8"))
        env = environment(path.with_suffix(".env").read_text(encoding="utf-8"))
        target, draft = args["model-path"], args.get("speculative-draft-model-path")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise Misuse(f"instance {path} can't be read: {error!r}; name its YAML, with the .env beside it") from error
    flags = flags_of({name: value for name, value in args.items() if not LEFT_OUT.fullmatch(name)})
    return Served(Path(target), draft and Path(draft), flags, env)


def environment(text: str) -> dict[str, str]:
    """An EnvironmentFile of systemd as the fleet writes it: NAME="value", with \\ before signs that are special there."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if line.startswith("#") or not equals:
            continue
        if len(value) >= 2 and value[0] == value[-1] == '"':
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        if not name.startswith(OURS):
            found[name] = value
    return found
