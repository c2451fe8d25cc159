# SPDX-License-Identifier: Apache-2.0
"""Judges hosts before anything is changed on them, over SSH and without a play: will it work, why not, what to do.

    bin/preflight -l ct200             one host: every problem with its cause and the next step
    bin/preflight                      all hosts: a table
    bin/preflight --json               the verdicts as a JSON list

Facts are read on the host, nothing is written there. Exit codes: 0 no host has a blocking finding, 1 one has or gave no answer,
2 misuse. What is behind each finding is in docs/checks.md.
"""

from __future__ import annotations

import argparse
import ast
import base64
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import gpu_host_judge as judge
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.gpu_host_rules import BLOCK, INFO, WARN
from ansible.module_utils.gpu_host_rules_files import model_paths
from ansible.module_utils.gpu_host_rules_given import file_paths
from ansible.module_utils.gpu_host_words import kind, shown

from fleet import backends, causes, declared, faults, keyfiles, recording, remote
from fleet.smoke import table

REPO = Path(__file__).resolve().parent.parent
ROLE = REPO / "roles" / "gpu_host"
MARK = "FACTS "
OLDEST_PYTHON = (3, 10)  # of the code that reads facts; what the roles need is a rule
# Called on the host in place of a module.
DOOR = f"""
import json
from ansible.module_utils.gpu_host_gather import gather
def main(payload):
    print({MARK!r} + json.dumps(gather(**payload)))
"""
Map = dict[str, Any]


# --- what the inventory wants ------------------------------------------------------------------------------------


def settings(host: str, variables: Mapping[str, Any], where: str | None = None) -> Map:
    """Options of the role for a host, checked as its argument spec says. Raises Misuse. where: the file that a person edits."""
    spec = yaml.safe_load((ROLE / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))
    options = spec["argument_specs"]["main"]["options"]
    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text(encoding="utf-8"))
    chosen = {}
    for name, default in defaults.items():
        value = variables.get(name, default)
        checked = ArgumentSpecValidator({name: options[name]}).validate({name: value})
        if checked.error_messages:
            raise wrong_type(f"{host}: {name}", value, options[name], faults.place(value) or where)
        chosen[name.removeprefix("gpu_host_")] = checked.validated_parameters[name]
    return chosen


# Types of an argument spec in the words of YAML, each with a value that is one.
KINDS = {
    "dict": ("a map", "{NAME: value}"),
    "list": ("a list", "[a, b]"),
    "float": ("a number", "20"),
    "int": ("a whole number", "250"),
    "bool": ("true or false", "false"),
}


def wrong_type(name: str, value: Any, option: Map, where: str | None) -> remote.Misuse:
    """What is said of an option whose value is of another type than its argument spec has."""
    expected, example = KINDS.get(option.get("type", "str"), ("one text", "value"))
    example = json.dumps(option["default"]) if option.get("default") not in (None, {}, "") else example
    place = where or "its variables"
    return remote.Misuse(
        f"{name} is {kind(value)}, {shown(value, name)}, expected {expected} ({place})",
        f"write it in {place.partition(':')[0]} as {name.partition(': ')[2]}: {example}, with your own values",
    )


def wanted(host: str, variables: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> tuple[Map, Map]:
    """(the inventory's side as the judge takes it, the role's options). given: all variables of the host as they are written."""
    folder = variables.get("inventory_dir")
    where = remote.short_path(Path(folder) / "host_vars" / f"{host}.yml") if folder else None
    chosen = settings(host, variables, where)
    names = ("fleet_engine", "gpu_units_instances", "gpu_units_defaults")
    engine, instances, defaults = (variables.get(name) for name in names)
    keys = (
        "profile",
        "pythons",
        "min_driver",
        "min_systemd",
        "min_disk_gib",
        "min_shm_gib",
        "allow_any_address",
        "waivers",
    )
    asked = {
        "engine": engine,
        "engines": sorted(lock.parent.name for lock in (REPO / "engines").glob("*/lock.txt")),
        "defaults": defaults,
        "instances": instances,
        "matrix": backends.asked(engine, instances, defaults),
        **declared.known(engine, instances, defaults, given or variables),
        "key_files": keyfiles.found(instances, defaults, folder),
        "root": chosen["root"],
        "where": where,
        "reach": reach(host, variables),
        "ssh": remote.client_options(variables),
        "user": variables.get("gpu_units_user") or "sglang",
        "groups": variables.get("gpu_units_groups") or [],
        **{key: chosen[key] for key in keys},
    }
    return asked, chosen


def reach(host: str, variables: Mapping[str, Any]) -> str:
    """How ssh and scp name a host; empty for this machine."""
    if variables.get("ansible_connection") == "local":
        return ""
    user = variables.get("ansible_user")
    return f"{user}@{variables.get('ansible_host') or host}" if user else str(variables.get("ansible_host") or host)


def recorded(host: str, file: str) -> Map:
    """Facts that stand in for the host's own; empty without a file. Raises Misuse for a file that is none."""
    try:
        return recording.read(file)
    except recording.RecordingError as error:
        raise remote.Misuse(f"{host}: {error}", f"remove gpu_host_facts_file for {host}: only tests need it") from error


# --- facts from the host -----------------------------------------------------------------------------------------


def sources(entry: str) -> dict[str, str]:
    """Module utilities that `entry` needs, itself included, each after those it imports."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        path = ROLE / "module_utils" / f"{name}.py"
        if name in found or not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ansible.module_utils."):
                add(str(node.module).rpartition(".")[2])
        found[name] = text

    add(entry)
    return found


def pynvml() -> str:
    """The control environment's pynvml.py, as `gpu_host_nvml.load` takes it."""
    spec = find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise remote.Misuse("no pynvml here", "`source bin/setup.sh` makes an environment that has it")
    return base64.b85encode(zlib.compress(Path(spec.origin).read_bytes(), 9)).decode("ascii")


def program(asked: Map) -> str:
    """The gathering of one host's facts, as the text of a program."""
    instances = judge.instances_of(asked)
    payload = {
        "root": asked["root"],
        "pythons": [str(version) for version in asked["pythons"]],
        "models": model_paths(instances),
        "addresses": sorted({one["address"] for one in instances if isinstance(one.get("address"), str)}),
        "pynvml": pynvml(),
        "user": str(asked["user"]),
        "groups": [str(group) for group in asked["groups"]] if isinstance(asked["groups"], list) else [],
        "files": file_paths(instances),
    }
    return remote.module_program({**sources("gpu_host_gather"), "gpu_host_door": DOOR}, "gpu_host_door", payload)


def probe(
    target: remote.Target, text: str, asked: Map, stand_in: Map, *, limit: float, inventory: Sequence[str]
) -> Map:
    """The verdict on one host. A host that gives no facts is judged by its inventory alone, and says so."""
    try:
        out = remote.run_python(target, text, limit, OLDEST_PYTHON)
        line = next((line for line in out.splitlines() if line.startswith(MARK)), None)
        if line is None:
            raise remote.Unreachable("the program that gathers facts printed none")
        facts = {**json.loads(line.removeprefix(MARK)), **stand_in}
        return {**judged(target, asked, facts, bool(stand_in)), "gpus": [gpu["name"] for gpu in facts["gpu"]["gpus"]]}
    except remote.Unreachable as error:
        verdict = judge.judge(target.name, asked)
        silent = no_facts(target, error, inventory)
        return {**verdict, "ok": False, "findings": [silent, *verdict["findings"]], "gpus": []}


def judged(target: remote.Target, asked: Map, facts: Map, stand_in: bool) -> Map:
    """The verdict. Raises Misuse where facts of a recording have a form that no rule knows."""
    try:
        return dict(judge.judge(target.name, asked, facts))
    except recording.NO_FIT as error:
        if not stand_in:
            raise
        file = str(target.variables.get("gpu_host_facts_file"))
        fix = f"remove gpu_host_facts_file for {target.name}: only tests need it"
        raise remote.Misuse(f"{target.name}: {recording.no_fit(file, error)}", fix) from error


def no_facts(target: remote.Target, error: remote.Unreachable, inventory: Sequence[str]) -> Map:
    """The finding about a host that gave no facts: out of reach, or the program that reads them failed there."""
    return {
        "id": "host.reachable",
        "severity": BLOCK,
        "thing": f"facts of {target.address}",
        "observed": str(error),
        "expected": error.expected,
        "fix": causes.fix(target, error, inventory),
        "why": "A host that does not answer cannot be judged; its inventory was.",
        "source": "docs/checks.md",
    }


# --- text --------------------------------------------------------------------------------------------------------


def devices(names: Sequence[str]) -> str:
    """`8x RTX PRO 6000` from the names of GPUs."""
    kinds = dict.fromkeys(names)
    return ", ".join(f"{list(names).count(kind)}x {kind.removeprefix('NVIDIA ')}" for kind in kinds) or "-"


def text_of(verdict: Map, inventory: Sequence[str], info: bool) -> Iterator[str]:
    """One host as a person reads it, and what to call next."""
    head, *rest = judge.lines(verdict, info=info)
    yield head
    if verdict["gpus"]:
        yield f"GPUs: {devices(verdict['gpus'])}"
    yield from rest
    hidden = sum(finding["severity"] == INFO for finding in verdict["findings"])
    if hidden and not info:
        yield f"{hidden} more, only good to know: -v shows them."
    words = ["-l", verdict["host"], *remote.given(inventory)]
    if verdict["ok"]:
        yield f"Next: {' '.join(['ansible-playbook', 'site.yml', *words])}"
    else:
        yield f"After the repair: {' '.join(['bin/preflight', *words])}"


def table_of(verdicts: Sequence[Map], inventory: Sequence[str]) -> list[str]:
    """Many hosts, a row each."""
    rows = [("host", "verdict", "profile", "GPUs", "blocks", "warns", "first problem")]
    for verdict in verdicts:
        counts = [sum(one["severity"] == kind for one in verdict["findings"]) for kind in (BLOCK, WARN)]
        first = next((one for one in verdict["findings"] if one["severity"] != INFO), None)
        told = " ".join(f"{first['id']}: {first['thing']}: {first['observed']}".split()) if first else "-"
        rows.append(
            (
                verdict["host"],
                "ok" if verdict["ok"] else "BLOCKED",
                verdict["profile"] or "-",
                devices(verdict["gpus"]),
                *map(str, counts),
                told if len(told) <= 90 else f"{told[:87]}...",
            )
        )
    return [
        *table(rows),
        f"All of a host, with why and fix: {' '.join(['bin/preflight -l HOST', *remote.given(inventory)])}",
    ]


# --- command -----------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bin/preflight", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    remote.choosing_hosts(parser)
    remote.asking_password(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="also what is only good to know")
    parser.add_argument("--json", action="store_true", help="print the verdicts as a JSON list")
    parser.add_argument(
        "--timeout", type=remote.seconds, default=60, metavar="S", help="seconds that a host may take (default: 60)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        hosts = remote.targets(args.inventory, args.limit, "gpu_host_", "gpu_units_", "fleet_", "inventory_dir")
        hosts = remote.with_password(hosts, args.ask_become_pass)
        sides = [wanted(host.name, host.variables, host.written) for host in hosts]
        calls = [
            (host, program(asked), asked, recorded(host.name, chosen["facts_file"]))
            for host, (asked, chosen) in zip(hosts, sides, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
            verdicts = list(pool.map(lambda c: probe(*c, limit=args.timeout, inventory=args.inventory), calls))
    except remote.Misuse as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    if args.json:
        out = [json.dumps(verdicts, indent=1)]
    elif len(verdicts) == 1:
        out = list(text_of(verdicts[0], args.inventory, args.verbose))
    else:
        out = table_of(verdicts, args.inventory)
    try:
        print(*out, sep="\n", flush=True)
    except BrokenPipeError:  # the reader has seen enough; the exit code is still the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if all(verdict["ok"] for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
