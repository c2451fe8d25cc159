# SPDX-License-Identifier: Apache-2.0
"""Inventories that cannot be meant: one sentence with file, line and host, exit code 2, and nothing of Ansible's own screens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet import mode, preflight, remote, smoke

HOSTS = """---
gpu_hosts:
  hosts:
    ct200: {ansible_host: 127.0.0.1}
    ct201: {ansible_host: 127.0.0.1}
other:
  hosts:
    bastion: {ansible_host: 127.0.0.1}
"""

CASES: dict[str, tuple[str, str | bytes, list[str]]] = {
    "tab": (
        "host_vars/ct200.yml",
        "a_map:\n\tmode: dflash\n",
        ["host ct200", "host_vars/ct200.yml:2", "a tab (\\t), where", r"is: '\tmode: dflash'", "Write spaces"],
    ),
    "indent": (
        "host_vars/ct200.yml",
        "a:\n  b: 1\n c: 2\n",
        ["host ct200", "host_vars/ct200.yml:3", "the line is: 'c: 2'; the fault may be on the line before: 'b: 1'", "one column"],
    ),
    "open": ("group_vars/all.yml", "a: [1, 2\nb: 1\n", ["group_vars/all.yml:1: no valid YAML: a [ is opened", "is: 'a: [1, 2'"]),
    "open at the end": ("group_vars/all.yml", "a: 1\nb: [1, 2\n", ["group_vars/all.yml:2", "a [ is opened and not closed"]),
    "quote": (
        "group_vars/all.yml",
        "a: 'x\nb: 1\nc: 2\n",
        ["all.yml:1: no valid YAML: a quote is opened", "Close the quote in line 1"],
    ),
    "colon": (
        "group_vars/all.yml",
        "a: 1\nb 'x'\nc: 2\n",
        ["group_vars/all.yml:2", "a name without a colon; the line is: \"b 'x'\""],
    ),
    "braces": (
        "host_vars/ct200.yml",
        "models: /srv\na:\n  model_path: {{ models }}/target\nb: 1\n",
        ["host ct200", "host_vars/ct200.yml:3", "stands without quotes", '`model_path: "{{ models }}/target"`'],
    ),
    "braces alone": (
        "host_vars/ct200.yml",
        "models: /srv\na: {{ models['x'] | default(\"y\") }}\n",
        ["host_vars/ct200.yml:2", "`a: '{{ models['x']"],
    ),
    "braces in a list": ("host_vars/ct200.yml", "a:\n  - {{ x }}\n", ["host_vars/ct200.yml:2", '`- "{{ x }}"`']),
    "latin1": (
        "host_vars/ct200.yml",
        b"a: 1\n# M\xfcller\nb: [\n",
        ["host_vars/ct200.yml:2", "not UTF-8", "Save host_vars/ct200.yml"],
    ),
    "secret": ("host_vars/ct200.yml", "ansible_become_pass: 'hush\nb: 1\n", ["ct200.yml:1", "ansible_become_pass: (hidden)"]),
    "list": ("host_vars/ct200.yml", "- a\n", ["host ct200", "host_vars/ct200.yml:1", "variables are a list, expected a map"]),
    "undefined": (
        "host_vars/ct200.yml",
        "gpu_units_defaults:\n  mode: ddtree\n  model_path: '{{ models }}/target'\n",
        ["ct200: variable gpu_units_defaults", "'models' is undefined", "host_vars/ct200.yml:3"],
    ),
    "template": (
        "host_vars/ct200.yml",
        "fleet_engine: sglang\ngpu_host_root: '{{ models | }}'\n",
        ["ct200: variable gpu_host_root", "Syntax error in template", "host_vars/ct200.yml:2"],
    ),
    "filter": (
        "host_vars/ct200.yml",
        "fleet_engine: \"{{ 'x' | nosuch }}\"\n",
        ["ct200: variable fleet_engine", "nosuch", "host_vars/ct200.yml:1"],
    ),
    "port": ("host_vars/ct200.yml", "a: 1\nansible_port: ssh\n", ["ct200: ansible_port is 'ssh'", "host_vars/ct200.yml:2"]),
    "hosts": ("hosts.yml", "gpu_hosts:\n  hosts:\n    - ct200\n", ["hosts.yml:3", "hosts of group gpu_hosts are a list"]),
    "brace": ("hosts.yml", "gpu_hosts:\n  hosts:\n    ct200: {a: 1\n", ["hosts.yml:3", "no valid YAML: a { is opened"]),
    "itself": ("hosts.yml", "gpu_hosts:\n  children:\n    gpu_hosts:\n", ["hosts.yml", "can't add group to itself"]),
    "vault": ("host_vars/ct200.yml", "$ANSIBLE_VAULT;1.1;AES256\n6262\n", ["ct200.yml: Attempting to decrypt", "_PASSWORD_FILE"]),
    "a vault inline": (
        "host_vars/ct200.yml",
        "a: 1\nansible_become_password: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  6262\n",
        ["ct200: variable ansible_become_password", "host_vars/ct200.yml:2", "ANSIBLE_VAULT_PASSWORD_FILE=FILE"],
    ),
    "type": (
        "host_vars/ct200.yml",
        "a: 1\ngpu_host_min_disk_gib: lots\n",
        [
            "ct200: gpu_host_min_disk_gib is a text, 'lots', expected a number (host_vars/ct200.yml:2)",
            "gpu_host_min_disk_gib: 12,",
        ],
    ),
    "type of a map": (
        "host_vars/ct200.yml",
        "gpu_host_waivers: [gpu-busy]\n",
        ["gpu_host_waivers is a list, [\"gpu-busy\"], expected a map (host_vars/ct200.yml:1)", "gpu_host_waivers: {NAME: value}"],
    ),
    "tag": ("host_vars/ct200.yml", "a: !foo x\n", ["host_vars/ct200.yml", "constructor for the tag '!foo'"]),
    "key": ("hosts.yml", "gpu_hosts:\n  host:\n    ct200:\n", ["no host in hosts.yml", "unexpected key (host)"]),
    "become": (
        "host_vars/ct200.yml",
        "ansible_become_method: su\n",
        ["ct200: become method su", "ansible_become_method: sudo in host_vars/ct200.yml"],
    ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.yml").write_text(HOSTS)
    for name in ("host_vars", "group_vars"):
        (tmp_path / name).mkdir()
    return tmp_path


def one_error(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    said = capfd.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1, said.err
    for word in words:
        assert word in said.err
    assert ". Next: " in said.err, "what to do about it"
    assert "Traceback" not in said.err and "hush" not in said.err


@pytest.mark.parametrize("name", list(CASES))
def test_a_fault_is_one_sentence_with_its_place(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, text, words = CASES[name]
    (here / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert preflight.main(["-i", "hosts.yml"]) == 2
    one_error(capfd, words)


def test_every_door_says_it(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "host_vars/ct200.yml").write_text("ansible_host: '{{ ip }}'\n")
    for door in (preflight.main, smoke.main):
        assert door(["-i", "hosts.yml"]) == 2
        one_error(capfd, ["ct200: variable ansible_host", "'ip' is undefined", "host_vars/ct200.yml:1"])
    assert mode.main(["ct200", "gpu0", "-i", "hosts.yml"]) == 2
    one_error(capfd, ["ct200: variable ansible_host", "host_vars/ct200.yml:1"])


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("ct20", ["no host matches 'ct20' in hosts.yml; it has ct200, ct201"]),
        ("zz*", ["no host matches 'zz*'", "bastion, ct200, ct201"]),
        ("ct200,!ct200", ["-l ct200,!ct200 leaves no host"]),
        ("a[9]", ["a[9]"]),
        ("~(", ["Invalid host list pattern: ~("]),
        ("bastion", ["no play is for bastion (hosts.yml:8)", "gpu_hosts and lab", "`gpu_hosts: {hosts: {bastion: }}`"]),
    ],
)
def test_a_limit_that_names_no_host_of_a_play(
    limit: str, words: list[str], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert preflight.main(["-i", "hosts.yml", "-l", limit]) == 2
    one_error(capfd, words)


@pytest.mark.parametrize("limit", ["0", "-5", "soon", "nan", "inf"])
def test_a_limit_of_time_is_above_zero(limit: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for door in (preflight.main, smoke.main):
        with pytest.raises(SystemExit) as ended:
            door(["-i", "hosts.yml", f"--timeout={limit}"])
        assert ended.value.code == 2
        assert f"'{limit}' is no number of seconds above 0" in capsys.readouterr().err


def test_a_password_file_of_vaults_that_is_not_there_is_misuse(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "_vault_secrets", remote._vault_secrets.__wrapped__)
    monkeypatch.setattr("ansible.constants.DEFAULT_VAULT_PASSWORD_FILE", "none.txt")
    for door in (preflight.main, smoke.main):
        assert door(["-i", "hosts.yml"]) == 2
        one_error(capfd, ["the password of the vault cannot be read", "none.txt", "ANSIBLE_VAULT_PASSWORD_FILE"])


def test_hosts_that_no_play_is_for_are_left_out(here: Path) -> None:
    assert [one.name for one in remote.targets(["hosts.yml"], None)] == ["ct200", "ct201"]
    assert [one.name for one in remote.targets(["hosts.yml"], "all")] == ["ct200", "ct201"]


def test_groups_are_those_of_every_play(repo: Path) -> None:
    files = [repo / "site.yml", *(repo / "playbooks").glob("*.yml")]
    plays: list[dict[str, Any]] = [play for file in files for play in yaml.safe_load(file.read_text())]
    asked = [play for play in plays if "hosts" in play]
    assert {play["hosts"] for play in asked} == {f"~^({'|'.join(remote.GROUPS)})$"}
    assert all(play["become"] is True for play in asked), "what a door takes for become where the inventory is silent"


@pytest.mark.parametrize(
    ("given", "become"),
    [
        ({"ansible_user": "admin"}, "root"),
        ({}, "root"),
        ({"ansible_user": "root"}, None),
        ({"ansible_user": "admin", "ansible_become": False}, None),
        ({"ansible_user": "admin", "ansible_become_user": "app"}, "app"),
    ],
)
def test_a_door_becomes_root_as_the_plays_do(given: dict[str, Any], become: str | None, here: Path) -> None:
    (here / "host_vars/ct200.yml").write_text(yaml.safe_dump(given))
    (one,) = remote.targets(["hosts.yml"], "ct200")
    assert one.become == become


def test_a_password_is_asked_for_once_and_only_where_it_is_needed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "hunter2"

    monkeypatch.setattr("getpass.getpass", answer)
    (here / "host_vars/ct200.yml").write_text("ansible_user: admin\n")
    (here / "host_vars/ct201.yml").write_text("ansible_user: root\n")
    hosts = remote.with_password(remote.targets(["hosts.yml"], None), ask=True)
    assert [one.become_password for one in hosts] == ["hunter2", None]
    assert len(asked) == 1
    assert [one.become_password for one in remote.with_password(hosts[1:], ask=False)] == [None]


def test_a_password_that_nobody_can_give_is_misuse(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def nobody(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("getpass.getpass", nobody)
    assert preflight.main(["-K", "-i", "hosts.yml"]) == 2
    one_error(capfd, ["-K asks for a password"])


def test_options_of_ssh_come_from_where_ansible_takes_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump host of ansible.cfg or the environment is on the way of a play, so it is on the way of a door."""
    monkeypatch.setenv("ANSIBLE_SSH_COMMON_ARGS", "-o ProxyJump=jump@192.0.2.9")
    (here / "host_vars/ct201.yml").write_text("ansible_ssh_common_args: -F none\n")
    first, second = remote.targets(["hosts.yml"], None)
    assert "ProxyJump jump@192.0.2.9" in first.ssh_config
    assert "ProxyJump=jump@192.0.2.9" in first.ssh_words
    assert "ProxyJump" not in second.ssh_config
