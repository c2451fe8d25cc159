# SPDX-License-Identifier: Apache-2.0
"""Switches one instance to another mode on its GPUs, proves it, and goes back if that fails.

    bin/mode ct200 gpu0            the mode that it serves in now
    bin/mode ct200 gpu0 dflash     stop, proof that its GPUs are free, start, smoke; the old mode again if one of them fails

A switch is temporary: the inventory is not touched, and the next site.yml makes the host what the inventory says.
Exit codes: 0 it serves in that mode, proven, 1 it does not or the host gave no answer, 2 misuse.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils import gpu_host_judge as judge
from ansible.module_utils import gpu_units_live as units
from ansible.module_utils.gpu_host_words import near

from fleet import causes, remote
from fleet.console import Progress, last_lines, run_logged
from fleet.importer import ROOT
from fleet.playview import PLAY_ENV, PlayView

ROLE = ROOT / "roles" / "gpu_units"
SOURCES = ("gpu_units_host", "gpu_units_live")  # in the order of their imports
DEFAULT_MODE = "ddtree"  # of an instance that names none, as gpu_units_instances has it


def modes() -> list[str]:
    """The modes of the role."""
    return list(yaml.safe_load((ROLE / "files" / "modes.yml").read_text(encoding="utf-8")))


def instances(target: remote.Target) -> dict[str, str]:
    """Mode by instance, as the inventory has them."""
    given = {key: target.variables.get(f"gpu_units_{key}") for key in ("instances", "defaults")}
    return {str(i["name"]): str(i.get("mode") or DEFAULT_MODE) for i in judge.instances_of(given) if i.get("name")}


def choose(inventory: Sequence[str], host: str, name: str, mode: str | None) -> tuple[remote.Target, str]:
    """(host, mode that its inventory has for the instance). Raises Misuse for what is unknown, with what is known."""
    hosts = remote.targets(inventory, host, "gpu_units_")
    files = "".join(f" {word}" for word in remote.given(inventory))
    if len(hosts) != 1:
        names = ", ".join(h.name for h in hosts)
        raise remote.Misuse(
            f"{host} names {len(hosts)} hosts ({names})", f"name one, as in bin/mode {hosts[0].name} {name}{files}"
        )
    known = instances(hosts[0])
    if name not in known:
        told = f"{hosts[0].name} has no instance {name!r}; known: {', '.join(known) or 'none'}"
        one = next(iter(known), None)
        fix = f"bin/mode {hosts[0].name} {one}{files}" if one else f"write gpu_units_instances into {hosts[0].where}"
        raise remote.Misuse(told, fix)
    if mode is not None and mode not in modes():
        likely = (near(mode, modes(), 1) or modes())[0]
        raise remote.Misuse(
            f"unknown mode {mode!r}; known: {', '.join(modes())}",
            f"bin/mode {host} {name} {likely}{files}, or another of them",
        )
    return hosts[0], known[name]


class Damaged(Exception):
    """The record of what a host serves cannot be used; path: the file on the host."""

    def __init__(self, told: str, path: str) -> None:
        super().__init__(told)
        self.path = path


def live(target: remote.Target, limit: float = 60.0) -> dict[str, Any]:
    """What the host serves now. Raises Unreachable, and Damaged where its record of it cannot be used."""
    sources = {name: (ROLE / "module_utils" / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES}
    out = remote.run_python(target, remote.module_program(sources, SOURCES[-1], {}), limit)
    line = next((line for line in out.splitlines() if line.startswith(units.MARK)), None)
    if line is None:
        raise remote.Unreachable("it printed no state")
    told = dict(json.loads(line.removeprefix(units.MARK)))
    if "broken" in told:
        raise Damaged(f"{told['path']} cannot be used ({told['broken']})", told["path"])
    return told


def play(target: remote.Target, inventory: Sequence[str], name: str, mode: str, progress: Progress) -> dict[str, Any]:
    """Run the playbook: {code, failure, smoke, log}; `smoke` is the last verdict, of the mode that it ended in."""
    log = ROOT / "logs" / f"mode-{target.name}-{time.strftime('%Y%m%dT%H%M%S')}.log"
    view = PlayView(progress)
    with tempfile.TemporaryDirectory(prefix="fleet-mode-") as folder:
        report = Path(folder) / "report.json"
        variables = {"mode_instance": name, "mode_wanted": mode, "mode_report": str(report)}
        argv = ["ansible-playbook", str(ROOT / "playbooks/mode.yml"), *(w for i in inventory for w in ("-i", i))]
        argv += ["-l", target.name, "-e", json.dumps(variables)]
        if target.become_password is not None:  # the play has no terminal to ask on
            secret = Path(folder) / "become"
            secret.touch(mode=0o600)
            secret.write_text(target.become_password, encoding="utf-8")
            argv += ["--become-password-file", str(secret)]
        code = run_logged(argv, log, view.line, view.wait, {**os.environ, **PLAY_ENV})
        try:
            told = json.loads(report.read_text(encoding="utf-8"))
        except FileNotFoundError:  # the play ended before it could tell
            told = {"failure": "\n".join(last_lines(log, 20)), "smoke": None}
    return {"code": code, "log": str(log), **told}


def verdict(target: remote.Target, name: str, wanted: str | None, inventory_mode: str) -> dict[str, Any]:
    """The answer before anything was done."""
    now = live(target)["instances"].get(name)
    serves = now["mode"] if now and now["state"] == "active" else None
    return {
        "verb": "mode",
        "host": target.name,
        "instance": name,
        "wanted": wanted,
        "inventory": inventory_mode,
        "before": now and now["mode"],
        "mode": now and now["mode"],
        "state": now["state"] if now else "not deployed",
        "ok": serves is not None if wanted is None else False,
        "message": None,
        "smoke": None,
        "log": None,
    }


def switch(target: remote.Target, inventory: Sequence[str], answer: dict[str, Any], progress: Progress) -> None:
    """Switch, and complete the answer with what came of it."""
    name, wanted = answer["instance"], answer["wanted"]
    with progress.phase("switch", f"{name} of {target.name}: {answer['before']} -> {wanted}"):
        done = play(target, inventory, name, wanted, progress)
    now = live(target)["instances"].get(name) or {"mode": None, "state": "not deployed"}
    answer |= {"mode": now["mode"], "state": now["state"], "smoke": done["smoke"], "log": done["log"]}
    answer["message"] = done["failure"]
    answer["ok"] = done["code"] == 0 and now["mode"] == wanted and now["state"] == "active"
    if not answer["ok"] and not answer["message"]:
        answer["message"] = f"{target.name}: ansible-playbook ended with {done['code']}; read {done['log']}"


def text_of(answer: dict[str, Any]) -> str:
    """The answer as a person reads it."""
    where = f"{answer['host']} {answer['instance']}"
    lines = [f"{where}: {answer['mode'] or 'no mode'} ({answer['state']})"]
    if answer["wanted"] is not None:
        lines[0] = f"{'ok' if answer['ok'] else 'FAILED'}: {lines[0]}"
    if answer["message"]:
        lines.append(str(answer["message"]))
    if answer["mode"] is not None and answer["mode"] != answer["inventory"]:
        lines.append(
            f"temporary: the inventory says {answer['inventory']}, and the next site.yml makes it that; "
            f"to keep {answer['mode']}, write mode: {answer['mode']} for {answer['instance']} into the inventory"
        )
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bin/mode", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("host", metavar="HOST", help="one host of the inventory")
    parser.add_argument("instance", metavar="INSTANCE", help="one of its instances")
    parser.add_argument(
        "mode", nargs="?", metavar="MODE", help=f"one of {', '.join(modes())}; left out: only say the mode"
    )
    parser.add_argument(
        "-i", "--inventory", action="append", default=[], metavar="FILE", help="default: that of ansible.cfg"
    )
    remote.asking_password(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the door."""
    args = arguments(argv)
    try:
        target, inventory_mode = choose(args.inventory, args.host, args.instance, args.mode)
        (target,) = remote.with_password([target], args.ask_become_pass)
        answer = verdict(target, args.instance, args.mode, inventory_mode)
        if answer["mode"] is None:
            answer["message"] = f"nothing was changed; first: {remote.site_command(target.name, args.inventory)}"
        elif args.mode is not None:
            switch(target, args.inventory, answer, Progress(sys.stderr))
    except remote.Misuse as error:
        print(f"mode: {error}", file=sys.stderr)
        return 2
    except Damaged as error:
        command = remote.site_command(args.host, args.inventory)
        fix = f"`rm {error.path}` on the host, then `{command}`, which writes it anew"
        print(f"mode: {args.host}: {error}; fix: {fix}", file=sys.stderr)
        return 1
    except remote.Unreachable as error:
        print(
            f"mode: {args.host} gave no answer: {error}; fix: {causes.fix(target, error, args.inventory)}",
            file=sys.stderr,
        )
        return 1
    print(json.dumps(answer, indent=1) if args.json else text_of(answer))
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
