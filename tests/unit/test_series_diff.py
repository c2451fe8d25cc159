# SPDX-License-Identifier: Apache-2.0
"""Reading and applying unified diffs: exact or not at all."""

from __future__ import annotations

import difflib
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils import ddtree_patches_diff as diff

from fleet.series import cut

OLD = "one\ntwo\nthree\nfour\nfive\n"
GOOD = """\
Description: x

--- a/m/f.py
+++ b/m/f.py
@@ -2,2 +2,3 @@ def context(): names may follow
 two
+2.5
 three
@@ -5 +6 @@
-five
+FIVE
"""


def apply(text: str, old: str) -> str:
    return str(diff.apply("p", diff.parse("p", text).files[0], old))


def test_good() -> None:
    patch = diff.parse("0001-x.patch", GOOD)
    assert patch.header == "Description: x\n\n"
    assert [(f.path, [h.line for h in f.hunks]) for f in patch.files] == [("m/f.py", [2, 5])]
    assert apply(GOOD, OLD) == "one\ntwo\n2.5\nthree\nfour\nFIVE\n"


def test_several_files() -> None:
    second = GOOD[GOOD.index("---") :].replace("m/f.py", "m/g.py")
    assert [f.path for f in diff.parse("p", GOOD + second).files] == ["m/f.py", "m/g.py"]


def test_a_removed_line_may_look_like_a_file_header() -> None:
    text = "--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n--- a/f\n keep\n"
    assert apply(text, "-- a/f\nkeep\n") == "keep\n"


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (OLD.replace("two", "2"), r"m/f.py:2: expected 'two\\n', found '2\\n'"),
        ("zero\n" + OLD, r"m/f.py:2: expected 'two\\n', found 'one\\n'"),  # an offset of one line
        (OLD.replace("two", "two "), "m/f.py:2"),
        ("one\ntwo\n", r"m/f.py:3: expected 'three\\n', found the end of the file"),
        (OLD.rstrip("\n"), r"m/f.py:5: expected 'five\\n', found 'five'"),
        (OLD.replace("\n", "\r\n"), "m/f.py:2"),
    ],
)
def test_no_fuzz_no_offset(old: str, message: str) -> None:
    with pytest.raises(diff.PatchError, match=message):
        apply(GOOD, old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--- a/m/f.py", "--- /dev/null"), "new files go into overlay"),
        (("+++ b/m/f.py", "+++ /dev/null"), "expected '\\+\\+\\+ b/PATH'"),
        (("+++ b/m/f.py", "+++ b/m/g.py"), "renamed"),
        (("@@ -2,2 +2,3 @@", "@@ -2,3 +2,3 @@"), "counts|ends early"),
        (("@@ -2,2 +2,3 @@", "@@ -2,2 +2,2 @@"), "counts|ends early|expected a hunk"),
        (("@@ -5 +6 @@", "@@ -5 +5 @@"), "new line is 5, but 6 follows"),
        (("@@ -5 +6 @@", "@@ -3 +4 @@"), "overlaps"),
        ((" two\n", "\ntwo\n"), "ends early"),
        (("-five\n+FIVE", "-five\n+five"), "changes nothing"),
        (("@@ -5 +6 @@\n-five\n+FIVE\n", "@@ -5,0 +6 @@\n+FIVE\n"), "no context"),
        (("@@ -5 +6 @@", "@@ five @@"), "expected a hunk"),
        (("Description: x\n\n--- a/m/f.py", "nothing\n\n-- a/m/f.py"), "nothing to apply"),
    ],
)
def test_malformed(change: tuple[str, str], message: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(diff.PatchError, match=message):
        diff.parse("p", GOOD.replace(*change))


def test_malformed_as_a_whole() -> None:
    with pytest.raises(diff.PatchError, match="no newline"):
        diff.parse("p", GOOD.rstrip("\n"))
    with pytest.raises(diff.PatchError, match="appears twice"):
        diff.parse("p", GOOD + GOOD[GOOD.index("---") :])


def test_an_empty_file() -> None:
    text = cut("f", "", "new\n")
    assert apply(text, "") == "new\n"
    with pytest.raises(diff.PatchError, match="expected an empty file"):
        apply(text, "old\n")


def edit(rng: random.Random, lines: list[str]) -> list[str]:
    out = list(lines)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        kind = rng.choice("adr")
        if kind == "a" or not out:
            out[at:at] = [f"new {rng.randrange(9)}\n" for _ in range(rng.randint(1, 3))]
        elif kind == "d":
            del out[at : at + rng.randint(1, 3)]
        else:
            out[min(at, len(out) - 1)] = rng.choice(["x = '\f'\n", "naïve\n", "\n", "--- a/f\n", "@@ -1 +1 @@\n"])
    return out


@pytest.mark.parametrize("seed", range(60))
def test_cut_and_apply_are_inverse_and_agree_with_patch(seed: int, tmp_path: Path) -> None:
    """Random edits of a file with many equal lines: what is cut applies to exactly the new text, ours and GNU patch's."""
    rng = random.Random(seed)
    lines = [rng.choice(["a\n", "b\n", "\n", f"c{i}\n"]) for i in range(rng.randint(3, 60))]
    old = "".join(lines)
    new = "".join(edit(rng, lines))
    if rng.random() < 0.3:
        new = new.rstrip("\n")
    if rng.random() < 0.3:
        old = old.rstrip("\n") or "a"
    if old == new:
        new += "end\n"
    text = cut("f", old, new)
    assert apply(text, old) == new
    assert max(map(len, context_of(text))) <= 3
    if shutil.which("patch"):
        (tmp_path / "f").write_bytes(old.encode())
        (tmp_path / "p").write_bytes(text.encode())
        argv = ["patch", "-p1", "--fuzz=0", "--posix", "-s", "-i", "p"]
        subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True)
        assert (tmp_path / "f").read_bytes() == new.encode()


def context_of(text: str) -> list[list[str]]:
    """Runs of context lines before the first and after the last change of each hunk."""
    runs = []
    for hunk in text.split("\n@@ ")[1:]:
        body = [line for line in hunk.split("\n")[1:] if line and line != diff.NO_NEWLINE]
        kinds = [line[0] for line in body]
        changed = [i for i, kind in enumerate(kinds) if kind in "+-"]
        runs += [body[: changed[0]], body[changed[-1] + 1 :]]
    return runs


def test_cut_takes_as_little_context_as_is_unique() -> None:
    lines = [f"line {i}\n" for i in range(40)]
    unique = cut("f", "".join(lines), "".join([*lines[:20], "new\n", *lines[20:]]))
    assert "@@ -20,2 +20,3 @@" in unique
    block = ["def x():\n", "    pass\n", "\n"] * 10
    block[0] = "first\n"
    changed = [*block[:2], "new\n", *block[2:]]
    repeated = cut("f", "".join(block), "".join(changed))
    assert "-1,4 +1,5" in repeated  # two lines of context: one alone is there ten times
    assert difflib.SequenceMatcher(None, block, changed).ratio() > 0.9
