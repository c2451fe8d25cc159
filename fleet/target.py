# SPDX-License-Identifier: Apache-2.0
"""A host as the doors see it, and the two ways in which a call of a door ends early."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Misuse(Exception):
    """The call cannot be meant like this; exit code 2. fix: the next step, one sentence."""

    def __init__(self, told: str, fix: str) -> None:
        super().__init__(f"{told.rstrip('.')}. Next: {fix.rstrip('.')}.")


class Unreachable(Exception):
    """No answer from a host: the text says what was seen, `expected` what should be, `fix` what to do, with the exact command.

    fix: empty where the cause is not known; the door then tells how to look further.
    """

    def __init__(self, told: str, fix: str = "", expected: str = "an answer over SSH") -> None:
        super().__init__(told)
        self.fix, self.expected = fix, expected


@dataclass(frozen=True)
class Target:
    """How one host is reached, and its inventory variables, templated.

    ssh_words: options of the inventory for a person's own ssh. where: file of the host's variables. written: all, not templated.
    """

    name: str
    address: str
    local: bool = False
    user: str | None = None
    port: int | None = None
    keys: tuple[str, ...] = ()
    password: str | None = field(default=None, repr=False)
    ssh_config: str = field(default="", repr=False)
    ssh_words: tuple[str, ...] = ()
    timeout: int = 20
    become: str | None = None
    become_password: str | None = field(default=None, repr=False)
    python: str = "/usr/bin/python3"
    where: str = "its host_vars"
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)
    written: Mapping[str, Any] = field(default_factory=dict, repr=False)


def given(inventory: Sequence[str]) -> list[str]:
    """The inventory options of a command that a person is told to call."""
    return [word for one in inventory for word in ("-i", shlex.quote(one))]


def short_path(path: str | Path) -> str:
    """A path as a person here would write it."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


def site_command(host: str, inventory: Sequence[str]) -> str:
    """The command that deploys a host, as a person calls it."""
    return " ".join(["ansible-playbook", "site.yml", "-l", host, *given(inventory)])
