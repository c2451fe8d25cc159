# SPDX-License-Identifier: Apache-2.0
"""Rules about the driver and what compiles kernels: nvcc, C compiler, Python headers."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, on_gpus, rule, version

MIN_CUDA_DRIVER = "13.0"  # torch of the lock is built for CUDA 13.0
MIN_NVCC = {"sm120": "12.9", "sm100": "12.9", "sm90": "12.4"}


@rule(
    "driver-old",
    BLOCK,
    "The engine's torch is built for CUDA 13.0, which needs driver 580 or newer.",
    source="https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html",
)
def driver_old(case: Case) -> Iterator[Hit]:
    """The driver is new enough for the lock's CUDA."""
    if not on_gpus(case):
        return
    gpu, least = case.facts["gpu"], str(case.wanted.get("min_driver"))
    fix = f"Install NVIDIA driver {least} or newer and reboot; in a container it has to equal the outer host's."
    if version(gpu.get("driver")) < version(least):
        yield Hit("the NVIDIA driver", str(gpu.get("driver")), f"{least} or newer", fix)
    elif gpu.get("cuda_driver") and version(gpu["cuda_driver"]) < version(MIN_CUDA_DRIVER):
        yield Hit("the driver's CUDA", gpu["cuda_driver"], f"{MIN_CUDA_DRIVER} or newer", fix)


@rule(
    "nvcc-missing",
    BLOCK,
    "Kernels that no wheel carries are compiled at the first start, and deep_gemm refuses to be imported without a CUDA folder.",
    source="https://docs.flashinfer.ai/installation.html",
)
def nvcc_missing(case: Case) -> Iterator[Hit]:
    """A GPU host has nvcc."""
    if on_gpus(case) and not case.facts.get("nvcc"):
        yield Hit(
            "nvcc",
            "not found on PATH or in /usr/local/cuda/bin",
            "nvcc of CUDA 13.0",
            "Install the CUDA 13.0 compiler (package cuda-nvcc-13-0 of NVIDIA's repository).",
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
    least = MIN_NVCC.get(case.profile or "")
    if on_gpus(case) and nvcc and least and version(nvcc.get("version")) < version(least):
        yield Hit(
            "nvcc",
            f"{nvcc.get('version')} at {nvcc['path']}",
            f"{least} or newer for {case.profile}",
            "Install the CUDA 13.0 compiler (package cuda-nvcc-13-0) and remove the old one from PATH.",
        )


@rule(
    "compiler-missing",
    BLOCK,
    "Triton compiles its launcher with the host's C compiler at the first start.",
    source="https://triton-lang.org/main/getting-started/installation.html",
)
def compiler_missing(case: Case) -> Iterator[Hit]:
    """A C compiler on a GPU host; where apt is, the build installs one."""
    if on_gpus(case) and not case.facts.get("compiler") and not case.facts["platform"]["apt"]:
        yield Hit("the C compiler", "no cc, gcc or clang", "a C compiler", "Install gcc and the C library's headers.")


@rule(
    "python-headers-missing",
    BLOCK,
    "Triton's launcher includes Python.h when it is compiled at the first start.",
    source="https://triton-lang.org/main/getting-started/installation.html",
)
def python_headers_missing(case: Case) -> Iterator[Hit]:
    """Python.h of the chosen interpreter on a GPU host; the build installs python3-dev, which serves the system's own only."""
    python = next((one for one in case.facts["pythons"] if one["venv"]), None)
    installed = case.facts["platform"]["apt"] and bool(python and python["system"])
    if on_gpus(case) and python and not python["headers"] and not installed:
        yield Hit(
            "Python.h",
            f"not installed for {python['path']}",
            f"the headers of Python {python['version']}",
            f"Install python{python['version']}-dev, or the like for this interpreter.",
        )
