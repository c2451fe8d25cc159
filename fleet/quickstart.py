# SPDX-License-Identifier: Apache-2.0
"""From a clean clone to a verdict: one lab host, the main job on it with the bundled nano pair, the smoke.

Phases: setup (bin/setup.sh), lab (bin/lab up), play (site.yml), smoke (bin/smoke ddtree). Exit 0 if the verdict is ok, 1 if a
phase or a check failed, 2 for misuse or a machine that cannot do it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet import smoke
from fleet.console import Progress, last_lines, run_logged
from fleet.importer import ROOT
from fleet.playview import PLAY_ENV, PlayView

GIB = 1 << 30
# One engine on the CPU holds 3 GiB; the engine's packages take about 9 GiB in uv's cache and less than 1 GiB in the host.
NEED_MEMORY, NEED_DISK = 4 * GIB, 14 * GIB


class PhaseError(Exception):
    """A phase that ended badly; the text says what to do next."""


def as_root(argv: Sequence[str]) -> list[str]:
    """The command for root; the lab makes namespaces and mounts."""
    return list(argv) if os.geteuid() == 0 else ["sudo", "-E", *argv]


def lacking() -> list[str]:
    """What this machine lacks for a quickstart, in sentences; empty if nothing."""
    found = []
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        found.append(f"this is {sys.platform} on {platform.machine()}; expected Linux on x86_64 or aarch64")
    if os.geteuid() != 0 and not shutil.which("sudo"):
        found.append("the lab needs root for namespaces and mounts; run bin/quickstart as root or install sudo")
    memory = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    if memory and int(memory[1]) * 1024 < NEED_MEMORY:
        found.append(f"{int(memory[1]) / 1024**2:.1f} GiB of memory are free; expected {NEED_MEMORY // GIB}")
    cache = Path(os.environ["UV_CACHE_DIR"])
    parent = next(p for p in (cache, *cache.parents) if p.is_dir())
    free, need = shutil.disk_usage(parent).free, 1 * GIB if any(cache.glob("archive-v*/*/torch")) else NEED_DISK
    if free < need:
        found.append(
            f"{free / GIB:.1f} GiB are free for uv's cache {cache}; expected {need // GIB}, or set UV_CACHE_DIR"
        )
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bin/quickstart", description="One lab host from bare to a proven DDTree engine on the CPU."
    )
    parser.add_argument("--lab", default="quickstart", help="name of the lab (default: quickstart)")
    parser.add_argument("--down", action="store_true", help="take the lab away at the end; otherwise the host stays up")
    parser.add_argument(
        "--json", action="store_true", help="print verdict and seconds by phase as JSON; progress goes to stderr"
    )
    return parser.parse_args(argv)


class Quickstart:
    """The phases, one method each; `log` gets the whole output of all programs."""

    def __init__(self, lab: str, progress: Progress) -> None:
        self.lab, self.progress = lab, progress
        self.host = f"{lab}-h1"
        self.inventory = ["-i", f"inventory/lab/{lab}/hosts.yml"]
        self.log = ROOT / "logs" / f"quickstart-{time.strftime('%Y%m%dT%H%M%S')}.log"
        self.view = PlayView(progress)

    def up(self) -> None:
        def show(line: str) -> None:
            if line.startswith("lab: "):
                self.progress.say(f"            {line.removeprefix('lab: ')}")

        since = time.monotonic()
        self._run(
            "lab",
            as_root(["bin/lab", "up", "1", "--lab", self.lab]),
            show,
            lambda: self.progress.still("the first lab on a machine builds its base system", since),
        )

    def play(self) -> None:
        argv = ["ansible-playbook", "site.yml", *self.inventory, "-l", self.host]
        self._run("play", argv, self.view.line, self.view.wait, {**os.environ, **PLAY_ENV})

    def smoke(self) -> dict[str, Any]:
        """The verdict of the everyday verb, which asks the host over plain SSH."""
        argv = ["bin/smoke", "ddtree", *self.inventory, "-l", self.host, "--json"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(argv)}\n{done.stdout}")
        if done.returncode not in (0, 1):
            raise PhaseError(f"smoke: bin/smoke exited {done.returncode}; its message is above")
        return dict(json.loads(done.stdout)[0])

    def _run(self, phase: str, argv: list[str], on_line: Any, on_wait: Any, env: dict[str, str] | None = None) -> None:
        code = run_logged(argv, self.log, on_line, on_wait, env)
        if code:
            self.progress.say("\n".join(["", *last_lines(self.log, 40), ""]))
            raise PhaseError(f"{phase}: {' '.join(argv)} exited {code}; the lines above are the end of {self.log}")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All phases; returns the report, whose `ok` is the verdict's."""
    work = Quickstart(args.lab, progress)
    report: dict[str, Any] = {"ok": False, "host": work.host, "log": str(work.log)}
    try:
        with progress.phase("lab", "one host with systemd, sshd and an address of its own"):
            work.up()
        with progress.phase("play", f"site.yml on {work.host}: release, patch series, engine, baseline, smoke"):
            work.play()
        with progress.phase("smoke", "bin/smoke ddtree"):
            report["verdict"] = work.smoke()
        report["ok"] = report["verdict"]["ok"]
    except PhaseError as error:
        progress.say(f"quickstart: {error}")
        report["error"] = str(error)
    report["seconds"] = {**progress.seconds, "total": round(time.time() - progress.started, 1)}
    report["play"] = {"tasks": work.view.tasks, "changed": work.view.changed, "seconds_by_role": work.view.roles}
    return report


def close(args: argparse.Namespace, report: dict[str, Any], progress: Progress) -> None:
    """Takes the host away, or says what can be done with it."""
    sudo = "" if os.geteuid() == 0 else "sudo -E "
    if args.down:
        subprocess.run(as_root(["bin/lab", "down", "--lab", args.lab]), stdin=subprocess.DEVNULL, check=True)
        return
    flags = f"-i inventory/lab/{args.lab}/hosts.yml"
    progress.say(
        f"""
{report["host"]} stays up. What now?
  bin/lab ssh {report["host"]} --lab {args.lab}        a shell on it; journalctl -u 'sglang@*' is the engine's log
  bin/smoke ddtree {flags}
  source bin/setup.sh                                  for this shell: the control environment
  ansible-playbook site.yml {flags}        a second run changes nothing
  {sudo}bin/lab down --lab {args.lab}        away with it"""
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    os.chdir(ROOT)
    now = time.time()
    started = min(now, float(os.environ.get("FLEET_STARTED") or now))  # set by the door, before its setup
    progress = Progress(sys.stderr if args.json else sys.stdout, started=started)
    if wrong := lacking():
        print("\n".join(f"quickstart: {sentence}" for sentence in wrong), file=sys.stderr)
        return 2
    progress.done("setup", now - started)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        report = run(args, progress)
    except KeyboardInterrupt:
        progress.say(f"interrupted; run it again to go on from here, or: bin/lab down --lab {args.lab}")
        return 130
    if args.json:
        print(json.dumps(report, indent=1))
    elif "verdict" in report:
        progress.say(f"\n{smoke.text_of(report['verdict'])}")
    progress.say(f"\n{'ok' if report['ok'] else 'NOT OK'} after {report['seconds']['total']:.0f} s")
    close(args, report, progress)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
