# SPDX-License-Identifier: Apache-2.0
"""`bin/bench -l HOST,..`: the same benchmark on hosts, by playbooks/bench.yml in the place of an instance."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fleet.bench.arms import ROOT, Misuse
from fleet.bench.servers import hold_signals, release_signals

UNIT = "sglang-fleet-bench.service"
# Seconds that an interrupted play has to end: by itself, after an interrupt of ours, after a kill.
PLAY_LIMITS = (2.0, 15.0, 15.0)
STOP_LIMIT = 180.0  # seconds until the benchmarks of all hosts are told to end


def _places(inventory: Sequence[str]) -> list[str]:
    return [word for file in inventory for word in ("-i", file)]


def command(
    limit: str, inventory: Sequence[str], instance: str | None, out: Path, prompts: Path | None, words: Sequence[str]
) -> list[str]:
    """The play's command line; `words` go to the benchmark on the host."""
    variables = {"bench_arguments": list(words), "bench_out": str(out.resolve())}
    if instance:
        variables["bench_instance"] = instance
    if prompts:
        variables["bench_prompts"] = str(prompts.resolve())
    play = ["ansible-playbook", str(ROOT / "playbooks/bench.yml"), *_places(inventory), "-l", limit]
    return [*play, "-e", json.dumps(variables)]


def ending(limit: str, inventory: Sequence[str]) -> list[str]:
    """The command line that ends benchmarks on hosts; their units then start the instances again."""
    stop = f"systemctl stop {UNIT} || [ $? = 5 ]"  # 5: not loaded, so it is not running
    return ["ansible", limit, *_places(inventory), "--become", "-m", "ansible.builtin.shell", "-a", stop]


def _interrupted(_sign: int, _frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _end(play: subprocess.Popen[bytes]) -> None:
    """A terminal's Ctrl-C reaches the play as well; one that only this process got is passed on."""
    for sign, limit in zip((None, signal.SIGINT, signal.SIGKILL), PLAY_LIMITS, strict=True):
        if sign is not None:
            play.send_signal(sign)
        with suppress(subprocess.TimeoutExpired):
            play.wait(limit)
            return


def run(argv: Sequence[str], end: Sequence[str]) -> int:
    """0 all hosts are fine, 1 one is not, 130 interrupted. Raises Misuse without Ansible, or for a play that can't run at all.

    Ansible cleans nothing up when it is interrupted, so then `end` is run to end the benchmarks on the hosts.
    """
    held = signal.signal(signal.SIGTERM, _interrupted)
    try:
        play = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise Misuse("ansible-playbook is not there; start this with bin/bench") from error
    try:
        code = play.wait()
    except KeyboardInterrupt:
        again = hold_signals()
        try:
            print("bench: interrupted; ending the benchmark on the hosts", file=sys.stderr, flush=True)
            _end(play)
            return _end_on_hosts(end)
        finally:
            release_signals(again)
    finally:
        signal.signal(signal.SIGTERM, held)
    if code not in (0, 2, 4):
        raise Misuse(f"ansible-playbook ended with {code}; see its message above")
    return 0 if code == 0 else 1


def _end_on_hosts(end: Sequence[str]) -> int:
    try:
        done = subprocess.run(
            end, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STOP_LIMIT, check=False
        )
        why = None if done.returncode == 0 else f"{done.stdout}{done.stderr}".strip()
    except subprocess.TimeoutExpired:
        why = f"no answer within {STOP_LIMIT:.0f} s"
    if why is not None:
        print(
            f"{why}\nbench: not every host is known to have ended it; on the host: systemctl stop {UNIT}",
            file=sys.stderr,
        )
    else:
        print("bench: ended on all hosts; instances that ran are being started again", file=sys.stderr)
    return 130
