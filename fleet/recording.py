# SPDX-License-Identifier: Apache-2.0
"""A recorded machine whose facts stand in for a host's own: the file that gpu_host_facts_file names, read and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXPECTED = (
    "expected what `python3 roles/gpu_host/module_utils/gpu_host_gather.py --record WORDS` prints on a GPU machine"
)
NO_FIT = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # how a rule meets facts of another form
# What a recording holds at least: the type of each key, here and in every GPU. Older ones lack what was added later.
HOLDS: dict[str, tuple[type, ...]] = {"recorded": (dict,), "gpu": (dict,), "nvcc": (dict, type(None))}
IN_GPU: dict[str, tuple[type, ...]] = {"gpus": (list,), "processes": (list,), "driver": (str, type(None))}
IN_GPUS: dict[str, tuple[type, ...]] = {
    "index": (int,),
    "pci": (str,),
    "uuid": (str,),
    "name": (str,),
    "compute_cap": (str,),
    "memory_total_mib": (int,),
}


class RecordingError(ValueError):
    """The file is no recording; the text names it, the place in it and what was expected."""


def read(file: str) -> dict[str, Any]:
    """The recorded facts; empty without a file. Raises RecordingError."""
    if not file:
        return {}
    try:
        facts = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordingError(f"gpu_host_facts_file {file} cannot be read: {error.strerror}; {EXPECTED}") from error
    except json.JSONDecodeError as error:
        raise RecordingError(
            f"gpu_host_facts_file {file}:{error.lineno} is no JSON: {error.msg}; {EXPECTED}"
        ) from error
    except UnicodeDecodeError as error:
        raise RecordingError(f"gpu_host_facts_file {file} is no text; {EXPECTED}") from error
    _check(file, "", facts, HOLDS)
    _check(file, "gpu", facts["gpu"], IN_GPU)
    for at, gpu in enumerate(facts["gpu"]["gpus"]):
        _check(file, f"gpu.gpus[{at}]", gpu, IN_GPUS)
    return dict(facts)


def _check(file: str, where: str, facts: Any, holds: dict[str, tuple[type, ...]]) -> None:
    if not isinstance(facts, dict):
        raise RecordingError(f"gpu_host_facts_file {file}: {where or 'it'} is {_called(facts)}, not a map; {EXPECTED}")
    for key, types in holds.items():
        name = f"{where}.{key}" if where else key
        if key not in facts:
            raise RecordingError(f"gpu_host_facts_file {file}: {name} is missing; {EXPECTED}")
        if not isinstance(facts[key], types) or isinstance(facts[key], bool):
            raise RecordingError(f"gpu_host_facts_file {file}: {name} is {_called(facts[key])}; {EXPECTED}")


def _called(value: Any) -> str:
    return {dict: "a map", list: "a list", type(None): "null"}.get(type(value), f"{value!r:.40}")


def no_fit(file: str, error: Exception) -> RecordingError:
    """What is said where a rule met something in the recording that no gatherer writes."""
    told = "has not the form of a recording, or the check is at fault (report it then)"
    return RecordingError(f"gpu_host_facts_file {file} {told}: {error}; {EXPECTED}")
