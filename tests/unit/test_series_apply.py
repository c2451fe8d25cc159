# SPDX-License-Identifier: Apache-2.0
"""From clean to applied on a small engine: states, failures in the middle, links, imports, the stamp."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from ansible.module_utils import ddtree_patches_series as core

from tests.unit import series_kit as kit_of
from tests.unit.series_kit import ENGINE, KILLED, Kit, apply_in_child, kill_after, tree_hash

NEW = kit_of.FILES | kit_of.EDITS | kit_of.OVERLAY | {"demo/tree/utils.py": "U = 'common'\n"}


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return kit_of.make(tmp_path)


def content(kit: Kit) -> dict[str, str]:
    return {path: data.decode() for path in NEW if (data := core.read(kit.site, path)) is not None}


def prove(kit: Kit, **env: str) -> list[str]:
    return list(core.check_imports(kit.python, kit.site, kit.load(), env, 60))


def test_clean_to_applied_and_no_further(kit: Kit) -> None:
    done = core.apply(kit.load(), kit.site, stamp=kit.stamp, imports=lambda: prove(kit))
    assert vars(done) == {"was": "clean", "state": "applied", "changed": True, "imported": list(kit.load().imports)}
    assert content(kit) == NEW
    assert not list(kit.site.rglob("*ddtree-new")), "no temporary file is left"
    stamp = json.loads(kit.stamp.read_text())
    assert stamp["digest"] == kit.load().digest
    assert {p: h["after"] for p, h in stamp["files"].items()} == {p: h.after for p, h in kit.load().files.items()}
    before = {p: p.stat().st_mtime_ns for p in [*kit.site.rglob("*"), kit.stamp]}

    def never() -> list[str]:
        raise AssertionError("a stamped release is not imported again")

    again = core.apply(kit.load(), kit.site, stamp=kit.stamp, imports=never)
    assert (again.was, again.changed) == ("applied", False)
    assert {p: p.stat().st_mtime_ns for p in [*kit.site.rglob("*"), kit.stamp]} == before


def test_dry_run_leaves_every_byte(kit: Kit) -> None:
    before = tree_hash(kit.release)
    done = core.apply(kit.load(), kit.site, stamp=kit.stamp, dry=True)
    assert (done.was, done.state, done.changed) == ("clean", "applied", True)
    assert tree_hash(kit.release) == before
    assert kit.state() == "clean"


@pytest.mark.parametrize("path", kit_of.TOUCHED)
def test_foreign_is_named_with_hashes_and_left_alone(kit: Kit, path: str) -> None:
    kit_of.write(kit.site, {path: "X = 'somebody else'\n"})
    before = tree_hash(kit.release)
    want, seen = kit.load().files[path], core._sha(b"X = 'somebody else'\n")
    with pytest.raises(core.SeriesError) as e:
        core.apply(kit.load(), kit.site)
    assert f"{path}: expected sha256 {want.before or 'absent'} (unpatched) or {want.after}" in str(e.value)
    assert f"observed {seen}" in str(e.value)
    assert tree_hash(kit.release) == before


def test_a_missing_file_is_foreign(kit: Kit) -> None:
    (kit.site / "demo/a.py").unlink()
    report = core.inspect(kit.site, kit.load())
    assert report.state == "foreign"
    assert "observed absent" in report.reason


def set_version(kit: Kit, version: str) -> None:
    meta = kit.site / "demo-1.0.dist-info/METADATA"
    meta.write_text(meta.read_text().replace("Version: 1.0", f"Version: {version}"))


def test_another_version_is_foreign_or_superseded(kit: Kit) -> None:
    set_version(kit, "1.1")
    report = core.inspect(kit.site, kit.load())
    assert (report.state, report.reason) == ("foreign", "expected demo 1.0, observed 1.1")
    kit_of.write(kit.site, {"demo/srt/args.py": kit_of.EDITS["demo/srt/args.py"]})
    before = tree_hash(kit.release)
    done = core.apply(kit.load(), kit.site, stamp=kit.stamp)
    assert (done.was, done.state, done.changed) == ("superseded", "superseded", False)
    assert tree_hash(kit.release) == before


def test_our_own_patch_is_never_taken_for_upstream(kit: Kit) -> None:
    """The pattern matches a patched file too, so in the version of the series it means nothing."""
    core.apply(kit.load(), kit.site)
    args = kit.site / "demo/srt/args.py"
    args.write_text(args.read_text() + "# edited by hand\n")
    assert kit.state() == "foreign"


def test_an_engine_that_is_not_there(kit: Kit) -> None:
    (kit.site / "demo-1.0.dist-info/METADATA").unlink()
    assert core.inspect(kit.site, kit.load()).reason == f"demo is not installed in {kit.site}"
    with pytest.raises(core.SeriesError, match="is no folder"):
        core.inspect(kit.site / "nowhere", kit.load())


@pytest.mark.parametrize("renames", range(len(kit_of.TOUCHED) + 1))
def test_killed_between_two_renames(kit: Kit, renames: int) -> None:
    """Each file is whole, the state says what happened, and no file of another state is called partial."""
    done = apply_in_child(kit.root, ENGINE, kit.site, kill_after(renames), kit.stamp)
    assert done.returncode == KILLED, done.stderr
    report = core.inspect(kit.site, kit.load())
    assert {f.state for f in report.files} <= {"before", "after"}, "a file is torn"
    assert [f.path for f in report.files if f.state == "after"] == kit_of.TOUCHED[:renames]
    assert not kit.stamp.exists()
    if renames in (0, len(kit_of.TOUCHED)):
        # Nothing or everything was done: the next run finishes, leftovers of the killed one included.
        again = core.apply(kit.load(), kit.site, stamp=kit.stamp, imports=lambda: prove(kit))
        assert (again.state, again.changed) == ("applied", True)
        assert not list(kit.site.rglob("*ddtree-new"))
        return
    assert report.state == "partial"
    before = tree_hash(kit.release)
    with pytest.raises(core.SeriesError) as e:
        core.apply(kit.load(), kit.site)
    text = str(e.value)
    patched, unpatched = text[text.index("patched: ") : text.index("; an apply")].split("; unpatched: ")
    assert patched == "patched: " + ", ".join(kit_of.TOUCHED[:renames])
    assert unpatched == ", ".join(kit_of.TOUCHED[renames:])
    assert "build again" in text
    assert tree_hash(kit.release) == before


def test_no_room_for_the_new_files_leaves_the_old(kit: Kit) -> None:
    """A size limit makes a write fail as a full disk does, in the middle of the files."""
    before = tree_hash(kit.release)
    limit = len(kit_of.EDITS["demo/srt/args.py"]) + 1  # demo/a.py is larger
    done = apply_in_child(kit.root, ENGINE, kit.site, f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    assert done.returncode == 1
    assert "nothing was changed, writing the patched files failed" in done.stderr
    assert tree_hash(kit.release) == before
    assert not (kit.site / "demo/tree").exists(), "folders that were made for new files are gone"


def test_a_failed_rename_says_how_far_it_got(kit: Kit) -> None:
    failing = """
    real = Path.replace
    def fail(self, target):
        if target.name == 'args.py':
            raise OSError(5, 'Input/output error')
        return real(self, target)
    Path.replace = fail
    """
    done = apply_in_child(kit.root, ENGINE, kit.site, failing)
    assert "1 of 5 files were replaced, then: [Errno 5]" in done.stderr
    assert kit.state() == "partial"
    assert not list(kit.site.rglob("*ddtree-new"))


def test_hard_links_and_their_cache_are_unharmed(kit: Kit, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for path in kit_of.EDITS:
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(kit.site / path, cache / path)
    before = tree_hash(cache)
    core.apply(kit.load(), kit.site)
    assert tree_hash(cache) == before
    assert [(cache / path).stat().st_nlink for path in kit_of.EDITS] == [1, 1]
    assert content(kit) == NEW


def test_symlinks_are_replaced_not_followed(kit: Kit, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for path in kit_of.EDITS:
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        (kit.site / path).rename(cache / path)
        (kit.site / path).symlink_to(cache / path)
    (cache / "demo/a.py").chmod(0o755)
    before = tree_hash(cache)
    core.apply(kit.load(), kit.site)
    assert tree_hash(cache) == before
    assert content(kit) == NEW
    assert not any((kit.site / path).is_symlink() for path in kit_of.EDITS)
    assert stat.S_IMODE((kit.site / "demo/a.py").stat().st_mode) == 0o755, "the mode is kept"


def test_a_strict_umask_hides_nothing_from_the_engines_user(kit: Kit) -> None:
    done = apply_in_child(kit.root, ENGINE, kit.site, "os.umask(0o077)", kit.stamp)
    assert done.returncode == 0, done.stderr
    modes = {p: stat.S_IMODE((kit.site / p).stat().st_mode) for p in ("demo/tree", "demo/tree/worker.py", "demo/a.py")}
    assert modes == {"demo/tree": 0o755, "demo/tree/worker.py": 0o644, "demo/a.py": 0o644}
    assert stat.S_IMODE(kit.stamp.stat().st_mode) == 0o644


def test_a_folder_that_links_out_of_the_site_is_refused(kit: Kit, tmp_path: Path) -> None:
    (kit.site / "demo/srt").rename(tmp_path / "srt")
    (kit.site / "demo/srt").symlink_to(tmp_path / "srt")
    before = tree_hash(tmp_path / "srt")
    with pytest.raises(core.SeriesError, match="is a link out of"):
        core.apply(kit.load(), kit.site)
    assert tree_hash(tmp_path / "srt") == before


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "demo/../../x", ""])
def test_paths_stay_inside(kit: Kit, path: str) -> None:
    with pytest.raises(core.SeriesError, match="stay inside"):
        core.read(kit.site, path)


def test_stale_bytecode_goes(kit: Kit) -> None:
    """An unchecked .pyc would run the old source for ever."""
    import py_compile

    for path in ("demo/a.py", "demo/srt/other.py"):
        py_compile.compile(str(kit.site / path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    core.apply(kit.load(), kit.site)
    left = [p.name.split(".")[0] for p in kit.site.rglob("*.pyc")]
    assert left == ["other"], "only that of a file that the series does not touch"


def test_imports_are_of_the_release_and_leave_nothing(kit: Kit) -> None:
    core.apply(kit.load(), kit.site)
    assert prove(kit) == list(kit.load().imports)
    assert not list(kit.site.rglob("*.pyc"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_thing\n",
            r"demo\.tree\.worker: ModuleNotFoundError: No module named 'no_such_thing' \(.*worker\.py:1\)",
        ),
        ("raise SystemExit(0)\n", r"demo\.tree\.worker: SystemExit"),
        ("import os\nos.write(2, b'out of memory')\nos._exit(0)\n", "exit code 0: out of memory"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "exit code -11"),
        ("import threading\nthreading.Event().wait()\n", "took longer than 2 s"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(kit: Kit, source: str, message: str) -> None:
    kit_of.write(kit.folder / "overlay", {"demo/tree/worker.py": source})
    kit_of.series.refresh(ENGINE, kit.site, kit.root)
    one = kit.load()

    def imports() -> list[str]:
        return list(core.check_imports(kit.python, kit.site, one, {}, 2 if "wait" in source else 60))

    with pytest.raises(core.SeriesError, match=message):
        core.apply(one, kit.site, stamp=kit.stamp, imports=imports)
    assert not kit.stamp.exists()
    # Applied without a stamp is not proven: the next run tries the imports again instead of saying ok.
    with pytest.raises(core.SeriesError, match=message):
        core.apply(one, kit.site, stamp=kit.stamp, imports=imports)


def test_a_module_from_elsewhere_does_not_count(kit: Kit, tmp_path: Path) -> None:
    core.apply(kit.load(), kit.site)
    kit_of.write(tmp_path / "elsewhere", NEW)
    with pytest.raises(core.SeriesError, match=r"demo\.a: came from .*/elsewhere/demo/a\.py, expected"):
        prove(kit, PYTHONPATH=str(tmp_path / "elsewhere"))


def test_a_python_that_is_not_there(kit: Kit) -> None:
    with pytest.raises(core.SeriesError, match="cannot be started"):
        core.check_imports(kit.release / "none", kit.site, kit.load(), {}, 2)


def test_published_is_checked_and_never_changed(kit: Kit) -> None:
    before = tree_hash(kit.release)
    with pytest.raises(core.SeriesError, match="a release is never changed"):
        core.apply(kit.load(), kit.site, stamp=kit.stamp, published=True)
    assert tree_hash(kit.release) == before
    core.apply(kit.load(), kit.site)
    before = tree_hash(kit.release)
    done = core.apply(kit.load(), kit.site, stamp=kit.stamp, published=True)
    assert (done.state, done.changed) == ("applied", False)
    assert tree_hash(kit.release) == before


def test_a_stamp_of_another_series_is_not_believed(kit: Kit) -> None:
    core.apply(kit.load(), kit.site, stamp=kit.stamp)
    for text in ('{"digest": "0"}', "[]", "no JSON"):
        kit.stamp.write_text(text)
        assert core.apply(kit.load(), kit.site, stamp=kit.stamp).changed
        assert json.loads(kit.stamp.read_text())["digest"] == kit.load().digest


def test_one_venv_one_site(tmp_path: Path) -> None:
    with pytest.raises(core.SeriesError, match="found 0"):
        core.find_site(tmp_path)
    for minor in (11, 12):
        (tmp_path / f"lib/python3.{minor}/site-packages").mkdir(parents=True)
    with pytest.raises(core.SeriesError, match="found 2"):
        core.find_site(tmp_path)
