# SPDX-License-Identifier: Apache-2.0
"""Whether a deployment's files lie as they were deployed, and why a journal has no line of an engine.

Python 3.11+, standard library only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from ansible.module_utils import smoke_judge as judge

FEW = 4  # files that a message names


def judge_files(files: Mapping[str, str], root: Path) -> judge.Check:
    """Compare the files of a deployment, {path below root: text}, with what lies there. No text is shown: it may be secret."""
    wrong = [f"{root / path}: {word}" for path, text in sorted(files.items()) if (word := _state(root / path, text))]
    more = f" and {len(wrong) - FEW} more" if len(wrong) > FEW else ""
    return judge.check(
        "deployment.files",
        bool(files) and not wrong,
        ", ".join(wrong[:FEW]) + more if wrong else f"{len(files)} files as deployed",
        "units and instances as they were deployed" if files else "files in the record of the deployment",
        "what was changed by hand serves now or from the next start on, and no check of the inventory knows of it",
        "`{site} --tags activate` writes the deployed files again and restarts what they concern; `{site} --check --diff` "
        "shows the difference first; what is to stay belongs into the inventory, under `args` or `env` of the instance",
    )


def _state(path: Path, text: str) -> str | None:
    """What is wrong with a file; None if it holds just this text."""
    try:
        return None if path.read_bytes() == text.encode() else "changed"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return str(error.strerror)


def storage(settings: str) -> tuple[str, str] | None:
    """(value, file) of the Storage= that holds, of `systemd-analyze cat-config systemd/journald.conf`; None where none is set."""
    found, file = None, ""
    for line in settings.splitlines():
        if head := re.fullmatch(r"# (/\S+)", line):
            file = head[1]
        elif row := re.fullmatch(r"\s*Storage\s*=\s*(\w+)\s*", line):
            found = (row[1].lower(), file)
    return found


def judge_silent(settings: str, name: str) -> judge.Check:
    """The one check on a journal without a line: nothing else can be read from it. settings: as `storage` takes them."""
    kept = storage(settings)
    if kept and kept[0] == "none":
        observed = f"0 lines of this invocation; Storage=none in {kept[1]} keeps none of any unit"
        edit = rf"sed -i 's/^\s*Storage\s*=.*/Storage=auto/' {shlex.quote(kept[1])}"
        again = "systemctl restart systemd-journald.service && systemctl restart {unit}"
        fix = f"`{edit} && {again}` on the host, then smoke again"
    else:
        observed = "0 lines of this invocation"
        fix = (
            "on the host `systemctl cat {unit}` shows a drop-in that sends output elsewhere (StandardOutput=, LogNamespace=), "
            "and `journalctl -b -n 1` whether anything is kept; mend that, `systemctl restart {unit}`, then smoke again"
        )
    return judge.check(
        "journal.whole",
        False,
        observed,
        "the whole journal of this invocation",
        "no line can be looked for, so checks of lines were left out: they would say nothing of the engine",
        fix,
        name,
    )
