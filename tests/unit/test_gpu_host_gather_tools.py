# SPDX-License-Identifier: Apache-2.0
"""Toolchain: the programs' words in, and the interpreters and libraries of this machine."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_tools as gather


def test_version_of_nvcc() -> None:
    assert gather.parse_nvcc("Cuda compilation tools, release 13.0, V13.0.88\n") == "13.0"
    assert gather.parse_nvcc("") is None


def test_interpreters_of_the_wanted_versions_only() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = gather.gather_pythons([here, "2.6"])
    assert {python["version"] for python in found} == {here}
    assert all(python["venv"] and Path(python["path"]).exists() for python in found)


def only(*paths: str) -> Callable[[str], bool]:
    return lambda path: path in paths


BOTH = only("/usr/local/bin/nvcc", "/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")


@pytest.mark.parametrize(
    ("env", "exists", "path"),
    [
        ({"PATH": "/usr/local/bin:/usr/bin"}, BOTH, "/usr/local/bin/nvcc"),
        ({"PATH": "/usr/bin"}, BOTH, "/usr/local/cuda/bin/nvcc"),
        ({"PATH": "/usr/local/bin", "CUDA_HOME": "/opt/cuda"}, BOTH, "/opt/cuda/bin/nvcc"),
        ({"PATH": "/usr/local/bin", "CUDA_PATH": "/opt/cuda"}, BOTH, "/opt/cuda/bin/nvcc"),
        # A folder that is named wins even when it holds no nvcc: then nothing can be compiled.
        ({"PATH": "/usr/local/bin", "CUDA_HOME": "/usr/lib/cuda"}, BOTH, None),
        ({"PATH": ":/usr/bin"}, only(), None),
    ],
)
def test_which_nvcc_a_build_takes(env: dict[str, str], exists: Callable[[str], bool], path: str | None) -> None:
    assert gather.jit_nvcc(env, exists) == path


def test_every_nvcc_is_a_candidate_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("a", "12.4"), ("b", "13.0")):
        (tmp_path / name).mkdir()
        nvcc = tmp_path / name / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        nvcc.chmod(0o755)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/nvcc").symlink_to(tmp_path / "a/nvcc")
    monkeypatch.setattr(gather, "NVCC_PLACES", ())
    monkeypatch.setattr(gather, "unit_environment", lambda: {"PATH": ":".join(str(tmp_path / name) for name in "abc")})
    first, second = (
        {"path": f"{tmp_path}/a/nvcc", "version": "12.4"},
        {"path": f"{tmp_path}/b/nvcc", "version": "13.0"},
    )
    assert gather.gather_nvcc() == {**first, "candidates": [first, second], "cuda_home": None}
    monkeypatch.setattr(
        gather, "unit_environment", lambda: {"PATH": f"{tmp_path}/b", "CUDA_HOME": str(tmp_path / "none")}
    )
    facts = gather.gather_nvcc()
    assert facts == {"path": None, "version": None, "candidates": [second], "cuda_home": str(tmp_path / "none")}
    monkeypatch.setattr(gather, "unit_environment", lambda: {"PATH": ""})
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert gather.gather_nvcc() is None


def on_path(monkeypatch: pytest.MonkeyPatch, *folders: object) -> None:
    monkeypatch.setattr(gather, "unit_environment", lambda: {"PATH": ":".join(map(str, folders))})


def test_compilers_of_this_machine_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, "/usr/bin")
    found = gather.gather_compilers()
    assert set(found) == {"gcc", "g++", "c++"}
    assert found["gcc"] == {"path": "/usr/bin/gcc", "error": None, "installed": gather.in_dpkg("gcc", "libc6-dev")}


def test_a_compiler_that_is_gone_or_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("gcc", "echo 'gcc: fatal error: cannot execute cc1' >&2; exit 1"), ("c++", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "g++").symlink_to(tmp_path / "g++-12")
    on_path(monkeypatch, tmp_path)
    found = gather.gather_compilers()
    assert found["gcc"]["error"] == "gcc: fatal error: cannot execute cc1"
    assert found["c++"]["error"] == "exit status 3"
    assert found["g++"]["path"] is None


def test_what_dpkg_has() -> None:
    if gather.which("dpkg-query") is None:  # a developer on another distribution; hosts are Debian and Ubuntu
        pytest.skip("this machine has no dpkg")
    assert gather.in_dpkg("dpkg") is True
    assert gather.in_dpkg("dpkg", "no-such-package") is False
    assert gather.owner_in_dpkg("/usr/bin/dpkg") == "dpkg"
    assert gather.owner_in_dpkg("/usr/bin/no-such-file") is None


def test_environment_of_units() -> None:
    text = "LANG=C.UTF-8\nPATH=/usr/local/bin:/usr/bin\nA=b=c\n"
    assert gather.parse_environment(text) == {"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin", "A": "b=c"}


LDCONFIG = """3 libs found in cache `/etc/ld.so.cache'
\tlibnuma.so.1 (libc6) => /lib/i386-linux-gnu/libnuma.so.1
\tlibnuma.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnuma.so.1
\tlibnuma.so.1 (libc6,x86-64) => /usr/local/lib/libnuma.so.1
\tlibcuda.so.1 (libc6,x86-64, OS ABI: Linux 3.2.0) => /usr/lib/libcuda.so.1
\tlibgcc_s.so.1 (libc6,AArch64) => /lib/aarch64-linux-gnu/libgcc_s.so.1
Cache generated by: ldconfig (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36
"""


def test_libraries_of_the_engines_architecture_in_the_loaders_order() -> None:
    assert gather.parse_ldconfig(LDCONFIG, "x86_64") == {
        "libnuma.so.1": "/lib/x86_64-linux-gnu/libnuma.so.1",
        "libcuda.so.1": "/usr/lib/libcuda.so.1",
    }
    assert gather.parse_ldconfig(LDCONFIG, "aarch64") == {"libgcc_s.so.1": "/lib/aarch64-linux-gnu/libgcc_s.so.1"}


def test_newest_interface_of_the_cxx_library() -> None:
    assert (
        gather.newest_glibcxx(b"\0GLIBCXX_3.4.9\0GLIBCXX_3.4.30\0GLIBCXX_DEBUG_MESSAGE_LENGTH\0GLIBCXX_3.4\0")
        == "3.4.30"
    )
    assert gather.newest_glibcxx(b"\0GLIBC_2.34\0") is None


def test_libraries_of_this_machine_are_those_that_load() -> None:
    facts = gather.gather_libraries()
    assert set(facts) == {*gather.SONAMES, "libstdcxx_glibcxx"}
    ctypes.CDLL(facts["libstdc++.so.6"])
    assert facts["libstdcxx_glibcxx"].startswith("3.4.")
