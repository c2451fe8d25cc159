# SPDX-License-Identifier: Apache-2.0
"""Rules about what compiles kernels on the host: nvcc, C compiler, Python headers."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, WARN, Case, Hit, Map, on_gpus, rule, version
from ansible.module_utils.gpu_host_rules_driver import from_nvidia

CUDA = "13.0"  # torch of the lock
TOOLKIT = "cuda-toolkit-13-0"
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
    "Triton compiles its launcher with the host's C compiler at the first start.",
    source="https://triton-lang.org/main/getting-started/installation.html",
)
def compiler_missing(case: Case) -> Iterator[Hit]:
    """A C compiler on a GPU host; where apt is, the build installs one."""
    if on_gpus(case) and not case.facts.get("compiler") and not case.facts["platform"]["apt"]:
        yield Hit(
            "the C compiler",
            "no cc, gcc or clang",
            "a C compiler",
            "Install gcc and the C library's headers: `dnf install -y gcc glibc-devel`, or the like.",
        )


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
    installed = apt and bool(python and python["system"])
    if on_gpus(case) and python and not python["headers"] and not installed:
        package = f"python{python['version']}-dev" if apt else f"python{python['version']}-devel"
        yield Hit(
            "Python.h",
            f"not installed for {python['path']}",
            f"the headers of Python {python['version']}",
            f"`{'apt-get update && apt-get' if apt else 'dnf'} install -y {package}`, or the like for this interpreter.",
        )
