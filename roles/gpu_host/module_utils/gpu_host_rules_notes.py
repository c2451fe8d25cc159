# SPDX-License-Identifier: Apache-2.0
"""What a person should know, though nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import INFO, WARN, Case, Hit, inside, kernel, rule


@rule(
    "facts-stand-in",
    WARN,
    "The GPU facts come from a file, so they say nothing about this host: for tests only.",
    source="docs/checks.md",
)
def facts_stand_in(case: Case) -> Iterator[Hit]:
    """Facts of another machine stand in for this one's."""
    recorded = case.facts.get("recorded")
    if recorded:
        yield Hit(
            "the GPU facts",
            f"recorded on {recorded['machine']}, {recorded['date']}",
            "this host's own",
            f"Remove gpu_host_facts_file from {case.where}.",
        )


@rule(
    "cpu-profile",
    INFO,
    "Asked for in the inventory. It runs the real engine for trials and tests, not for service.",
    source="docs/architecture.md",
)
def cpu_profile(case: Case) -> Iterator[Hit]:
    """The cpu profile is in use."""
    if case.wanted.get("profile") == "cpu":
        yield Hit(
            "gpu_host_profile",
            "cpu",
            "a GPU profile for service",
            f"Remove gpu_host_profile from {case.where}, or from its group, on a GPU host.",
        )


OUTSIDE = {
    "container": "kernel, driver, boot parameters, limits and the clock",
    "vm": "firmware, PCIe slots, IOMMU and ACS of the machine",
}


@rule(
    "host-guest",
    INFO,
    "What lies outside belongs to the machine that runs this host.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemd-detect-virt.html",
)
def host_guest(case: Case) -> Iterator[Hit]:
    """The host is a machine of its own."""
    kind = inside(case)
    if kind:
        name = kernel(case).get("virt_name")
        word = "VM" if kind == "vm" else kind
        yield Hit(
            "the host",
            f"a {word}" + (f" ({name})" if name else "") + f": {OUTSIDE[kind]} can't be changed from inside",
            "fixes of these on the machine that runs it",
            "What a fix calls the outer machine's is done there; `systemd-detect-virt` on the host says what it is.",
        )
