# SPDX-License-Identifier: Apache-2.0
"""Releases of the real engine, out of the committed lock."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import sglang_venv_base as base
from ansible.module_utils import sglang_venv_build as building
from ansible.module_utils import sglang_venv_elf as elf
from ansible.module_utils import sglang_venv_install as install
from ansible.module_utils import sglang_venv_release as releases
from ansible.module_utils.sglang_venv_base import BuildError

from fleet import engine as engines
from fleet import lock, wheelhouse
from tests import venv
from tests.unit import release_kit as kit

AUDIT = engines.load(venv.ENGINE).data["audit"]


@pytest.fixture
def root() -> Iterator[Path]:
    """A place for releases beside the uv cache."""
    with venv.scratch() as path:
        yield path


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "releases").iterdir() if path.name != ".lock")


def test_every_locked_version_is_installed_and_nothing_else(release: Path, engine_site: Path) -> None:
    plan = venv.make_plan()
    assert releases.installed(engine_site) == plan["packages"]
    assert json.loads((release / "manifest.json").read_text())["packages"] == plan["packages"]
    assert plan["packages"]["sglang"] == "0.5.11"


def test_the_engine_imports_from_where_it_was_published(release: Path) -> None:
    code = "import sglang, sgl_kernel, torch; print(sglang.__version__, torch.version.cuda)"
    env = {"LD_LIBRARY_PATH": str(release / "profile" / "lib"), "PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    python = release / "venv" / "bin" / "python"
    said = subprocess.run([python, "-B", "-c", code], env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split()[-2] == "0.5.11"
    assert said.stdout.split()[-1].startswith(f"{AUDIT['cuda_major']}.")


def test_one_cuda_with_the_known_exceptions(release: Path, engine_site: Path) -> None:
    verdict = elf.audit(engine_site, AUDIT["cuda_major"], AUDIT["exceptions"])
    assert verdict.faults == []
    assert verdict.unused == []
    assert verdict.files > 500
    assert verdict.majors["13"] > 20
    assert json.loads((release / "manifest.json").read_text())["audit"] == verdict.data()


def test_without_the_exceptions_the_audit_names_files_and_packages(engine_site: Path) -> None:
    faults = elf.audit(engine_site, AUDIT["cuda_major"]).faults
    assert any("torch_memory_saver_hook_mode_preload_cu12.abi3.so of torch-memory-saver==" in fault for fault in faults)
    assert any("libcupti.so.12 of triton==" in fault for fault in faults)


def test_against_the_wrong_cuda_the_engine_itself_is_named(engine_site: Path) -> None:
    assert any(" of sglang-kernel==" in fault for fault in elf.audit(engine_site, 12).faults)


def test_files_are_links_into_an_unharmed_cache(engine_site: Path) -> None:
    record = next(engine_site.glob("sglang-*.dist-info/RECORD"))
    linked = checked = 0
    with record.open(newline="") as handle:
        for name, digest, _ in csv.reader(handle):
            path = engine_site / name
            if digest and path.is_file() and not name.startswith("..") and ".dist-info/" not in name:
                found = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
                assert f"sha256={found}" == digest, name
                checked += 1
                linked += path.stat().st_nlink > 1
    assert checked > 1500
    assert linked == checked


def test_a_second_build_is_nothing(release: Path) -> None:
    before = (release / "manifest.json").stat().st_mtime_ns
    root = release.parent.parent
    done = building.build(venv.make_plan(), venv.make_options(root))
    assert (done["present"], done["path"]) == (True, str(release))
    assert (release / "manifest.json").stat().st_mtime_ns == before


def test_a_wrong_hash_fails_with_its_package_and_file_and_leaves_nothing(root: Path) -> None:
    plan = venv.make_plan()
    row = next(row for row in plan["files"] if row["package"].startswith("sniffio=="))
    right, row["sha256"] = row["sha256"], "0" * 64
    with pytest.raises(BuildError, match=rf"wrong hash: {row['package']}, file {row['name']}") as caught:
        building.build(plan, venv.make_options(root))
    assert right in str(caught.value)
    assert left(root) == []


def build_and_publish(root: Path, plan: dict[str, Any]) -> None:
    """One run; exits 1 if another run was in its way."""
    try:
        building.build(plan, venv.make_options(root))
        building.publish(root, plan["id"])
    except BuildError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_build_that_was_killed_is_recovered_by_the_next(root: Path) -> None:
    plan = venv.make_plan()
    venv.make_options(root)
    run = multiprocessing.get_context("fork").Process(target=build_and_publish, args=(root, plan))
    run.start()
    site = base.site_packages(releases.build_path(root, plan["id"]) / "venv", plan["python"])
    until = time.monotonic() + 120
    while not (site / "sglang").exists() and run.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    (uv,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.kill()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    while alive(int(uv)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(int(uv)), "an installer goes with the run that started it"
    assert left(root) == [f".build-{plan['id']}"]
    done = building.build(plan, venv.make_options(root))
    assert done["discarded"] == [str(releases.build_path(root, plan["id"]))]
    assert building.publish(root, plan["id"]) is True
    release = releases.release_path(root, plan["id"])
    assert releases.installed(venv.site_packages(release)) == plan["packages"]
    assert left(root) == [plan["id"]]


def test_two_builds_at_once_end_with_one_whole_release(root: Path) -> None:
    plan = venv.make_plan()
    venv.make_options(root)
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=build_and_publish, args=(root, plan)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(300)
    assert 0 in [run.exitcode for run in runs]
    assert left(root) == [plan["id"]]
    release = releases.release_path(root, plan["id"])
    assert releases.installed(venv.site_packages(release)) == plan["packages"]


def test_uv_is_fetched_by_its_pin_where_it_is_missing(root: Path) -> None:
    plan = venv.make_plan()
    options = base.Options(root=root, python=sys.executable, uv_cache=venv.CACHE)
    said = subprocess.run([install.ensure_uv(plan, options), "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.split()[1] == plan["uv"]["version"]
    wrong = {**plan, "uv": {**plan["uv"], "hashes": ["0" * 64]}}
    other = base.Options(root=root / "other", python=sys.executable, uv_cache=venv.CACHE)
    with pytest.raises(BuildError, match=r"uv .* could not be downloaded"):
        install.ensure_uv(wrong, other)


def test_the_same_inputs_resolve_to_the_committed_lock() -> None:
    engine = engines.load(venv.ENGINE)
    assert lock.resolve(engine) == engine.lock.read_text()


def small_engine(folder: Path) -> engines.Engine:
    """The default engine with a handful of its packages, locked anew."""
    shutil.copytree(engines.ROOT / "engines" / venv.ENGINE, folder / venv.ENGINE)
    path = folder / venv.ENGINE
    (path / "requirements.in").write_text("anyio\nmsgspec\n")
    (path / "engine.yml").write_text((path / "engine.yml").read_text().replace("bytes: ", "bytes: 1 # "))
    engine = engines.load(venv.ENGINE, folder)
    assert lock.write(engine) == 0
    return engine


@pytest.mark.skipif(os.geteuid() != 0, reason="cuts the network with unshare, needs root")
def test_a_wheelhouse_carries_everything_to_a_host_without_a_network(tmp_path: Path) -> None:
    engine = small_engine(tmp_path / "engines")
    machine = os.uname().machine
    python, path = venv.find_python(engine.pythons)
    house = tmp_path / "house"
    assert wheelhouse.fill(engine, house, [python], [machine]) == 0
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=house, check=True)
    plan = kit.make_plan(engine.folder)
    plan["audit"]["exceptions"] = []
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    code = """
import json, sys
from pathlib import Path
import fleet
from ansible.module_utils.sglang_venv_base import Options
from ansible.module_utils.sglang_venv_build import build, publish
top, python = Path(sys.argv[1]), sys.argv[2]
plan = json.loads((top / "plan.json").read_text())
options = Options(root=top / "root", python=python, uv_cache=top / "root/cache/uv", wheelhouse=top / "house")
build(plan, options)
publish(top / "root", plan["id"])
"""
    env = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "UV_DEFAULT_INDEX": "http://127.0.0.1:9/"}
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code, tmp_path, path], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    release = releases.release_path(tmp_path / "root", plan["id"])
    assert releases.installed(venv.site_packages(release)) == plan["packages"]
    assert {"anyio", "msgspec"} <= set(plan["packages"])
