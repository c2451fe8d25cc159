# SPDX-License-Identifier: Apache-2.0
"""Rules about the operating system: architecture, C library, systemd and its journal, limits, the clock."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ansible.module_utils.gpu_host_gather_system import SYSLOG
from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    INFO,
    UNIT_PREFIX,
    WARN,
    Case,
    Hit,
    boot_with,
    inside,
    kernel,
    on_kernel,
    rule,
    version,
)

ARCHITECTURES = ("x86_64", "aarch64")
MIN_NOFILE = 4096
MIN_PIDS = 2048  # threads and processes of an instance, its compilers included
MIN_MAPS = 65530  # what kernels come with
MIN_YEAR, MAX_YEAR = 2026, 2046  # this software is not older, and no certificate of today lasts longer
SYSCTL = "/etc/sysctl.d/60-sglang.conf"
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
        yield Hit(
            "the host",
            arch,
            " or ".join(ARCHITECTURES),
            f"Take it out of the inventory beside {case.where}; `uname -m` names the architecture of a host.",
        )


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
            "Upgrade the distribution to Debian 12, Ubuntu 22.04 or newer (`ldd --version` shows its glibc).",
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
        first = found.get("pid1")
        yield Hit(
            "systemd",
            f"process 1 of this host is {first}" if first else "does not run this host",
            f"systemd {least} or newer as process 1",
            _boot_systemd(case),
        )
    elif found["version"] is None:
        fix = (
            "`apt-get update && apt-get install -y systemd`"
            if case.facts["platform"]["apt"]
            else "`dnf install -y systemd`"
        )
        yield Hit("systemd", "no systemctl that tells its version", f"version {least} or newer", f"{fix}.")
    elif found["version"] < least:
        yield Hit(
            "systemd",
            f"version {found['version']}",
            f"{least} or newer",
            "Upgrade the distribution to Debian 12, Ubuntu 22.04 or newer (`systemctl --version` shows it).",
        )


def _boot_systemd(case: Case) -> str:
    kind, name = inside(case), kernel(case).get("virt_name")
    if name == "wsl":
        return "`printf '[boot]\\nsystemd=true\\n' >> /etc/wsl.conf`, then `wsl --shutdown` on Windows."
    if kind == "container":
        return (
            "On the machine that runs this container: make another that boots systemd, as LXC and Incus do, or `podman run "
            "--systemd=always` of an image with systemd, its command /sbin/init; `ps -p 1 -o comm=` says systemd there."
        )
    if case.facts["platform"]["apt"]:
        return "`apt-get update && apt-get install -y systemd-sysv && reboot`; `ps -p 1 -o comm=` says systemd then."
    return "Use a distribution that boots with systemd, as Debian 12 and Ubuntu 24.04 do: `ps -p 1 -o comm=` says systemd there."


@rule(
    "journal-off",
    BLOCK,
    "What an engine says is in the journal: the smoke proves by it which path serves, and a failed start is explained by it.",
    source="docs/checks.md",
)
def journal_off(case: Case) -> Iterator[Hit]:
    """journald takes messages and keeps them."""
    journal = case.facts["systemd"].get("journal")
    if not journal or not case.facts["systemd"]["running"]:
        return
    again = "systemctl restart systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service"
    # A unit that was started without a journal has its output nowhere.
    units = f" && systemctl try-restart '{UNIT_PREFIX}*'" if case.facts.get("current") else ""
    masked, storage = " ".join(journal["masked"]), journal.get("storage") or {}
    if masked:  # the restart fails at each that is left masked
        again = f"systemctl unmask {masked} && {again}"
    if set(journal["masked"]) - {SYSLOG}:
        yield Hit("the journal", f"masked: {masked}", "systemd-journald at work", f"`{again}{units}`.")
    elif not journal["active"]:
        yield Hit("the journal", "systemd-journald is stopped", "systemd-journald at work", f"`{again}{units}`.")
    elif storage.get("value") == "none":
        yield Hit(
            "the journal",
            f"Storage=none in {storage['file']}",
            "Storage=auto, or any other that keeps messages",
            f"`{_keeping(storage['file'])} && {again}{units}`.",
        )
    elif journal["kept"] is False:
        keep = "/etc/systemd/journald.conf.d"
        yield Hit(
            "the journal",
            "no message of this boot is kept",
            "messages that `journalctl -b -n 1` shows",
            "`grep -rn Storage= /etc/systemd/journald.conf* /usr/lib/systemd/journald.conf.d` shows who switched it off; "
            f"`mkdir -p {keep} && printf '[Journal]\\nStorage=auto\\n' > {keep}/zz-sglang.conf && {again}{units}` mends it.",
        )


def _keeping(file: str) -> str:
    """The command after which journald keeps messages though a file says none: a later drop-in where it is a package's."""
    if file.startswith("/etc/"):
        return rf"sed -i 's/^\s*Storage\s*=.*/Storage=auto/' {shlex.quote(file)}"
    folder, name = "/etc/systemd/journald.conf.d", file.rpartition("/")[2]
    own = shlex.quote(f"{folder}/{'z' if name.startswith('z') else 'zz-'}{name}")
    return f"mkdir -p {folder} && printf '[Journal]\\nStorage=auto\\n' > {own}"


# --- what the wheels load -----------------------------------------------------------------------

# Library and its package for dnf. Where apt is, the build installs libnuma1, and apt itself needs the others.
LIBRARIES = {"libnuma.so.1": "numactl-libs", "libgcc_s.so.1": "libgcc", "libstdc++.so.6": "libstdc++"}


@rule(
    "library-missing",
    BLOCK,
    "A wheel of the lock loads this library of the system; without it the engine's import fails.",
    source="https://github.com/sgl-project/sglang/pull/15355",
)
def library_missing(case: Case) -> Iterator[Hit]:
    """System libraries that no wheel carries are there, or come with the build."""
    for name, path in (case.facts.get("libraries") or {}).items():
        if path is None and name in LIBRARIES and not case.facts["platform"]["apt"]:
            fix = f"`dnf install -y {LIBRARIES[name]}`, or the like of this distribution."
            yield Hit(name, "not known to the loader (`ldconfig -p`)", "installed", fix)


# --- limits -------------------------------------------------------------------------------------


def _limit(case: Case, name: str) -> int | None:
    value = (case.facts.get("limits") or {}).get(name)
    return value if isinstance(value, int) else None


@rule(
    "nofile-low",
    WARN,
    "Every connection is a file. The unit asks for 1048576; a container's own limit cuts that silently.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html",
)
def nofile_low(case: Case) -> Iterator[Hit]:
    """Room for connections under the container's limit."""
    limit = _limit(case, "pid1_nofile")
    if inside(case) == "container" and limit is not None and 0 <= limit < MIN_NOFILE:
        fix = "Start the container with `docker run --ulimit nofile=1048576` or the like (LXC: `lxc.prlimit.nofile: 1048576`)."
        yield Hit("the limit of open files", str(limit), f"{MIN_NOFILE} or more", fix)


@rule(
    "pids-low",
    WARN,
    "An engine has hundreds of threads, and its compilers start more; beyond the limit they fail.",
    source="https://docs.kernel.org/admin-guide/cgroup-v2.html",
)
def pids_low(case: Case) -> Iterator[Hit]:
    """Room for the threads of all instances."""
    limit, least = _limit(case, "pids_max"), MIN_PIDS * max(1, len(case.instances))
    if limit is not None and limit < least:
        fix = f"`echo 'kernel.pid_max = 4194304' >> {SYSCTL} && sysctl --system`"
        if inside(case) == "container":
            fix = "Start the container with `docker run --pids-limit=-1` or the like (LXC: without limits.processes)"
        yield Hit(
            "the limit of processes and threads",
            str(limit),
            f"{least} or more for {len(case.instances)} instances",
            f"{fix}.",
        )


@rule(
    "map-count-low",
    WARN,
    "Weights and libraries are mapped in many pieces; below the kernel's usual number of them loading may fail.",
    source="https://docs.kernel.org/admin-guide/sysctl/vm.html",
)
def map_count_low(case: Case) -> Iterator[Hit]:
    """vm.max_map_count is at least the kernel's default."""
    limit = _limit(case, "map_count")
    if limit is not None and limit < MIN_MAPS:
        fix = f"`echo 'vm.max_map_count = 1048576' >> {SYSCTL} && sysctl --system`"
        yield Hit("vm.max_map_count", str(limit), f"{MIN_MAPS} or more", f"{on_kernel(case, fix)}.")


# --- clock and kernel ---------------------------------------------------------------------------


@rule(
    "clock-insane",
    BLOCK,
    "Certificates are not valid at this time, so nothing can be fetched, and the journal's times prove nothing.",
    source="https://datatracker.ietf.org/doc/html/rfc5280#section-4.1.2.5",
)
def clock_insane(case: Case) -> Iterator[Hit]:
    """The clock is not before this software's own time, nor a generation after it."""
    year = (case.facts.get("clock") or {}).get("year")
    if year is not None and not MIN_YEAR <= year <= MAX_YEAR:
        yield Hit(
            "the clock",
            f"year {year}",
            f"{MIN_YEAR} or later, and not after {MAX_YEAR}",
            on_kernel(case, _right_now(case)),
        )


@rule(
    "clock-behind",
    WARN,
    "The clock is earlier than the newest file of the operating system, so it is wrong, or was wrong when that was installed.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemd-timesyncd.service.html",
)
def clock_behind(case: Case) -> Iterator[Hit]:
    """The clock is not behind the system's own files."""
    clock = case.facts.get("clock") or {}
    if clock.get("before_build") and (clock.get("year") or 0) >= MIN_YEAR:
        yield Hit("the clock", "earlier than files of the system", "later", on_kernel(case, _right_now(case)))


@rule(
    "clock-unsynchronized",
    INFO,
    "Nothing keeps the clock right; times of this host's journal and of others will drift apart.",
    source="https://www.freedesktop.org/software/systemd/man/latest/timedatectl.html",
)
def clock_unsynchronized(case: Case) -> Iterator[Hit]:
    """Something disciplines the clock."""
    clock = case.facts.get("clock") or {}
    # Told already, with this step in it.
    wrong = clock.get("before_build") or not MIN_YEAR <= (clock.get("year") or MIN_YEAR) <= MAX_YEAR
    if clock.get("synchronized") is False and not wrong:
        source = f"{clock['source']} runs and has not got there yet" if clock.get("source") else "no clock service runs"
        yield Hit("the clock", f"not synchronized; {source}", "synchronized", on_kernel(case, _set_clock(case)))


def _right_now(case: Case) -> str:
    """Set it by hand first: with a clock far off, packages and certificates are refused, and so is its own repair."""
    reach = case.wanted.get("reach")
    if reach and inside(case) != "container":
        ssh = f"ssh {case.wanted.get('ssh') or ''}".rstrip()
        by_hand = f'`{ssh} {reach} "date -s @$(date +%s)"` from a machine whose clock is right'
    else:
        by_hand = "`date -s @SECONDS`, with what `date +%s` says on a machine whose clock is right"
    return f"First {by_hand}; then, to keep it: {_set_clock(case)}"


def _set_clock(case: Case) -> str:
    source = (case.facts.get("clock") or {}).get("source")
    if source == "chrony":
        return "`chronyc makestep`; `timedatectl` shows the result."
    own = case.facts["platform"]["apt"] and inside(case) != "container"  # what the outer machine has is not known
    install = "apt-get update && apt-get install -y systemd-timesyncd && " if own and not source else ""
    return f"`{install}timedatectl set-ntp true`; `timedatectl` shows the result."


@rule(
    "cgroup-old",
    INFO,
    "systemd gives up version 1 of control groups: releases from 258 on do not boot with it.",
    source="https://github.com/systemd/systemd/blob/main/NEWS",
)
def cgroup_old(case: Case) -> Iterator[Hit]:
    """Control groups of version 2."""
    if kernel(case).get("cgroup") == 1:
        fix = boot_with("systemd.unified_cgroup_hierarchy=1")
        yield Hit("control groups", "version 1", "version 2", f"{on_kernel(case, fix)}.")
