# SPDX-License-Identifier: Apache-2.0
"""What an earlier run left: records, the link to the live release, owners of its cache, units in systemd's words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_access as access
from ansible.module_utils import gpu_host_gather_deployed as gather


@pytest.mark.parametrize("text", ["", '{"release": "a', "[]"])
def test_a_record_that_was_cut(tmp_path: Path, text: str) -> None:
    (tmp_path / "current.json").write_text('{"release": "abc"}')
    (tmp_path / "failed.json").write_text(text)  # no run reads it
    assert gather.broken_records(tmp_path) == []
    (tmp_path / "previous.json").write_text(text)
    (broken,) = gather.broken_records(tmp_path)
    assert broken["path"] == str(tmp_path / "previous.json")
    assert broken["error"]


def test_what_is_left_of_a_release(tmp_path: Path) -> None:
    asked = (str(tmp_path), str(tmp_path / "none"))
    facts = gather.gather_deployed(*asked)
    assert (facts["broken"], facts["gone"], facts["cache"]) == ([], None, [])
    (tmp_path / "current").symlink_to("releases/abc")
    assert gather.gather_deployed(*asked)["gone"] == "abc"
    cache = tmp_path / "releases/abc/cache"
    (cache / "triton").mkdir(parents=True)
    (cache / "lock").touch()
    facts = gather.gather_deployed(*asked)
    assert facts["gone"] is None
    assert [one["path"] for one in facts["cache"]] == [str(cache), str(cache / "triton")]
    assert {one["uid"] for one in facts["cache"]} == {os.geteuid()}


def test_masked_units_in_systemds_words() -> None:
    listed = """\
sglang@.service              disabled       enabled
sglang@gpu0.baseline.service masked-runtime enabled
sglang@gpu0.service          enabled        enabled
sglang@gpu1.service          masked         enabled
"""
    assert gather.parse_masked(listed) == {
        "sglang@gpu0.baseline.service": "masked-runtime",
        "sglang@gpu1.service": "masked",
    }


def test_failed_units_in_systemds_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = "sglang@gpu0.service loaded failed failed SGLang engine gpu0\n"
    monkeypatch.setattr(gather, "run", lambda argv: (0, listed if "--state=failed" in argv else "", ""))
    assert gather.gather_deployed(str(tmp_path), str(tmp_path))["failed"] == ["sglang@gpu0.service"]


def test_single_files_of_flags(tmp_path: Path) -> None:
    user = {"name": "nobody", "uid": None, "gid": None, "groups": []}
    tmp_path.chmod(0o700)
    file, gone = tmp_path / "chat.jinja", tmp_path / "none.jinja"
    file.touch(mode=0o644)
    found = access.gather_files([str(file), str(gone), str(tmp_path)], user)
    assert found[str(gone)] == found[str(tmp_path)] == {"exists": False, "barred": []}
    assert found[str(file)]["exists"]
    assert {"path": str(tmp_path), "need": "search"}.items() <= found[str(file)]["barred"][-1].items()
