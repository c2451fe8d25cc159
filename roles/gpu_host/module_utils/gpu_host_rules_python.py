# SPDX-License-Identifier: Apache-2.0
"""Rule about the interpreter that releases are made with, and how a distribution comes by one."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, rule

LOCK_PYTHONS = ("3.12", "3.11")  # what locks are made for: engines/*/engine.yml
# Python of a distribution, where a lock is made for it.
SYSTEM_PYTHON = {"ubuntu 24.04": "3.12", "debian 12": "3.11"}
# Distributions for which a public archive has both: https://launchpad.net/~deadsnakes/+archive/ubuntu/ppa, 2026-12.
DEADSNAKES = ("ubuntu 22.04",)
# Source archives of these that are there: https://github.com/astral-sh/python-build-standalone/pull/817, 2026-12; newer do too.
SOURCES = {"3.12": "3.12.12", "3.11": "3.11.14"}
BUILD_PACKAGES = (
    "build-essential curl ca-certificates xz-utils libssl-dev zlib1g-dev libffi-dev libbz2-dev liblzma-dev libsqlite3-dev "
    "uuid-dev"
)


@rule(
    "python-missing",
    BLOCK,
    "The lock is made for these Python versions, and none is ever fetched behind your back.",
    source="engines/sglang-0.5.11/lock.txt",
)
def python_missing(case: Case) -> Iterator[Hit]:
    """One wanted interpreter with the venv module, of a version that locks are made for."""
    wanted, found = case.wanted.get("pythons") or [], case.facts["pythons"]
    if any(python["venv"] and python["version"] in LOCK_PYTHONS for python in found):
        return
    asked = [str(one) for one in wanted] if isinstance(wanted, list) else [str(wanted)]
    fit = [one for one in asked if one in LOCK_PYTHONS]
    bare = next((one for one in found if one["version"] in LOCK_PYTHONS), None)
    observed = f"{bare['path']} without the venv module" if bare else "not found"
    if not fit:
        observed = f"gpu_host_pythons is {', '.join(asked) or 'empty'}, for which no lock is made"
    yield Hit(
        "Python",
        observed,
        " or ".join(fit or LOCK_PYTHONS) + " with its venv module",
        _install_python(case, fit, bare["version"] if bare else None),
    )


def _install_python(case: Case, fit: list[str], bare: str | None) -> str:
    system, apt = str(case.facts["platform"].get("os")), case.facts["platform"]["apt"]
    own = SYSTEM_PYTHON.get(system)
    # The distribution's own is the best one, even if the inventory has to be widened for it.
    version_ = bare or (own if own and apt else fit[0] if fit else LOCK_PYTHONS[0])
    widen = "" if version_ in fit else f"Take gpu_host_pythons out of {case.where} (the default has {version_}). "
    packages = f"python{version_} python{version_}-venv"
    if apt and (bare or own == version_):
        return f"{widen}`apt-get update && apt-get install -y {packages}`"
    if system in DEADSNAKES:
        tools = "apt-get update && apt-get install -y software-properties-common"
        add = "add-apt-repository -y ppa:deadsnakes/ppa"
        install = f"apt-get install -y {packages} python{version_}-dev"
        return f"{widen}`{tools} && {add} && {install}` (this Ubuntu has none of its own)."
    if not apt:
        return f"{widen}`dnf install -y python{version_} python{version_}-devel`, or the like of this distribution."
    source = SOURCES[version_]
    return (
        f"{widen}This distribution has none. From source, beside its own: `apt-get update && apt-get install -y {BUILD_PACKAGES} "
        f"&& curl -fsSL https://www.python.org/ftp/python/{source}/Python-{source}.tar.xz | tar -xJC /usr/src && "
        f"cd /usr/src/Python-{source} && ./configure && make -j$(nproc) altinstall`; `python{version_} -m venv -h` works then."
    )
