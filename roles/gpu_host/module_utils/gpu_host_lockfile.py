# SPDX-License-Identifier: Apache-2.0
"""The run lock's words: one line that `systemctl status` shows to people and the next run reads. Pure."""

from __future__ import annotations

from typing import Any

UNIT = "sglang-fleet-run.service"
TITLE = "sglang-fleet run"
FIELDS = ("controller", "user", "machine", "pid", "started", "since")


def describe(holder: dict[str, Any], since: str) -> str:
    """`sglang-fleet run user=.. machine=.. pid=.. since=.. started=.. controller=..`; values hold no space."""
    values = {**holder, "since": since}
    return " ".join([TITLE, *(f"{name}={''.join(str(values[name]).split()) or '-'}" for name in FIELDS)])


def parse(description: str) -> dict[str, Any]:
    """What `describe` wrote; a line of another origin gives a holder that equals nobody."""
    found = dict.fromkeys(FIELDS, "unknown")
    for word in description.split():
        name, equals, value = word.partition("=")
        if equals and name in found:
            found[name] = value
    return found


def same_run(holder: dict[str, Any], me: dict[str, Any]) -> bool:
    """Whether the holder is this very process of this controller."""
    return all(
        "".join(str(holder.get(name)).split()) == "".join(str(me.get(name)).split())
        for name in ("controller", "pid", "started")
    )
