# SPDX-License-Identifier: Apache-2.0
"""Rules about the driver: there, one version of it, new enough, loaded by the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    INFO,
    WARN,
    Case,
    Hit,
    inside,
    kernel,
    on_gpus,
    on_kernel,
    rule,
    version,
)
from ansible.module_utils.gpu_host_rules_bus import lost

MIN_CUDA_DRIVER = "13.0"  # torch of the lock is built for CUDA 13.0
# Folders of NVIDIA's package repository: https://developer.download.nvidia.com/compute/cuda/repos/, 2026-11.
REPOSITORIES = {
    "ubuntu 22.04": "ubuntu2204",
    "ubuntu 24.04": "ubuntu2404",
    "debian 12": "debian12",
    "debian 13": "debian13",
}
DRIVER = "nvidia-open"
REPOSITORY = "https://developer.download.nvidia.com/compute/cuda/repos"
INSTALL_GUIDE = "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/"


def from_nvidia(case: Case, package: str) -> str:
    """The command that installs a package of NVIDIA's repository on this distribution."""
    platform = case.facts["platform"]
    if inside(case) == "container" and package == DRIVER:  # the outer machine may be of another distribution
        return f"the package {DRIVER}, {case.wanted.get('min_driver')} or newer, by {INSTALL_GUIDE}"
    folder = REPOSITORIES.get(str(platform.get("os")))
    if folder is None:
        return f"install the package {package} from {REPOSITORY} with this distribution's package manager"
    arch = "sbsa" if platform["arch"] == "aarch64" else "x86_64"
    keyring = "cuda-keyring_1.1-1_all.deb"
    if package == DRIVER:
        # Its module is compiled on the host.
        package = f"{headers(case)} {package}" + _fabric(case)
    return (
        f"`apt-get update && apt-get install -y curl ca-certificates && "
        f"curl -fsSLO {REPOSITORY}/{folder}/{arch}/{keyring} && dpkg -i {keyring} && apt-get update && "
        f"apt-get install -y {package}`"
    )


def headers(case: Case) -> str:
    """The packages that a kernel module is compiled with.

    Debian's archive drops those of kernels that it has replaced, so there the kernel of today comes along; the fix ends in a
    reboot anyway.
    """
    platform = case.facts["platform"]
    if "-pve" in str(kernel(case).get("release")):  # Proxmox calls itself Debian
        return "proxmox-headers-$(uname -r)"
    if not str(platform.get("os")).startswith("debian"):
        return "linux-headers-$(uname -r)"
    arch = "arm64" if platform["arch"] == "aarch64" else "amd64"
    return f"linux-image-{arch} linux-headers-{arch}"


def _fabric(case: Case) -> str:
    """What an NVSwitch board needs in the driver's version; from Blackwell on, a subnet manager too."""
    if not any(gpu.get("fabric") for gpu in case.gpus):
        return ""
    return " nvidia-fabricmanager nvlsm" if case.profile == "sm100" else " nvidia-fabricmanager"


def no_driver_cause(case: Case) -> str | None:
    """Id of the rule that explains why no GPU is seen; None where GPUs are seen, or nothing explains it."""
    if case.wanted.get("profile") == "cpu" or case.gpus:
        return None
    gpu, modules = case.facts.get("gpu", {}), kernel(case).get("modules") or {}
    told = f"{gpu.get('error') or ''} {(gpu.get('nvml') or {}).get('error') or ''}"
    if re.search(r"version mismatch|LibRmVersionMismatch", told, re.IGNORECASE):
        return "driver-mismatch"
    if kernel(case).get("nouveau") and not modules.get("nvidia"):
        return "driver-nouveau"
    # A container that sees no GPU was more likely given none.
    if (
        inside(case) != "container"
        and case.facts.get("secure_boot")
        and gpu.get("nvidia_smi")
        and kernel(case)
        and not modules.get("nvidia")
    ):
        return "driver-unsigned"
    return None


@rule(
    "driver-mismatch",
    BLOCK,
    "The kernel runs the module of one driver while the libraries on disk are another's, as after an upgrade without a reboot; "
    "they refuse each other.",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html",
)
def driver_mismatch(case: Case) -> Iterator[Hit]:
    """Kernel module and libraries are of one version."""
    if no_driver_cause(case) != "driver-mismatch":
        return
    gpu = case.facts["gpu"]
    loaded = (kernel(case).get("modules") or {}).get("nvidia") or "another version"
    if inside(case) == "container":
        fix = "Restart this container, so that it gets the libraries of the driver that runs now; `nvidia-smi` has to work in it."
    else:
        fix = "Load the new module: `systemctl reboot`."
    told = gpu.get("error") or (gpu.get("nvml") or {}).get("error")
    yield Hit("the NVIDIA driver", f"kernel module {loaded}, but: {told}", "module and libraries of one version", fix)


@rule(
    "driver-nouveau",
    BLOCK,
    "While the kernel's own nouveau driver holds the cards, NVIDIA's cannot be loaded.",
    source=INSTALL_GUIDE,
)
def driver_nouveau(case: Case) -> Iterator[Hit]:
    """Nouveau is not what drives the cards."""
    if no_driver_cause(case) != "driver-nouveau":
        return
    smi = case.facts["gpu"].get("nvidia_smi")
    install = "" if smi else f"Install NVIDIA's driver: {from_nvidia(case, DRIVER)}. "
    rebuild = "update-initramfs -u" if case.facts["platform"]["apt"] else "dracut --force"
    block = (
        "`printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > /etc/modprobe.d/blacklist-nouveau.conf && "
        f"{rebuild} && systemctl reboot`"
    )
    yield Hit(
        "the kernel",
        "module nouveau is loaded, nvidia is not",
        "module nvidia",
        on_kernel(case, f"{install}Keep nouveau out: {block}"),
    )


@rule(
    "driver-unsigned",
    BLOCK,
    "With secure boot on, the kernel loads signed modules only; the driver's programs are here, its module is not loaded.",
    source=INSTALL_GUIDE,
)
def driver_unsigned(case: Case) -> Iterator[Hit]:
    """Secure boot does not keep the module out."""
    if no_driver_cause(case) != "driver-unsigned":
        return
    ubuntu = str(case.facts["platform"].get("os")).startswith("ubuntu")
    key = "/var/lib/shim-signed/mok/MOK.der" if ubuntu else "/var/lib/dkms/mok.pub"
    yield Hit(
        "the NVIDIA driver",
        "secure boot is on and module nvidia is not loaded",
        "the module loaded",
        on_kernel(
            case,
            "See the refusal (`modprobe nvidia; dmesg | tail`). If it says key or signature, enrol the key that signed it: "
            f"`apt-get install -y mokutil && mokutil --import {key}` asks for a password of your choice; `systemctl reboot`, and "
            "on the console's blue screen: Enroll MOK, and that password. Or switch secure boot off in the firmware.",
        ),
    )


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
    fix = on_kernel(case, f"Install the newest driver: {from_nvidia(case, DRIVER)}, then `systemctl reboot`.")
    if gpu.get("driver") and version(gpu["driver"]) < version(least):
        yield Hit("the NVIDIA driver", str(gpu.get("driver")), f"{least} or newer", fix)
    elif gpu.get("cuda_driver") and version(gpu["cuda_driver"]) < version(MIN_CUDA_DRIVER):
        yield Hit("the driver's CUDA", gpu["cuda_driver"], f"{MIN_CUDA_DRIVER} or newer", fix)


@rule(
    "nvml-missing",
    INFO,
    "Health, links and memory errors of GPUs are read through NVML; without it their checks have nothing to look at and hold.",
    source="https://docs.nvidia.com/deploy/nvml-api/",
)
def nvml_missing(case: Case) -> Iterator[Hit]:
    """NVML answers where nvidia-smi does."""
    nvml = case.facts.get("gpu", {}).get("nvml") or {}
    if on_gpus(case) and nvml.get("error") and not lost(case):
        yield Hit(
            "NVML",
            str(nvml["error"]),
            "answers, as nvidia-smi does",
            "Compare with `nvidia-smi -q | head` and `ldconfig -p | grep libnvidia-ml` on the host.",
        )


@rule(
    "libcuda-hidden",
    WARN,
    "The engine's units find the driver's library through the loader's cache; a login shell's LD_LIBRARY_PATH is not theirs.",
    source="https://man7.org/linux/man-pages/man8/ldconfig.8.html",
)
def libcuda_hidden(case: Case) -> Iterator[Hit]:
    """The loader knows libcuda.so.1 on a GPU host."""
    libraries = case.facts.get("libraries") or {}
    if on_gpus(case) and "libcuda.so.1" in libraries and libraries["libcuda.so.1"] is None:
        folder = "/usr/local/nvidia/lib64"
        if str(case.facts["gpu"].get("nvidia_smi")).startswith("/usr/local/nvidia/"):
            fix = f"`echo {folder} > /etc/ld.so.conf.d/nvidia.conf && ldconfig`"
        elif inside(case) == "container":
            fix = "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, then `ldconfig` in it"
        else:
            fix = f"Install the driver's libraries again: {from_nvidia(case, DRIVER)}, then `ldconfig`"
        yield Hit("libcuda.so.1", "not known to the loader (`ldconfig -p`)", "known", f"{fix}.")
