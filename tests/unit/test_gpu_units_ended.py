# SPDX-License-Identifier: Apache-2.0
"""Why a unit does not serve, told from properties and lines as systemd and engines give them."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_units_damage as damage
from ansible.module_utils import gpu_units_ended as e

UNIT = "sglang@gpu0.service"
AGAIN = f"`systemctl reset-failed {UNIT} && systemctl restart {UNIT}`"
PROGRESS = "sglang-fleet: not ready after 15 s, /health: [Errno 111] Connection refused; 0.3 GB read"
CRASHED = "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
READY = "sglang-fleet: ready after 41.2 s (2 tokens came back)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["[2026-12-01 00:00:00] server_args=ServerArgs(x='Error: y')", "Traceback (most recent call last):",
             '  File "x.py", line 3, in f', "    raise ValueError('no')", "ValueError: no", "RuntimeError: later"],
            "ValueError: no",
        ),
        (["[2026-12-01 00:00:00 TP0] torch.OutOfMemoryError: CUDA ran out"], "torch.OutOfMemoryError: CUDA ran out"),
        (["double: RuntimeError: CUDA error: no kernel image"], "RuntimeError: CUDA error: no kernel image"),
        (["x.so: undefined symbol: _ZN3c10"], "x.so: undefined symbol: _ZN3c10"),
        (["Loading weights", "sglang-fleet: not ready: it hangs: for 61 s"], "sglang-fleet: not ready: it hangs: for 61 s"),
        (["sglang-fleet: /x/cache is not writable for uid 7"], "sglang-fleet: /x/cache is not writable for uid 7"),
        (["error_count=0", "Started.", f"{UNIT}: Main process exited, code=killed, status=9/KILL"], None),
        ([PROGRESS, PROGRESS.replace("/health", "/generate: 200 {'error: x'}"), READY], None),
        ([PROGRESS, "EOFError: marshal data too short"], "EOFError: marshal data too short"),
        (["sglang-fleet: the engine's process 7 ended before it gave a token; its own lines say why"], None),
        (["sglang-fleet: byte code that a full disk had cut was removed: a.pyc"], None),
        (["ImportError: an optional module", READY, f"[2026-12-01 00:00:00] {CRASHED}"], CRASHED),
        (["OSError: [Errno 28] No space left on device"], "OSError: [Errno 28] No space left on device"),
        ([f"{UNIT}: Failed at step CHDIR spawning /x/python: Permission denied"],
         f"{UNIT}: Failed at step CHDIR spawning /x/python: Permission denied"),
    ],
)  # fmt: skip
def test_the_first_error_of_a_journal(lines: list[str], expected: str | None) -> None:
    assert e.first_error(lines) == expected


def state(**more: str) -> dict[str, str]:
    """A unit that failed with status 1, as systemctl shows it."""
    usual = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "LoadState": "loaded"}
    usual |= {
        "UnitFileState": "enabled",
        "NRestarts": "4",
        "StartLimitBurst": "4",
        "User": pwd.getpwuid(os.getuid()).pw_name,
    }
    return usual | {"ExecMainCode": "1", "ExecMainStatus": "1", "MemoryMax": "infinity"} | more


KILLED = {"ExecMainCode": "2", "ExecMainStatus": "9", "ExecMainPID": "4711"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with a release that is live."""
    home = tmp_path / "opt/sglang-fleet"
    (home / "releases/r1/cache").mkdir(parents=True)
    (home / "current").symlink_to("releases/r1")
    return tmp_path


def why(root: Path, lines: list[str] | None = None, kernel: list[str] | None = None, **more: str) -> e.Cause:
    return e.why(UNIT, state(**more), lines or [], "SITE", root=root, kernel=lambda: kernel or [])


def test_words_of_an_end() -> None:
    assert e.ending(state(**KILLED)) == "its process was killed by SIGKILL"
    assert e.ending(state(ExecMainStatus="200")) == "its process ended with status 200/CHDIR"
    assert e.ending(state(ExecMainCode="0")) == ""
    assert e.restarts(state()) == 3, "the attempt that the limit refused is none"
    assert e.restarts(state(NRestarts="1")) == 1


def test_an_unknown_error_is_put_right_and_the_counter_of_starts_is_no_obstacle(root: Path) -> None:
    assert why(root, ["ValueError: no"]) == (
        "", f"on the host: read `journalctl -u {UNIT} -e`, put its first error right, then {AGAIN}"
    )  # fmt: skip


@pytest.mark.parametrize("sub", ["start-post", "auto-restart"])
def test_a_unit_that_comes_back_is_waited_for(root: Path, sub: str) -> None:
    found = why(root, ["ValueError: of the start before"], ActiveState="activating", SubState=sub)
    assert found.observed == "it is starting"
    assert f"`systemctl start {UNIT}`" in found.fix
    assert "restart" not in found.fix


def test_between_two_tries_a_cause_that_stays_is_told_at_once(root: Path) -> None:
    cut = ["EOFError: marshal data too short"]
    between = why(root, cut, ActiveState="activating", SubState="auto-restart")
    assert between.observed == "byte code in the release's cache is damaged"
    assert why(root, cut, ActiveState="activating", SubState="start-pre").observed == "it is starting"


def test_a_unit_that_was_stopped_has_no_error(root: Path) -> None:
    stopped = {
        "ActiveState": "inactive",
        "Result": "success",
        "MemoryMax": "1",
        **KILLED,
    }  # the engine kills itself at a stop
    found = why(root, ["ImportError: optional", READY, f"Stopped {UNIT}."], **stopped)
    assert found == ("no error is in its journal: it was stopped, or never started", f"on the host: {AGAIN}")


def test_a_unit_that_was_started_too_often_only_needs_its_counter_reset(root: Path) -> None:
    lines = [f"{UNIT}: Start request repeated too quickly."]
    found = why(root, lines, Result="start-limit-hit")
    assert found == ("systemd refuses one more start so soon after the others", f"on the host: {AGAIN}")
    assert "put its first error right" in why(root, ["ValueError: no", *lines], Result="start-limit-hit").fix


@pytest.mark.parametrize(("word", "option"), [("masked", ""), ("masked-runtime", " --runtime")])
def test_a_masked_unit_is_unmasked_first(root: Path, word: str, option: str) -> None:
    found = why(root, ActiveState="inactive", UnitFileState=word, LoadState="masked")
    assert found == ("the unit is masked", f"on the host: `systemctl unmask{option} {UNIT}`, then {AGAIN}")


def test_a_unit_without_a_file_is_deployed(root: Path) -> None:
    assert why(root, LoadState="not-found").fix == "`SITE --tags activate`"


def test_a_cache_of_another_user_is_given_back(root: Path) -> None:
    other = next(user for user in pwd.getpwall() if user.pw_uid != os.getuid())
    found = why(root, User=other.pw_name, ExecMainStatus="200")
    assert found.observed.startswith("/opt/sglang-fleet/releases/r1/cache belongs to uid")
    assert f"`chown -R {other.pw_name}: /opt/sglang-fleet/releases/r1/cache`, then {AGAIN}" in found.fix


def test_a_full_disk_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = why(root, ["RuntimeError: no kernel", "OSError: [Errno 28] No space left on device: '/tmp/x'"])
    assert said.observed.startswith("it says: OSError: [Errno 28] No space left on device: '/tmp/x'; ")
    assert "df -h" in said.fix
    room = list(os.statvfs(root))
    room[4] = 0  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(room))
    found = why(root, ["EOFError: marshal data too short"])
    assert found.observed.startswith("No space left: 0 MiB and ")
    assert "/opt/sglang-fleet/releases/r1/cache" in found.observed


def limited(root: Path) -> dict[str, str]:
    """Properties of a unit whose memory a drop-in limits."""
    folder = root / "etc/systemd/system"
    (folder / "sglang@.service.d").mkdir(parents=True)
    (folder / "sglang@.service").write_text("[Service]\n")
    (folder / "sglang@.service.d/50-site.conf").write_text("[Service]\nMemoryMax=300M\n")
    paths = "/etc/systemd/system/sglang@.service.d/50-site.conf /etc/systemd/system/sglang@gpu0.service.d/10-sglang-fleet.conf"
    return {"FragmentPath": "/etc/systemd/system/sglang@.service", "DropInPaths": paths, "MemoryMax": str(300 << 20)}


@pytest.mark.parametrize(
    ("lines", "more", "what"),
    [
        ([PROGRESS], KILLED, "probably out of memory"),
        (["Subprocess scheduler_0 (pid=7) crashed with exit code -9. x"], {}, "probably out of memory"),
        (["ValueError: no"], {"Result": "oom-kill"}, "out of memory"),
        ([f"{UNIT}: Failed with result 'oom-kill'."], {}, "out of memory"),
    ],
)
def test_a_limit_of_memory_is_told_with_the_file_that_sets_it(
    root: Path, lines: list[str], more: dict[str, str], what: str
) -> None:
    place = "MemoryMax=300M in /etc/systemd/system/sglang@.service.d/50-site.conf"
    found = why(root, lines, **limited(root), **more)
    assert found.observed == f"{what}: {place} is its limit"
    fix = f"raise {place.replace('=300M', '')} or take it out, then `systemctl daemon-reload` and {AGAIN}"
    assert found.fix == f"on the host: {fix}"


def test_an_error_of_its_own_is_no_lack_of_memory(root: Path) -> None:
    """The engine ends by killing itself, so SIGKILL alone says nothing."""
    assert why(root, ["ValueError: no"], **limited(root), **KILLED).observed == ""


def test_a_kill_of_the_kernel_is_told_in_its_words(root: Path) -> None:
    kernel = [
        "Out of memory: Killed process 99 (mysqld) total-vm:1kB",
        "Out of memory: Killed process 4711 (python3) total-vm:9kB, anon-rss:8kB",
        "eth0: link up",
    ]
    found = why(root, [PROGRESS], kernel, **KILLED)
    assert found.observed.startswith(
        "the kernel killed it: the host was out of memory (Out of memory: Killed process 4711"
    )
    assert why(root, [PROGRESS], kernel[:1], **KILLED).observed == ""
    assert why(root, ["ValueError: no"], kernel, **KILLED).observed == ""


def test_damaged_byte_code_is_removed_by_a_command(root: Path) -> None:
    found = why(root, ["EOFError: marshal data too short"])
    assert f"`rm -rf /opt/sglang-fleet/releases/r1/cache/pycache`, then {AGAIN}" in found.fix


# --- a damaged release --------------------------------------------------------------------------------------------


def package(site: Path, name: str, *files: str) -> None:
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("x = 1\n")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    listed = [*files, f"{info.name}/RECORD", f"{name}/__pycache__/x.pyc", f"../../../bin/{name}"]
    (info / "RECORD").write_text("".join(f'"{file}",sha256=x,1\n' for file in listed))


def test_a_package_that_lost_its_files_is_named_with_the_way_to_build_again(root: Path) -> None:
    release = root / "opt/sglang-fleet/releases/r1"
    site = release / "venv/lib/python3.11/site-packages"
    for name in ("Or_json", "torch", "numpy"):
        package(site, name, f"{name}/__init__.py", f"{name}/one.py")
    packages = {"or-json": "1.0", "torch": "1.0", "numpy": "1.0"}
    (release / "manifest.json").write_text(json.dumps({"packages": packages}))
    assert damage.missing(release) == []
    error = ["ModuleNotFoundError: No module named 'or_json'"]
    assert why(root, error).observed == "", "a release that is whole is not built again"
    (site / "Or_json/__init__.py").unlink()
    for path in (site / "numpy-1.0.dist-info").iterdir():
        path.unlink()
    (site / "numpy-1.0.dist-info").rmdir()
    found = why(root, error)
    assert found.observed == (
        "the release is damaged: numpy 1.0 is gone; Or_json 1.0 lacks 1 of 3 files, Or_json/__init__.py first"
    )
    assert "`rm -rf /opt/sglang-fleet/releases/r1`" in found.fix
    assert found.fix.endswith("then build it again: `SITE`")
    assert why(root, ["ValueError: no"]).observed == ""
    (release / "manifest.json").unlink()
    assert "its manifest.json can't be read" in damage.missing(release)


# --- byte code that a full disk has cut ---------------------------------------------------------------------------


def test_cut_byte_code_ends_no_start(repo: Path, tmp_path: Path) -> None:
    """A real Python, a real .pyc: cut, no import works any more; the check removes it and nothing else."""
    (tmp_path / "big.py").write_text("".join(f"def f{n}(): return '{n}'\n" for n in range(400)))
    (tmp_path / "small.py").write_text("x = 1\n")
    environment = {"PYTHONPYCACHEPREFIX": str(tmp_path / "pycache"), "PYTHONPATH": str(tmp_path)}

    def run(*words: Any, ok: bool = True) -> str:
        done = subprocess.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode == 0) is ok, done.stderr
        return done.stdout + done.stderr

    check = ("-I", repo / "roles/gpu_units/files/sglang_pycache.py")
    assert run(*check) == "", "before the first start there is no byte code"
    run("-c", "import big, small")
    (big,) = tmp_path.rglob("big.*.pyc")
    (small,) = tmp_path.rglob("small.*.pyc")
    for size in (4096, 0):
        os.truncate(big, size)
        if size:
            assert "EOFError: marshal data too short" in run("-c", "import big", ok=False)
        before = small.stat().st_mtime_ns
        assert run(*check) == (
            f"sglang-fleet: byte code that a full disk had cut was removed: {big.relative_to(tmp_path / 'pycache')}\n"
        )
        assert (big.exists(), small.stat().st_mtime_ns) == (False, before)
        run("-c", "import big")
        assert run(*check) == ""


def test_whole_byte_code_of_a_suspicious_size_stays(repo: Path, tmp_path: Path) -> None:
    """A module is padded until its file has the size of whole blocks."""
    folder = tmp_path / "pycache"
    folder.mkdir()
    import marshal
    from importlib.util import MAGIC_NUMBER

    def written(padding: int) -> bytes:
        return MAGIC_NUMBER + bytes(12) + marshal.dumps(compile(f"x = {'y' * padding!r}", "m", "exec"))

    padding = next(n for n in range(300, 900) if len(written(n)) % 512 == 0)
    (folder / "m.cpython.pyc").write_bytes(written(padding))
    (folder / "other.pyc").write_bytes(b"????" + bytes(508))  # of another Python
    (folder / "m.cpython.pyc.123").write_bytes(b"")  # being written by another instance
    done = subprocess.run(
        [sys.executable, "-I", repo / "roles/gpu_units/files/sglang_pycache.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list(folder.iterdir())) == 3
