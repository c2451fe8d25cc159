# SPDX-License-Identifier: Apache-2.0
"""Taking an engine over that is there: small distributions in real folders, a real venv, real copies."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import sglang_venv_adopt as adopt
from ansible.module_utils import sglang_venv_base as base
from ansible.module_utils import sglang_venv_build as building
from ansible.module_utils import sglang_venv_copy as copying
from ansible.module_utils.sglang_venv_adopt import AdoptError
from ansible.module_utils.sglang_venv_base import BuildError

from tests.unit import release_kit as kit
from tests.unit import test_sglang_venv_build as plays
from tests.unit.test_sglang_venv_elf import write_elf

Data = dict[str, Any]
LOCK = {"sglang": "0.5.11", "torch": "2.11.0", "side": "1.0", "gone": "3"}


def put(site: Path, name: str, version: str, files: dict[str, bytes] | None = None, **more: str) -> Path:
    """A distribution as an installer leaves it: package, RECORD with hashes and sizes, programs outside."""
    content = {f"{name}/__init__.py": f"__version__ = {version!r}\n".encode(), **(files or {})}
    info = f"{name}-{version}.dist-info"
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: no\n".encode()
    content |= {f"{info}/{key}": text.encode() for key, text in more.items()}
    rows = [f"../../../bin/{name},sha256=x,9", f"{name}/__pycache__/a.pyc,,", f"{info}/RECORD,,"]
    for path, data in content.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    (site / info / "RECORD").write_text("\n".join(rows) + "\n")
    return site / info


@pytest.fixture
def plan(tmp_path: Path) -> Data:
    """A plan of an engine with these packages in its lock."""
    made = kit.make_plan(kit.make_engine(tmp_path), packages=LOCK, load_bearing=["torch", "none-of-the-lock"])
    return made | {"base": made["id"]}


@pytest.fixture
def folders(tmp_path: Path, plan: Data) -> list[str]:
    """The second case: a plain folder with the engine, and a venv of the machine with torch."""
    engine, venv = tmp_path / "engine", tmp_path / "machine"
    put(engine, "sglang", "0.5.11", {"sglang/srt/a.py": b"A = 1\n", "sglang/data/big.bin": b"12345"})
    put(engine, "side", "1.0")
    site = venv / "lib" / f"python{plan['python']}" / "site-packages"
    put(site, "torch", "2.11.0+cu130", {"torch/lib/run": b"#!"})
    put(site, "side", "0.9", {"side/old.py": b"OLD = 1\n"})
    (site / "torch/lib/run").chmod(0o4750)
    (site / "torch/__pycache__").mkdir()
    (site / "torch/__pycache__/a.pyc").write_bytes(b"x")
    return [str(engine), str(venv)]


def build(top: Path, plan: Data, folders: list[str]) -> tuple[Path, Data]:
    """Checks, builds and publishes as the module does; site-packages and manifest."""
    found = adopt.scan(folders)
    made = plan | {"id": adopt.adopted_id(plan["base"], found.identity())}
    adopt.check(found, made)
    options = kit.make_options(top, wheelhouse=top / "nowhere")
    manifest: Data = building.build(made, options, found)["manifest"]
    building.publish(options.root, made["id"])
    release = top / "root" / "releases" / made["id"]
    return base.site_packages(release / "venv", plan["python"]), manifest


def state(folder: str) -> list[tuple[str, int, int, int]]:
    """Every file with inode, links and time of change."""
    found = ((str(path), path.lstat()) for path in sorted(Path(folder).rglob("*")))
    return [(path, stat.st_ino, stat.st_nlink, stat.st_mtime_ns) for path, stat in found]


def test_two_folders_become_one_release_that_needs_neither(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    before = [state(folder) for folder in folders]
    site, manifest = build(tmp_path, plan, folders)
    assert [state(folder) for folder in folders] == before
    for folder in folders:
        shutil.rmtree(folder)
    code = "import sglang.srt.a, torch, side; print(sglang.__version__, torch.__version__, side.__version__)"
    python = site.parents[2] / "bin" / "python"
    said = subprocess.run([python, "-I", "-B", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["0.5.11", "2.11.0+cu130", "1.0"]
    assert not (site / "side/old.py").exists(), "the first folder's side, and nothing of the second's"
    assert not list(site.rglob("*.pyc"))
    assert (site / "torch/lib/run").stat().st_mode & 0o7777 == 0o754
    assert (site.parents[2] / "pyvenv.cfg").read_text().count(".build-") == 0
    adopted = manifest["adopted"]
    assert (manifest["kind"], "uv" in manifest) == ("adopted", False)
    assert manifest["packages"] == {"sglang": "0.5.11", "torch": "2.11.0+cu130", "side": "1.0"}
    assert adopted["distributions"]["torch"]["folder"] == folders[1]
    assert (adopted["missing"], adopted["differ"], adopted["incomplete"]) == (["gone 3"], [], {})
    assert set(manifest["seconds"]) == {"copy", "audit", "profile", "imports"}


def test_native_programs_come_along_and_scripts_do_not(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    true = Path("/bin/true").read_bytes()
    target = tmp_path / "engine"  # as pip install --target leaves it
    (target / "bin").mkdir()
    (target / "bin" / "side").write_bytes(true)
    programs = tmp_path / "machine" / "bin"
    programs.mkdir()
    (programs / "torch").write_text("#!/usr/bin/python3\n")
    site, manifest = build(tmp_path, plan, folders)
    venv = site.parents[2]
    assert (venv / "bin" / "side").read_bytes() == true
    assert not (venv / "bin" / "torch").exists()
    assert (venv / "bin" / "python").is_symlink(), "the venv's own stay"
    assert manifest["adopted"]["bytes"] > len(true)


def test_a_program_that_the_engine_calls_has_to_be_somewhere(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    row = {"program": "fleet-no-such-ninja", "package": "torch", "why": "it builds kernels"}
    plan["imports"] = {"programs": [row]}
    with pytest.raises(BuildError, match=r"no program fleet-no-such-ninja in .*it builds kernels.*: install torch"):
        build(tmp_path, plan, folders)
    assert not list((tmp_path / "root" / "releases").glob(".build-*"))
    for name, fine in {"there": row | {"program": "true"}, "not-asked": row | {"package": "none-of-the-lock"}}.items():
        plan["imports"] = {"programs": [fine]}
        build(tmp_path / name, plan, folders)


def test_links_in_a_folder_become_files(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    path = Path(folders[0]) / "sglang/srt/a.py"
    path.rename(tmp_path / "cache.py")
    path.symlink_to(tmp_path / "cache.py")
    site, _ = build(tmp_path, plan, folders)
    assert not (site / "sglang/srt/a.py").is_symlink()
    assert (site / "sglang/srt/a.py").stat().st_nlink == 1


# -- the id ------------------------------------------------------------------------------------------------------------


def test_the_same_source_elsewhere_is_the_same_release(tmp_path: Path, folders: list[str]) -> None:
    first = adopt.scan(folders).identity()
    shutil.copytree(folders[0], tmp_path / "elsewhere")
    assert adopt.scan([str(tmp_path / "elsewhere"), folders[1]]).identity() == first


def test_what_is_in_the_folders_makes_the_id(folders: list[str]) -> None:
    engine = Path(folders[0])
    seen = [adopt.scan(folders).identity()]
    for change in (
        (engine / "sglang/data/big.bin").unlink,
        lambda: put(engine, "more", "1"),
        lambda: (engine / "own.py").write_text("x"),
        lambda: (engine / "own.py").write_text("y"),
        lambda: put(engine, "more", "1", {"more/x.py": b""}),
    ):
        change()
        seen.append(adopt.scan(folders).identity())
    assert len(set(seen)) == len(seen)
    assert adopt.scan(folders[::-1]).packages["side"] == "0.9", "the order decides"
    assert re.fullmatch(r"[0-9a-f]{14}", adopt.adopted_id("0" * 14, seen[0]))
    assert adopt.adopted_id("0" * 14, seen[0]) != adopt.adopted_id("1" * 14, seen[0])


def test_a_release_is_known_by_its_folders_when_they_are_gone(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    _, manifest = build(tmp_path, plan, folders)
    root = tmp_path / "root"
    assert adopt.find_known(root, plan["base"], folders) == manifest["id"]
    assert adopt.find_known(root, plan["base"], folders[:1]) == ""
    assert adopt.find_known(root, "0" * 14, folders) == ""


# -- what is no distribution's -----------------------------------------------------------------------------------------


def test_what_no_distribution_brought_is_copied_unless_it_lies_in_anothers(
    tmp_path: Path, plan: Data, folders: list[str]
) -> None:
    engine = Path(folders[0])
    (engine / "IPython").mkdir()
    (engine / "IPython/__init__.py").write_text("STAND_IN = 1\n")
    (engine / "side/left.so").write_text("x")
    (engine / "path.pth").write_text("/somewhere/else\n")
    site, manifest = build(tmp_path, plan, folders)
    assert (site / "IPython/__init__.py").exists()
    assert not (site / "path.pth").exists()
    assert not (site / "side/left.so").exists()
    assert manifest["adopted"]["loose"] == ["IPython"]
    assert manifest["adopted"]["left"] == {folders[0]: {"files": 2, "first": ["path.pth", "side/left.so"]}}


def test_a_stand_in_does_not_mix_with_the_real_package_of_another_folder(
    tmp_path: Path, plan: Data, folders: list[str]
) -> None:
    loose = Path(folders[1]) / f"lib/python{plan['python']}/site-packages/sglang"
    loose.mkdir()
    (loose / "extra.py").write_text("x")
    site, _ = build(tmp_path, plan, folders)
    assert not (site / "sglang/extra.py").exists()


def test_files_that_were_left_out_are_counted_and_kept_in_the_manifest(
    tmp_path: Path, plan: Data, folders: list[str]
) -> None:
    (Path(folders[0]) / "sglang/data/big.bin").unlink()
    assert any("sglang 1 of 5" in line for line in adopt.check(adopt.scan(folders), plan))
    _, manifest = build(tmp_path, plan, folders)
    assert manifest["adopted"]["incomplete"] == {"sglang": {"missing": 1, "of": 5, "files": ["sglang/data/big.bin"]}}


def test_a_changed_file_of_another_package_is_kept_in_the_manifest(
    tmp_path: Path, plan: Data, folders: list[str]
) -> None:
    (Path(folders[0]) / "side/__init__.py").write_text("__version__ = '1.1'\n")
    torch = Path(folders[1]) / f"lib/python{plan['python']}/site-packages/torch/lib/run"
    torch.write_bytes(b"longer than it was")
    _, manifest = build(tmp_path, plan, folders)
    assert manifest["adopted"]["changed"] == {"side": ["side/__init__.py"], "torch": ["torch/lib/run"]}


# -- errors ------------------------------------------------------------------------------------------------------------


def refused(folders: list[str], plan: Data) -> str:
    """The one message of a refusal; it always names the host."""
    with pytest.raises(AdoptError) as caught:
        adopt.check(adopt.scan(folders), plan)
    assert str(caught.value).startswith(f"{os.uname().nodename}: ")
    return str(caught.value)


def test_a_patched_engine_is_refused_with_the_file(plan: Data, folders: list[str]) -> None:
    path = Path(folders[0]) / "sglang/srt/a.py"
    path.write_text("A = 2\n")
    said = refused(folders, plan)
    assert f"somebody patched this already: {path} is not as the wheel" in said
    assert "--target FOLDER sglang==0.5.11" in said


def test_a_module_that_was_added_to_the_engine_is_a_patch_too(plan: Data, folders: list[str]) -> None:
    path = Path(folders[0]) / "sglang/srt/ddtree.py"
    path.write_text("")
    assert f"somebody patched this already: {path} is not" in refused(folders, plan)


def test_a_load_bearing_version_has_to_be_the_locks(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    put(tmp_path / "first", "torch", "2.10.0")
    said = refused([str(tmp_path / "first"), *folders], plan)
    assert f"torch: {kit.NAME} needs 2.11.0, found is 2.10.0 in {tmp_path}/first, " in said
    assert "install torch==2.11.0 there" in said
    assert "sglang: sglang-0 needs 0.5.11, found is none in" in refused(folders[1:], plan)


def test_other_versions_are_a_warning(plan: Data, folders: list[str]) -> None:
    said = adopt.check(adopt.scan(folders[::-1]), plan)
    assert any("not the versions of sglang-0's lock: side 0.9 (lock: 1.0)" in line for line in said)
    assert any("missing: gone 3" in line for line in said)


def test_an_editable_engine_is_refused_with_the_reason(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    put(tmp_path / "dev", "sglang", "0.5.11", **{"direct_url.json": json.dumps({"dir_info": {"editable": True}})})
    said = refused([str(tmp_path / "dev"), folders[1]], plan)
    assert "sglang: sglang-0 needs 0.5.11, installed editable: " in said


def test_without_a_record_nothing_is_known_of_the_engine(plan: Data, folders: list[str]) -> None:
    (Path(folders[0]) / "sglang-0.5.11.dist-info/RECORD").unlink()
    assert "sglang: sglang-0 needs 0.5.11, no RECORD in" in refused(folders, plan)


def test_another_python_is_refused(plan: Data, folders: list[str]) -> None:
    said = refused(folders, plan | {"python": "3.99"})
    assert f"{folders[1]} is for Python {plan['python']}, the release is for 3.99: set sglang_venv_python to" in said
    put(Path(folders[0]), "native", "1", WHEEL="Tag: cp38-abi3-linux\nTag: cp37-cp37m-linux\nTag: cp398-cp398-linux\n")
    assert f"{folders[0]} is for Python 3.98, the release is for {plan['python']}" in refused(folders, plan)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: "rel/ative", "rel/ative is not absolute"),
        (lambda top: str(top / "nowhere"), "is no folder here, expected a venv or a site-packages folder"),
        (lambda top: str(top / "house"), "holds no installed distribution, expected"),
    ],
)
def test_a_folder_that_is_none_is_named(tmp_path: Path, plan: Data, make: Any, words: str) -> None:
    assert words in refused([make(tmp_path)], plan)


def test_a_distribution_that_is_there_twice_is_refused(plan: Data, folders: list[str]) -> None:
    put(Path(folders[0]), "side", "1.1")
    assert f"{folders[0]} holds side twice (1.0 and 1.1), expected one" in refused(folders, plan)


def test_too_little_room_for_the_copy_is_found_first(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    found = adopt.scan(folders)
    assert found.bytes > 100
    found.bytes = 2**60
    with pytest.raises(BuildError, match=rf"disk full: the release needs 11529215\d+ bytes .* below {tmp_path}"):
        building.build(plan, kit.make_options(tmp_path), found)
    assert plays.left(tmp_path) == []


def test_the_audits_are_those_of_a_build_and_a_failure_leaves_nothing(
    tmp_path: Path, plan: Data, folders: list[str]
) -> None:
    bound = {"package": "side", "from": "2", "below": "3", "why": "It is needed.", "source": "https://example.org/1"}
    with pytest.raises(
        BuildError, match=r"do not fit sglang-0: side 1\.0: expected 2 .*right first in sglang_venv_adopt"
    ):
        build(tmp_path, plan | {"imports": {"bounds": [bound]}}, folders)
    native = write_elf(tmp_path / "native").read_bytes()
    put(Path(folders[0]), "hook", "1", {"hook/x.so": native})
    with pytest.raises(BuildError, match=r"hook/x\.so of hook==1 asks for libcudart\.so\.12 .*unset that to build"):
        build(tmp_path, plan, folders)
    assert plays.left(tmp_path) == []


def test_requirements_of_the_engine_that_nothing_depends_on_are_no_fault(
    tmp_path: Path, plan: Data, folders: list[str]
) -> None:
    metadata = "Name: sglang\nVersion: 0.5.11\nRequires-Dist: gone==3\nRequires-Dist: torch==2.11.0\n"
    put(Path(folders[0]), "sglang", "0.5.11", {"sglang/srt/a.py": b"A = 1\n"}, METADATA=metadata)
    _, manifest = build(tmp_path, plan | {"imports": {"bounds": []}}, folders)
    assert manifest["imports"]["pins"] == 1


def test_an_interpreter_that_makes_no_venv_is_told(tmp_path: Path, plan: Data, folders: list[str]) -> None:
    options = kit.make_options(tmp_path, python="/bin/false")
    with pytest.raises(BuildError, match="/bin/false could not make a venv for Python"):
        building.build(plan, options, adopt.scan(folders))
    assert plays.left(tmp_path) == []


# -- the copy of a file ------------------------------------------------------------------------------------------------


def test_a_file_is_copied_where_the_kernel_can_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)

    def refuse(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    copying.copy_file(str(tmp_path / "a"), str(tmp_path / "b"))
    monkeypatch.setattr(os, "copy_file_range", refuse)
    copying.copy_file(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    copying.copy_file(str(tmp_path / "a"), str(tmp_path / "d"))
    assert (tmp_path / "d").stat().st_size == 3_000_000


# -- the module --------------------------------------------------------------------------------------------------------


def test_the_module_predicts_takes_over_and_rests_even_without_the_folder(tmp_path: Path) -> None:
    engine = kit.make_engine(tmp_path)
    (engine / "imports.yml").write_text(yaml.safe_dump({"load_bearing": ["alpha"]}))
    folder = tmp_path / "there"
    put(folder, "alpha", "1.0")
    given = {"adopt": [str(folder)], "wheelhouse": str(tmp_path / "nowhere")}
    predicted = plays.play(tmp_path, "--check", "--diff", **given)
    assert plays.changed(predicted) == 2
    assert f"+taken over from: {folder}" in predicted.stdout
    assert not (tmp_path / "root" / "releases").exists()
    made = plays.play(tmp_path, **given)
    assert plays.changed(made) == 2
    assert "[WARNING]: " in made.stderr
    assert "missing: beta-two 2.1.post1" in re.sub(r"\s+", " ", made.stderr)
    (release,) = plays.left(tmp_path)
    assert plays.changed(plays.play(tmp_path, **given)) == 0
    shutil.rmtree(folder)
    assert plays.changed(plays.play(tmp_path, **given)) == 0
    assert plays.left(tmp_path) == [release]
    put(folder, "alpha", "1.1")
    failed = plays.play(tmp_path, "--check", **given)
    assert failed.returncode != 0
    assert "alpha: sglang-0 needs 1.0, found is 1.1" in failed.stdout
    assert "Traceback" not in failed.stdout + failed.stderr


def test_one_folder_that_is_no_list_is_refused(tmp_path: Path) -> None:
    kit.make_engine(tmp_path)
    failed = plays.play(tmp_path, adopt={"a": 1})
    assert "is no list of folders" in failed.stdout
