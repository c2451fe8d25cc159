# SPDX-License-Identifier: Apache-2.0
"""What engines/<engine>/ says, read and checked."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent


class EngineError(ValueError):
    """A file of an engine that is missing or wrong; the message names it."""


@dataclass(frozen=True)
class Engine:
    """One engine's inputs. `folder` holds lock.txt and files.json beside them."""

    name: str
    folder: Path
    pythons: tuple[str, ...]
    machines: tuple[str, ...]
    exclude_newer: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    prereleases: tuple[str, ...]
    data: dict[str, Any]

    @property
    def lock(self) -> Path:
        return self.folder / "lock.txt"

    @property
    def files(self) -> Path:
        return self.folder / "files.json"

    def input_digest(self) -> str:
        """sha256 over everything that can change the resolution, and nothing else (no reasons, no dates of rows)."""
        inputs = {
            "pythons": self.pythons,
            "machines": self.machines,
            "exclude_newer": self.exclude_newer,
            "requirements": sorted(self.requirements),
            "constraints": sorted(self.constraints),
            "prereleases": sorted(self.prereleases),
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _rows(path: Path, data: dict[str, Any], section: str, key: str) -> tuple[str, ...]:
    rows = data.get(section) or []
    for row in rows:
        if missing := {key, "reason", "source", "date"} - set(row):
            raise EngineError(f"{path}: a row of {section} lacks {', '.join(sorted(missing))}: {row}")
    return tuple(str(row[key]) for row in rows)


def names(engines: Path = ROOT / "engines") -> list[str]:
    """The engines of this repository."""
    return sorted(path.parent.name for path in engines.glob("*/engine.yml"))


def load(name: str, engines: Path = ROOT / "engines") -> Engine:
    """One engine by name; EngineError names what is missing or wrong."""
    folder = engines / name
    try:
        data = yaml.safe_load((folder / "engine.yml").read_text())
        overrides = yaml.safe_load((folder / "overrides.yml").read_text()) or {}
        lines = (folder / "requirements.in").read_text().splitlines()
        lock = data["lock"]
        return Engine(
            name=name,
            folder=folder,
            pythons=tuple(map(str, lock["python"])),
            machines=tuple(lock["machines"]),
            exclude_newer=str(lock["exclude_newer"]),
            requirements=tuple(line.strip() for line in lines if line.strip() and not line.startswith("#")),
            constraints=_rows(folder / "overrides.yml", overrides, "constraints", "requirement"),
            prereleases=_rows(folder / "overrides.yml", overrides, "prereleases", "package"),
            data=data,
        )
    except FileNotFoundError as error:
        known = ", ".join(names(engines)) or "none"
        raise EngineError(f"engine {name!r}: {error.filename} is missing; engines here: {known}") from None
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise EngineError(f"engine {name!r}: {folder}: {error!r}") from None
