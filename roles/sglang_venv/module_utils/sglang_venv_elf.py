# SPDX-License-Identifier: Apache-2.0
"""Reads the dynamic section of ELF files and judges which CUDA major they ask for. Standard library only.

A venv with two CUDA majors loads two runtimes into one process, and fails late and far from its cause. So every native file
of a release is asked for the libraries it needs, and a second major is a fault that names the file and its package.
"""

from __future__ import annotations

import fnmatch
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DRIVER", "ElfError", "Owners", "audit", "names", "native_files", "read", "stub_source", "undefined_cuda"]

# Libraries whose soname carries the CUDA major. Not among them: cudnn, nccl, cufft and others, which count for themselves.
_MAJOR = re.compile(
    r"lib(?:cudart|cublas|cublasLt|nvblas|nvrtc|cupti|nvJitLink)(?:[-.][0-9a-f]{6,})?\.so\.(?P<major>\d+)(?:\.|$)"
)
# Never host code, and by far the most files of a venv; anything else is asked for its first bytes.
_TEXT = """
py pyi pyc pyx pxd h hpp hxx cuh cu cc cpp c inl cubin json txt md rst toml yaml yml cfg ini csv html js css svg png
jpg proto typed in cmake jinja ptx bc fatbin gz npz npy whl zip a
"""
_NOT_NATIVE = frozenset(f".{suffix}" for suffix in _TEXT.split())
DRIVER = "libcuda.so.1"
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME, _DT_HASH, _DT_GNU_HASH = (
    0, 1, 5, 6, 10, 11, 14, 4, 0x6FFFFEF5,
)  # fmt: skip
_EM_CUDA = 190
_SHT_DYNSYM = 11


class ElfError(ValueError):
    """A file that begins like ELF and can't be read as one; the message names it."""


@dataclass(frozen=True)
class Elf:
    """What a native file asks for: needed sonames, its own soname; if asked for, names of its undefined dynamic symbols and
    the whole table of its dynamic names."""

    needed: tuple[str, ...] = ()
    soname: str = ""
    undefined: tuple[str, ...] = ()
    table: bytes = b""


def names(path: Path) -> set[bytes]:
    """Every name in the dynamic string table of an ELF file, defined or not; empty for any other file."""
    elf = read(path, table=True)
    return set(elf.table.split(b"\0")) if elf else set()


def read(path: Path, symbols: bool = False, table: bool = False) -> Elf | None:
    """The dynamic section of a 64-bit little-endian ELF file; None for any other file, device code and static files.

    With `symbols`, the undefined dynamic symbols too, with `table` the string table. ElfError names a damaged file.
    """
    with path.open("rb") as handle:
        head = handle.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return None
        machine, offset = struct.unpack_from("<H", head, 18)[0], struct.unpack_from("<Q", head, 32)[0]
        size, count = struct.unpack_from("<HH", head, 54)
        if machine == _EM_CUDA or not count:
            return None
        try:
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _dynamic(data, offset, size, count, symbols, table)
        except (struct.error, ValueError, IndexError) as error:
            raise ElfError(f"{path}: a damaged ELF file ({error})") from None


def _dynamic(data: mmap.mmap, offset: int, size: int, count: int, symbols: bool, table: bool) -> Elf | None:
    segments = [struct.unpack_from("<IIQQQQQQ", data, offset + index * size) for index in range(count)]
    loads = [(vaddr, start, length) for kind, _, start, vaddr, _, length, _, _ in segments if kind == 1]
    dynamic = next(((start, length) for kind, _, start, _, _, length, _, _ in segments if kind == 2), None)
    if dynamic is None:
        return None

    def place(address: int) -> int:
        for vaddr, start, length in loads:
            if vaddr <= address < vaddr + length:
                return int(address - vaddr + start)
        raise ValueError(f"address {address:#x} is in no segment")

    tags: dict[int, int] = {}
    needed: list[int] = []
    for position in range(dynamic[0], dynamic[0] + dynamic[1], 16):
        tag, value = struct.unpack_from("<QQ", data, position)
        if tag == _DT_NULL:
            break
        if tag == _DT_NEEDED:
            needed.append(value)
        else:
            tags[tag] = value
    if _DT_STRTAB not in tags:
        return Elf()
    strings = place(tags[_DT_STRTAB])

    def text(index: int) -> str:
        start = strings + index
        end = data.find(b"\0", start)
        if not strings <= start < len(data) or end < 0:
            raise ValueError(f"string {index} is outside the file")
        return data[start:end].decode("utf-8", "replace")

    undefined: tuple[str, ...] = ()
    if symbols and _DT_SYMTAB in tags:
        undefined = tuple(_undefined(data, tags, place, text))
    own = text(tags[_DT_SONAME]) if _DT_SONAME in tags else ""
    whole = data[strings : strings + tags.get(_DT_STRSZ, 0)] if table else b""
    return Elf(tuple(map(text, needed)), own, undefined, whole)


def _undefined(data: mmap.mmap, tags: Mapping[int, int], place: Any, text: Any) -> Iterator[str]:
    table, entry = place(tags[_DT_SYMTAB]), tags.get(_DT_SYMENT, 24)
    for index in range(1, _symbol_count(data, tags, place)):
        name, _, _, section = struct.unpack_from("<IBBH", data, table + index * entry)
        if name and section == 0:
            yield text(name)


def _symbol_count(data: mmap.mmap, tags: Mapping[int, int], place: Any) -> int:
    """Number of dynamic symbols: by the section headers, or where those were stripped by the hash tables."""
    offset = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    for index in range(count if offset else 0):
        _, kind, _, address, _, length, _, _, _, entry = struct.unpack_from("<IIQQQQIIQQ", data, offset + index * size)
        if kind == _SHT_DYNSYM and address == tags[_DT_SYMTAB] and entry:
            return int(length // entry)
    if _DT_HASH in tags:
        return int(struct.unpack_from("<II", data, place(tags[_DT_HASH]))[1])
    if _DT_GNU_HASH not in tags:
        return 0
    start = place(tags[_DT_GNU_HASH])
    buckets, first, bloom, _ = struct.unpack_from("<IIII", data, start)
    bucket_at = start + 16 + bloom * 8
    last = max(struct.unpack_from(f"<{buckets}I", data, bucket_at), default=0)
    if last < first:
        return int(first)  # nothing is defined: every symbol lies before the first hashed one
    chain = bucket_at + buckets * 4
    while not struct.unpack_from("<I", data, chain + (last - first) * 4)[0] & 1:
        last += 1
    return int(last) + 1


def native_files(root: Path) -> Iterator[Path]:
    """Regular files below `root` that may be native code, by name only; links to files count, links to folders do not."""
    for folder, _, names in os.walk(root):
        for name in names:
            if os.path.splitext(name)[1] not in _NOT_NATIVE:  # noqa: PTH122  # a path object per file of a venv takes a second
                yield Path(folder, name)


class Owners:
    """Which package a file of a site-packages folder belongs to, by the RECORD files; those are read at the first question."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.records: list[tuple[str, str]] = []

    def of(self, relative: str) -> str:
        """`name==version`, or 'no package' for a file that no package has brought. `relative` is a path below the folder."""
        if not self.records:
            self.records = [
                (path.parent.name.removesuffix(".dist-info"), f"\n{path.read_text(encoding='utf-8')}")
                for path in self.site.glob("*.dist-info/RECORD")
            ]
        for owner, text in self.records:
            if f"\n{relative}," in text or f'\n"{relative}",' in text:
                name, _, version = owner.partition("-")
                return f"{name.replace('_', '-').lower()}=={version}"
        return "no package"


@dataclass
class Audit:
    """The verdict over a venv: native files, files per CUDA major, faults in plain words, what the exceptions let pass,
    the globs of exceptions that let nothing pass (some wheels differ by machine), the files that need the CUDA driver."""

    files: int = 0
    majors: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    excepted: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    driver_users: list[Path] = field(default_factory=list, repr=False)

    def data(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        return {key: value for key, value in asdict(self).items() if key != "driver_users"}


def audit(site: Path, major: int, exceptions: Iterable[Mapping[str, Any]] = ()) -> Audit:
    """Judges every native file below a site-packages folder.

    `exceptions` are rows `{file: glob relative to site, package: name, major: int}`; all three have to hold.
    """
    rows = list(exceptions)
    used = [False] * len(rows)
    package = Owners(site)
    verdict = Audit()
    for path in sorted(native_files(site)):
        elf = read(path)
        if elf is None:
            continue
        verdict.files += 1
        if DRIVER in elf.needed:
            verdict.driver_users.append(path)
        asked = {m["major"]: name for name in (*elf.needed, elf.soname) if (m := _MAJOR.match(name))}
        for number, library in sorted(asked.items()):
            verdict.majors[number] = verdict.majors.get(number, 0) + 1
            if int(number) == major:
                continue
            relative = path.relative_to(site).as_posix()
            owner = package.of(relative)
            said = f"{relative} of {owner} asks for {library} (CUDA {number}), the release is CUDA {major}"
            for index, row in enumerate(rows):
                if (
                    fnmatch.fnmatchcase(relative, row["file"])
                    and int(row["major"]) == int(number)
                    and owner.partition("==")[0] == row["package"]
                ):
                    used[index] = True
                    verdict.excepted.append(said)
                    break
            else:
                verdict.faults.append(said)
    verdict.unused = [row["file"] for row, seen in zip(rows, used, strict=True) if not seen]
    return verdict


def undefined_cuda(files: Iterable[Path]) -> list[str]:
    """Names of the CUDA driver functions (cu + capital letter) that the files need from libcuda.so.1, sorted.

    Give it files that name libcuda.so.1 as needed: other files may define such names themselves, or load them late.
    """
    names: set[str] = set()
    for path in files:
        elf = read(path, symbols=True)
        if elf:
            names |= {name for name in elf.undefined if re.match(r"cu[A-Z]\w*$", name)}
    return sorted(names)


def stub_source(symbols: Iterable[str]) -> str:
    """C source of a libcuda.so.1 in which every function answers 100 (CUDA_ERROR_NO_DEVICE)."""
    return "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(set(symbols)))
