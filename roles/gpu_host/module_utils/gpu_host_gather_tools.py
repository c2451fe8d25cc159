# SPDX-License-Identifier: Apache-2.0
"""Toolchain: interpreters, nvcc and which one just-in-time compilation will find, the C compiler, system libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts, run, which

PYTHON_PROBE = (
    "import json,sys,sysconfig,os,importlib.util as u;"
    "json.dump({'full':'.'.join(map(str,sys.version_info[:3])),"
    "'version':'.'.join(map(str,sys.version_info[:2])),"
    "'venv':u.find_spec('venv') is not None,"
    "'include':sysconfig.get_paths()['include']},sys.stdout)"
)
COMPILERS = {"gcc": "gcc", "g++": "g++", "c++": "g++"}  # program to Debian's package
CUDA = "/usr/local/cuda"
NVCC_PLACES = (
    "usr/local/cuda/bin/nvcc",
    "usr/local/cuda-*/bin/nvcc",
    "usr/bin/nvcc",
    "usr/local/bin/nvcc",
    "opt/cuda/bin/nvcc",
)
# What ELF files of the locks ask for and no wheel carries, beside the C library itself (engines/sglang-0.5.11, read 2026-12-01).
# Others are asked for by optional plugins only, such as torchcodec's for each FFmpeg and nvshmem's for InfiniBand.
SONAMES = ("libcuda.so.1", "libgcc_s.so.1", "libnuma.so.1", "libstdc++.so.6")
LDCONFIG_ARCH = {"x86_64": "x86-64", "aarch64": "AArch64"}


def gather_pythons(versions: list[str]) -> list[Facts]:
    """Interpreters of the wanted versions, /usr/bin before others.

    `[{version, full, path, venv, headers, headers_package, system}]`; headers_package: the one that a missing Python.h is of.
    """
    found: dict[str, Facts] = {}
    system = os.path.realpath("/usr/bin/python3")  # what the distribution's python3-dev belongs to
    for name in [f"python{version}" for version in versions] + ["python3"]:
        for path in filter(None, (f"/usr/bin/{name}", which(name))):
            real = os.path.realpath(path)
            if real in found or not os.access(path, os.X_OK):
                continue
            status, out, _ = run([path, "-I", "-c", PYTHON_PROBE])
            if status == 0:
                told = json.loads(out)
                header = f"{told.pop('include')}/Python.h"
                headers = Path(header).exists()
                told |= {"headers": headers, "headers_package": None if headers else owner_in_dpkg(header)}
                found[real] = {**told, "path": path, "system": real == system}
    return [python for version in versions for python in found.values() if python["version"] == version]


# --- nvcc ---------------------------------------------------------------------------------------


def parse_nvcc(text: str) -> str | None:
    """`13.0` from the last lines of `nvcc --version`."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else None


def parse_environment(text: str) -> dict[str, str]:
    """`systemctl show-environment`: what every unit gets before its own settings."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def jit_nvcc(env: Mapping[str, str], exists: Callable[[str], bool]) -> str | None:
    """Path of the nvcc that just-in-time compilation takes; None when the place it looks at has none.

    It takes CUDA_HOME or CUDA_PATH without a look at PATH, else the first nvcc on PATH, else /usr/local/cuda: so do
    `_find_cuda_home` of torch 2.11 and apache-tvm-ffi 0.1 and `get_cuda_path` of FlashInfer 0.6 (read 2026-12-01).
    """
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if home:
        path = f"{home}/bin/nvcc"
        return path if exists(path) else None
    for folder in env.get("PATH", "").split(os.pathsep):
        if folder and exists(f"{folder}/nvcc"):
            return f"{folder}/nvcc"
    path = f"{CUDA}/bin/nvcc"
    return path if exists(path) else None


def unit_environment() -> dict[str, str]:
    """The environment that systemd gives to units; this process's where systemd does not run."""
    if Path("/run/systemd/system").is_dir():
        status, out, _ = run(["systemctl", "show-environment"])
        if status == 0:
            return parse_environment(out)
    return dict(os.environ)


def gather_nvcc() -> Facts | None:
    """`{path, version, candidates: [{path, version}], cuda_home}`; None without any nvcc.

    path is None when CUDA_HOME names a folder without nvcc.
    """
    env = unit_environment()
    chosen = jit_nvcc(env, _executable)
    on_path = [f"{folder}/nvcc" for folder in env.get("PATH", "").split(os.pathsep) if folder]
    places = [str(path) for pattern in NVCC_PLACES for path in sorted(Path("/").glob(pattern))]
    found: dict[str, Facts] = {}
    for path in (*([chosen] if chosen else []), *on_path, *places):
        real = os.path.realpath(path)
        if real not in found and _executable(path):
            found[real] = {"path": path, "version": parse_nvcc(run([path, "--version"])[1])}
    if not found:
        return None
    picked = found[os.path.realpath(chosen)] if chosen else {"path": None, "version": None}
    return {**picked, "candidates": list(found.values()), "cuda_home": env.get("CUDA_HOME") or env.get("CUDA_PATH")}


def _executable(path: str) -> bool:
    return Path(path).is_file() and os.access(path, os.X_OK)


def gather_compilers() -> Facts:
    """`{gcc: {path, error, installed}, ..}` of gcc, g++ and c++, as a unit's PATH finds them.

    The cpu profile's stub and Triton's launcher are built with gcc, kernels of FlashInfer and tvm-ffi with c++; nvcc calls gcc,
    g++ (triton runtime/build.py, apache-tvm-ffi 0.1.15 cpp/extension.py, flashinfer jit/cpp_ext.py, read 2026-12-01).
    error: why it compiles nothing, the libraries' headers included. installed: whether dpkg has its package, None without dpkg;
    dpkg does not see a file that was moved or broken by hand.
    """
    path = unit_environment().get("PATH") or os.defpath
    return {name: _compiler(shutil.which(name, path=path), package) for name, package in COMPILERS.items()}


def _compiler(path: str | None, package: str) -> Facts:
    kind, header = ("c", "stdlib.h") if package == "gcc" else ("c++", "cstdlib")
    error = None
    if path:  # -fsyntax-only writes no file
        status, _, told = run([path, "-fsyntax-only", "-x", kind, "-include", header, os.devnull])
        lines = [line.strip() for line in told.splitlines() if "error" in line] or told.strip().splitlines()[-1:]
        error = (lines[0] if lines else f"exit status {status}") if status else None
    # The build installs the C library's headers too, where they are missing.
    return {"path": path, "error": error, "installed": in_dpkg(package, *(["libc6-dev"] if path else []))}


def in_dpkg(*packages: str) -> bool | None:
    """Whether dpkg has all of these as installed: then apt sees nothing to do. None without dpkg."""
    status, out, _ = run(["dpkg-query", "-W", "-f", "${db:Status-Status}\n", *packages])
    return None if status in (126, 127) else out.splitlines().count("installed") == len(packages)


def owner_in_dpkg(path: str) -> str | None:
    """The package that a file, there or not, belongs to; None without dpkg or an owner."""
    status, out, _ = run(["dpkg-query", "-S", path])
    return out.split(":")[0] if status == 0 and out else None


# --- shared libraries ---------------------------------------------------------------------------


def parse_ldconfig(text: str, arch: str) -> dict[str, str]:
    """soname to path from `ldconfig -p`, for one architecture: a 32-bit library helps no 64-bit engine."""
    word = LDCONFIG_ARCH.get(arch, arch)
    rows = re.findall(r"^\s+(\S+) \(([^)]*)\) => (\S+)$", text, re.MULTILINE)
    found: dict[str, str] = {}
    for name, kinds, path in rows:
        if word in kinds:
            found.setdefault(name, path)
    return found


def newest_glibcxx(library: bytes) -> str | None:
    """`3.4.30` from the version names inside libstdc++: the newest C++ interface that it has."""
    versions = {
        tuple(map(int, found.split(b"."))) for found in re.findall(rb"\0GLIBCXX_(\d+\.\d+(?:\.\d+)?)(?=\0)", library)
    }
    return ".".join(map(str, max(versions))) if versions else None


def gather_libraries() -> Facts:
    """`{soname: path or None, libstdcxx_glibcxx: version or None}`; empty on a host without ldconfig (no glibc)."""
    status, out, _ = run([which("ldconfig") or "ldconfig", "-p"])
    if status != 0:
        return {}
    known = parse_ldconfig(out, os.uname().machine)
    facts: Facts = {name: known.get(name) for name in SONAMES}
    path = facts["libstdc++.so.6"]
    try:
        facts["libstdcxx_glibcxx"] = newest_glibcxx(Path(path).read_bytes()) if path else None
    except OSError:
        facts["libstdcxx_glibcxx"] = None
    return facts
