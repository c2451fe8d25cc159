# SPDX-License-Identifier: Apache-2.0
"""Weight files of a model folder: which ones an engine loads, and whether each is whole. Only heads and ends are read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts

# Kinds in the order in which an engine looks for them, each with the index that names its files. Source: model_loader/loader.py
# of SGLang 0.5.11, read 2026-12.
KINDS = (
    ("*.safetensors", "model.safetensors.index.json"),
    ("*.bin", "pytorch_model.bin.index.json"),
    ("*.pt", None),
)
# What a training left beside the weights.
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
PART = re.compile(r"(.*?)(\d{5})-of-(\d{5})(.*)")
LFS = b"version https://git-lfs"
# The reader of the format refuses a longer one. Source: https://github.com/huggingface/safetensors, 2026-12.
HEADER_MAX = 100_000_000
ZIP_TAIL = 22 + 65535  # its last record with the longest comment
# What tools call a file that they have not written to its end; rsync puts a dot before and six letters behind the name.
PARTIAL = ("*.incomplete", ".cache/huggingface/download/*.incomplete", "*.aria2", "*.part", "*.partial")
RSYNC_PARTIAL = re.compile(r"\..+\.(safetensors|bin|pt)\.\w{6}")
MANY = 16


def weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """(files that an engine loads, what is missing in words): shards that an index or a neighbour's name promises."""
    kinds = [
        ([path for path in sorted(folder.glob(pattern)) if path.name not in NO_WEIGHTS], index)
        for pattern, index in KINDS
    ]
    found, index = next(((files, index) for files, index in kinds if files), kinds[0])
    shards, missing = _shards(folder / index) if index else ([], [])
    if not found:
        # An index alone still says what was to come.
        return [], missing or shards or ["*.safetensors"]
    if shards:
        # A folder may hold the same weights twice, as shards and in one file.
        found = [path for path in found if path.name in shards]
    elif {path.name for path in found} == {"consolidated.safetensors", "model.safetensors"}:
        found = [path for path in found if path.name == "model.safetensors"]
    promised = shards or _numbered(found)
    missing += [name for name in promised if not os.path.lexists(folder / name)]
    missing += [f"{path.name} (a link to {path.readlink()}, which is not there)" for path in found if not path.exists()]
    return [path for path in found if path.exists()], missing


def _shards(index: Path) -> tuple[list[str], list[str]]:
    """(files that the index names, what is wrong with the index)."""
    if not index.exists():
        return [], []
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())), []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [], [f"{index.name} ({type(error).__name__}: {error})"]


def _numbered(found: list[Path]) -> list[str]:
    """All names of a set of shards that has no index: `model-00002-of-00004.safetensors` tells of three more."""
    names = set()
    for path in found:
        match = PART.fullmatch(path.name)
        if match:
            before, _, count, after = match.groups()
            names |= {f"{before}{number:05d}-of-{count}{after}" for number in range(1, min(int(count), 9999) + 1)}
    return sorted(names)


def leftovers(folder: Path) -> list[str]:
    """Files of downloads and copies that were cut short."""
    found = [path for pattern in PARTIAL for path in folder.glob(pattern)]
    found += [path for path in folder.glob(".*") if RSYNC_PARTIAL.fullmatch(path.name)]
    if folder.parent.name == "snapshots":  # of Hugging Face's cache, whose files lie beside it
        found += folder.parent.parent.glob("blobs/*.incomplete")
    return [str(path) for path in sorted(found)][:MANY]


def faults(files: list[Path]) -> list[Facts]:
    """`{file, size, expected, what, lfs}` of every file that is not whole; sizes in bytes, expected None where it is not known.

    A file that may not be read is no fault here.
    """
    found = []
    for path in files:
        try:
            fault = _fault(path)
        except OSError:
            continue
        if fault:
            found.append({"file": path.name, "expected": None, "lfs": False, **fault})
    return found


def _fault(path: Path) -> Facts | None:
    size = path.stat().st_size
    if not size:
        return {"size": 0, "what": "it is empty"}
    if path.with_name(f"{path.name}.aria2").exists():
        return {"size": size, "what": f"{path.name}.aria2 beside it says that its download was cut short"}
    with path.open("rb") as file:
        head = file.read(512)
        if head.startswith(LFS):
            told = re.search(rb"^size (\d+)$", head, re.MULTILINE)
            expected = int(told.group(1)) if told else None
            return {"size": size, "expected": expected, "lfs": True, "what": "it is a Git LFS pointer, not the file"}
        if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
            return {"size": size, "what": "it is an HTML page, saved under this name"}
        if path.suffix == ".safetensors":
            file.seek(0)
            return _safetensors(file.read(8), size, file.read)
        if path.suffix in (".bin", ".pt"):
            if not head.startswith((b"PK\x03\x04", b"\x80")):
                return {"size": size, "what": "it begins like no file of PyTorch"}
            file.seek(max(0, size - ZIP_TAIL))
            if head.startswith(b"PK") and b"PK\x05\x06" not in file.read():
                return {"size": size, "what": "its end is missing"}
        if path.suffix == ".json":
            file.seek(max(0, size - 512))
            if not head.lstrip().startswith(b"{") or not file.read().rstrip().endswith(b"}"):
                return {"size": size, "what": "it is no whole JSON map"}
    return None


def _safetensors(start: bytes, size: int, read: Callable[[int], bytes]) -> Facts | None:
    """The header, a length in 8 bytes and as much JSON, says where the last tensor ends: there the file has to end."""
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= HEADER_MAX:
        return {"size": size, "what": "it has no header of a safetensors file"}
    if 8 + length > size:
        return {"size": size, "what": f"it ends within its header of {length} bytes"}
    try:
        tensors = json.loads(read(length))
        ends = [int(one["data_offsets"][1]) for name, one in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {"size": size, "what": "it has no header of a safetensors file"}
    expected = 8 + length + max(ends, default=0)
    return None if expected == size else {"size": size, "expected": expected, "what": "its header says another size"}
