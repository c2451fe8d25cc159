# SPDX-License-Identifier: Apache-2.0
"""The preflight verdict: facts and inventory in, findings out. Pure, so that every rule is tested without a host."""

from __future__ import annotations

from typing import Any

# Importing the rules registers them.
from ansible.module_utils import (
    gpu_host_rules_args,
    gpu_host_rules_backends,
    gpu_host_rules_bus,
    gpu_host_rules_control,
    gpu_host_rules_deployed,
    gpu_host_rules_driver,
    gpu_host_rules_files,
    gpu_host_rules_flags,
    gpu_host_rules_given,
    gpu_host_rules_gpus,
    gpu_host_rules_health,
    gpu_host_rules_holders,
    gpu_host_rules_hybrid,
    gpu_host_rules_instances,
    gpu_host_rules_inventory,
    gpu_host_rules_memory,
    gpu_host_rules_models,
    gpu_host_rules_named,
    gpu_host_rules_network,
    gpu_host_rules_notes,
    gpu_host_rules_numbers,
    gpu_host_rules_ports,
    gpu_host_rules_python,
    gpu_host_rules_ranks,
    gpu_host_rules_room,
    gpu_host_rules_speculation,
    gpu_host_rules_system,
    gpu_host_rules_toolchain,
    gpu_host_rules_topology,
    gpu_host_rules_weights,
    gpu_host_rules_xids,
)
from ansible.module_utils.gpu_host_grouped import grouped
from ansible.module_utils.gpu_host_rules import BLOCK, CAPABILITIES, INFO, PROFILES, RULES, WARN, Case, Map, merge

# The order of the report, within one severity: a cause comes before what it brings about.
SUBJECTS = (
    gpu_host_rules_control,
    gpu_host_rules_inventory,
    gpu_host_rules_instances,
    gpu_host_rules_named,
    gpu_host_rules_ports,
    gpu_host_rules_flags,
    gpu_host_rules_args,
    gpu_host_rules_numbers,
    gpu_host_rules_speculation,
    gpu_host_rules_driver,
    gpu_host_rules_bus,
    gpu_host_rules_gpus,
    gpu_host_rules_holders,
    gpu_host_rules_xids,
    gpu_host_rules_health,
    gpu_host_rules_topology,
    gpu_host_rules_toolchain,
    gpu_host_rules_system,
    gpu_host_rules_python,
    gpu_host_rules_room,
    gpu_host_rules_deployed,
    gpu_host_rules_network,
    gpu_host_rules_files,
    gpu_host_rules_given,
    gpu_host_rules_weights,
    gpu_host_rules_models,
    gpu_host_rules_ranks,
    gpu_host_rules_memory,
    gpu_host_rules_hybrid,
    gpu_host_rules_backends,
    gpu_host_rules_notes,
)
_PLACE = {subject.__name__: at for at, subject in enumerate(SUBJECTS)}
RULES.sort(key=lambda known: _PLACE[known.check.__module__])

ORDER = {BLOCK: 0, WARN: 1, INFO: 2}
# What judges the inventory, though against the host: no unit can be bound to a GPU that is not there, no profile be taken where
# GPUs have two or none, and no engine starts with what it refuses. Estimates and untried combinations can be waived.
NEVER_WAIVED = (
    "not-root",
    "gpu-none",
    "gpu-unknown",
    "gpu-capability",
    "gpu-mixed",
    "profile-mismatch",
    "hybrid-radix",
    "hybrid-tree",
    "symmetric-memory",
)
WAIVABLE = tuple(
    known.id for known in RULES if known.needs_host and known.severity == BLOCK and known.id not in NEVER_WAIVED
)


def profile_of(wanted: Map, facts: Map | None) -> str | None:
    """The device profile: the inventory's word where it gives one, else what the instances' GPUs are; None if that fails."""
    asked = wanted.get("profile")
    if asked in PROFILES:
        return str(asked)
    if facts is None or asked != "auto":
        return None
    case = Case("", wanted, facts, instances_of(wanted))
    named = [case.gpu(one) for one in _asked(case.instances)]
    gpus = [gpu for gpu in named if gpu] or case.gpus
    profiles = {CAPABILITIES.get(gpu["compute_cap"]) for gpu in gpus}
    return profiles.pop() if len(profiles) == 1 else None


def _asked(instances: list[Map]) -> list[Any]:
    return [one for instance in instances if isinstance(instance.get("gpus"), list) for one in instance["gpus"]]


def instances_of(wanted: Map) -> list[Map]:
    """The inventory's instances with its defaults under each; entries that are no map are left to their own rule.

    None while the defaults are no map: what is missing then is not the instances' fault.
    """
    instances, defaults = wanted.get("instances"), wanted.get("defaults")
    if not isinstance(instances, list) or not isinstance(defaults, (dict, type(None))):
        return []
    return [merge(defaults, one) for one in instances if isinstance(one, dict)]


class CheckFailed(ValueError):
    """A rule met facts of a form that it does not know, or is at fault itself; the text names it."""


def judge(host: str, wanted: Map, facts: Map | None = None) -> Map:
    """The verdict on a host; without facts only the inventory's rules are asked.

    Returns `{verb, host, ok, profile, instances, findings, passed}`. instances: how many were judged. findings: blocks first,
    each `{id, severity, thing, observed, expected, fix, why, source}`, a waived one with its reason; a fault of several instances
    is one finding, with `also: [the others]`. passed: ids of rules that held.
    """
    wanted = {**wanted, "waivable": WAIVABLE}
    profile = profile_of(wanted, facts)
    case = Case(host, wanted, facts or {}, instances_of(wanted), profile)
    waivers = wanted.get("waivers") or {}
    findings, passed = [], []
    for known in RULES:
        if known.needs_host and facts is None:
            continue
        try:
            hits = list(known.check(case))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckFailed(f"the check {known.id}: {error!r}") from error
        if not hits:
            passed.append(known.id)
        for hit in hits:
            finding: Map = {"id": known.id, "severity": known.severity, **hit._asdict()}
            finding |= {"why": known.why, "source": known.source}
            if known.id in WAIVABLE and str(waivers.get(known.id) or "").strip():
                finding.update(severity=WARN, waived=waivers[known.id])
            findings.append(finding)
    findings = sorted(grouped(findings, case.instances), key=lambda finding: ORDER[finding["severity"]])
    ok = not any(finding["severity"] == BLOCK for finding in findings)
    about = {"verb": "preflight", "host": host, "ok": ok, "profile": profile, "instances": len(case.instances)}
    return {**about, "findings": findings, "passed": passed}


def lines(verdict: Map, *, info: bool = False) -> list[str]:
    """The verdict for people: one line on the whole, then three for each finding; what is only good to know with `info`."""
    findings = verdict["findings"]
    blocks = sum(finding["severity"] == BLOCK for finding in findings)
    missed = {finding["id"] for finding in findings}
    held = f"{len(verdict['passed'])} of {len(verdict['passed']) + len(missed)} checks hold"
    if verdict["ok"]:
        count = "1 instance" if verdict["instances"] == 1 else f"{verdict['instances']} instances"
        head = f"{verdict['host']}: preflight ok, profile {verdict['profile']}, {count}, {held}."
    else:
        problems = "1 problem" if blocks == 1 else f"{blocks} problems"
        head = f"{verdict['host']}: preflight found {problems}, {held}. Nothing was changed."
    return [head, *(row for finding in findings if info or finding["severity"] != INFO for row in rows(finding))]


def rows(finding: Map) -> list[str]:
    """One finding: what is and should be, why it matters and who says so, the next step."""
    head = f"{finding['severity']} [{finding['id']}] {finding['thing']}: {finding['observed']}; expected {finding['expected']}"
    waived = [f"    waived: {finding['waived']}"] if finding.get("waived") else []
    return [head, f"    why: {finding['why']} ({finding['source']})", f"    fix: {finding['fix']}", *waived]
