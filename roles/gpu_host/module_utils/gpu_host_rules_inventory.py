# SPDX-License-Identifier: Apache-2.0
"""Rules about the inventory as a whole: engine, profile, the lists themselves, waivers."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, KEYS, PROFILES, Case, Hit, rule, shown


@rule(
    "engine-unknown",
    BLOCK,
    "A release is built from the lock and the series of a named engine only.",
    source="docs/architecture.md",
    needs_host=False,
)
def engine_unknown(case: Case) -> Iterator[Hit]:
    """fleet_engine names a folder under engines/."""
    engines, engine = case.wanted.get("engines") or [], case.wanted.get("engine")
    if engine not in engines:
        yield Hit(
            "fleet_engine",
            shown(engine),
            "one of " + ", ".join(engines),
            f"Set fleet_engine in {case.where} or its group.",
        )


@rule(
    "profile-unknown",
    BLOCK,
    "Backends are written down per profile; there is none for another word.",
    source="docs/architecture.md",
    needs_host=False,
)
def profile_unknown(case: Case) -> Iterator[Hit]:
    """gpu_host_profile is auto or a profile."""
    profile = case.wanted.get("profile")
    if profile != "auto" and profile not in PROFILES:
        allowed = ", ".join(("auto", *PROFILES))
        yield Hit(
            "gpu_host_profile", shown(profile), f"one of {allowed}", f"Set gpu_host_profile: auto in {case.where}."
        )


@rule(
    "defaults-malformed",
    BLOCK,
    "The defaults are merged under every instance, so they have to be a map of the same keys.",
    source="docs/operations.md",
    needs_host=False,
)
def defaults_malformed(case: Case) -> Iterator[Hit]:
    """gpu_units_defaults is a map of known keys."""
    defaults = case.wanted.get("defaults")
    if defaults is None:
        return
    if not isinstance(defaults, dict):
        yield Hit(
            "gpu_units_defaults",
            type(defaults).__name__,
            "a map of keys and values",
            f"Write it as a map in {case.where} or its group.",
        )
        return
    for key in sorted(set(map(str, defaults)) - set(KEYS)):
        yield Hit(
            "gpu_units_defaults",
            f"key {key!r}",
            "only " + ", ".join(KEYS),
            f"Remove or rename {key}; engine flags go under args.",
        )


@rule(
    "instances-malformed",
    BLOCK,
    "Without a list of instances there is nothing to serve.",
    source="docs/operations.md",
    needs_host=False,
)
def instances_malformed(case: Case) -> Iterator[Hit]:
    """gpu_units_instances is a list of maps with at least one entry."""
    example = "- {name: gpu0, gpus: [0], port: 30000}"
    instances = case.wanted.get("instances")
    if not isinstance(instances, list) or not instances:
        observed = "no instance" if instances in (None, [], {}, "") else type(instances).__name__
        yield Hit(
            "gpu_units_instances",
            observed,
            "a list with at least one instance",
            f"Add one in {case.where}, for example: {example}",
        )
        return
    for at, instance in enumerate(instances):
        if not isinstance(instance, dict):
            yield Hit(
                f"gpu_units_instances, entry {at + 1}",
                shown(instance),
                "a map",
                f"Write it in {case.where} as: {example}",
            )


@rule(
    "waiver-unknown",
    BLOCK,
    "A waiver that names no check hides nothing and would be forgotten.",
    source="docs/checks.md",
    needs_host=False,
)
def waiver_unknown(case: Case) -> Iterator[Hit]:
    """gpu_host_waivers names known checks of the host and gives a reason for each."""
    waivers = case.wanted.get("waivers") or {}
    known = case.wanted.get("waivable") or ()
    for name, reason in sorted(waivers.items()):
        if name not in known:
            yield Hit(
                "gpu_host_waivers",
                str(name),
                "one of " + ", ".join(sorted(known)),
                f"Remove {name} from gpu_host_waivers in {case.where}.",
            )
        elif not isinstance(reason, str) or not reason.strip():
            yield Hit(
                "gpu_host_waivers",
                f"{name} without a reason",
                "one sentence that says why",
                f"Write {name}: <reason> in {case.where}.",
            )
