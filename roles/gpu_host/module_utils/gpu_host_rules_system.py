# SPDX-License-Identifier: Apache-2.0
"""Rules about the operating system: architecture, C library, systemd, Python."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, rule, version

ARCHITECTURES = ("x86_64", "aarch64")
MIN_GLIBC = "2.34"  # the newest that a wheel of the lock asks for: engines/*/files.json


@rule(
    "arch-unsupported",
    BLOCK,
    "The lock holds files for these architectures only.",
    source="engines/sglang-0.5.11/files.json",
)
def arch_unsupported(case: Case) -> Iterator[Hit]:
    """x86_64 or aarch64."""
    arch = case.facts["platform"]["arch"]
    if arch not in ARCHITECTURES:
        yield Hit("the host", arch, " or ".join(ARCHITECTURES), "Use a host of a supported architecture.")


@rule(
    "glibc-old",
    BLOCK,
    f"The wheels are built against glibc {MIN_GLIBC}; an older one, or another C library, cannot load them.",
    source="engines/sglang-0.5.11/files.json",
)
def glibc_old(case: Case) -> Iterator[Hit]:
    """New enough for every wheel of the lock."""
    glibc = case.facts["platform"]["glibc"]
    if version(glibc) < version(MIN_GLIBC):
        yield Hit(
            "the C library",
            f"glibc {glibc}" if glibc else "not glibc",
            f"glibc {MIN_GLIBC} or newer",
            "Use Debian 12, Ubuntu 22.04 or newer.",
        )


@rule(
    "systemd",
    BLOCK,
    "Instances are systemd units, and their start is judged by features of this version.",
    source="roles/gpu_units/templates/sglang@.service.j2",
)
def systemd(case: Case) -> Iterator[Hit]:
    """systemd runs the host and is new enough."""
    found, least = case.facts["systemd"], int(case.wanted.get("min_systemd") or 0)
    if not found["running"]:
        yield Hit(
            "systemd",
            "does not run this host",
            f"systemd {least} or newer as process 1",
            "Use a host, VM or system container that boots systemd.",
        )
    elif (found["version"] or 0) < least:
        yield Hit(
            "systemd",
            f"version {found['version']}",
            f"{least} or newer",
            "Upgrade the distribution: Debian 12, Ubuntu 24.04 or newer.",
        )


@rule(
    "python-missing",
    BLOCK,
    "The lock is made for these Python versions, and none is ever fetched behind your back.",
    source="engines/sglang-0.5.11/lock.txt",
)
def python_missing(case: Case) -> Iterator[Hit]:
    """One wanted interpreter with the venv module."""
    wanted = case.wanted.get("pythons") or []
    if not any(python["venv"] for python in case.facts["pythons"]):
        observed = "without the venv module" if case.facts["pythons"] else "not found"
        yield Hit(
            "Python",
            observed,
            " or ".join(wanted) + " with its venv module",
            f"apt-get install python{wanted[0]} python{wanted[0]}-venv, or the like for {' or '.join(wanted[1:]) or 'it'}.",
        )
