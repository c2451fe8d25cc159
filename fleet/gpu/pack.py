# SPDX-License-Identifier: Apache-2.0
"""Packs the patched engine, pairs and JIT caches for a GPU machine without a network. Behind bin/gpu-pack.

    bin/gpu-pack --out DIR [--engine sglang-0.5.11] [--python 3.12] [--piece-mib 58] [--pair PAIR]... [--host] [--caches FILE]

DIR/load-1, load-2, .. hold the big pieces, each folder small enough for one transfer; DIR/series holds the patch series
as it is now and is rebuilt in seconds. Every folder has unpack.py and the list of all pieces with their sha256:

    python3 DIR/load-1/unpack.py /tmp/engine      # there, once per load; it says what is still missing
    tests/gpu/run.sh DIR/series                   # there, whenever the series changed: unpack and run the tests

Wheels come from the engine's lock, checked by hash; which of them travel and which files of them is said with reasons in
fleet/gpu/<engine>.yml. Archives are kept in .cache/gpu-pack by digest of their inputs. Needs xz.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import yaml
from ansible.module_utils import ddtree_patches_series as core
from ansible.module_utils.sglang_venv_lock import LockError, Pin, parse, select

from fleet import engine as engines
from fleet import lock, series
from fleet.engine import Engine, EngineError
from fleet.gpu import host
from fleet.lab.shell import LabError

FORMAT = 1
MIB = 1 << 20
CACHE = engines.ROOT / ".cache" / "gpu-pack"
HERE = Path(__file__).resolve().parent
KEPT = 3  # archives of one name in the cache, those used last
LEVEL = 6  # of xz: 62 MiB of engine in a minute of two cores; 1 makes 75 MiB in a quarter of the time


class PackError(RuntimeError):
    """Something cannot be packed; the message says what and the next step."""


@dataclass(frozen=True)
class Piece:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """A packed tree: `digest` is of its inputs, `place` its folder below the one that is unpacked into."""

    name: str
    place: str
    digest: str
    files: int
    bytes: int
    pieces: tuple[Piece, ...]

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name}-{self.digest[:16]}"


def digest_of(what: Any) -> str:
    """sha256 of any JSON-able value."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """sha256 of a file in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# --- what travels


def rules(engine: str) -> dict[str, Any]:
    """fleet/gpu/<engine>.yml. PackError if there is none."""
    path = HERE / f"{engine}.yml"
    if not path.is_file():
        raise PackError(
            f"{path} is missing: it says what of {engine} a GPU machine needs; begin with a copy of another's"
        )
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def travelling(pins: Iterable[Pin], rule: Mapping[str, Any]) -> list[Pin]:
    """The pins that the machine does not have and the engine needs."""
    patterns = rule["provided"]["packages"].split()
    patterns += [pattern for row in rule["unused"] for pattern in row["packages"].split()]
    pins = list(pins)
    idle = [p for p in patterns if not any(fnmatch.fnmatchcase(pin.name, p) for pin in pins)]
    if idle:
        raise PackError(f"the lock has no package {', '.join(idle)}; correct fleet/gpu/ENGINE.yml")
    return [pin for pin in pins if not any(fnmatch.fnmatchcase(pin.name, p) for p in patterns)]


def platform_of(rule: Mapping[str, Any]) -> str:
    """The GPU machine as uv names it."""
    return f"{rule['machine']['machine']}-manylinux_2_{rule['machine']['glibc']}"


def unpack_wheels(wanted: str, python: str, platform: str, folder: Path) -> None:
    """The wheels of a requirements text with hashes, unpacked into `folder` by uv, which refuses a wrong hash."""
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as name:
        listed = Path(name) / "wanted.txt"
        listed.write_text(wanted)
        command = [
            lock.find_uv(), "pip", "install", "-q", "--require-hashes", "--no-deps", "--only-binary", ":all:",
            "--target", folder, "--python-version", python, "--python-platform", platform, "-r", listed,
        ]  # fmt: skip
        done = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"uv could not unpack these wheels:\n{done.stderr.strip()[-3000:]}")


def install(pins: Iterable[Pin], python: str, rule: Mapping[str, Any], site: Path) -> None:
    """The wheels of these pins, unpacked into `site`."""
    wanted = "".join(f"{pin} {' '.join(f'--hash=sha256:{digest}' for digest in pin.hashes)}\n" for pin in pins)
    unpack_wheels(wanted, python, platform_of(rule), site)


def prune(site: Path, rule: Mapping[str, Any]) -> None:
    """Deletes what stays behind and writes the stand-ins. PackError on a pattern that matches nothing."""
    patterns = [pattern for row in rule["drop"] for pattern in row["files"]]
    for path in sorted(site.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif any(fnmatch.fnmatchcase(path.relative_to(site).as_posix(), pattern) for pattern in patterns):
            path.unlink()
    for name, text in rule["stand_ins"].items():
        if (site / name).exists():
            raise PackError(f"{name} of fleet/gpu/ENGINE.yml would replace a real file")
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


# --- archives


class _Split(io.RawIOBase):
    """A sink that cuts what is written into pieces of at most `limit` bytes."""

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        self.folder, self.name, self.limit = folder, name, limit
        self.pieces: list[Piece] = []
        self.handle: IO[bytes] | None = None
        self.room = 0

    def writable(self) -> bool:
        return True

    def _finish(self) -> None:
        if self.handle:
            path = Path(self.handle.name)
            self.handle.close()
            self.pieces.append(Piece(path.name, path.stat().st_size, sha256(path)))
            self.handle = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        while view:
            if not self.room:
                self._finish()
                self.handle = (self.folder / f"{self.name}.tar.xz.{len(self.pieces):02d}").open("wb")
                self.room = self.limit
            part, view = view[: self.room], view[self.room :]
            cast(IO[bytes], self.handle).write(part)
            self.room -= len(part)
        return len(data)

    def close(self) -> None:
        self._finish()
        super().close()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    return info


def _compress(tar: IO[bytes], sink: _Split) -> None:
    """The spooled tar through xz on all cores; from a file, so that xz cuts the same blocks each time."""
    if not shutil.which("xz"):
        raise PackError("xz not found; install xz-utils")
    tar.seek(0)
    with subprocess.Popen(["xz", "-T0", f"-{LEVEL}", "-c"], stdin=tar, stdout=subprocess.PIPE) as xz:
        while chunk := cast(IO[bytes], xz.stdout).read(MIB):
            sink.write(chunk)
    sink.close()
    if xz.returncode:
        raise PackError(f"xz ended with {xz.returncode}")


def archive(
    name: str, place: str, digest: str, limit: int, fill: Callable[[tarfile.TarFile, Path], tuple[int, int]]
) -> Archive:
    """The archive of these inputs, out of the cache or made now by `fill(tar, scratch folder)` -> (files, bytes)."""
    folder = CACHE / f"{name}-{digest[:16]}"
    listed = folder / "archive.json"
    if listed.is_file():
        data = json.loads(listed.read_text())
        made = Archive(**(data | {"pieces": tuple(Piece(**piece) for piece in data["pieces"])}))
        if made.digest == digest and all((folder / piece.name).is_file() for piece in made.pieces):
            os.utime(folder)
            return made
        shutil.rmtree(folder)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=CACHE) as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        with tempfile.TemporaryFile(dir=scratch) as spool:
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.GNU_FORMAT) as tar:
                files, size = fill(tar, Path(scratch))
            sink = _Split(out, name, limit)
            _compress(spool, sink)
        made = Archive(name, place, digest, files, size, tuple(sink.pieces))
        (out / "archive.json").write_text(json.dumps(asdict(made), indent=1))
        out.rename(folder)
    same = [old for old in CACHE.glob(f"{name}-*") if len(old.name) == len(folder.name)]
    for old in sorted(same, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old)
    return made


@contextmanager
def own_cache() -> Iterator[None]:
    """The cache for this process alone; what a killed one left unfinished goes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for left in CACHE.glob(".*-*"):
            shutil.rmtree(left)
        yield


def add_tree(tar: tarfile.TarFile, root: Path) -> tuple[int, int]:
    """All files below a folder, like beside like; (files, bytes)."""
    files = sorted((f for f in root.rglob("*") if f.is_file()), key=lambda f: (f.suffix, f.as_posix()))
    for file in files:
        tar.add(file, file.relative_to(root).as_posix(), filter=_plain)
    return len(files), sum(f.stat().st_size for f in files)


def engine_archive(engine: Engine, python: str, limit: int) -> Archive:
    """The unpatched engine, pruned."""
    rule = rules(engine.name)
    machine = rule["machine"]["machine"]
    if python not in engine.pythons or python not in rule["machine"]["python"]:
        raise PackError(
            f"Python {python}: the lock of {engine.name} is for {', '.join(engine.pythons)}, "
            f"fleet/gpu/{engine.name}.yml for {', '.join(rule['machine']['python'])}"
        )
    if wrong := lock.faults(engine):
        raise LockError(f"{engine.name}: {wrong[0]}")
    pins = travelling(select(parse(engine.lock.read_text()), python, machine), rule)
    digest = digest_of(
        [
            FORMAT,
            LEVEL,
            limit,
            python,
            rule["machine"],
            rule["drop"],
            rule["stand_ins"],
            [[str(p), p.hashes] for p in pins],
        ]
    )

    def fill(tar: tarfile.TarFile, scratch: Path) -> tuple[int, int]:
        site = scratch / "site"
        install(pins, python, rule, site)
        prune(site, rule)
        return add_tree(tar, site)

    return archive("engine", "site", digest, limit, fill)


def sglang_wheel(engine: Engine, python: str) -> Path:
    """The engine's own unpatched package: unpacked once by uv and kept, 30 MB, for its files that the series changes."""
    name, version = series.split_engine(engine.name)
    site = CACHE / f"package-{engine.name}-{python}"
    if core.installed_version(site, name) != version:
        shutil.rmtree(site, ignore_errors=True)
        pins = [p for p in parse(engine.lock.read_text()) if p.name == name]
        CACHE.mkdir(parents=True, exist_ok=True)
        install(pins, python, rules(engine.name), site)
    return site


def series_archive(engine: Engine, python: str, limit: int) -> Archive:
    """What the series makes of the engine: the changed and the added files, proven against the manifest's hashes."""
    found = series.load(engine.name)
    site = sglang_wheel(engine, python)
    new = core.dry_run(found, lambda path: core.read(site, path))

    def fill(tar: tarfile.TarFile, scratch: Path) -> tuple[int, int]:
        del scratch
        for path, data in sorted(new.items()):
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        return len(new), sum(map(len, new.values()))

    return archive("series", "site", digest_of([FORMAT, found.digest]), limit, fill)


def pair_archive(folder: Path, limit: int) -> Archive:
    """A (target, drafter) pair with its prompts, unpacked to pairs/<name of the folder>."""
    for part in ("target/config.json", "draft/config.json"):
        if not (folder / part).is_file():
            raise PackError(f"{folder}: expected a pair, there is no {part}")
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    size = sum(f.stat().st_size for f in files)
    if size > 512 * MIB:
        raise PackError(
            f"{folder} holds {size / MIB:.0f} MiB; carry the small pair and run models/inflate_pair.py there"
        )
    digest = digest_of([FORMAT, LEVEL, limit, [[f.relative_to(folder).as_posix(), sha256(f)] for f in files]])
    name = folder.resolve().name
    return archive(f"pair-{name}", f"pairs/{name}", digest, limit, lambda tar, _: add_tree(tar, folder))


def caches_archive(file: Path, limit: int) -> Archive:
    """JIT caches that tests/gpu/run.sh --keep-caches brought back from an earlier machine."""
    if not tarfile.is_tarfile(file):
        raise PackError(f"{file} is no tar archive of caches")

    def fill(tar: tarfile.TarFile, scratch: Path) -> tuple[int, int]:
        with tarfile.open(file) as old:
            old.extractall(scratch / "caches", filter="data")
        return add_tree(tar, scratch / "caches")

    return archive("caches", "caches", digest_of([FORMAT, LEVEL, limit, sha256(file)]), limit, fill)


def control_archive(engine: Engine, python: str, limit: int) -> Archive:
    """What plays and doors import on the machine itself."""
    wanted = host.subset(host.CONTROL.read_text(), host.closure(python))
    platform = platform_of(rules(engine.name))

    def fill(tar: tarfile.TarFile, scratch: Path) -> tuple[int, int]:
        unpack_wheels(wanted, python, platform, scratch / "control")
        shutil.rmtree(scratch / "control/bin", ignore_errors=True)  # programs that begin with this machine's Python
        return add_tree(tar, scratch / "control")

    return archive("control", "control", digest_of([FORMAT, LEVEL, limit, python, platform, wanted]), limit, fill)


def systemd_archive(limit: int) -> Archive:
    """systemd with its libraries, for a machine that has none; kept as one tar, whose links unpack.py would not make."""
    root = host.base_root()

    def fill(tar: tarfile.TarFile, scratch: Path) -> tuple[int, int]:
        with tarfile.open(scratch / "systemd.tar", "w") as inner:
            count, size = host.add_systemd(inner, root)
        tar.add(scratch / "systemd.tar", "systemd.tar", filter=_plain)
        return count, size

    return archive("systemd", "systemd", digest_of([FORMAT, LEVEL, limit, root.name]), limit, fill)


# --- the folders that are carried


def loads(pieces: Iterable[Piece], limit: int) -> list[list[Piece]]:
    """Pieces in as few groups of at most `limit` bytes as first-fit finds."""
    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (-p.size, p.name)):
        for group in groups:
            if sum(p.size for p in group) + piece.size <= limit:
                group.append(piece)
                break
        else:
            groups.append([piece])
    return groups


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def lay_out(out: Path, archives: list[Archive], manifest: Mapping[str, Any], limit: int) -> list[Path]:
    """Writes DIR/load-N and DIR/series anew, whole or not at all; returns the folders in the order they are carried."""
    places = {piece.name: made.folder / piece.name for made in archives for piece in made.pieces}
    big = [piece for made in archives if made.name != "series" for piece in made.pieces]
    groups = {f"load-{i}": group for i, group in enumerate(loads(big, limit), 1)}
    groups["series"] = [piece for made in archives if made.name == "series" for piece in made.pieces]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gpu-pack-", dir=out) as scratch:
        for name, group in groups.items():
            folder = Path(scratch) / name
            folder.mkdir()
            for piece in group:
                _link(places[piece.name], folder / piece.name)
            shutil.copyfile(HERE / "unpack.py", folder / "unpack.py")
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
            (folder / "SHA256SUMS").write_text("".join(f"{piece.sha256}  {piece.name}\n" for piece in group))
        for old in [*out.glob("load-[0-9]*"), out / "series"]:
            shutil.rmtree(old, ignore_errors=True)
        for name in groups:
            (Path(scratch) / name).rename(out / name)
    return [out / name for name in groups]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bin/gpu-pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default=lock.DEFAULT)
    parser.add_argument("--python", default="3.12", help="Python minor of the GPU machine (default: 3.12)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--piece-mib", type=int, default=58, help="largest piece and largest load (default: 58)")
    parser.add_argument("--pair", type=Path, action="append", default=[], help="a pair's folder, repeated")
    parser.add_argument("--host", action="store_true", help="systemd and Ansible too, to run the plays there")
    parser.add_argument("--caches", type=Path, help="JIT caches of an earlier machine (tests/gpu/run.sh --keep-caches)")
    return parser


def pack(args: argparse.Namespace) -> list[Path]:
    """Makes or finds every archive, then lays out the folders."""
    if args.piece_mib < 1:
        raise PackError(f"--piece-mib {args.piece_mib}: expected at least 1")
    limit = args.piece_mib * MIB
    engine = engines.load(args.engine)
    twice = {p.resolve().name for p in args.pair if sum(q.resolve().name == p.resolve().name for q in args.pair) > 1}
    if twice:
        raise PackError(f"two pairs are called {', '.join(twice)}; name their folders apart")
    jobs: list[Callable[[], Archive]] = [lambda: engine_archive(engine, args.python, limit)]
    jobs += [lambda folder=folder: pair_archive(folder, limit) for folder in args.pair]  # type: ignore[misc]
    if args.host:
        jobs += [lambda: control_archive(engine, args.python, limit), lambda: systemd_archive(limit)]
    jobs += [lambda: caches_archive(args.caches, limit)] if args.caches else []
    jobs += [lambda: series_archive(engine, args.python, limit)]
    made = []
    for job in jobs:
        began = time.monotonic()
        made.append(job())
        sizes = ", ".join(f"{piece.size / MIB:.1f}" for piece in made[-1].pieces)
        print(
            f"{made[-1].name}: {made[-1].files} files, {made[-1].bytes / MIB:.1f} MiB, "
            f"packed {sizes} MiB, {time.monotonic() - began:.1f} s",
            flush=True,
        )
    manifest = {
        "engine": engine.name,
        "python": args.python,
        "series": series.load(engine.name).digest,
        "env": rules(engine.name)["machine"]["env"],
        "archives": [{k: v for k, v in asdict(a).items() if k != "bytes"} for a in made],
    }
    return lay_out(args.out, made, manifest, limit)


def main(argv: list[str] | None = None) -> int:
    """The command line; see the top of this file."""
    args = _parser().parse_args(argv)
    try:
        with own_cache():
            folders = pack(args)
    except (PackError, EngineError, LabError, LockError, lock.ToolError, series.SeriesError) as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        return 1
    print("carry, one call each:")
    for folder in folders:
        size = sum(f.stat().st_size for f in folder.iterdir())
        print(f"  {folder}  {size / MIB:.1f} MiB   python3 {folder}/unpack.py /tmp/engine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
