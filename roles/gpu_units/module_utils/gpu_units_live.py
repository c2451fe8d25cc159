# SPDX-License-Identifier: Apache-2.0
"""What a host serves now, for `bin/mode`, which sends this file and its neighbour over SSH and runs `main`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.gpu_units_host import Systemd

MARK = "UNITS-LIVE "
CURRENT = Path("/var/lib/sglang-fleet/deployments/current.json")


def live(current: Path, systemd: Any) -> dict[str, Any]:
    """{release, instances: {name: {mode, unit, state, result}}} of the live deployment; no instance where nothing is deployed.

    {broken: why, path} where the record of the deployment cannot be used.
    """
    try:
        deployment = json.loads(current.read_text(encoding="utf-8"))
        units = [instance["unit"] for instance in deployment["instances"]]
    except FileNotFoundError:
        return {"release": None, "instances": {}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"broken": repr(error), "path": str(current)}
    states = systemd.show(units)
    return {
        "release": deployment["release"],
        "instances": {
            instance["name"]: {
                "mode": instance["mode"],
                "unit": instance["unit"],
                "state": states[instance["unit"]]["ActiveState"],
                "result": states[instance["unit"]]["Result"],
            }
            for instance in deployment["instances"]
        },
    }


def main(_payload: Mapping[str, Any]) -> None:
    """Print it after a mark, as the login shell may print lines of its own."""
    print(MARK + json.dumps(live(CURRENT, Systemd())))
