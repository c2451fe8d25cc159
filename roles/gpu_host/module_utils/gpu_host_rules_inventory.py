# SPDX-License-Identifier: Apache-2.0
"""Rules about the inventory as a whole: engine, profile, the lists themselves, waivers."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, KEYS, PROFILES, WARN, Case, Hit, Map, flag, rule, shown
from ansible.module_utils.gpu_host_words import SECRET_FLAGS, kind, meant, near
from ansible.module_utils.gpu_units_owned import OWNED_FLAGS

# gpu_units_render.HOME: units, links and the way back are written for this folder.
ROOT = "/opt/sglang-fleet"


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
            "one of " + ", ".join(engines) + meant(near(str(engine), engines)),
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
            f"{kind(defaults)}: {shown(defaults)}",
            "a map of keys and values",
            f"Write it in {case.where} or its group as gpu_units_defaults: {{mode: ddtree, model_path: /srv/models/target, "
            "draft_model_path: /srv/models/drafter}.",
        )
        return
    for key in sorted(set(map(str, defaults)) - set(KEYS)):
        yield unknown_key(case, "gpu_units_defaults", key)


def unknown_key(case: Case, thing: str, key: str) -> Hit:
    """A key that no instance has, with the ones that look like it; a flag of the engine stands a level deeper."""
    name, place = flag(key), f"in {case.where} or its group"
    names = [OWNED_FLAGS[name]] if name in OWNED_FLAGS else near(key, KEYS)
    way = f"Remove {key} {place}; a flag of the engine is written as args: {{{name}: ..}}."
    if ":" in key:  # YAML wants a space behind the colon
        begin, _, value = key.partition(":")
        names, value = near(begin, KEYS), ".." if flag(begin) in SECRET_FLAGS else value
        way = f"Put a space behind the colon {place}: `{begin}: {value}`."
    elif name in SECRET_FLAGS:
        way = f"Remove {key} {place}; write the key alone into a file on this machine, and its path as api_key_file."
    elif names:
        way = f"Write {names[0]} instead of {key} {place}."
    return Hit(thing, f"key {shown(key)}", "only " + ", ".join(KEYS) + meant(names), way)


@rule(
    "instances-malformed",
    BLOCK,
    "Without a list of instances there is nothing to serve.",
    source="docs/operations.md",
    needs_host=False,
)
def instances_malformed(case: Case) -> Iterator[Hit]:
    """gpu_units_instances is a list of maps with at least one entry."""
    cpu = case.wanted.get("profile") == "cpu"
    example = "{name: cpu0, gpus: [], port: 30000}" if cpu else "{name: gpu0, gpus: [0], port: 30000}"
    instances = case.wanted.get("instances")
    if not isinstance(instances, list) or not instances:
        observed = f"{kind(instances)}: {shown(instances)}"
        fix = f"Write in {case.where}: gpu_units_instances: [{example}]"
        misspelt = [name for name, names in unread(case).items() if "gpu_units_instances" in names]
        if instances in (None, [], {}, ""):
            observed = f"no instance; {misspelt[0]} is set, which nothing reads" if misspelt else "no instance"
        stray = _unread_files(case)[:1] if instances in (None, [], {}, "") and not misspelt else []
        for file in stray:
            observed, fix = f"no instance; {file['path']} is there and is not read: {file['why']}", file["fix"]
        if misspelt:
            fix = f"Rename {misspelt[0]} to gpu_units_instances in {case.where} or its group."
        yield Hit("gpu_units_instances", observed, "a list with at least one instance", fix)
        return
    for at, instance in enumerate(instances):
        if not isinstance(instance, dict):
            yield Hit(
                f"gpu_units_instances, entry {at + 1}",
                f"{kind(instance)}: {shown(instance)}",
                "a map",
                f"Write it in {case.where} as: - {example}",
            )


def unread(case: Case) -> dict[str, list[str]]:
    """Variables of the host that look like ours and that nothing reads, each with the names that may be meant."""
    return dict(case.wanted.get("unread") or {})


@rule(
    "variable-unknown",
    WARN,
    "Nothing reads a variable of this name, so what is meant by it is not done, and a default holds instead.",
    source="docs/operations.md",
    needs_host=False,
)
def variable_unknown(case: Case) -> Iterator[Hit]:
    """Variables with a prefix of ours, or a name that is nearly one of ours, are known."""
    folder = case.where.rpartition("host_vars/")[0] or "."
    for name, names in sorted(unread(case).items()):
        if "gpu_units_instances" in names and not case.wanted.get("instances"):
            continue  # said by instances-malformed
        fix = f"Rename it to {names[0]}" if names else "Rename or remove it"
        yield Hit(
            "the host's variables",
            name,
            "an option of a role (roles/*/meta/argument_specs.yml)" + meant(names),
            f"{fix} in {case.where} or its group: `grep -rn {name} {folder}` finds it.",
        )


def _unread_files(case: Case) -> list[Map]:
    """Files of variables that nothing reads, as `fleet.varfiles.known` tells of them."""
    return list(case.wanted.get("unread_files") or [])


@rule(
    "file-unread",
    WARN,
    "Ansible reads one file or folder of each host and group, by its exact name; what another one says is not done.",
    source="https://docs.ansible.com/ansible/latest/inventory_guide/intro_inventory.html#organizing-host-and-group-variables",
    needs_host=False,
)
def file_unread(case: Case) -> Iterator[Hit]:
    """Every file below host_vars and group_vars is somebody's, and the one that is read."""
    told = 0 if case.wanted.get("instances") or unread(case) else 1  # the first one by instances-malformed
    for file in _unread_files(case)[told:]:
        yield Hit(file["path"], f"not read: {file['why']}", "files of hosts and groups, one each", file["fix"])


@rule(
    "key-twice",
    BLOCK,
    "YAML takes the last of two equal names in a map and drops the other without a word: half of what is written holds.",
    source="https://yaml.org/spec/1.2.2/#3213-node-comparison",
    needs_host=False,
)
def key_twice(case: Case) -> Iterator[Hit]:
    """Every name stands once in its map, in the files that this host's variables come from."""
    for one in case.wanted.get("twice") or []:
        yield Hit(
            one["at"],
            f"{one['name']} is written a second time, before at {one['before']}",
            "each name once in a map",
            f"Remove one of the two `{one['name']}:` in {one['at'].rpartition(':')[0]}.",
        )


@rule(
    "path-relative",
    BLOCK,
    "A relative path is taken from wherever the program that reads it happens to run.",
    source="docs/operations.md",
    needs_host=False,
)
def path_relative(case: Case) -> Iterator[Hit]:
    """Folders of the host are given from / or from a home (~) on."""
    for name, given in sorted((case.wanted.get("paths") or {}).items()):
        for path in given if isinstance(given, list) else [given]:
            if path not in (None, "") and not (isinstance(path, str) and path.startswith(("/", "~"))):
                yield Hit(
                    name,
                    shown(path),
                    "an absolute path on the host",
                    f"Write it from / on in {case.where} or its group, or leave {name} out for its default.",
                )


@rule(
    "root-elsewhere",
    BLOCK,
    f"Units, links and the way back are written for {ROOT}: a release elsewhere is built and then not found by the swap.",
    source="docs/architecture.md",
    needs_host=False,
)
def root_elsewhere(case: Case) -> Iterator[Hit]:
    """Releases are built where units look for them."""
    root = (case.wanted.get("paths") or {}).get("sglang_venv_root")
    if isinstance(root, str) and root.startswith("/") and root.rstrip("/") != ROOT:
        yield Hit(
            "sglang_venv_root",
            root,
            ROOT,
            f"Remove it from {case.where} or its group. Where the room is elsewhere, bring it there on the host: "
            f"`mkdir -p {root} {ROOT} && mount --bind {root} {ROOT}`, and /etc/fstab for the next boot.",
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
                "one of " + ", ".join(sorted(known)) + meant(near(str(name), known)),
                f"Remove {name} from gpu_host_waivers in {case.where}.",
            )
        elif not isinstance(reason, str) or not reason.strip():
            yield Hit(
                "gpu_host_waivers",
                f"{name} without a reason",
                "one sentence that says why",
                f"Write {name}: <reason> in {case.where}.",
            )
