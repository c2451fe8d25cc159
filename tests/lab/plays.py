# SPDX-License-Identifier: Apache-2.0
"""Running the repository's playbooks against lab hosts, as a person does, and reading what came out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.lab.client import LabHost

REPO = Path(__file__).resolve().parents[2]
RECAP = re.compile(r"^(\S+)\s+: (ok=\d+ .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Play:
    """What a run said: exit status, all its text, and the recap as {host: {ok, changed, failed, ...}}."""

    status: int
    text: str

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        return {
            host: {word.split("=")[0]: int(word.split("=")[1]) for word in counts.split()}
            for host, counts in RECAP.findall(self.text)
        }

    def tasks(self, host: str) -> int:
        """Tasks of a host, skipped ones too: each costs time."""
        counts = self.recap[host]
        return sum(counts[word] for word in ("ok", "failed", "skipped", "rescued"))

    def failure(self, host: str) -> str:
        """The last message with which a host failed, unfolded to one line; empty if it did not. Earlier ones were rescued."""
        pattern = rf"^fatal: \[{re.escape(host)}(?: ->[^\n]*)?\]: FAILED! =>(.*?)^(?=\S)"
        found = re.findall(pattern, self.text + "\nEND", re.M | re.S)
        return " ".join(found[-1].split()) if found else ""


def command(*words: str, hosts: Sequence[LabHost] = (), inventory: Path | None = None, **variables: Any) -> list[str]:
    """ansible-playbook with the lab's inventory, limited to hosts; variables are given as JSON, so that types stay."""
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), *words]
    argv += ["-i", str(inventory or hosts[0].inventory)]
    if inventory is None:
        argv += ["-l", ",".join(host.name for host in hosts)]
    return argv + (["-e", json.dumps(variables)] if variables else [])


def _environment() -> dict[str, str]:
    return {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"), "LC_ALL": "C.UTF-8"}


def releases(host: LabHost) -> list[str]:
    """What lies in the host's folder of releases, hidden builds included; nothing if there is no folder."""
    return host.ssh("test ! -d /opt/sglang-fleet/releases || ls -A /opt/sglang-fleet/releases").stdout.split()


def run_play(
    *words: str, hosts: Sequence[LabHost] = (), inventory: Path | None = None, timeout: float = 900, **variables: Any
) -> Play:
    """Run to the end; the text is kept for the assertion that reads it."""
    argv = command(*words, hosts=hosts, inventory=inventory, **variables)
    done = subprocess.run(
        argv,
        cwd=REPO,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Play(done.returncode, done.stdout)


@contextmanager
def playing(*words: str, hosts: Sequence[LabHost], log: Path, **variables: Any) -> Iterator[subprocess.Popen[str]]:
    """A run in the background, with its text in `log`; it is killed if the test leaves before it ended."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command(*words, hosts=hosts, **variables),
            cwd=REPO,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def fingerprint(host: LabHost) -> str:
    """Everything that the toolkit may change on a host, as one text: paths, kinds, times, targets of links.

    Left out is what is no state: the preflight report, and the caches that a running engine writes.
    """
    find = (
        "find /opt /etc /usr/local /srv /var/lib/sglang-fleet -xdev "
        r"\( -path '/opt/sglang-fleet/releases/*/cache' -o -path /var/lib/sglang-fleet/verdicts -o -name '*.pyc' \) -prune "
        "-o -path /var/lib/sglang-fleet -o -printf '%p %y %m %U %T@ %l\\n' 2>/dev/null | sort; "
        "getent passwd sglang; systemctl list-units --no-legend --plain 'sglang@*'"
    )
    return host.ssh(find).stdout
