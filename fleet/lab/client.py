# SPDX-License-Identifier: Apache-2.0
"""Labs from Python, for tests and tools: every change goes through bin/lab, so the door itself is used."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fleet.lab.labs import Lab as _Lab
from fleet.lab.settings import lab_names, settings
from fleet.lab.shell import LabError

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LabHost:
    """One host. `inventory` is the lab's; the host's name there is `name`."""

    lab: LabClient
    name: str
    address: str

    @property
    def inventory(self) -> Path:
        return self.lab.inventory

    def ssh(
        self, command: str, *, check: bool = True, stdin: str | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command on the host by SSH. LabError with both outputs if `check` and it fails."""
        words = [*self.lab.ssh_words(self.name), command]
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise LabError(f"{self.name}: {command!r} exited {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def info(self) -> dict[str, Any]:
        """The host's row of `bin/lab list --json`."""
        return next(row for row in self.lab.rows() if row["name"] == self.name)

    def crash(self) -> None:
        self.lab.call("crash", self.name)

    def stop(self) -> None:
        self.lab.call("stop", self.name)

    def start(self) -> None:
        self.lab.call("start", self.name)

    def partition(self) -> None:
        self.lab.call("partition", self.name)

    def heal(self) -> None:
        self.lab.call("heal", self.name)

    def cut(self) -> None:
        self.lab.call("cut", self.name)

    def uncut(self) -> None:
        self.lab.call("uncut", self.name)

    def remove(self) -> None:
        """Take the host away with its disk."""
        self.lab.call("down", self.name)


@dataclass(frozen=True)
class LabClient:
    """A lab by name; nothing is made before `up` or `fresh`."""

    name: str
    repo: Path = REPO

    @cached_property
    def _lab(self) -> _Lab:
        return _Lab(settings(os.environ, self.repo), lab_names(self.name), lambda _line: None)

    @property
    def inventory(self) -> Path:
        return self._lab.settings.inventory(self.name)

    def ssh_words(self, host: str) -> list[str]:
        index = int(host.rpartition("-h")[2])
        return self._lab.ssh_words(self._lab.host(index))

    def call(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """bin/lab with this lab's name. LabError with its output if `check` and it fails."""
        argv = [str(self.repo / "bin/lab"), words[0], "--lab", self.name, *words[1:]]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise LabError(f"bin/lab {' '.join(words)} exited {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def rows(self) -> list[dict[str, Any]]:
        """`bin/lab list --json`."""
        rows: list[dict[str, Any]] = json.loads(self.call("list", "--json").stdout)
        return rows

    def hosts(self) -> list[LabHost]:
        return [LabHost(self, row["name"], row["address"]) for row in self.rows()]

    def up(
        self,
        names: Sequence[str],
        *,
        suite: str | None = None,
        memory: str | None = None,
        disk: str | None = None,
        binds: Sequence[str] = (),
    ) -> list[LabHost]:
        """Boot hosts by name (`h1`) or count (`["4"]`) and return the lab's hosts that this call named."""
        options = [
            w for flag, v in (("--suite", suite), ("--memory", memory), ("--disk", disk)) if v for w in (flag, v)
        ]
        options += [w for b in binds for w in ("--bind", b)]
        self.call("up", *options, *names)
        wanted = {f"{self.name}-{n}" for n in names} if not names[0].isdigit() else None
        every = self.hosts()
        return [h for h in every if h.name in wanted] if wanted else every[: int(names[0])]

    def fresh(self, count: int = 1, **options: Any) -> list[LabHost]:
        """Boot `count` hosts that did not exist before; `options` as for `up`."""
        used = {int(h.name.rpartition("-h")[2]) for h in self.hosts()}
        free = [i for i in range(1, 200) if i not in used][:count]
        return self.up([f"h{i}" for i in free], **options)

    def down(self) -> None:
        self.call("down")
