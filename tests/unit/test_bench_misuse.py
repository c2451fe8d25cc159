# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything starts, and what an interrupted benchmark on hosts does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.bench import arms, asked, cli, places

REPO = Path(__file__).resolve().parents[2]
NANO = REPO / "models/nano"
ENGINE = Path(__file__).parent / "data/bench_engine"
ENV = {**os.environ, "PYTHONPATH": str(ENGINE)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--requests", "5"], "--requests 5 at concurrency 8 never has 8 at once"),
        (["--count", "0"], "--count has to be at least 1"),
        (["--count", "-3"], "--count has to be at least 1"),
        (["--max-running", "0"], "--max-running has to be at least 1"),
        (["--max-total-tokens", "0"], "--max-total-tokens has to be at least 1"),
        (["--start-limit", "0"], "--start-limit has to be at least 1"),
        (["--limit", "35"], "--limit 35 has no time for rounds: 35 s of it are kept"),
        (["--limit", "0"], "--limit 0 has no time for rounds"),
        (["--limit", "100", "--soak", "ngram"], "--limit 100 has no time for rounds: 165 s of it are kept"),
        (["--engine-flags=--a 'b"], 'flags "--a \'b": No closing quotation'),
        (["--arm", "baseline@b=--a 'b"], 'flags "--a \'b": No closing quotation'),
        (["-l", "ct200", "--limit", "5"], "--limit 5 has no time for rounds"),
        (["--python", "/nowhere/python"], "--python /nowhere/python can't be run"),
        (
            ["--python", "false"],
            "false: it has no sglang; name the engine's Python with --python, or measure on a host",
        ),
    ],
)
def test_misuse(words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.main(["--pair", str(NANO), "--out", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("bench: ") and error.count("\n") == 1
    assert not out.exists(), "nothing half done"


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ('{"id": "b"', "line 3: JSONDecodeError"),
        ('{"id": "b"}', "line 3: KeyError('prompt')"),
        ('["b"]', "line 3: TypeError"),
        ('{"id": "b", "prompt": ""}', "line 3: its prompt has to be a text, and its id 'b' its own"),
        ('{"id": "b", "prompt": 5}', "line 3: its prompt has to be a text"),
        ('{"id": "a", "prompt": "y"}', "line 3: its prompt has to be a text, and its id 'a' its own"),
    ],
)
def test_the_line_of_a_bad_prompt_is_told(tmp_path: Path, second: str, told: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "x"}) + f"\n\n{second}\n")
    with pytest.raises(arms.Misuse) as caught:
        asked.prompts(path, 1)
    assert f"prompts {path}, {told}" in str(caught.value)


def test_logs_of_two_arms_are_two_files() -> None:
    found = arms.arms(["dflash:8", "dflash@8"], NANO)
    assert len({arm.slug for arm in found}) == 2


def test_an_unknown_flag_is_told_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--pair", str(NANO), "--out", "out", "--no-such"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(arms.Misuse, match="name a folder that can be written"):
            places.take(tmp_path / name)


def bench(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "fleet.bench", "--pair", str(NANO), "--out", str(out), "--arms", "baseline", "--count", "4",
            "--new", "16", "--concurrency", "1", "--rounds", "1", "--requests", "2", *words]  # fmt: skip


def test_an_older_report_goes_and_a_running_ones_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = [out / "report.json", out / "report.md", out / "report.svg", out / "servers/ngram/engine.log"]
    (out / "servers/ngram").mkdir(parents=True)
    for path in old:
        path.write_text("yesterday")
    held = places.take(out)
    done = subprocess.run(bench(out), cwd=REPO, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "belongs to a benchmark that still runs" in done.stderr
    assert all(path.read_text() == "yesterday" for path in old), "the other run's"
    os.close(held)
    refused = "--engine-flags=--fake-refuse"
    done = subprocess.run(bench(out, refused), cwd=REPO, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert json.loads(old[0].read_text())["ended"] == "no server ready" and "yesterday" not in old[1].read_text()
    assert not old[2].exists() and not old[3].exists()
    assert not list(out.glob(".*")), "no half report"


PLAY = """\
#!/bin/sh
[ "$(basename "$0")" = ansible-playbook ] || { echo "$@" >"$SEEN/ended"; exit "${FAKE_CODE:-0}"; }
trap 'echo INT >"$SEEN/told"; exit 99' INT
echo $$ >"$SEEN/play"
for i in $(seq 600); do sleep 0.1; done
"""


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGINT, 4)])
def test_an_interrupted_benchmark_ends_on_the_hosts_too(tmp_path: Path, sign: signal.Signals, code: int) -> None:
    """A stand-in for Ansible, which cleans nothing up when it is interrupted."""
    for name in ("ansible", "ansible-playbook"):
        (tmp_path / name).write_text(PLAY)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path), "FAKE_CODE": str(code)}
    words = [sys.executable, "-m", "fleet.bench", "-l", "ct200", "-i", "inv", "--out", str(tmp_path / "out")]
    # its own session, as a terminal gives one; INT reaches the play as well, TERM this process only
    process = subprocess.Popen(words, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 20
    while not (tmp_path / "play").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, sign) if sign == signal.SIGINT else process.send_signal(sign)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error
    assert (tmp_path / "told").read_text() == "INT\n"
    asked = (tmp_path / "ended").read_text()
    assert asked.startswith(
        "ct200 -i inv --become -m ansible.builtin.shell -a systemctl stop sglang-fleet-bench.service"
    )
    last = "not every host is known to have ended it" if code else "instances that ran are being started again"
    assert last in error.splitlines()[-1]
