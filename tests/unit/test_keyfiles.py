# SPDX-License-Identifier: Apache-2.0
"""Key files on the control machine: what is told of them, and that the fix as it stands mends it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.gpu_host_judge import judge
from ansible.plugins.loader import lookup_loader

from fleet import keyfiles, preflight

KEY = "d0d0cafe"


def found(folder: Path, file: str = "keys/one") -> dict[str, Any]:
    (one,) = keyfiles.found([{"name": "gpu0", "api_key_file": file}], None, str(folder))
    return one


def good(path: Path, text: str = KEY) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_good_file_is_no_finding_and_its_key_is_not_told(tmp_path: Path) -> None:
    good(tmp_path / "keys/one", f"{KEY}\n")
    one = found(tmp_path)
    assert (one["fault"], one["open"]) == (None, None)
    assert KEY not in json.dumps(one)


@pytest.mark.parametrize(
    ("text", "fault", "taken"),
    [
        (None, "no such file", True),
        ("", "empty", True),
        (" \n", "empty", True),
        ("a\nb\n", "2 lines", False),
        ("a\x07b", "letters that no header may have", False),
        ("kéy", "no plain text", False),
    ],
)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the fix calls openssl")
def test_a_fault_has_a_fix_that_mends_it(
    text: str | None, fault: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that holds anything is left as it is: the key goes into another one."""
    monkeypatch.chdir(tmp_path)
    if text is not None:
        good(tmp_path / "keys/one", text)
    one = found(tmp_path)
    assert fault in one["fault"]
    command = re.findall(r"`([^`]+)`", one["fix"])[0]
    subprocess.run(command, shell=True, check=True)
    file = "keys/one" if taken else "keys/gpu0"
    assert one["instead"] == (None if taken else file)
    after = found(tmp_path, file)
    assert (after["fault"], after["open"]) == (None, None)
    assert len((tmp_path / file).read_text()) == 65
    assert taken or (tmp_path / "keys/one").read_text() == text
    if not taken:
        assert subprocess.run(command, shell=True, check=False, capture_output=True).returncode, (
            "not written over either"
        )
        assert found(tmp_path)["instead"] == "keys/gpu0-2"


@pytest.mark.parametrize(
    "value", ["sk-abcdef1234567890", "hf_AbCdEfGh", "d0d0cafe" * 4, "Bearer abc", "aGVsbG8gd29ybGQ5/8x7+abcd=="]
)
def test_a_key_in_place_of_a_file_is_not_told_and_gets_a_file(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"inventory_dir": str(tmp_path), "gpu_units_instances": [{"name": "gpu0", "api_key_file": value}]}
    asked, _ = preflight.wanted("ct200", variables)
    (finding,) = [one for one in judge("ct200", asked)["findings"] if one["id"] == "api-key-file"]
    assert value not in json.dumps(finding)
    assert "(hidden) on this control machine: no such file, and it looks like a key itself" in finding["observed"]
    assert finding["fix"].endswith("; then write api_key_file: keys/gpu0 in host_vars/ct200.yml.")
    command = re.findall(r"`([^`]+)`", finding["fix"])[0]
    subprocess.run(command, shell=True, check=True, input=f"{value}\n", text=True)
    after = found(tmp_path, "keys/gpu0")
    assert (after["fault"], after["open"]) == (None, None)
    assert (tmp_path / "keys/gpu0").read_text() == f"{value}\n"


@pytest.mark.parametrize(
    "file", ["keys/rack8.key", "rack8-gpu0", "/etc/fleet/api-key-2026-12-01", "api.key", "~/keys/one"]
)
def test_a_name_of_a_file_is_told(file: str, tmp_path: Path) -> None:
    one = found(tmp_path, file)
    assert one["fault"] == "no such file"
    assert one["path"].endswith(file.removeprefix("~"))


def test_everybodys_file_a_folder_and_a_vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good(tmp_path / "keys/one").chmod(0o644)
    assert found(tmp_path)["open"] == "0644"
    assert found(tmp_path, "keys")["fault"] == "a folder"
    good(tmp_path / "keys/one", "$ANSIBLE_VAULT;1.1;AES256\n3334\n")
    one = found(tmp_path)
    assert one["fault"] == "encrypted by ansible-vault"
    assert "`ansible-vault decrypt keys/one && chmod 600 keys/one`" in one["fix"]


def test_a_file_is_looked_at_once_and_where_the_swap_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path
) -> None:
    lookup_loader.add_directory(str(repo / "roles/gpu_units/lookup_plugins"))
    monkeypatch.setenv("HOME", str(tmp_path))
    good(tmp_path / "keys/one")
    instances: list[Any] = [{"name": "a"}, {"name": "b"}, {"name": "c", "api_key_file": "~/keys/one"}, "no map"]
    (one,) = keyfiles.found(instances, {"api_key_file": "keys/one"}, str(tmp_path))
    assert one["of"] == "instance a and instance b and instance c"
    swap = lookup_loader.get("gpu_units_api_keys")
    keys = swap.run(instances[:3], {"inventory_dir": str(tmp_path)}, defaults={"api_key_file": "keys/one"})
    assert keys == [dict.fromkeys("abc", KEY)]
    assert keyfiles.found([{"name": "a"}], {"mode": "ddtree"}, None) == []
    assert keyfiles.found(None, ["x"], None) == []
    assert keyfiles.found([{"name": "a", "api_key_file": 5}], None, None) == [], "its type is another rule's"


def test_the_door_and_the_play_look_at_them(tmp_path: Path, repo: Path) -> None:
    variables = {"inventory_dir": str(tmp_path), "gpu_units_instances": [{"name": "a", "api_key_file": "none"}]}
    asked, _ = preflight.wanted("ct200", variables)
    assert asked["key_files"][0]["fault"] == "no such file"
    assert "keyfiles.found(" in (repo / "roles/gpu_host/action_plugins/gpu_host_preflight.py").read_text()
