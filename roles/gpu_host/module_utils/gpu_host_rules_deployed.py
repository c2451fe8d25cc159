# SPDX-License-Identifier: Apache-2.0
"""Rules about what an earlier run left on the host, and about the places where this one writes beside the releases."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ansible.module_utils.gpu_host_gather_room import PLACES
from ansible.module_utils.gpu_host_rules import BLOCK, INFO, UNIT_PREFIX, WARN, Case, Hit, Map, label, rule
from ansible.module_utils.gpu_host_rules_room import remount, root_mount


def _left(case: Case) -> Map:
    return case.facts.get("deployed") or {}


@rule(
    "state-read-only",
    BLOCK,
    "Users, units, instances and records of deployments are written there.",
    source="docs/architecture.md",
)
def state_read_only(case: Case) -> Iterator[Hit]:
    """What is not below the folder of releases can be written too."""
    mounts, told = case.facts.get("mounts") or {}, {root_mount(case)[1].get("point")}
    for place in PLACES:
        mount = mounts.get(place) or {}
        point = str(mount.get("point") or place)
        if "ro" in mount.get("options", ()) and point not in told:
            told.add(point)
            look = "See `dmesg | tail` for errors of the disk; without any, "
            yield Hit(place, f"read-only, mounted at {point}", "read-write", f"{look}{remount(case, 'rw', point)}.")


@rule(
    "record-broken",
    BLOCK,
    "Deployments are compared with these records; a run stops at one that cannot be read, before it changes anything.",
    source="docs/checks.md",
)
def record_broken(case: Case) -> Iterator[Hit]:
    """Records of deployments are whole."""
    for record in _left(case).get("broken") or []:
        path = record["path"]
        then = "site.yml then writes it anew from the inventory"
        if not path.endswith(("/current.json", "/swap.json")):
            then = "no rollback leads to what it held any more"
        fix = f"`rm {shlex.quote(path)}`; {then}."
        yield Hit(path, f"damaged: {record['error']}", "a record in JSON", fix)


@rule(
    "unit-masked",
    BLOCK,
    "systemd starts and enables no masked unit.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemctl.html",
)
def unit_masked(case: Case) -> Iterator[Hit]:
    """Units of the instances, and of their baselines, may be started."""
    masked = _left(case).get("masked") or {}
    for at, instance in enumerate(case.instances):
        name = f"{UNIT_PREFIX}{instance.get('name')}"
        for unit in (f"{name}.service", f"{name}.baseline.service"):
            if unit in masked:
                runtime = "--runtime " if masked[unit] == "masked-runtime" else ""
                fix = f"`systemctl unmask {runtime}{unit}`."
                yield Hit(label(instance, at), f"{unit} is masked", "a unit that may be started", fix)


@rule(
    "release-gone",
    WARN,
    "The units start from this link, so none of them comes up again; the next run builds the release anew.",
    source="docs/releases.md",
)
def release_gone(case: Case) -> Iterator[Hit]:
    """`current` leads to a release."""
    gone = _left(case).get("gone")
    if gone:
        root = case.wanted.get("root") or "/opt/sglang-fleet"
        yield Hit(
            f"{root}/current",
            f"leads to releases/{gone}, which is not there",
            "a release",
            f"`ansible-playbook site.yml -l {case.host}`, with the same inventory, builds it under the same id.",
        )


@rule(
    "cache-owner",
    WARN,
    "An engine writes compiled kernels there and does not start where it may not.",
    source="docs/releases.md",
)
def cache_owner(case: Case) -> Iterator[Hit]:
    """The live release's cache belongs to the engine's user."""
    user = case.facts.get("user") or {}
    wrong = [one for one in _left(case).get("cache") or [] if user.get("uid") is not None and one["uid"] != user["uid"]]
    if wrong:
        cache, name = _left(case)["cache"][0]["path"], user["name"]
        more = f" and {len(wrong) - 1} more there" if len(wrong) > 1 else ""
        fix = f"`chown -R {name}: {shlex.quote(cache)}`; site.yml then starts what failed."
        yield Hit(f"{wrong[0]['path']}{more}", f"of user {wrong[0]['owner']}", f"of user {name}", fix)


@rule(
    "unit-failed",
    INFO,
    "site.yml starts it again; without its cause it fails again.",
    source="docs/checks.md",
)
def unit_failed(case: Case) -> Iterator[Hit]:
    """No unit of an instance is in systemd's state `failed`."""
    failed = _left(case).get("failed") or []
    for at, instance in enumerate(case.instances):
        unit = f"{UNIT_PREFIX}{instance.get('name')}.service"
        if unit in failed:
            fix = f"`journalctl -u {unit} -n 100 --no-pager` shows why."
            yield Hit(label(instance, at), f"{unit} failed", "a unit that runs, or was never started", fix)
