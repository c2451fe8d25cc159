# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, read and applied strictly.

The file that a patch changes is known by its hash, so a hunk either sits exactly where it says or the series is wrong:
no fuzz, no offset, no new, deleted, renamed or binary files, no mode changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?$")
NO_NEWLINE = "\\ No newline at end of file"


class PatchError(ValueError):
    """A patch is malformed or does not fit; the message names patch, file and line."""


@dataclass(frozen=True)
class Hunk:
    """One hunk: line numbers count from 1 (0 in an empty file), lines keep their newline (or lack it, at a file's end)."""

    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one file, in order; `path` is relative to site-packages."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One patch file: the text before the first `---` line (the DEP-3 header) and its files."""

    name: str
    header: str
    files: tuple[FilePatch, ...]


def _path(line: str, mark: str, side: str, where: str) -> str:
    name = line.removeprefix(mark + " ").split("\t")[0].rstrip("\n")
    if not line.startswith(mark + " ") or name == "/dev/null" or not name.startswith(side + "/"):
        raise PatchError(
            f"{where}: expected '{mark} {side}/PATH', found {line.rstrip()!r} (new files go into overlay/)"
        )
    return name.removeprefix(side + "/")


class _Reader:
    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.lines = text.split("\n")
        if self.lines[-1] != "":
            raise PatchError(f"{name}: the last line has no newline")
        self.lines.pop()
        self.at = 0

    @property
    def where(self) -> str:
        return f"{self.name}:{self.at + 1}"

    @property
    def line(self) -> str | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def hunk(self, shift: int) -> tuple[Hunk, int]:
        """Reads one hunk; `shift` is by how many lines the file has grown so far. Returns the hunk and the new shift."""
        start, match = self.where, HUNK.match(self.line or "")
        if match is None:
            raise PatchError(f"{start}: expected a hunk (@@ -line,count +line,count @@), found {self.line!r}")
        old_at, old_want, new_at, new_want = (1 if group is None else int(group) for group in match.groups())
        self.at += 1
        old: list[str] = []
        new: list[str] = []
        while len(old) < old_want or len(new) < new_want:
            line = self.line
            # Some editors strip the blank of an empty context line; the hunk is then not what was hashed and reviewed.
            if not line or line[0] not in " -+":
                raise PatchError(f"{self.where}: the hunk of line {start} ends early, at {line!r}")
            self.at += 1
            ending = "\n"
            if self.line == NO_NEWLINE:
                self.at += 1
                ending = ""
            if line[0] in " -":
                old.append(line[1:] + ending)
            if line[0] in " +":
                new.append(line[1:] + ending)
        if len(old) != old_want or len(new) != new_want:
            raise PatchError(f"{start}: the counts in the hunk's first line do not fit its lines")
        if not old and (old_at or new_at != 1):
            raise PatchError(f"{start}: the hunk has no context, nothing would prove that it sits at its place")
        if not old:
            return Hunk(0, (), tuple(new)), len(new)
        if old == new:
            raise PatchError(f"{start}: the hunk changes nothing")
        if new_at != old_at + shift:
            raise PatchError(
                f"{start}: the hunk's new line is {new_at}, but {old_at + shift} follows from the hunks above"
            )
        return Hunk(old_at, tuple(old), tuple(new)), shift + len(new) - len(old)


def parse(name: str, text: str) -> Patch:
    """Reads a patch file (-p1 paths: a/ and b/).

    Raises PatchError on anything but well-formed hunks of existing files; a file appears at most once.
    """
    reader = _Reader(name, text)
    while reader.line is not None and not reader.line.startswith("--- "):
        reader.at += 1
    header = "".join(line + "\n" for line in reader.lines[: reader.at])
    files: list[FilePatch] = []
    while reader.line is not None:
        old = _path(reader.line, "---", "a", reader.where)
        reader.at += 1
        new = _path(reader.line or "", "+++", "b", reader.where)
        if old != new:
            raise PatchError(f"{reader.where}: {old} would be renamed to {new}")
        if any(file.path == old for file in files):
            raise PatchError(f"{reader.where}: {old} appears twice")
        reader.at += 1
        hunks: list[Hunk] = []
        shift, end = 0, 0
        while not hunks or (reader.line is not None and not reader.line.startswith("--- ")):
            where = reader.where
            hunk, shift = reader.hunk(shift)
            if hunk.line <= end and hunks:
                raise PatchError(f"{where}: the hunk overlaps or precedes the one above")
            end = hunk.line + len(hunk.old) - 1
            hunks.append(hunk)
        files.append(FilePatch(old, tuple(hunks)))
    if not files:
        raise PatchError(f"{name}: no '--- a/PATH' line, so nothing to apply")
    return Patch(name, header, tuple(files))


def split_lines(text: str) -> list[str]:
    """Lines with their newline. Only \\n ends a line: str.splitlines would also cut at form feeds and the like."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def apply(patch: str, file: FilePatch, text: str) -> str:
    """The text after the hunks of `file`, each exactly at its line. Raises PatchError naming the first line that differs."""
    lines = split_lines(text)
    out: list[str] = []
    done = 0
    for hunk in file.hunks:
        begin = max(hunk.line - 1, 0)
        if hunk.line == 0 and lines:
            raise PatchError(f"{patch}: {file.path}: expected an empty file, found {lines[0]!r}")
        found = lines[begin : begin + len(hunk.old)]
        if found != list(hunk.old):
            at = next((i for i, (a, b) in enumerate(zip(found, hunk.old, strict=False)) if a != b), len(found))
            seen = repr(found[at]) if at < len(found) else "the end of the file"
            raise PatchError(f"{patch}: {file.path}:{hunk.line + at}: expected {hunk.old[at]!r}, found {seen}")
        out += lines[done:begin]
        out += hunk.new
        done = begin + len(hunk.old)
    return "".join(out + lines[done:])
