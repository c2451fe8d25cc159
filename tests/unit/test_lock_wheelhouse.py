# SPDX-License-Identifier: Apache-2.0
"""Downloads of a wheelhouse against a real HTTP server that can break off, lie and forbid."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from ansible.module_utils.sglang_venv_lock import LockError

from fleet import engine as engines
from fleet import lock, wheelhouse
from fleet.wheelhouse import Progress, Wanted, fetch

BODY = bytes(range(256)) * 4096
WANT = Wanted("a-1-py3-none-any.whl", len(BODY), hashlib.sha256(BODY).hexdigest())


class Server(BaseHTTPRequestHandler):
    """Serves BODY at any path; the class attributes say how badly."""

    asked: ClassVar[list[str]] = []
    cut: ClassVar[list[int]] = []  # bytes after which each of the next answers breaks off
    status: ClassVar[int] = 200
    body: ClassVar[bytes] = BODY

    def do_GET(self) -> None:
        start = int(re.findall(r"bytes=(\d+)-", self.headers.get("Range", ""))[0]) if "Range" in self.headers else 0
        self.asked.append(f"{start} {self.headers.get('Authorization', '')}".strip())
        if self.status != 200:
            self.send_error(self.status)
            return
        body = self.body[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.cut.pop(0)] if self.cut else body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a server in its best mood."""
    Server.asked, Server.cut, Server.status, Server.body = [], [], 200, BODY
    monkeypatch.setattr(wheelhouse, "_PAUSE", 0.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/{WANT.name}"
    server.shutdown()
    server.server_close()
    thread.join()


def progress() -> Progress:
    return Progress(WANT.size, 1)


def test_a_file_arrives_whole(url: str, tmp_path: Path) -> None:
    count = progress()
    fetch(url, tmp_path / WANT.name, WANT, count)
    assert (tmp_path / WANT.name).read_bytes() == BODY
    assert count.done == WANT.size
    assert [path.name for path in tmp_path.iterdir()] == [WANT.name]


def test_a_download_that_breaks_off_goes_on_where_it_was(url: str, tmp_path: Path) -> None:
    Server.cut = [1000, 5000]
    count = progress()
    fetch(url, tmp_path / WANT.name, WANT, count)
    assert Server.asked == ["0", "1000", "6000"]
    assert (tmp_path / WANT.name).read_bytes() == BODY
    assert count.done == WANT.size


def test_a_part_of_an_earlier_run_is_continued(url: str, tmp_path: Path) -> None:
    (tmp_path / f".{WANT.name}.part").write_bytes(BODY[:777])
    fetch(url, tmp_path / WANT.name, WANT, progress())
    assert Server.asked == ["777"]
    assert (tmp_path / WANT.name).read_bytes() == BODY


def test_a_wrong_hash_names_the_file_and_leaves_nothing(url: str, tmp_path: Path) -> None:
    Server.body = b"x" + BODY[1:]
    with pytest.raises(LockError, match=rf"wrong hash: {WANT.name}"):
        fetch(url, tmp_path / WANT.name, WANT, progress())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_part_is_thrown_away_and_said(url: str, tmp_path: Path) -> None:
    (tmp_path / f".{WANT.name}.part").write_bytes(b"?" * 777)
    with pytest.raises(LockError, match="wrong hash"):
        fetch(url, tmp_path / WANT.name, WANT, progress())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (404, 1), (503, 5)])
def test_a_refusal_is_reported_with_the_file(url: str, tmp_path: Path, status: int, tries: int) -> None:
    Server.status = status
    with pytest.raises(OSError, match=rf"{WANT.name} could not be downloaded.*{status}"):
        fetch(url, tmp_path / WANT.name, WANT, progress())
    assert len(Server.asked) == tries
    assert not (tmp_path / WANT.name).exists()


def test_a_password_in_the_address_becomes_a_header(url: str, tmp_path: Path) -> None:
    fetch(url.replace("http://", "http://me:s%40cret@"), tmp_path / WANT.name, WANT, progress())
    assert Server.asked == ["0 Basic bWU6c0BjcmV0"]


def test_a_wheelhouse_is_filled_once_and_then_kept(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines.load(lock.DEFAULT)
    monkeypatch.setattr(wheelhouse, "wanted_files", lambda *_: [WANT])
    monkeypatch.setattr(wheelhouse, "uv_files", lambda _: ([], {}))
    monkeypatch.setattr(lock, "remote_files", lambda *_: {"a==1": [{"name": WANT.name, "url": url}]})
    folder = tmp_path / "house"
    assert wheelhouse.fill(engine, folder, ["3.11"], ["x86_64"]) == 0
    assert (folder / "SHA256SUMS").read_text() == f"{WANT.sha256}  {WANT.name}\n"
    Server.status = 503
    assert wheelhouse.fill(engine, folder, ["3.11"], ["x86_64"]) == 0
    assert "1 there already, 0 to fetch" in capsys.readouterr().err
    (folder / WANT.name).write_bytes(BODY[:-1] + b"?")  # damaged on a disk: fetched again
    Server.status = 200
    assert wheelhouse.fill(engine, folder, ["3.11"], ["x86_64"]) == 0
    assert (folder / WANT.name).read_bytes() == BODY


def test_the_default_engine_needs_one_wheel_per_package_and_c_library() -> None:
    engine = engines.load(lock.DEFAULT)
    one = wheelhouse.wanted_files(engine, ["3.11"], ["x86_64"])
    every = wheelhouse.wanted_files(engine, engine.pythons, engine.machines)
    assert 150 < len(one) < 200 < len(every)
    assert set(one) < set(every)
    assert len({want.name for want in every}) == len(every)
