# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/show.sh and plays.sh outlive whoever called them.

Stand-ins: for nvidia-smi, and for the benchmark, which writes down what it was told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SHOW = REPO / "tests/gpu/show.sh"
PYTHON = """\
#!/bin/sh
echo "$*"
for word in "$@"; do [ "$before" != --out ] || out=$word; before=$word; done
[ -n "$out" ] || exit 0
mkdir -p "$out"
until [ -e "$GO" ]; do sleep 0.05; done
echo said >"$out/report.md"
case $out in */$BAD) exit 1 ;; esac
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("python3", PYTHON), ("nvidia-smi", "#!/bin/sh\necho GPU 0\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    own = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "GPU_HOME": str(tmp_path),
        "GO": str(tmp_path / "go"),
        "BAD": "-",
    }
    return {**os.environ, **own}


def call(env: dict[str, str], *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SHOW, *words], env=env, capture_output=True, text=True, timeout=60)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_part_runs_and_its_report_is_copied(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "go").touch()
    assert call(env, "start", tmp_path / "show").returncode == 0
    done = call(env, "wait", tmp_path / "show", "30", tmp_path / "copy")
    assert done.returncode == 0, done
    for part in ("dense", "hybrid", "hybrid16", "leak"):
        assert (tmp_path / "copy" / part / "report.md").read_text() == "said\n"
        (told,) = [line for line in (tmp_path / f"copy/{part}.log").read_text().splitlines() if "fleet.bench" in line]
        assert told.count("--rounds ") == 1, "a flag that is given twice is a wrong command in the report"
    assert "needs two GPUs" in (tmp_path / "copy/ranks.log").read_text()


def test_misuse_is_one_line(tmp_path: Path, env: dict[str, str]) -> None:
    bare = {name: value for name, value in env.items() if name != "GPU_HOME"}
    for chosen, words, told in (
        (bare, ("start", tmp_path / "a"), "show.sh: no folder of pairs"),
        (env, ("start", tmp_path / "a", "nope"), "show.sh: no part nope; known: ranks dense"),
        (bare, ("wait", tmp_path / "a"), "show.sh: nothing was begun"),
        (env, ("stop", tmp_path / "a"), "show.sh: start or wait, got stop"),
    ):
        done = call(chosen, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and told in done.stderr
    assert not (tmp_path / "a").exists()


def test_it_outlives_its_caller(tmp_path: Path, env: dict[str, str]) -> None:
    caller = subprocess.Popen(
        ["bash", "-c", f"{SHOW} start {tmp_path}/show leak; sleep 60"], env=env, start_new_session=True
    )
    until((tmp_path / "show/leak").exists)
    os.killpg(caller.pid, signal.SIGKILL)
    caller.wait(10)
    assert call(env, "wait", tmp_path / "show", "1").returncode == 4
    (tmp_path / "go").touch()
    assert call(env, "wait", tmp_path / "show", "30").returncode == 0


def test_a_part_that_fails_and_an_end_from_outside(tmp_path: Path, env: dict[str, str]) -> None:
    assert call(env, "start", tmp_path / "ended", "leak").returncode == 0
    until((tmp_path / "ended/leak").exists)
    os.killpg(int((tmp_path / "ended/pid").read_text()), signal.SIGKILL)
    done = call(env, "wait", tmp_path / "ended", "30")
    assert done.returncode == 1 and "ended from outside" in done.stderr
    (tmp_path / "go").touch()
    assert call({**env, "BAD": "hybrid16"}, "start", tmp_path / "bad", "hybrid16", "leak").returncode == 0
    assert call(env, "wait", tmp_path / "bad", "30", tmp_path / "copy").returncode == 1
    assert (tmp_path / "copy/leak/report.md").exists(), "the next part runs all the same"


def test_plays_outlive_their_caller(tmp_path: Path) -> None:
    """One step that needs no host: what a stand-in for nvidia-smi says, once it may."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(
        '#!/bin/sh\n: >"$BEGUN"\nuntil [ -e "$GO" ]; do sleep 0.05; done\necho 5 MiB\n'
    )
    (programs / "nvidia-smi").chmod(0o755)
    (tmp_path / "vars.yml").write_text("gpu_units_instances: [{name: gpu0, port: 30000}]\n")
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "GO": str(tmp_path / "go"), "BEGUN": str(tmp_path / "begun")}
    env = {**os.environ, **own}
    words = [REPO / "tests/gpu/plays.sh", tmp_path / "out", tmp_path / "vars.yml", "memory"]
    caller = subprocess.Popen(words, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    until((tmp_path / "begun").exists)
    os.killpg(caller.pid, signal.SIGKILL)
    caller.wait(10)
    again = subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    (tmp_path / "go").touch()
    said, error = again.communicate(timeout=30)
    assert again.returncode == 0 and "following them" in error and said.startswith("memory       exit 0")
    assert "5 MiB" in (tmp_path / "out/memory.txt").read_text()
