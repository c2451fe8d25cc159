#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpacks what bin/gpu-pack made, on a machine with nothing but Python and tar archives. Travels with every load.

    python3 unpack.py FOLDER         # pieces beside this file, then whatever is complete, into FOLDER

Loads may come one after the other: pieces are kept in FOLDER/pieces until their archive is complete. A newer series
replaces an older one, files that only the older one touched go back to the engine's own. stdout: `export` lines to
evaluate; stderr: what was done. Exit codes: 0 ready, 1 a damaged piece, 3 pieces of the engine or of the series are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

NEEDED = ("engine", "series")


def say(text: str) -> None:
    print(f"unpack: {text}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def unpacked(archive: dict[str, Any], have: Path) -> bool:
    """Whether this very archive lies in its place already."""
    mark = have / str(archive["name"])
    return mark.exists() and mark.read_text() == str(archive["digest"])


def take(manifest: dict[str, Any], here: Path, store: Path, have: Path) -> None:
    """Copies the pieces that came with this load and are still needed. Raises SystemExit on a damaged one."""
    for archive in manifest["archives"]:
        if unpacked(archive, have):
            continue
        for piece in archive["pieces"]:
            file = here / piece["name"]
            if not file.is_file():
                continue
            if sha256(file) != piece["sha256"]:
                say(f"{file} is damaged (sha256 differs from manifest.json); carry it again")
                raise SystemExit(1)
            part = store / f".{piece['name']}.part"
            shutil.copyfile(file, part)
            part.replace(store / piece["name"])


@contextmanager
def members(archive: dict[str, Any], store: Path) -> Iterator[tarfile.TarFile]:
    """The archive's files as a stream, joined from its pieces and decompressed on all cores where xz is installed."""
    paths = [store / piece["name"] for piece in archive["pieces"]]
    if shutil.which("xz"):
        with (
            subprocess.Popen(["cat", *paths], stdout=subprocess.PIPE) as cat,
            subprocess.Popen(["xz", "-dc", "-T0"], stdin=cat.stdout, stdout=subprocess.PIPE) as xz,
        ):
            out = cast(IO[bytes], xz.stdout)
            with tarfile.open(fileobj=out, mode="r|") as stream:
                yield stream
            out.read()
        if xz.returncode:
            raise SystemExit(f"unpack: xz ended with {xz.returncode} on {archive['name']}")
        return
    with tempfile.TemporaryFile(dir=store) as joined:
        for path in paths:
            with path.open("rb") as source:
                shutil.copyfileobj(source, joined)
        joined.seek(0)
        with tarfile.open(fileobj=joined, mode="r:xz") as stream:
            yield stream


def apply_series(stream: tarfile.TarFile, site: Path, kept: Path) -> int:
    """Writes the series' files over the engine's, new files by rename; `kept` holds the engine's own of what they replace."""
    listed = kept / "files.json"
    old: dict[str, bool] = json.loads(listed.read_text()) if listed.exists() else {}
    new: dict[str, bytes] = {}
    for member in stream:
        if source := stream.extractfile(member):
            new[member.name] = source.read()
    for name, had in old.items():
        if name not in new:
            if had:
                shutil.copyfile(kept / "own" / name, site / name)
            else:
                (site / name).unlink(missing_ok=True)
    for name, data in new.items():
        target, own = site / name, kept / "own" / name
        if name not in old:
            old[name] = target.exists()
            if old[name]:
                own.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, own)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.new")
        part.write_bytes(data)
        part.replace(target)
        shutil.rmtree(target.parent / "__pycache__", ignore_errors=True)
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text(json.dumps(old))
    listed.write_text(json.dumps({name: old[name] for name in new}))
    return len(new)


def unpack(archive: dict[str, Any], folder: Path, store: Path) -> None:
    """One complete archive to its place below `folder`."""
    began = time.monotonic()
    with members(archive, store) as stream:
        if archive["name"] == "series":
            count = apply_series(stream, folder / "site", folder / "series")
            say(f"series: {count} files, {time.monotonic() - began:.1f} s")
            return
        fresh, place = folder / f".{archive['name']}.new", folder / archive["place"]
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        stream.extractall(fresh, filter="data")
    if archive["name"] == "engine":
        shutil.rmtree(folder / "series", ignore_errors=True)
        (folder / "have" / "series").unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh.rename(place)
    say(f"{archive['name']}: {archive['files']} files, {time.monotonic() - began:.1f} s")


def environment(manifest: dict[str, Any], folder: Path) -> dict[str, str]:
    """What an engine from `folder` needs in its environment; every JIT cache lies in folder/caches."""
    caches = folder / "caches"
    path = os.pathsep.join(p for p in (str(folder / "site"), os.environ.get("PYTHONPATH", "")) if p)
    return {
        "GPU_HOME": str(folder),
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(caches / "torch-extensions"),
        "TVM_FFI_CACHE_DIR": str(caches / "tvm-ffi"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        "SGLANG_CACHE_DIR": str(caches / "sglang"),
        "SERIES_DIGEST": manifest["series"],
        **manifest["env"],
    }


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    here, folder = Path(__file__).resolve().parent, Path(sys.argv[1]).resolve()
    manifest = json.loads((here / "manifest.json").read_text())
    store, have = folder / "pieces", folder / "have"
    store.mkdir(parents=True, exist_ok=True)
    have.mkdir(exist_ok=True)
    take(manifest, here, store, have)
    lacking = 0
    for archive in manifest["archives"]:  # the engine first, the series last
        if unpacked(archive, have):
            continue
        kept = {p["name"] for p in archive["pieces"] if (f := store / p["name"]).exists() and sha256(f) == p["sha256"]}
        missing = [p["name"] for p in archive["pieces"] if p["name"] not in kept]
        if archive["name"] == "series" and not (have / "engine").exists():
            say("series: waits for the engine")
            lacking += 1
        elif missing:
            say(f"{archive['name']}: not complete, missing {', '.join(missing)}")
            lacking += archive["name"] in NEEDED
        else:
            unpack(archive, folder, store)
            (have / archive["name"]).write_text(archive["digest"])
            for piece in archive["pieces"]:
                (store / piece["name"]).unlink()
    (folder / "caches").mkdir(exist_ok=True)
    for name, value in environment(manifest, folder).items():
        print(f"export {name}={shlex.quote(value)}")
    return 3 if lacking else 0


if __name__ == "__main__":
    raise SystemExit(main())
