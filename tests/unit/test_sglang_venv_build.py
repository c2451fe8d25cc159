# SPDX-License-Identifier: Apache-2.0
"""Building and publishing, by the real uv out of small real wheels, without a network."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import sglang_venv_base as base
from ansible.module_utils import sglang_venv_build as building
from ansible.module_utils import sglang_venv_install as install
from ansible.module_utils import sglang_venv_release as releases
from ansible.module_utils import sglang_venv_room as room
from ansible.module_utils.sglang_venv_base import BuildError

from tests import venv
from tests.unit import release_kit as kit
from tests.unit.test_sglang_venv_elf import write_elf


@pytest.fixture
def top(tmp_path: Path) -> Path:
    kit.make_engine(tmp_path)
    return tmp_path


@pytest.fixture
def plan(top: Path) -> dict[str, Any]:
    return kit.make_plan(top / "engines" / kit.NAME)


def left(top: Path) -> list[str]:
    """What is below releases, but for the lock."""
    return sorted(path.name for path in (top / "root" / "releases").iterdir() if path.name != ".lock")


def test_a_build_holds_venv_profile_cache_and_manifest(top: Path, plan: dict[str, Any]) -> None:
    done = building.build(plan, kit.make_options(top))
    folder = Path(done["path"])
    assert (done["present"], left(top)) == (False, [f".build-{plan['id']}"])
    assert (folder / "profile" / "plugin" / "x.py").read_text() == "X = 1\n"
    assert (folder / "cache").stat().st_mode & 0o777 == 0o750
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["packages"] == kit.PACKAGES
    assert (manifest["id"], manifest["profile"], manifest["python"]["version"]) == (plan["id"], "sm90", plan["python"])
    assert set(manifest["seconds"]) == {"uv", "install", "versions", "audit", "profile", "imports"}


def test_a_published_release_works_where_it_ends_up(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    building.build(plan, options)
    assert building.publish(options.root, plan["id"]) is True
    assert left(top) == [plan["id"]]
    python = releases.release_path(options.root, plan["id"]) / "venv" / "bin" / "python"
    command = [python, "-I", "-B", "-c", "import alpha, beta_two, sys; print(alpha.__version__, sys.prefix)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["1.0", str(python.parent.parent)]


def test_a_second_build_and_publish_change_nothing(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    building.build(plan, options)
    building.publish(options.root, plan["id"])
    manifest = releases.release_path(options.root, plan["id"]) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    assert building.build(plan, options)["present"] is True
    assert building.publish(options.root, plan["id"]) is False
    assert manifest.stat().st_mtime_ns == before


def test_an_interrupted_build_is_thrown_away(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    for name in (plan["id"], "0123456789abcd"):
        half = options.root / "releases" / f".build-{name}" / "venv" / "lib"
        half.mkdir(parents=True)
        (half / "rubbish").touch()
    done = building.build(plan, options)
    assert [Path(path).name for path in done["discarded"]] == sorted([f".build-{plan['id']}", ".build-0123456789abcd"])
    assert left(top) == [f".build-{plan['id']}"]
    assert not (Path(done["path"]) / "venv" / "lib" / "rubbish").exists()


def test_a_published_release_is_never_thrown_away_by_another_build(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    building.build(plan, options)
    building.publish(options.root, plan["id"])
    other = kit.make_plan(top / "engines" / kit.NAME, {"name": "sm100", "files": {}})
    building.build(other, options)
    assert left(top) == sorted([f".build-{other['id']}", plan["id"]])


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 1  # inside the first stored file
    path.write_bytes(data)


def test_a_wrong_hash_names_package_and_file_and_leaves_nothing(top: Path, plan: dict[str, Any]) -> None:
    spoil(top / "house" / "alpha-1.0-py3-none-any.whl")
    with pytest.raises(
        BuildError, match=r"wrong hash: alpha==1\.0, file .*/house/alpha-1\.0-py3-none-any\.whl"
    ) as caught:
        building.build(plan, kit.make_options(top))
    assert plan["files"][0]["sha256"] in str(caught.value)
    assert left(top) == []


def test_a_wheelhouse_without_a_wheel_names_it(top: Path, plan: dict[str, Any]) -> None:
    (top / "house" / "beta_two-2.1.post1-py3-none-any.whl").unlink()
    with pytest.raises(
        BuildError, match=r"lacks beta_two-2\.1\.post1-py3-none-any\.whl .*bin/lock sglang-0 --wheelhouse"
    ):
        building.build(plan, kit.make_options(top))
    assert left(top) == []


def test_a_wheelhouse_that_is_not_there_is_named(top: Path, plan: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=r"wheelhouse .*/nowhere is no folder"):
        building.build(plan, kit.make_options(top, wheelhouse=top / "nowhere"))


def test_a_wheelhouse_without_uv_is_told(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    (options.root / "tools" / f"uv-{plan['uv']['version']}" / "bin" / "uv").unlink()
    with pytest.raises(BuildError, match=r"has no uv-.*\.whl"):
        building.build(plan, options)
    assert left(top) == []


def test_too_little_room_is_found_before_anything_is_written(top: Path, plan: dict[str, Any]) -> None:
    huge = {**plan, "unpacked": {"bytes": 2**60, "files": 1}}
    with pytest.raises(BuildError, match=rf"disk full: the release needs 11529215\d+ bytes .* below {top}"):
        building.build(huge, kit.make_options(top))
    assert left(top) == []
    assert not (top / "root" / "cache").exists()


def test_a_cache_that_served_the_lock_before_needs_no_room(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    building.build(plan, options)
    room.check_room({**plan, "unpacked": {"bytes": 2**60, "files": 1}}, options)
    with pytest.raises(BuildError, match="disk full"):  # a copy needs it all the same
        room.check_room({**plan, "unpacked": {"bytes": 2**60, "files": 1}}, kit.make_options(top, link_mode="copy"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, needs root")
def test_a_disk_that_fills_during_the_build_is_told_with_path_and_bytes(tmp_path: Path) -> None:
    kit.make_engine(tmp_path, {"alpha/big.bin": os.urandom(3 * 2**20)})
    plan = kit.make_plan(tmp_path / "engines" / kit.NAME)
    options = kit.make_options(tmp_path, uv_cache=tmp_path / "small" / "uv", lock_timeout=5.0)
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "small"], check=True)
    try:
        with pytest.raises(BuildError, match=r"disk full while building .*/\.build-.*needs about 10000 bytes"):
            building.build(plan, options)
        assert left(tmp_path) == []
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)


def test_another_error_of_the_disk_is_told_and_cleaned_up(
    top: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "manifest.json")

    monkeypatch.setattr(building, "_write_profile", full)
    with pytest.raises(BuildError, match="disk full while building"):
        building.build(plan, kit.make_options(top))
    assert left(top) == []


def test_a_second_cuda_stops_the_build(tmp_path: Path) -> None:
    native = write_elf(tmp_path / "native").read_bytes()
    folder = kit.make_engine(tmp_path, {"alpha/hook.so": native})
    plan = kit.make_plan(folder)
    with pytest.raises(BuildError, match=r"alpha/hook\.so of alpha==1\.0 asks for libcudart\.so\.12 \(CUDA 12\)"):
        building.build(plan, kit.make_options(tmp_path))
    assert left(tmp_path) == []
    plan["audit"]["exceptions"] = [{"file": "alpha/hook.so", "package": "alpha", "major": 12}]
    manifest = building.build(plan, kit.make_options(tmp_path))["manifest"]
    assert manifest["audit"]["majors"] == {"12": 1}
    assert len(manifest["audit"]["excepted"]) == 1


def test_what_is_installed_has_to_be_what_is_locked(top: Path, plan: dict[str, Any]) -> None:
    plan["packages"] = {**plan["packages"], "alpha": "1.0.1", "gamma": "3"}
    with pytest.raises(
        BuildError, match=r"alpha: locked 1\.0\.1, installed 1\.0; gamma: locked 3, installed not at all"
    ):
        building.build(plan, kit.make_options(top))
    assert left(top) == []


def test_an_older_c_library_is_refused(top: Path, plan: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=r"has glibc 2\.\d+, the wheels of sglang-0 need 2\.99"):
        building.build({**plan, "glibc": "2.99"}, kit.make_options(top))


def test_a_profile_can_not_write_outside_the_release(top: Path) -> None:
    plan = kit.make_plan(top / "engines" / kit.NAME, {"name": "odd", "files": {"../../../x": "y"}})
    with pytest.raises(BuildError, match="outside the release"):
        building.build(plan, kit.make_options(top))
    assert left(top) == []


def test_publishing_what_was_never_built_is_told(top: Path) -> None:
    kit.make_options(top)
    with pytest.raises(BuildError, match=r"no finished build .*/\.build-0123456789abcd"):
        building.publish(top / "root", "0123456789abcd")


def test_a_build_that_another_run_was_faster_with_is_thrown_away(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    folder = Path(building.build(plan, options)["path"])
    releases.release_path(options.root, plan["id"]).mkdir()
    assert building.publish(options.root, plan["id"]) is False
    assert not folder.exists()


def run_build(top: Path, plan: dict[str, Any], answers: Any) -> None:
    """One of two runs: build, then publish."""
    options = kit.make_options(top)
    answers.put((building.build(plan, options)["present"], building.publish(options.root, plan["id"])))


def test_two_runs_at_once_end_with_one_release(top: Path, plan: dict[str, Any]) -> None:
    kit.make_options(top)  # both find the tools in place
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    runs = [context.Process(target=run_build, args=(top, plan, answers)) for _ in range(2)]
    for run in runs:
        run.start()
    found = []
    for run in runs:
        run.join(60)
        found.append(run.exitcode)
    assert left(top) == [plan["id"]]
    manifest = releases.release_path(top / "root", plan["id"]) / "manifest.json"
    assert json.loads(manifest.read_text())["id"] == plan["id"]
    # Whoever lost the race either found the release, or lost its build to the other and says so; both never win.
    assert found.count(0) >= 1
    assert [published for _, published in (answers.get() for _ in range(found.count(0)))].count(True) == 1


def test_a_busy_lock_names_its_holder(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top, lock_timeout=0.3)
    (options.root / "releases").mkdir(parents=True)
    with (options.root / "releases" / ".lock").open("w") as handle:
        handle.write("4242\n")
        handle.flush()
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"locked by process 4242"):
            building.build(plan, options)


def test_uv_comes_out_of_the_wheelhouse_and_is_checked(top: Path, plan: dict[str, Any]) -> None:
    options = kit.make_options(top)
    folder = options.root / "tools" / f"uv-{plan['uv']['version']}"
    binary = (folder / "bin" / "uv").read_bytes()
    (folder / "bin" / "uv").unlink()
    (folder / "bin").rmdir()
    folder.rmdir()
    wheel = top / "house" / f"uv-{plan['uv']['version']}-py3-none-manylinux_2_17_{plan['machine']}.manylinux2014.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"uv-{plan['uv']['version']}.data/scripts/uv", binary)
    with pytest.raises(BuildError, match=r"wrong hash: .*uv-.*\.whl has sha256"):
        install.ensure_uv(plan, options)
    assert not folder.exists()
    plan["uv"]["hashes"] = [base.sha256_of(wheel)]
    assert install.ensure_uv(plan, options).read_bytes() == binary
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_cache_of_a_release_belongs_to_the_service_user(top: Path, plan: dict[str, Any]) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives a folder away, needs root")
    done = building.build(plan, kit.make_options(top, uid=12345, gid=12345))
    state = (Path(done["path"]) / "cache").stat()
    assert (state.st_uid, state.st_gid) == (12345, 12345)
    assert (Path(done["path"]) / "manifest.json").stat().st_uid == 0


def test_everybody_may_read_a_release_whatever_the_umask(top: Path, plan: dict[str, Any]) -> None:
    before = os.umask(0o077)
    try:
        folder = Path(building.build(plan, kit.make_options(top))["path"])
    finally:
        os.umask(before)
    for path in folder.rglob("*"):
        if path != folder / "cache" and not path.is_symlink():
            assert path.stat().st_mode & 0o004, path


def test_a_password_of_the_index_is_not_in_any_argument(
    top: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []
    real = install.run
    monkeypatch.setattr(install, "run", lambda c, env, cwd: seen.append((c, dict(env))) or real(c, env, cwd))
    options = kit.make_options(top, index_url="https://me:secret@index.example.org/simple")
    building.build(plan, options)
    assert len(seen) == 2
    assert not any("secret" in word for command, _ in seen for word in command)
    assert all(env["UV_DEFAULT_INDEX"].endswith("/simple") for _, env in seen)


def play(top: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs sglang_release on this machine by a real playbook, with further `options`."""
    _, python = venv.find_python(("3.11", "3.12"))
    given = {
        "root": str(top / "root"),
        "engine": kit.NAME,
        "engines": str(top / "engines"),
        "uv_requirements": str(venv.ROOT / "requirements" / "uv.txt"),
        "python": {"version": kit.make_plan(top / "engines" / kit.NAME)["python"], "path": python},
        "machine": os.uname().machine,
        "profile": {"name": "sm90", "files": {"plugin/x.py": "X = 1\n"}},
        "uv_cache": str(top / "root" / "cache" / "uv"),
        "wheelhouse": str(top / "house"),
        **options,
    }
    tasks = [
        {
            "name": "Probe",
            "sglang_release": {**given, "state": "probed", "packages": ["base-files", "no-such-package"]},
        },
        {"name": "Build", "sglang_release": given, "register": "built"},
        {
            "name": "Publish",
            "sglang_release": {"state": "published", "root": given["root"], "id": "{{ built.release.id }}"},
        },
    ]
    book = top / "play.yml"
    book.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    command = [
        Path(sys.executable).parent / "ansible-playbook",
        "-i",
        "localhost,",
        "-c",
        "local",
        book,
        "-v",
        *arguments,
    ]
    env = {**os.environ, "ANSIBLE_CONFIG": str(venv.ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    env["ANSIBLE_LIBRARY"] = str(venv.ROOT / "roles" / "sglang_venv" / "library")
    env["ANSIBLE_MODULE_UTILS"] = str(venv.ROOT / "roles" / "sglang_venv" / "module_utils")
    env["ANSIBLE_ACTION_PLUGINS"] = str(venv.ROOT / "roles" / "sglang_venv" / "action_plugins")
    return subprocess.run(command, env=env, cwd=top, capture_output=True, text=True, timeout=120)


def changed(done: subprocess.CompletedProcess[str]) -> int:
    """Number of changed tasks of a run."""
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.findall(r"changed=(\d+)", done.stdout)[0])


def test_the_module_predicts_builds_and_then_rests(top: Path) -> None:
    kit.make_options(top)
    predicted = play(top, "--check", "--diff")
    assert changed(predicted) == 2
    assert "+packages: 2" in predicted.stdout
    assert "no-such-package" in predicted.stdout
    assert not (top / "root" / "releases").exists()
    assert changed(play(top)) == 2
    assert len(left(top)) == 1
    assert changed(play(top)) == 0
    assert changed(play(top, "--check", "--diff")) == 0


def test_the_module_fails_with_one_message(top: Path) -> None:
    kit.make_options(top)
    spoil(top / "house" / "alpha-1.0-py3-none-any.whl")
    done = play(top)
    assert done.returncode != 0
    assert re.search(r"wrong hash: alpha==1.0, file \S+/house/alpha-1.0-py3-none-any.whl", done.stdout)
    assert "Traceback" not in done.stdout + done.stderr


def test_a_wrong_lock_fails_on_the_controller(top: Path) -> None:
    path = top / "engines" / kit.NAME / "lock.txt"
    text = path.read_text()
    plan = kit.make_plan(top / "engines" / kit.NAME)
    path.write_text(text.replace(plan["files"][0]["sha256"], "0" * 64))
    path_kept = plan["files"][0]["name"]
    with pytest.raises(Exception, match=rf"wrong hash in the lock of sglang-0: alpha==1.0, file {path_kept}"):
        kit.make_plan(top / "engines" / kit.NAME)
