# SPDX-License-Identifier: Apache-2.0
"""Proves over SSH, without a play, that the engines of the fleet run the path they were deployed for.

    bin/smoke                          every instance of every host
    bin/smoke ddtree -l ct200,ct201    only instances in this mode, on these hosts
    bin/smoke --json                   the verdicts as a JSON list

Exit codes: 0 every check holds, 1 one does not or a host gave no answer, 2 misuse. What to do about a failed check is in
docs/checks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import smoke_judge as judge
from ansible.module_utils import smoke_run as run
from ansible.module_utils.gpu_host_judge import instances_of

from fleet import causes, remote

ROLE = Path(__file__).resolve().parent.parent / "roles" / "smoke"
SOURCES = (
    "gpu_units_damage",
    "gpu_units_ended",
    "smoke_judge",
    "smoke_host",
    "smoke_recording",
    "smoke_backends",
    "smoke_files",
    "smoke_run",
)  # in the order of their imports
Verdict = dict[str, Any]


def hooks() -> dict[str, Any]:
    """The hooks of the role, as the role's play reads them."""
    return dict(yaml.safe_load((ROLE / "files" / "hooks.yml").read_text(encoding="utf-8")))


def prompts() -> list[dict[str, str]]:
    """The prompts of the role."""
    return [json.loads(line) for line in (ROLE / "files" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def settings(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The role's defaults with a host's own values, without their prefix."""
    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text(encoding="utf-8"))
    return {name.removeprefix("smoke_"): variables.get(name, value) for name, value in defaults.items()}


def _source(name: str) -> str:
    """The text of a file of the roles: modules are named after their role."""
    (path,) = ROLE.parent.glob(f"*/module_utils/{name}.py")
    return path.read_text(encoding="utf-8")


def program(
    target: remote.Target,
    known: Mapping[str, Any],
    mode: str | None,
    instance: str | None,
    inventory: Sequence[str] = (),
) -> str:
    """The probe of one host, as the text of a program."""
    sources = {name: _source(name) for name in SOURCES}
    site = remote.site_command(target.name, inventory)
    chosen = {**settings(target.variables), "host": target.name, "site": site, "mode": mode, "instance": instance}
    payload = {"hooks": known, "prompts": prompts(), "settings": chosen}
    return remote.module_program(sources, "smoke_run", payload)


def probe(target: remote.Target, text: str, limit: float, inventory: Sequence[str] = ()) -> Verdict:
    """The verdict of one host; a host that gives none gets one that says so."""
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    try:
        out = remote.run_python(target, text, limit)
        line = next((line for line in out.splitlines() if line.startswith(run.MARK)), None)
        if line is None:
            raise remote.Unreachable("the probe printed no verdict")
        return dict(json.loads(line.removeprefix(run.MARK)))
    except remote.Unreachable as error:
        told, step, why = str(error), causes.fix(target, error, inventory), "a host that does not answer is not proven"
        if told.startswith("smoke: "):  # the probe itself says what it lacks and how to mend it
            told, _, step = told.rpartition("; ")
        failed = judge.check("host.reachable", False, told, error.expected, why, step)
        seconds = time.monotonic() - clock
        return dict(judge.verdict(target.name, None, [failed], [], started, seconds))


def planned(target: remote.Target) -> list[str]:
    """Instances that the inventory has for a host; what is none is the preflight's to tell."""
    instances = target.variables.get("gpu_units_instances")
    return [str(one["name"]) for one in instances_of({"instances": instances}) if one.get("name")]


def unknown(instance: str | None, hosts: Sequence[remote.Target], verdicts: Sequence[Verdict]) -> bool:
    """Whether every host answered, and neither they nor their inventories know an instance of this name."""
    return instance is not None and all(
        "deployed" in verdict and instance not in (*verdict["deployed"], *planned(host))
        for host, verdict in zip(hosts, verdicts, strict=True)
    )


def none_of(hosts: Sequence[remote.Target], verdicts: Sequence[Verdict], mode: str | None, instance: str | None) -> str:
    """That no host has such an instance, and which they have."""
    what = [f"named {instance}"] if instance else []
    what += [f"in mode {mode}"] if mode else []
    had = []
    for host, verdict in zip(hosts, verdicts, strict=True):
        names = [f"{name} ({one})" for name, one in verdict.get("deployed", {}).items()]
        names = names or [f"{name} (not deployed)" for name in planned(host)]
        had.append(f"{host.name} has {', '.join(names) or 'none'}")
    return f"no instance {' and '.join(what)}; {'; '.join(had)}"


# --- text --------------------------------------------------------------------------------------------------------


def _cut(text: Any, width: int) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 3] + "..."


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns padded to their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def text_of(verdict: Verdict) -> str:
    """One host as a person reads it: a headline, its instances, every check; a failed one with what to do."""
    word = "ok" if verdict["ok"] else "FAILED"
    failed = [c for c in verdict["checks"] if not c["ok"]]
    many = len(verdict["checks"])
    count = f"{many} check{'s' if many > 1 else ''}" + (f", {len(failed)} failed" if failed else "")
    lines = [f"{verdict['host']}: {word} (release {verdict['release'] or 'none'}, {count}, {verdict['seconds']:.1f} s)"]
    if verdict["instances"]:
        rows = [("instance", "mode", "requests", "tokens", "tokens/step", "identical", "near ties", "different")]
        for i in verdict["instances"]:
            ties, bad = len(i.get("near_ties", [])), len(i.get("different", []))
            step = "-" if i.get("tokens_per_step") is None else f"{i['tokens_per_step']:.2f}"
            figures = (i["requests"], i["tokens"], step, i.get("identical", "-"), ties, bad)
            rows.append((i["name"], i["mode"], *map(str, figures)))
        lines += [f"  {line}" for line in table(rows)]
    if verdict["checks"]:
        checks = [("check", "instance", "", "observed", "expected")]
        for c in verdict["checks"]:
            state = "ok" if c["ok"] else "FAIL"
            checks.append((c["id"], c["instance"] or "-", state, _cut(c["observed"], 60), _cut(c["expected"], 60)))
        lines += [f"  {line}" for line in table(checks)]
    for c in failed:
        where = f" ({c['instance']})" if c["instance"] else ""
        lines += [f"  FAIL {c['id']}{where}", f"    observed: {c['observed']}", f"    expected: {c['expected']}"]
        lines += [f"    why:      {c['why']}", f"    fix:      {c['fix']}"]
    return "\n".join(lines)


# --- command -----------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bin/smoke", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "mode", nargs="?", metavar="MODE", help="only instances in this mode: %(metavar)s of docs/architecture.md"
    )
    remote.choosing_hosts(parser)
    remote.asking_password(parser)
    parser.add_argument("--instance", metavar="NAME", help="only the instance of this name")
    parser.add_argument("--json", action="store_true", help="print the verdicts as a JSON list")
    parser.add_argument(
        "--timeout", type=remote.seconds, default=300, metavar="S", help="seconds that a host may take (default: 300)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        known = hooks()
        if args.mode is not None and args.mode not in known["modes"]:
            told = f"unknown mode {args.mode!r}; known: {', '.join(known['modes'])}"
            raise remote.Misuse(told, "name one of them, or none for all instances")
        hosts = remote.targets(args.inventory, args.limit, "smoke_", "gpu_units_instances")
        hosts = remote.with_password(hosts, args.ask_become_pass)
        programs = [program(host, known, args.mode, args.instance, args.inventory) for host in hosts]
        print(f"smoke: probing {', '.join(h.name for h in hosts)}", file=sys.stderr)
        with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
            verdicts = list(pool.map(lambda h, p: probe(h, p, args.timeout, args.inventory), hosts, programs))
        asked = [v for v in verdicts if v["checks"]]
        if not asked or unknown(args.instance, hosts, verdicts):
            told = none_of(hosts, verdicts, args.mode, args.instance)
            raise remote.Misuse(
                told, "name one of these, or none for all instances; site.yml deploys what the inventory has"
            )
    except remote.Misuse as error:
        print(f"smoke: {error}", file=sys.stderr)
        return 2
    if args.json:
        lines = [json.dumps(asked, indent=1)]
    else:
        lines = ["\n\n".join(text_of(v) for v in asked)]
        lines += [f"\n{v['host']}: no such instance, not probed" for v in verdicts if not v["checks"]]
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:  # the reader has seen enough; the exit code is still the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if all(v["ok"] for v in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
