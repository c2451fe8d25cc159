# SPDX-License-Identifier: Apache-2.0
"""Variables under `env` that an engine does not know, against its list in engines/<engine>/envs.yml."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.gpu_host_words import near

REPO = Path(__file__).resolve().parent.parent
OURS = "SGLANG_FLEET_"  # of the plugins that profiles bring along
NAME = re.compile(r"- (\w+)$", re.M)


@functools.cache
def known(engine: str) -> frozenset[str]:
    """Variables of an engine; none for one without a list."""
    path = REPO / "engines" / engine / "envs.yml"
    listed = re.fullmatch(r"[\w.-]+", engine) and path.is_file()
    return frozenset(NAME.findall(path.read_text(encoding="utf-8"))) if listed else frozenset()


def unknown(engine: Any, instances: Any, defaults: Any) -> dict[str, list[str]]:
    """SGLANG_ and SGL_ variables that instances give and the engine does not know, each with those that may be meant.

    What begins with SGL_ the engine writes over the same name with SGLANG_, which is the one to write then.
    """
    names, layers = known(str(engine)), [*(instances if isinstance(instances, list) else []), defaults]
    given = [layer["env"] for layer in layers if isinstance(layer, dict) and isinstance(layer.get("env"), dict)]
    found = {}
    for name in {str(name) for one in given for name in one} - names if names else ():
        own = f"SGLANG_{name.removeprefix('SGL_')}" if name.startswith("SGL_") else name
        if own.startswith("SGLANG_") and not own.startswith(OURS):
            found[name] = [own] if own in names else near(own, names, least=0.85)
    return found
