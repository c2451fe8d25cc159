# SPDX-License-Identifier: Apache-2.0
"""Rules about what compiles kernels on the host: nvcc, C compiler, Python headers."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, WARN, Case, Hit, Map, on_gpus, rule, version
from ansible.module_utils.gpu_host_rules_driver import from_nvidia

CUDA = "13.0"  # torch of the lock
TOOLKIT = "cuda-toolkit-13-0"
# All parts of Debian's compilers that are installed: whichever of them lost a file gets it back.
PARTS = "gcc 'gcc-*' g++ 'g++-*' cpp 'cpp-*' binutils 'binutils-*' libc6-dev linux-libc-dev 'libgcc-*-dev' 'libstdc++-*-dev'"
MEND = (
    "`apt-get update && apt-get install --reinstall -y $(dpkg-query -W -f '${db:Status-Status} ${binary:Package}\\n' "
    f"{PARTS} 2>/dev/null | sed -n 's/^installed //p')`"
)
INSTALL = "`dnf install -y gcc gcc-c++ glibc-devel`, and `dnf reinstall -y` with the same where they are installed; or the like."
MIN_NVCC = {"sm120": "12.9", "sm100": "12.9", "sm90": "12.4"}


def _install(case: Case) -> str:
    """The command that installs the lock's toolkit."""
    text = f"Install it: {from_nvidia(case, TOOLKIT)}"
    if case.facts["platform"].get("os") == "debian 13":  # NVIDIA's repository for it is younger than CUDA 13.0
        text += " (if apt has none, the oldest that `apt-cache search --names-only '^cuda-toolkit-13'` lists)"
    return text


def _remedy(case: Case) -> str:
    """How the right nvcc gets found: by name where it is installed, else by installing it."""
    nvcc: Map = case.facts.get("nvcc") or {}
    fitting = [one["path"] for one in nvcc.get("candidates") or [] if version(one.get("version")) == version(CUDA)]
    if fitting:
        home = fitting[0].removesuffix("/bin/nvcc")
        return f"Write env: {{CUDA_HOME: {home}}} for each instance, or under gpu_units_defaults, in {case.where}."
    return (
        f"{_install(case)}, then write env: {{CUDA_HOME: /usr/local/cuda-{CUDA}}} for each instance, or "
        f"under gpu_units_defaults, in {case.where}."
    )


def _named(case: Case) -> bool:
    """Whether every instance names its CUDA folder, and it is one that holds the right nvcc."""
    nvcc: Map = case.facts.get("nvcc") or {}
    fitting = {
        one["path"].removesuffix("/bin/nvcc")
        for one in nvcc.get("candidates") or []
        if version(one.get("version")) == version(CUDA)
    }
    homes = [(env if isinstance(env := one.get("env"), dict) else {}).get("CUDA_HOME") for one in case.instances]
    return bool(homes) and all(home in fitting for home in homes)


@rule(
    "nvcc-missing",
    BLOCK,
    "Kernels that no wheel carries are compiled at the first start, and deep_gemm refuses to be imported without a CUDA folder.",
    source="https://docs.flashinfer.ai/installation.html",
)
def nvcc_missing(case: Case) -> Iterator[Hit]:
    """A GPU host has nvcc, where just-in-time compilation looks."""
    nvcc = case.facts.get("nvcc")
    if not on_gpus(case) or _named(case):
        return
    if not nvcc:
        yield Hit(
            "nvcc",
            "not found on PATH or in /usr/local/cuda/bin",
            f"nvcc of CUDA {CUDA}",
            f"{_install(case)}.",
        )
    elif not nvcc["path"]:
        home, others = nvcc.get("cuda_home"), ", ".join(one["path"] for one in nvcc.get("candidates") or [])
        yield Hit(
            "nvcc",
            f"CUDA_HOME of units is {home}, where no nvcc is"
            if home
            else f"only at {others}, where nothing looks for it",
            f"nvcc of CUDA {CUDA}",
            f"Take CUDA_HOME out of /etc/systemd/system.conf and system.conf.d, or: {_remedy(case)}"
            if home
            else _remedy(case),
        )


@rule(
    "nvcc-old",
    BLOCK,
    "This nvcc cannot build for the GPU, so just-in-time compilation fails, or falls back without a word.",
    source="https://github.com/flashinfer-ai/flashinfer/issues/3675",
)
def nvcc_old(case: Case) -> Iterator[Hit]:
    """The nvcc that is found can build for the profile."""
    nvcc = case.facts.get("nvcc")
    if _old(case) and nvcc and not _named(case):
        least = MIN_NVCC[case.profile or ""]
        yield Hit(
            "nvcc",
            f"{nvcc.get('version') or 'one that tells no version'} at {nvcc['path']}",
            f"{CUDA}, at least {least} for {case.profile}",
            _remedy(case),
        )


def _old(case: Case) -> bool:
    nvcc, least = case.facts.get("nvcc"), MIN_NVCC.get(case.profile or "")
    return bool(on_gpus(case) and nvcc and nvcc["path"] and least and version(nvcc.get("version")) < version(least))


@rule(
    "nvcc-mismatch",
    WARN,
    "Kernels are compiled against the headers of the lock's CUDA; an nvcc of another version may refuse them.",
    source="https://github.com/flashinfer-ai/flashinfer/issues/3493",
)
def nvcc_mismatch(case: Case) -> Iterator[Hit]:
    """The nvcc that just-in-time compilation finds is of the lock's CUDA."""
    nvcc = case.facts.get("nvcc")
    if not on_gpus(case) or not nvcc or not nvcc.get("version") or _old(case) or _named(case):
        return
    if version(nvcc["version"]) != version(CUDA):
        others = [
            f"{one['version']} at {one['path']}" for one in nvcc.get("candidates") or [] if one["path"] != nvcc["path"]
        ]
        also = f" (also here: {', '.join(others)})" if others else ""
        yield Hit("nvcc", f"{nvcc['version']} at {nvcc['path']}{also}", f"{CUDA}, as torch's", _remedy(case))


@rule(
    "compiler-missing",
    BLOCK,
    "Kernels and their launchers are compiled on the host at the first start, the cpu profile's stub when a release is built.",
    source="https://docs.flashinfer.ai/installation.html",
)
def compiler_missing(case: Case) -> Iterator[Hit]:
    """Compilers that work; those that apt has not installed yet, the build installs."""
    apt, found = case.facts["platform"]["apt"], case.facts.get("compilers") or {}
    broken = {
        name: one
        for name, one in found.items()
        if name in _compilers(case) and (not one["path"] or one["error"]) and (not apt or one["installed"])
    }
    if broken:
        told = [
            f"{name} at {one['path']}: {one['error']}" if one["path"] else f"{name} is not found"
            for name, one in broken.items()
        ]
        if apt:
            told.append("apt has the package as installed and installs nothing")
        yield Hit("the compilers", "; ".join(told), "on a unit's PATH, and able to compile", MEND if apt else INSTALL)


def _compilers(case: Case) -> tuple[str, ...]:
    """What will be called: on the cpu profile gcc, once for a release; CC and CXX of all instances stand for others."""
    if case.wanted.get("profile") == "cpu":
        return () if case.facts.get("current") else ("gcc",)
    if not on_gpus(case):
        return ()
    envs = [env if isinstance(env := one.get("env"), dict) else {} for one in case.instances]
    given = {name for name in ("CC", "CXX") if envs and all(env.get(name) for env in envs)}
    return (*(() if "CC" in given else ("gcc",)), *(() if "CXX" in given else ("g++", "c++")))


@rule(
    "python-headers-missing",
    BLOCK,
    "Triton's launcher includes Python.h when it is compiled at the first start.",
    source="https://triton-lang.org/main/getting-started/installation.html",
)
def python_headers_missing(case: Case) -> Iterator[Hit]:
    """Python.h of the chosen interpreter on a GPU host; the build installs python3-dev, which serves the system's own only."""
    python = next((one for one in case.facts["pythons"] if one["venv"]), None)
    apt = case.facts["platform"]["apt"]
    owner = python.get("headers_package") if python and apt else None
    installed = apt and bool(python and python["system"]) and not owner
    if on_gpus(case) and python and not python["headers"] and not installed:
        package = owner or (f"python{python['version']}-dev" if apt else f"python{python['version']}-devel")
        again = " --reinstall" if owner else ""
        lost = f"; apt has {owner} as installed and installs nothing" if owner else ""
        yield Hit(
            "Python.h",
            f"{'not there' if owner else 'not installed'} for {python['path']}{lost}",
            f"the headers of Python {python['version']}",
            f"`{'apt-get update && apt-get' if apt else 'dnf'} install{again} -y {package}`, or the like for this interpreter.",
        )
