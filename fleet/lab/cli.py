# SPDX-License-Identifier: Apache-2.0
"""Command line of bin/lab. Exit codes: 0 done, 1 failed, 2 misuse; `ssh` passes on the command's own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fleet.lab import hosts
from fleet.lab.base import SUITES
from fleet.lab.labs import Lab, Wish, all_labs
from fleet.lab.settings import host_index, lab_names, settings, size, wanted_hosts
from fleet.lab.shell import LabError, MisuseError

_ANYBODY = {"list", "ssh", "console"}


def parser() -> argparse.ArgumentParser:
    """The command line; `NAME` is h3 or <lab>-h3."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--lab", default=os.environ.get("FLEET_LAB") or "lab", help="name of the lab (default: $FLEET_LAB, else lab)"
    )
    top = argparse.ArgumentParser(prog="bin/lab", description="Disposable real hosts on this machine; see docs/lab.md.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    up = verbs.add_parser("up", parents=[common], help="make and boot hosts; those that run are left alone")
    up.add_argument("hosts", nargs="*", metavar="N|NAME", help="how many hosts, or which ones (default: 1)")
    up.add_argument(
        "--suite", choices=sorted(SUITES), help="system of new hosts (default: the machine's own, else bookworm)"
    )
    up.add_argument("--memory", metavar="SIZE", help="memory limit of a new host, e.g. 6G")
    up.add_argument("--disk", metavar="SIZE", help="size of a new host's disk, held in memory, e.g. 512M")
    up.add_argument("--bind", action="append", default=[], metavar="SRC:DST[:ro]", help="show a folder to a new host")

    down = verbs.add_parser("down", parents=[common], help="take hosts away, or the whole lab")
    down.add_argument("hosts", nargs="*", metavar="NAME", help="only these hosts")

    listing = verbs.add_parser("list", parents=[common], help="hosts and their state")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.add_argument("--all", action="store_true", help="of every lab on this machine")

    ssh = verbs.add_parser("ssh", parents=[common], help="a shell, or a command, on a host")
    ssh.add_argument("host", metavar="NAME")
    ssh.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD")

    for verb, text in (
        ("crash", "kill a host's PID 1, as power loss does to its processes"),
        ("start", "boot a stopped or crashed host; its disk is as it was"),
        ("stop", "power a host off cleanly"),
        ("partition", "pull a host's network cable"),
        ("heal", "plug it in again and wait for SSH"),
        ("cut", "close a host's way out of the lab; SSH from this machine still works"),
        ("uncut", "open it again"),
    ):
        one = verbs.add_parser(verb, parents=[common], help=text)
        one.add_argument("hosts", nargs="+", metavar="NAME")
    console = verbs.add_parser("console", parents=[common], help="what a host printed on its console")
    console.add_argument("host", metavar="NAME")
    return top


def say(line: str) -> None:
    print(f"lab: {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    args = parser().parse_args(argv)
    if args.verb == "ssh" and args.command[:1] == ["--lab"] and len(args.command) > 1:  # given after the host
        args.lab, args.command = args.command[1], args.command[2:]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        names = lab_names(args.lab)
        lab = Lab(settings(os.environ, Path(__file__).resolve().parents[2]), names, say)
        if args.verb not in _ANYBODY and os.geteuid() != 0:
            raise MisuseError(
                f"bin/lab {args.verb} needs root for namespaces and mounts; run it with: sudo -E bin/lab ..."
            )
        return _dispatch(lab, args)
    except MisuseError as e:
        say(f"error: {e}")
        return 2
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LabError, OSError) as e:
        say(f"error: {e}")
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; repeat the call, or take everything away with: bin/lab down --lab {args.lab}")
        return 130


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _dispatch(lab: Lab, args: argparse.Namespace) -> int:
    names = lab.names
    if args.verb == "up":
        wish = Wish(
            args.suite,
            size(args.memory) if args.memory else None,
            size(args.disk) if args.disk else None,
            tuple(hosts.parse_bind(b) for b in args.bind),
        )
        lab.up(wanted_hosts(names, args.hosts), wish)
        print(lab.settings.inventory(names.lab))
    elif args.verb == "down":
        lab.down([host_index(names, w) for w in args.hosts] or None)
    elif args.verb == "list":
        return _list(lab, args)
    elif args.verb == "ssh":
        host = lab.existing(host_index(names, args.host))
        words = lab.ssh_words(host)
        os.execvp(words[0], [*words, *args.command])  # noqa: S606  becomes ssh, so that its exit code and terminal are ssh's
    elif args.verb == "console":
        host = lab.existing(host_index(names, args.host))
        sys.stdout.write(host.console.read_text(errors="replace") if host.console.exists() else "")
    else:
        for index in [host_index(names, w) for w in args.hosts]:
            _one(lab, args.verb, index)
    return 0


def _one(lab: Lab, verb: str, index: int) -> None:
    match verb:
        case "crash":
            lab.crash(index)
        case "start":
            lab.start(index)
        case "stop":
            lab.stop(index)
        case "partition" | "heal":
            lab.partition(index, verb == "partition")
        case "cut" | "uncut":
            lab.cut(index, verb == "cut")


def _list(lab: Lab, args: argparse.Namespace) -> int:
    labs = [Lab(lab.settings, lab_names(n), say) for n in all_labs(lab.settings)] if args.all else [lab]
    rows = [host.info() for one in labs for host in one.hosts()]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        used = (
            f"{row['memory_bytes'] >> 20} MB" if row["memory_bytes"] is not None and row["state"] == "running" else "-"
        )
        marks = " ".join(m for m in ("partitioned", "cut") if row[m] and (m == "cut" or row["state"] == "running"))
        print(f"{row['name']:<20} {row['address']:<15} {row['state']:<8} {row['suite']:<9} {used:>8} {marks}".rstrip())
    return 0
