# SPDX-License-Identifier: Apache-2.0
"""What an earlier run left on the host: records of deployments, the live release, its cache, states of the instances' units."""

from __future__ import annotations

import json
import pwd
import stat
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts, run

RECORDS = "/var/lib/sglang-fleet/deployments"
ROLES = ("current", "previous", "older", "swap")  # those that a run reads
UNITS = "sglang@*"


def gather_deployed(root: str, records: str = RECORDS) -> Facts:
    """`{broken: [{path, error}], gone, cache: [{path, uid, owner}], masked: {unit: state}, failed: [units]}`.

    gone: the release that `current` leads to and that is not there. cache: the live release's folder of compiled kernels, and
    those just in it.
    """
    current = Path(root) / "current"
    listed = run(["systemctl", "list-unit-files", "--no-legend", "--no-pager", "--plain", UNITS])[1]
    failed = run(["systemctl", "list-units", "--all", "--state=failed", "--no-legend", "--no-pager", "--plain", UNITS])[
        1
    ]
    return {
        "broken": broken_records(Path(records)),
        "gone": current.readlink().name if current.is_symlink() and not current.exists() else None,
        "cache": owners(current.resolve() / "cache"),
        "masked": parse_masked(listed),
        "failed": [line.split()[0] for line in failed.splitlines() if line.strip()],
    }


def broken_records(folder: Path) -> list[Facts]:
    """Records that every later run stops at: no JSON, cut or empty."""
    found = []
    for path in (folder / f"{role}.json" for role in ROLES):
        try:
            if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                found.append({"path": str(path), "error": "no map"})
        except ValueError as error:
            found.append({"path": str(path), "error": str(error)})
        except OSError:
            continue  # not there; another user than root may not read it, which a rule of its own tells
    return found


def parse_masked(text: str) -> dict[str, str]:
    """Masked units of `systemctl list-unit-files`, for good or until the next boot."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) > 1 and row[1].startswith("masked")}


def owners(cache: Path) -> list[Facts]:
    """Owner of a folder and of the folders in it; empty where it is not there or not ours to see."""
    found = []
    try:
        for path in (cache, *sorted(cache.iterdir())):
            about = path.lstat()
            if stat.S_ISDIR(about.st_mode):
                found.append({"path": str(path), "uid": about.st_uid, "owner": _name(about.st_uid)})
    except OSError:
        return []
    return found


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
