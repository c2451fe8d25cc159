# SPDX-License-Identifier: Apache-2.0
"""What is asked of the host: processes of a control group, holders of GPUs, keys, the launcher. Small real things stand in."""

from __future__ import annotations

import importlib.util
import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_deployment
import pytest
from ansible.errors import AnsibleError
from ansible.module_utils import gpu_units_host as h
from ansible.plugins.loader import lookup_loader


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- control groups -------------------------------------------------------------------------------


def test_processes_of_a_group_with_either_kind_of_cgroup(tmp_path):
    unit = "/system.slice/system-sglang.slice/sglang@a.service"
    groups = {
        1: "0::/init.scope\n",
        10: f"0::{unit}\n",
        11: f"0::{unit}/worker\n",
        12: f"9:name=systemd:{unit}\n8:pids:{unit}\n0::/\n",
        13: f"0::{unit.replace('@a', '@ab')}\n",
    }
    for pid, text in groups.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(text)
    (tmp_path / "14").mkdir()  # ended while it was looked at
    assert h.pids_of(unit, tmp_path) == [10, 11, 12]
    assert h.pids_of("", tmp_path) == []


def test_this_process_is_found_by_its_own_group():
    group = Path("/proc/self/cgroup").read_text().splitlines()[0].split(":", 2)[2]
    if group != "/":
        assert os.getpid() in h.pids_of(group)


def test_a_process_is_described_without_its_arguments():
    child = subprocess.Popen([sys.executable, "-c", "input()", "--api-key=s3cret"], stdin=subprocess.PIPE)
    try:
        text = h.describe(child.pid)
    finally:
        child.communicate(b"\n")
    assert f"pid {child.pid} (" in text
    assert "python" in text
    assert "s3cret" not in text
    assert h.describe(2**22 + 1) == f"pid {2**22 + 1}"


def folder_of(proc: Path, pid: int, *, unit: str = "", of: str = "", cwd: str = "/", parent: int = 7) -> None:
    """A process as /proc shows it, of this user."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (py (x) thon) S {parent} 1 1")
    (folder / "cmdline").write_bytes(b"/opt/python\0--api-key=s3cret\0")
    (folder / "cgroup").write_text(
        f"1:name=systemd:/system.slice/{unit}\n0::/system.slice/{unit}\n" if unit else "0::/\n"
    )
    (folder / "environ").write_bytes(f"A=1\0FLEET_UNIT={of}\0B=2\0".encode() if of else b"")
    (folder / "cwd").symlink_to(cwd)


def test_an_orphan_is_told_with_the_unit_that_it_came_from(tmp_path):
    folder_of(tmp_path, 5, unit="session-3.scope", of="sglang@a.service", parent=1)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert h.describe(5, tmp_path) == (
        f"pid 5 ({user}: /opt/python, in session-3.scope, left by sglang@a.service, its parent is PID 1)"
    )
    folder_of(tmp_path, 6, unit="sglang@a.service", of="sglang@a.service", parent=1)
    assert h.describe(6, tmp_path) == f"pid 6 ({user}: /opt/python, in sglang@a.service)"


def test_strays_are_known_by_environment_or_working_folder(tmp_path, monkeypatch):
    cache = "/opt/sglang-fleet/releases/4f/cache"
    folder_of(tmp_path, 10, unit="sglang@a.service", of="sglang@a.service", cwd=cache)
    folder_of(tmp_path, 11, unit="init.scope", of="sglang@a.service")
    folder_of(tmp_path, 12, of="sglang@b.service")
    folder_of(tmp_path, 13, cwd=cache)
    folder_of(tmp_path, 14, cwd="/srv")
    real = Path.stat
    someone = os.stat_result((0, 0, 0, 0, 4711, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self, **k: someone if self.parent == tmp_path else real(self, **k))
    assert h.strays(["sglang@a.service"], tmp_path) == [11, 13]
    monkeypatch.setattr(Path, "stat", real)  # root's own
    if os.getuid() == 0:
        assert h.strays(["sglang@a.service"], tmp_path) == []


def test_a_real_child_is_a_stray_after_its_parent(tmp_path):
    code = "import os, sys; os.setuid(65534); print('up', flush=True); sys.stdin.read()"
    if os.getuid():
        pytest.skip("needs root to become somebody else")
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={"FLEET_UNIT": "sglang@of-this-test.service"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout and child.stdout.readline() == b"up\n"
        assert h.strays(["sglang@of-this-test.service"]) == [child.pid]
        assert "left by sglang@of-this-test.service" in h.describe(child.pid)
    finally:
        child.communicate()


# --- GPUs -----------------------------------------------------------------------------------------


def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apps: str, memory: str, status: int = 0) -> h.Gpus:
    """A stand-in for nvidia-smi that prints what the real one prints for these queries."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase $1 in *compute-apps*) printf '{apps}';; *) printf '{memory}';; esac\nexit {status}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return h.Gpus(idle_mib=1024)


def test_free_gpus(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, "", "GPU-1, 4\\nGPU-2, 90000\\n")
    assert gpus.holders({"GPU-1"}) == []


def test_process_on_a_gpu_is_named(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, f"GPU-1, {os.getpid()}, 812\\nGPU-2, 1, 5\\n", "GPU-1, 900\\n")
    (text,) = gpus.holders({"GPU-1"})
    assert text.startswith(f"GPU GPU-1: pid {os.getpid()} (")
    assert text.endswith("uses 812 MiB")


def test_process_of_another_container_has_no_pid(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, "GPU-1, [N/A], 812\\n", "GPU-1, 900\\n")
    assert gpus.holders({"GPU-1"}) == ["GPU GPU-1: a process that shows no pid uses 812 MiB"]


def test_memory_without_a_process_is_not_free(tmp_path, monkeypatch):
    gpus = smi(tmp_path, monkeypatch, "", "GPU-1, 30000\\nGPU-2, 1\\n")
    assert gpus.holders({"GPU-1", "GPU-2"}) == [
        "GPU GPU-1: 30000 MiB used and no process shown (more than 1024 MiB of an idle GPU)"
    ]


def test_a_process_that_ends_while_it_is_looked_at_has_no_node_open(tmp_path, monkeypatch):
    folder_of(tmp_path, 9)
    (tmp_path / "9/fd/3").symlink_to("/dev/nvidia4")
    monkeypatch.setattr(h, "minors", lambda _: {"GPU-1": 4})
    real = Path.iterdir

    def iterdir(folder):
        if folder == tmp_path / "9/fd":
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return real(folder)

    assert h.openers({"GPU-1"}, tmp_path) == [9]
    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert h.openers({"GPU-1"}, tmp_path) == []


def test_whoever_has_the_node_open_is_named_beside_memory_without_a_process(tmp_path, monkeypatch):
    proc = tmp_path / "proc"
    folder_of(proc, 9, unit="docker-1.scope")
    (proc / "9/fd/3").symlink_to("/dev/nvidia4")
    folder_of(proc, 10)
    (proc / "10/fd/3").symlink_to("/dev/nvidia0")
    card = proc / "driver/nvidia/gpus/0000:00:06.0/information"
    card.parent.mkdir(parents=True)
    card.write_text("Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-1\nBus Location: \t 0000:00:06.0\nDevice Minor: \t 4\n")
    assert h.minors(proc) == {"GPU-1": 4}
    assert h.openers({"GPU-1"}, proc) == [9]
    monkeypatch.setattr(h, "openers", lambda uuids, real=h.openers: real(uuids, proc))
    monkeypatch.setattr(h, "describe", lambda pid, real=h.describe: real(pid, proc))
    (text,) = smi(tmp_path, monkeypatch, "", "GPU-1, 30000\n").holders({"GPU-1"})
    assert "30000 MiB used and no process shown" in text
    assert "; pid 9 (" in text and "docker-1.scope) has it open" in text


def test_without_an_answer_nothing_is_proven(tmp_path, monkeypatch):
    with pytest.raises(h.HostError, match="nothing shows that the GPUs are free: driver gone"):
        smi(tmp_path, monkeypatch, "driver gone", "", status=9).holders({"GPU-1"})
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(h.HostError, match="nvidia-smi is not there"):
        h.Gpus(1024).holders({"GPU-1"})


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def keys(repo: Path) -> Any:
    lookup_loader.add_directory(str(repo / "roles/gpu_units/lookup_plugins"))
    return lookup_loader.get("gpu_units_api_keys")


def test_keys_by_instance(keys, tmp_path):
    (tmp_path / "one").write_text("k1\n")
    (tmp_path / "all").write_text("k2\n")
    instances = [{"name": "a", "api_key_file": str(tmp_path / "one")}, {"name": "b"}]
    assert keys.run(instances, {}, defaults={}) == [{"a": "k1"}]
    assert keys.run(instances, {}, defaults={"api_key_file": str(tmp_path / "all")}) == [{"a": "k1", "b": "k2"}]
    assert keys.run([], {}, defaults={}) == [{}]
    # The inventory names it, so the inventory's folder is where a relative path begins.
    assert keys.run([{"name": "a", "api_key_file": "one"}], {"inventory_dir": str(tmp_path)}, defaults={}) == [
        {"a": "k1"}
    ]


def test_missing_key_names_instance_and_file(keys, tmp_path):
    with pytest.raises(
        AnsibleError, match=rf"instance a: api_key_file {tmp_path}/no of the control machine can't be read"
    ):
        keys.run([{"name": "a", "api_key_file": str(tmp_path / "no")}], {}, defaults={})


def test_the_engine_gets_the_key_and_hides_it(repo, tmp_path):
    launch = load(repo / "roles/gpu_units/files/sglang_launch.py")

    @dataclass
    class ServerArgs:
        """As the engine's: a dataclass that checks itself and is logged as text."""

        host: str
        api_key: str | None = None
        admin_api_key: str | None = None

        def __post_init__(self) -> None:
            self.had_key = self.api_key

    launch.guard(ServerArgs, "s3cret")
    args = ServerArgs("127.0.0.1")
    assert (args.api_key, args.had_key) == ("s3cret", "s3cret")
    assert "s3cret" not in f"{args=} {args}"
    assert "api_key='(hidden)'" in repr(args)
    assert "admin_api_key=None" in repr(args)
    assert args.api_key == "s3cret"


def test_programs_of_the_release_are_found_first(repo, tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text("import os; print(os.environ['PATH'])\n")
    done = subprocess.run(
        [sys.executable, repo / "roles/gpu_units/files/sglang_launch.py"],
        env={"PATH": "/own:/usr/bin", "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{Path(sys.executable).parent}:/own:/usr/bin\n"


def test_an_empty_key_ends_the_start(repo, tmp_path):
    (tmp_path / "api_key").write_text("\n")
    done = subprocess.run(
        [sys.executable, repo / "roles/gpu_units/files/sglang_launch.py"],
        env={"CREDENTIALS_DIRECTORY": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the API key is empty" in done.stderr


def test_a_cache_that_can_not_hold_kernels_ends_the_start(repo, tmp_path, monkeypatch):
    launch = load(repo / "roles/gpu_units/files/sglang_launch.py")
    assert launch.fit(tmp_path) is None
    monkeypatch.setattr(launch.os, "access", lambda path, how: False)
    assert "is not writable" in launch.fit(tmp_path)
    monkeypatch.undo()
    real = os.statvfs(tmp_path)
    noexec = os.statvfs_result([*real[:8], real.f_flag | os.ST_NOEXEC, real.f_namemax])
    monkeypatch.setattr(launch.os, "statvfs", lambda path: noexec)
    assert "is mounted noexec" in launch.fit(tmp_path)


# --- module ---------------------------------------------------------------------------------------


def test_documentation_and_arguments_agree():
    """Every option is documented with the same type and default."""
    import yaml

    documented = yaml.safe_load(gpu_deployment.DOCUMENTATION)["options"]
    caught: dict[str, Any] = {}

    class StoppedError(Exception):
        pass

    def record(**kwargs: Any) -> None:
        caught.update(kwargs)
        raise StoppedError

    original, gpu_deployment.AnsibleModule = gpu_deployment.AnsibleModule, record
    try:
        with pytest.raises(StoppedError):
            gpu_deployment.main()
    finally:
        gpu_deployment.AnsibleModule = original
    plain = [
        {
            name: {k: v for k, v in option.items() if k not in ("description", "no_log")}
            for name, option in options.items()
        }
        for options in (documented, caught["argument_spec"])
    ]
    assert plain[0] == plain[1]
    assert caught["supports_check_mode"]
    assert caught["argument_spec"]["api_keys"]["no_log"]


def test_role_defaults_and_specification_agree(repo):
    import yaml

    role = repo / "roles/gpu_units"
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    assert {name: option["default"] for name, option in specs["main"]["options"].items()} == defaults
    for entry in ("swap", "switch", "start", "rollback"):
        for name, option in specs[entry]["options"].items():
            alone = ("gpu_units_discard", "gpu_units_switch", "gpu_units_to_nothing")
            assert name in alone or option == specs["main"]["options"][name]
