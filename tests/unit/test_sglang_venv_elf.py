# SPDX-License-Identifier: Apache-2.0
"""The ELF reader and the audit, on small libraries that gcc makes here and on bytes written by hand."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils import sglang_venv_elf as elf
from elftools.elf.elffile import ELFFile

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")


def make_library(path: Path, *, needs: tuple[str, ...] = (), code: str = "int here(void) { return 1; }\n") -> Path:
    """A shared library that asks for `needs`, none of which has to exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stubs = path.parent / ".stubs"
    stubs.mkdir(exist_ok=True)
    (stubs / "empty.c").write_text("")
    for name in needs:
        command = ["gcc", "-shared", f"-Wl,-soname,{name}", "-o", stubs / name, stubs / "empty.c"]
        subprocess.run(command, check=True)
    (stubs / "code.c").write_text(code)
    libraries = [f"-l:{name}" for name in needs]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-o",
        path,
        stubs / "code.c",
        f"-L{stubs}",
        "-Wl,--no-as-needed",
        *libraries,
    ]
    subprocess.run([*command, f"-Wl,-soname,{path.name}"], check=True)
    shutil.rmtree(stubs)
    return path


def write_elf(path: Path, *, machine: int = 62, kind: int = 2) -> Path:
    """A hand-made ELF of 3 segments at most: one load, one dynamic (if kind is 2) that needs libcudart.so.12."""
    strings = b"\0libcudart.so.12\0libme.so\0"
    dynamic = struct.pack("<10Q", 1, 1, 14, 17, 5, 0x1000 + 400, 10, len(strings), 0, 0)
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x1000, 0x1000, 400 + len(strings), 400 + len(strings), 4096)
    second = struct.pack("<IIQQQQQQ", kind, 6, 200, 0x1000 + 200, 0, len(dynamic), len(dynamic), 8)
    body = head + load + second
    body += bytes(200 - len(body)) + dynamic
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body + bytes(400 - len(body)) + strings)
    return path


def record(site: Path, package: str, *files: str) -> None:
    """Says that a package brought these files."""
    folder = site / f"{package.replace('-', '_').replace('==', '-')}.dist-info"
    folder.mkdir(parents=True)
    (folder / "RECORD").write_text("".join(f"{name},sha256=x,1\n" for name in files))


def test_a_hand_made_file_is_read_to_the_letter(tmp_path: Path) -> None:
    found = elf.read(write_elf(tmp_path / "a.so"))
    assert found == elf.Elf(needed=("libcudart.so.12",), soname="libme.so")


def test_device_code_static_files_and_text_are_none_of_it(tmp_path: Path) -> None:
    assert elf.read(write_elf(tmp_path / "kernel.bin", machine=190)) is None
    assert elf.read(write_elf(tmp_path / "static", kind=4)) is None
    (tmp_path / "text").write_text("#!/bin/sh\n" + "x" * 100)
    assert elf.read(tmp_path / "text") is None
    (tmp_path / "empty").touch()
    assert elf.read(tmp_path / "empty") is None


@pytest.mark.parametrize("length", [70, 150, 230, 390, 402])
def test_a_cut_file_is_named(tmp_path: Path, length: int) -> None:
    path = write_elf(tmp_path / "cut.so")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(elf.ElfError, match=r"cut\.so"):
        elf.read(path)


@needs_gcc
def test_the_reader_agrees_with_pyelftools(tmp_path: Path) -> None:
    code = "extern int cuInit(int); extern int other(void); int f(void) { return cuInit(0) + other(); } int g = 3;\n"
    path = make_library(tmp_path / "libx.so", needs=("libcudart.so.13", "libcuda.so.1"), code=code)
    with path.open("rb") as handle:
        reference = ELFFile(handle)
        tags = [tag for tag in reference.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
        symbols = reference.get_section_by_name(".dynsym").iter_symbols()
        undefined = [s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF" and s.name]
        needed = [tag.needed for tag in tags]
    found = elf.read(path, symbols=True)
    assert found
    assert list(found.needed) == needed
    assert list(found.undefined) == undefined
    assert {"cuInit", "other"} <= set(found.undefined)


@needs_gcc
def test_symbols_are_counted_by_the_hash_table_where_section_headers_are_stripped(tmp_path: Path) -> None:
    code = "extern int cuInit(int); extern int other(void); int f(void) { return cuInit(0) + other(); }\n"
    path = make_library(tmp_path / "libx.so", code=code)
    whole = elf.read(path, symbols=True)
    data = bytearray(path.read_bytes())
    data[40:48], data[58:62] = bytes(8), bytes(4)
    path.write_bytes(data)
    assert elf.read(path, symbols=True) == whole
    assert whole
    assert "cuInit" in whole.undefined


@needs_gcc
def test_a_library_that_defines_nothing_still_lists_what_it_lacks(tmp_path: Path) -> None:
    code = "extern int cuInit(int); static int (*keep)(int) __attribute__((used)) = cuInit;\n"
    found = elf.read(make_library(tmp_path / "liby.so", code=code), symbols=True)
    assert found
    assert "cuInit" in found.undefined


def test_one_cuda_is_fine(tmp_path: Path) -> None:
    write_elf(tmp_path / "pkg" / "a.so")
    record(tmp_path, "pkg==1.0", "pkg/a.so")
    verdict = elf.audit(tmp_path, 12)
    assert (verdict.files, verdict.majors, verdict.faults) == (1, {"12": 1}, [])


def test_another_cuda_names_file_package_and_library(tmp_path: Path) -> None:
    write_elf(tmp_path / "pkg" / "a.so")
    record(tmp_path, "other==2", "pkg/b.so")
    record(tmp_path, "my-pkg==1.0", "pkg/a.so")
    assert elf.audit(tmp_path, 13).faults == [
        "pkg/a.so of my-pkg==1.0 asks for libcudart.so.12 (CUDA 12), the release is CUDA 13"
    ]


def test_a_file_of_no_package_is_judged_too(tmp_path: Path) -> None:
    write_elf(tmp_path / "stray.so")
    assert "stray.so of no package" in elf.audit(tmp_path, 13).faults[0]


def test_an_exception_lets_its_file_pass_and_nothing_else(tmp_path: Path) -> None:
    write_elf(tmp_path / "pkg" / "hook_cu12.so")
    write_elf(tmp_path / "pkg" / "main.so")
    record(tmp_path, "pkg==1.0", "pkg/hook_cu12.so", "pkg/main.so")
    verdict = elf.audit(tmp_path, 13, [{"file": "pkg/hook_*.so", "package": "pkg", "major": 12}])
    assert len(verdict.excepted) == 1
    assert [fault.split()[0] for fault in verdict.faults] == ["pkg/main.so"]
    assert verdict.unused == []


@pytest.mark.parametrize(
    "row",
    [
        {"file": "pkg/a.so", "package": "another", "major": 12},
        {"file": "pkg/a.so", "package": "pkg", "major": 11},
        {"file": "pkg/b.so", "package": "pkg", "major": 12},
    ],
)
def test_an_exception_that_does_not_fit_is_no_exception(tmp_path: Path, row: dict[str, object]) -> None:
    write_elf(tmp_path / "pkg" / "a.so")
    record(tmp_path, "pkg==1.0", "pkg/a.so")
    verdict = elf.audit(tmp_path, 13, [row])
    assert len(verdict.faults) == 1
    assert verdict.unused == [row["file"]]


@needs_gcc
@pytest.mark.parametrize(
    ("library", "major"),
    [
        ("libcudart.so.12", "12"),
        ("libcudart.faf08d9a.so.13", "13"),
        ("libcublasLt.so.13", "13"),
        ("libnvrtc.so.11.2", "11"),
        ("libnvJitLink.so.13", "13"),
        ("libcudnn.so.9", None),
        ("libcufft.so.12", None),
        ("libcuda.so.1", None),
        ("libnccl.so.2", None),
    ],
)
def test_only_libraries_named_by_the_cuda_major_count(tmp_path: Path, library: str, major: str | None) -> None:
    make_library(tmp_path / "a.so", needs=(library,))
    assert elf.audit(tmp_path, 13).majors == ({major: 1} if major else {})


def test_a_brought_along_runtime_counts_by_its_own_name(tmp_path: Path) -> None:
    path = write_elf(tmp_path / "libcudart.so.12")
    path.write_bytes(path.read_bytes().replace(b"libcudart.so.12\0libme.so", b"libc.so.6\0\0\0\0\0\0\0libme.so"))
    assert elf.audit(tmp_path, 13).majors == {}
    path.write_bytes(path.read_bytes().replace(b"libme.so", b"libnvrtc.so.12"))
    assert elf.audit(tmp_path, 13).majors == {"12": 1}


@needs_gcc
def test_the_stub_answers_no_device_to_every_function_asked_for(tmp_path: Path) -> None:
    code = "extern int cuInit(int); extern int cudaMalloc(void); int f(void) { return cuInit(0) + cudaMalloc(); }\n"
    user = make_library(tmp_path / "user.so", needs=("libcuda.so.1",), code=code)
    names = elf.undefined_cuda([user])
    assert names == ["cuInit"]
    source = tmp_path / "stub.c"
    source.write_text(elf.stub_source([*names, "cuDeviceGet"]))
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", tmp_path / "stub.so", source]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(tmp_path / "stub.so"))
    assert library.cuInit(0) == library.cuDeviceGet() == 100
