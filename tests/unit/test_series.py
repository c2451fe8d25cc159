# SPDX-License-Identifier: Apache-2.0
"""The series on the control side: folder, manifest, header, cutting, the door."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import yaml
from ansible.module_utils import ddtree_patches_series as core

from fleet import series
from tests.unit import series_kit as kit_of
from tests.unit.series_kit import ENGINE, Kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return kit_of.make(tmp_path)


def door(*argv: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = series.main([str(a) for a in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def manifest(kit: Kit) -> dict[str, object]:
    return dict(yaml.safe_load((kit.folder / "manifest.yml").read_text()))


def test_every_series_of_the_repository_agrees() -> None:
    assert series.engines(), "no series in the repository"
    assert [text for engine in series.engines() for text in series.lint(engine)] == []


def test_refresh_knows_all_hashes_and_modules(kit: Kit) -> None:
    one = kit.load()
    assert sorted(one.files) == kit_of.TOUCHED
    assert one.imports == ("demo.a", "demo.srt.args", "demo.tree", "demo.tree.utils", "demo.tree.worker")
    assert one.files["demo/a.py"].before == series.sha(kit_of.FILES["demo/a.py"].encode())
    assert one.files["demo/a.py"].after == series.sha(kit_of.EDITS["demo/a.py"].encode())
    assert one.files["demo/tree/utils.py"].before is None
    assert series.lint(ENGINE, kit.root) == []
    assert not series.refresh(ENGINE, kit.site, kit.root), "a second refresh changes nothing"


def test_refresh_from_a_wheel_is_the_same(kit: Kit, tmp_path: Path) -> None:
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        for path, text in kit_of.FILES.items():
            out.writestr(path, text)
    assert not series.refresh(ENGINE, wheel, kit.root)


def test_refresh_keeps_what_people_write(kit: Kit) -> None:
    m = manifest(kit) | {"imports_skip": {"demo.tree": "a reason"}}
    (kit.folder / "manifest.yml").write_text(yaml.safe_dump(m))
    assert series.refresh(ENGINE, kit.site, kit.root)
    assert manifest(kit)["superseded"] == kit_of.SUPERSEDED
    assert "demo.tree" not in kit.load().imports


def test_refresh_refuses_a_patched_or_other_site_and_writes_nothing(kit: Kit) -> None:
    before = (kit.folder / "manifest.yml").read_bytes()
    core.apply(kit.load(), kit.site)
    with pytest.raises(core.SeriesError, match=r"is .* unpatched"):
        series.refresh(ENGINE, kit.site, kit.root)
    meta = kit.site / "demo-1.0.dist-info/METADATA"
    meta.write_text(meta.read_text().replace("1.0", "1.1"))
    with pytest.raises(core.SeriesError, match=r"expected demo 1\.0, observed 1\.1"):
        series.refresh(ENGINE, kit.site, kit.root)
    assert (kit.folder / "manifest.yml").read_bytes() == before


def test_refresh_says_when_upstream_has_it(kit: Kit) -> None:
    m = manifest(kit) | {"superseded": kit_of.SUPERSEDED | {"pattern": "^FLAGS = "}}
    (kit.folder / "manifest.yml").write_text(yaml.safe_dump(m))
    with pytest.raises(
        core.SeriesError, match=r"demo-1\.0 has it upstream: its demo/srt/args\.py contains /\^FLAGS = /"
    ):
        series.refresh(ENGINE, kit.site, kit.root)


def test_a_result_that_is_no_python_is_refused(kit: Kit) -> None:
    before = (kit.folder / "manifest.yml").read_bytes()
    worker = kit.folder / "overlay/demo/tree/worker.py"
    worker.write_text("def broken(:\n")
    with pytest.raises(core.SeriesError, match=r"demo/tree/worker\.py: does not compile"):
        series.refresh(ENGINE, kit.site, kit.root)
    assert (kit.folder / "manifest.yml").read_bytes() == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("demo-1.0/0001-count.patch", r"0001-count\.patch differs from manifest"),
        ("demo-1.0/overlay/demo/tree/worker.py", r"worker\.py differs from manifest"),
        ("common/utils.py", r"utils\.py differs from manifest"),
    ],
)
def test_an_edit_without_refresh_is_refused(kit: Kit, path: str, message: str) -> None:
    """The digest goes into the release id; a stale one would keep an old release."""
    old = kit.load().digest
    file = kit.root / path
    text = file.read_text()
    file.write_text(text.replace("+    return 2", "+    return 3") if path.endswith(".patch") else text + "X = 1\n")
    with pytest.raises(core.SeriesError, match=message):
        kit.load()
    assert series.lint(ENGINE, kit.root)
    series.refresh(ENGINE, kit.site, kit.root)
    assert kit.load().digest != old


def test_the_digest_is_of_what_counts(kit: Kit) -> None:
    old = kit.load().digest
    patch = kit.folder / "0001-count.patch"
    patch.write_text(patch.read_text().replace("A Person", "Another Person"))
    series.refresh(ENGINE, kit.site, kit.root)
    assert kit.load().digest == old


def test_packing_is_lossless_and_refuses_noise(kit: Kit) -> None:
    one = kit.load()
    again = core.Series.unpack(one.pack())
    assert again == one
    assert again.digest == one.digest
    for noise in ("", "x", "eJyrVkrLz1eyUkpKLFKqBQAd7ARg"):
        with pytest.raises(core.SeriesError, match="unreadable"):
            core.Series.unpack(noise)


def test_folder_mistakes_have_one_clear_message(kit: Kit) -> None:
    def fails(message: str) -> None:
        with pytest.raises(core.SeriesError, match=message):
            kit.load()

    listed = (kit.folder / "series").read_text()
    (kit.folder / "0003-stray.patch").write_text("")
    fails(r"does not list 0003-stray\.patch")
    (kit.folder / "0003-stray.patch").unlink()
    (kit.folder / "series").write_text(listed + "0003-none.patch\n")
    fails(r"lists 0003-none\.patch, which is not there")
    (kit.folder / "series").write_text(listed + "0001-count.patch # again\n")
    fails("listed twice")
    (kit.folder / "series").write_text("0002-flag.patch\n0001-count.patch\n")
    fails("order differs")
    (kit.folder / "series").write_text(listed)
    (kit.folder / "overlay/demo/a.py").write_text("")
    fails(r"demo/a\.py is changed in two places")
    (kit.folder / "overlay/demo/a.py").unlink()
    kit.load()
    with pytest.raises(core.SeriesError, match=r"no patch series for engine 'demo-2\.0' .* there are: demo-1\.0"):
        series.load("demo-2.0", kit.root)
    with pytest.raises(core.SeriesError, match="expected DISTRIBUTION-VERSION"):
        series.load("../demo", kit.root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Author: A Person <person@example.com>\n", ""), "field Author is missing"),
        (("Kept: this is a test\n", ""), "why we carry it"),
        (("Kept: this is a test", "Applied-Upstream: soon"), "Applied-Upstream needs a URL"),
        (("Origin: vendor", "Origin: me"), "Origin is vendor"),
        (("Forwarded: not-needed", "Forwarded: maybe"), "Forwarded is no, not-needed or a URL"),
        (("2026-11-29", "29 Nov"), "Last-Update is a date"),
        (("Bug: https://example.com/1", "Bug: 1"), "Bug needs a URL"),
        (("Adds a thing", "TODO"), "field Description is not filled in"),
        (("Origin: vendor", "Origin: vendor\nsome text"), "'some text' is no 'Field: value' line"),
    ],
)
def test_header_lint(kit: Kit, change: tuple[str, str], message: str) -> None:
    patch = kit.folder / "0002-flag.patch"
    assert change[0] in patch.read_text()
    patch.write_text(patch.read_text().replace(*change))
    series.refresh(ENGINE, kit.site, kit.root)
    (problem,) = series.lint(ENGINE, kit.root)
    assert message in problem
    assert "0002-flag.patch" in problem


def test_too_much_context_and_no_superseded_rule(kit: Kit) -> None:
    patch = kit.folder / "0001-count.patch"
    text = kit_of.HEADER + "\n--- a/demo/a.py\n+++ b/demo/a.py\n@@ -1,9 +1,9 @@\n"
    old, new = kit_of.FILES["demo/a.py"].splitlines(), kit_of.EDITS["demo/a.py"].splitlines()
    patch.write_text(text + "".join(f" {x}\n" if x == y else f"-{x}\n+{y}\n" for x, y in zip(old, new, strict=True)))
    (kit.folder / "manifest.yml").write_text(yaml.safe_dump({"common": kit_of.COMMON}))
    series.refresh(ENGINE, kit.site, kit.root)
    problems = "\n".join(series.lint(ENGINE, kit.root))
    assert "0001-count.patch: demo/a.py:1: more than 3 lines of context" in problems
    assert "superseded needs path, pattern and bug" in problems


def test_diff_cuts_anew_and_keeps_headers(kit: Kit) -> None:
    assert series.recut(ENGINE, kit.site, kit.tree, kit.root) == []
    a = kit.tree / "demo/a.py"
    a.write_text(a.read_text() + "# more\n")
    (kit.tree / "demo/srt/other.py").write_text("OTHER = 2\n")
    (kit.tree / "demo/new.py").write_text("")
    (kit.tree / "demo/tree").mkdir()
    (kit.tree / "demo/tree/worker.py").write_text("different\n")
    said = series.recut(ENGINE, kit.site, kit.tree, kit.root)
    assert said[0] == "0001-count.patch: cut anew (demo/a.py)"
    assert said[1].startswith("demo/srt/other.py: edited, in no patch")
    assert said[2].startswith("demo/new.py: new, not in the series")
    assert said[3].startswith("demo/tree/worker.py: differs from")
    text = (kit.folder / "0001-count.patch").read_text()
    assert text.startswith(kit_of.HEADER.split("Last-Update")[0])
    series.refresh(ENGINE, kit.site, kit.root)
    core.apply(kit.load(), kit.site)
    assert (kit.site / "demo/a.py").read_bytes() == a.read_bytes()


def test_diff_takes_the_package_folder_too(kit: Kit) -> None:
    assert series.recut(ENGINE, kit.site, kit.tree / "demo", kit.root) == []
    with pytest.raises(core.SeriesError, match="expected an edited copy"):
        series.recut(ENGINE, kit.site, kit.root, kit.root)


def test_diff_refuses_to_empty_a_patch(kit: Kit) -> None:
    (kit.tree / "demo/a.py").write_text(kit_of.FILES["demo/a.py"])
    with pytest.raises(core.SeriesError, match=r"0001-count\.patch: .* changes none of its files"):
        series.recut(ENGINE, kit.site, kit.tree, kit.root)


def test_new_takes_its_place_in_the_order(kit: Kit) -> None:
    (kit.tree / "demo/srt/other.py").write_text("OTHER = 2\n")
    files = ["demo/srt/other.py"]
    with pytest.raises(core.SeriesError, match=r"belongs to 0001-count\.patch"):
        series.new_patch(ENGINE, "x", ["demo/a.py"], kit.site, kit.tree, kit.root)
    with pytest.raises(core.SeriesError, match="no difference"):
        series.new_patch(ENGINE, "x", ["demo/version.py"], kit.site, kit.tree, kit.root)
    with pytest.raises(core.SeriesError, match="expected NNNN-what"):
        series.new_patch(ENGINE, "Big Name", files, kit.site, kit.tree, kit.root)
    (kit.folder / "series").write_text("# first\n0001-count.patch\n# second\n0002-flag.patch\n")
    series.new_patch(ENGINE, "0001-other", files, kit.site, kit.tree, kit.root)
    assert series.read_series(kit.folder) == ["0001-count.patch", "0001-other.patch", "0002-flag.patch"]
    assert (kit.folder / "series").read_text().startswith("# first\n0001-count.patch\n")


def test_the_door(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    root = ("--root", kit.root)
    code, out, _ = door(*root, "check", capsys=capsys)
    assert (code, ENGINE in out) == (0, True)
    code, out, _ = door(*root, "state", ENGINE, "--release", kit.release, "--json", capsys=capsys)
    assert (code, json.loads(out)["state"]) == (0, "clean")
    code, out, _ = door(*root, "apply", ENGINE, "--site", kit.site, "--dry-run", capsys=capsys)
    assert (code, kit.state()) == (0, "clean")
    assert "would be changed" in out
    code, out, _ = door(*root, "apply", ENGINE, "--release", kit.release, "--imports", "--json", capsys=capsys)
    answer = json.loads(out)
    assert (code, answer["was"], answer["state"], answer["changed"]) == (0, "clean", "applied", True)
    assert answer["imported"] == list(kit.load().imports)
    code, out, _ = door(*root, "apply", ENGINE, "--release", kit.release, capsys=capsys)
    assert (code, "(unchanged)" in out) == (0, True)
    (kit.site / "demo/a.py").write_text("x\n")
    code, out, err = door(*root, "state", ENGINE, "--site", kit.site, capsys=capsys)
    assert (code, out) == (1, "")
    assert "foreign: demo/a.py: expected sha256" in err
    code, out, _ = door(*root, "apply", ENGINE, "--site", kit.site, "--json", capsys=capsys)
    assert (code, json.loads(out)["ok"]) == (1, False)
    with pytest.raises(SystemExit, match="2"):
        door(*root, "apply", ENGINE, capsys=capsys)
    capsys.readouterr()
