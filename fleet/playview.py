# SPDX-License-Identifier: Apache-2.0
"""A running playbook as a person follows it: the tasks that changed something or took a while, by ansible-playbook's output."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from fleet.console import Progress

BANNER = re.compile(r"^(?:TASK|RUNNING HANDLER) \[(.*)\] \*+$")
RESULT = re.compile(r"^(ok|changed|failed|fatal|skipping|included): \[")
# What a PlayView reads: banners have to come when a task starts, also of a task that will be skipped.
PLAY_ENV = {"ANSIBLE_DISPLAY_SKIPPED_HOSTS": "1", "ANSIBLE_NOCOLOR": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class PlayView:
    """Follows the default output of ansible-playbook and shows the tasks that changed something or took a second.

    `roles` sums the seconds by role, `tasks` counts tasks that ran, `changed` those that changed something.
    """

    progress: Progress
    tasks: int = 0
    changed: int = 0
    roles: dict[str, float] = field(default_factory=dict)
    _task: str = ""
    _since: float = field(default_factory=time.monotonic)
    _results: set[str] = field(default_factory=set)

    def line(self, line: str) -> None:
        if (banner := BANNER.match(line)) or line.startswith(("PLAY RECAP", "PLAY [")):
            self._close()
            self._task = banner.group(1) if banner else ""
        elif result := RESULT.match(line):
            self._results.add(result.group(1))

    def wait(self) -> None:
        self.progress.still(self._task or "ansible starts", self._since)

    def _close(self) -> None:
        seconds = time.monotonic() - self._since
        role, _, name = self._task.rpartition(" : ")
        if self._task and self._results - {"skipping", "included"}:
            self.tasks += 1
            self.changed += "changed" in self._results
            self.roles[role or "site"] = round(self.roles.get(role or "site", 0.0) + seconds, 2)
            notable = self._results & {"changed", "failed", "fatal"}
            if notable or seconds >= 1:
                word = "FAILED" if notable & {"failed", "fatal"} else "changed" if notable else "ok"
                self.progress.say(f"  {seconds:6.1f} s  {word:7}  {role + ': ' if role else ''}{name}")
        self._since, self._results = time.monotonic(), set()
