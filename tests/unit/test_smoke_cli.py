# SPDX-License-Identifier: Apache-2.0
"""bin/smoke: how the inventory becomes a connection, what is sent, what a person reads, exit codes."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from ansible.module_utils import smoke_judge as judge

from fleet import remote, smoke, ssh


def inventory(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts.yml"
    path.write_text(textwrap.dedent(text))
    return str(path)


THREE = """
    gpu_hosts:
      vars:
        base: 192.0.2
        smoke_tokens: 32
        secret: not for us
      hosts:
        ct200: {ansible_host: "{{ base }}.200", ansible_user: admin, ansible_port: 2222, ansible_become: true}
        ct201: {ansible_host: 192.0.2.201, ansible_ssh_private_key_file: ~/key, ansible_become: false}
        here: {ansible_connection: local, ansible_python_interpreter: PYTHON}
""".replace("PYTHON", sys.executable)


def test_targets_are_what_ansible_would_connect_to(tmp_path: Path) -> None:
    found = {t.name: t for t in remote.targets([inventory(tmp_path, THREE)], None, "smoke_")}
    assert sorted(found) == ["ct200", "ct201", "here"]
    one = found["ct200"]
    assert (one.address, one.user, one.port, one.become) == ("192.0.2.200", "admin", 2222, "root")
    assert one.variables["smoke_tokens"] == 32
    assert "secret" not in one.variables
    assert found["ct201"].keys == (str(Path("~/key").expanduser()),)
    assert found["ct201"].become is None
    assert found["here"].local
    assert found["here"].python == sys.executable


def test_limits_choose_and_unknown_hosts_are_misuse(tmp_path: Path) -> None:
    path = inventory(tmp_path, THREE)
    assert [t.name for t in remote.targets([path], "ct201", "smoke_")] == ["ct201"]
    assert [t.name for t in remote.targets([path], "all,!ct200,!here", "smoke_")] == ["ct201"]
    with pytest.raises(remote.Misuse, match=r"no host matches 'ct999' .*it has ct200, ct201, here"):
        remote.targets([path], "ct200,ct999", "smoke_")
    with pytest.raises(remote.Misuse, match="no inventory"):
        remote.targets([str(tmp_path / "none.yml")], None, "smoke_")


def test_a_become_method_other_than_sudo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(remote.Misuse, match="become method su"):
        remote.targets(
            [inventory(tmp_path, "gpu_hosts: {hosts: {h: {ansible_become: true, ansible_become_method: su}}}")],
            None,
            "x",
        )


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(remote.Target("h", "h", password="hunter2", become_password="hunter2"))


# --- ssh ---------------------------------------------------------------------------------------------------------


def link(words: str, **given: Any) -> Any:
    return ssh.connection(remote.Target("h", "192.0.2.1", ssh_config=ssh.config("192.0.2.1", words.split()), **given))


def test_known_hosts_of_the_options_are_the_only_ones_trusted(tmp_path: Path) -> None:
    key = paramiko.ECDSAKey.generate()
    known = tmp_path / "known_hosts"
    known.write_text(f"192.0.2.1 {key.get_name()} {key.get_base64()}\n")
    made = link(
        f"-F /dev/null -o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null -o StrictHostKeyChecking=yes"
    )
    assert isinstance(made.client._policy, paramiko.RejectPolicy)
    assert list(made.client._system_host_keys.keys()) == ["192.0.2.1"]


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("-F none", "Refuse"),
        ("-F none -o StrictHostKeyChecking=accept-new", "AutoAddPolicy"),
        ("-F none -oStrictHostKeyChecking=no", "WarningPolicy"),
    ],
)
def test_unknown_keys_are_refused_unless_the_site_says_so(words: str, policy: str) -> None:
    assert type(link(words).client._policy).__name__ == policy


def test_a_jump_host_is_checked_too() -> None:
    made = link("-F none -o ProxyJump=jump@192.0.2.9:2200 -o IdentitiesOnly=yes")
    assert (made.gateway.host, made.gateway.user, made.gateway.port) == ("192.0.2.9", "jump", 2200)
    assert isinstance(made.gateway.client._policy, paramiko.RejectPolicy)
    assert made.connect_kwargs["look_for_keys"] is False


def test_inventory_wins_over_ssh_options(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.touch(mode=0o600)
    made = link("-F none -o User=other -p 2200 -i /none", user="admin", port=22, keys=(str(mine),))
    assert (made.user, made.port) == ("admin", 22)
    assert made.connect_kwargs["key_filename"] == [str(mine)], "a file that is not there is left aside, as by ssh"


def test_an_option_without_value_is_misuse() -> None:
    with pytest.raises(remote.Misuse, match="no value"):
        ssh.config("h", ["-o"])


# --- program -----------------------------------------------------------------------------------------------------

HERE = remote.Target("here", "here", local=True, python=sys.executable)


def test_a_program_brings_its_modules_along() -> None:
    sources = {
        "zz_first": "from __future__ import annotations\nVALUE = 20\n",
        "zz_second": "from ansible.module_utils import zz_first as f\nfrom ansible.module_utils.zz_first import VALUE\n"
        "def main(payload):\n    print(f.VALUE + VALUE + payload['more'], payload['text'])\n",
    }
    program = remote.module_program(sources, "zz_second", {"more": 2, "text": "\"quoted\" 'too'\n#SMOKE\n\\n"})
    assert remote.run_python(HERE, program, 30) == "42 \"quoted\" 'too'\n#SMOKE\n\\n\n"


def test_a_failing_or_slow_program_is_unreachable() -> None:
    with pytest.raises(remote.Unreachable, match="ZeroDivisionError"):
        remote.run_python(HERE, "1/0", 30)
    with pytest.raises(remote.Unreachable, match="timed out"):
        remote.run_python(HERE, "import threading; threading.Event().wait()", 0.5)


def test_a_password_that_sudo_does_not_ask_for_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(words: list[str], **given: Any) -> Any:
        seen.update(words=words, **given)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(remote.subprocess, "run", run)
    target = remote.Target("h", "h", local=True, become="root", become_password="hunter2")
    remote.run_python(target, "print(1)", 5)
    assert seen["words"][:4] == ["env", "LC_ALL=C", "sudo", "-S"], (
        "its questions are read, so they are asked in English"
    )
    assert "hunter2" not in " ".join(seen["words"])
    assert seen["input"] == "hunter2\n#SMOKE\nprint(1)"


def test_the_whole_probe_runs_on_a_bare_python(tmp_path: Path) -> None:
    """Sent as it is to a host: here with folders that hold no deployment."""
    text = smoke.program(HERE, smoke.hooks(), None, None)
    text = text.replace("/var/lib/sglang-fleet", str(tmp_path))
    verdict = smoke.probe(HERE, text, 60)
    if os.geteuid() != 0:
        assert "ansible_become" in verdict["checks"][0]["observed"]
        return
    assert [c["id"] for c in verdict["checks"]] == ["deployment.current"]
    assert verdict["host"] == "here"
    assert not verdict["ok"]


def test_settings_are_the_roles_defaults_with_the_hosts_own() -> None:
    assert smoke.settings({})["tokens"] == 24
    assert smoke.settings({"smoke_tokens": 32, "smoke_unknown": 1})["tokens"] == 32
    assert "unknown" not in smoke.settings({"smoke_unknown": 1})


# --- text and exit codes -----------------------------------------------------------------------------------------


def a_verdict(ok: bool, host: str = "ct200") -> dict[str, Any]:
    checks = [
        judge.check("unit.active", True, "active (running)", "sglang@gpu0.service active", "w", "f", "gpu0"),
        judge.check("hook.ddtree-verify", ok, "no such line", "a line like /X/", "the why", "the fix", "gpu0"),
    ]
    instance = {"name": "gpu0", "mode": "ddtree", "requests": 20, "tokens": 480, "tokens_per_step": 2.5}
    instance |= {"identical": 20, "near_ties": [], "different": []}
    return dict(judge.verdict(host, "abc", checks, [instance], "now", 9.87))


def test_text_names_a_failed_check_with_all_that_helps() -> None:
    good, bad = smoke.text_of(a_verdict(True)), smoke.text_of(a_verdict(False))
    assert good.startswith("ct200: ok (release abc, 2 checks, 9.9 s)")
    assert "FAIL" not in good
    assert bad.startswith("ct200: FAILED (release abc, 2 checks, 1 failed, 9.9 s)")
    for word in (
        "FAIL hook.ddtree-verify (gpu0)",
        "observed: no such line",
        "expected: a line like /X/",
        "fix:      the fix",
    ):
        assert word in bad


EMPTY = {"verb": "smoke", "checks": [], "instances": [], "ok": False}
OTHER = {**EMPTY, "host": "ct200", "deployed": {"cpu0": "dflash"}}


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ([a_verdict(True), a_verdict(True, "ct201")], 0),
        ([a_verdict(True), a_verdict(False, "ct201")], 1),
        ([a_verdict(True), {**EMPTY, "host": "ct201"}], 0),
        ([OTHER, {**EMPTY, "host": "ct201"}], 2),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_codes(
    made: list[dict[str, Any]],
    code: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosts = [remote.Target(v["host"], v["host"]) for v in made]
    by_name = {v["host"]: v for v in made}
    monkeypatch.setattr(smoke.remote, "targets", lambda *_: hosts)
    monkeypatch.setattr(smoke, "probe", lambda target, *_: by_name[target.name])
    assert smoke.main(["ddtree", *(["--json"] if as_json else [])]) == code
    out = capsys.readouterr()
    if code == 2:
        assert out.out == ""
        assert "no instance in mode ddtree; ct200 has cpu0 (dflash); ct201 has none" in out.err
    elif as_json:
        assert [v["host"] for v in json.loads(out.out)] == [v["host"] for v in made if v["checks"]]


def test_misuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert smoke.main(["ddtre"]) == 2
    assert "known: baseline, dflash, ddtree-shadow, ddtree" in capsys.readouterr().err
    assert smoke.main(["-i", str(tmp_path / "none")]) == 2
    with pytest.raises(SystemExit) as caught:
        smoke.main(["--no-such-flag"])
    assert caught.value.code == 2


def test_a_host_without_answer_fails_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "gpu_hosts: {hosts: {gone: {ansible_host: 127.0.0.1, ansible_port: 9, ansible_ssh_common_args: -F none}}}"
    assert smoke.main(["-i", inventory(tmp_path, text)]) == 1
    out = capsys.readouterr().out
    assert "gone: FAILED" in out
    assert "FAIL host.reachable" in out


def test_an_instance_that_neither_host_nor_inventory_knows_is_misuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bare host has a failed check, but a misspelt name is told as that; a planned one fails as not deployed."""
    bare = {**a_verdict(False), "deployed": {}}
    one = remote.Target("ct200", "ct200", variables={"gpu_units_instances": [{"name": "gpu0"}, "junk"]})
    monkeypatch.setattr(smoke.remote, "targets", lambda *_: [one])
    monkeypatch.setattr(smoke, "probe", lambda *_: bare)
    assert smoke.main(["--instance", "zz"]) == 2
    said = capsys.readouterr().err
    assert "smoke: no instance named zz; ct200 has gpu0 (not deployed). Next: name one of these" in said
    assert smoke.main(["--instance", "gpu0"]) == 1
    del bare["deployed"]  # it gave no answer, so nobody knows
    assert smoke.main(["--instance", "zz"]) == 1


def test_every_fix_of_a_verdict_is_filled_for_its_host_and_instance() -> None:
    """Marks of the hooks are replaced by the command with the caller's inventory, the unit and the name."""
    program = smoke.program(HERE, smoke.hooks(), None, None, ["a b.yml"])
    assert "ansible-playbook site.yml -l here -i 'a b.yml'" in program.replace("\\'", "'")
    hooks = smoke.hooks()
    fixes = [row["fix"] for part in ("hooks", "backends") for row in hooks[part].values()]
    assert all("site.yml" not in fix for fix in fixes), "{site} stands for the whole command"
    assert all(re.findall(r"`[^`]+`", fix) for fix in fixes)
    checks = [judge.check("a.b", False, "x", "y", "w", fix, "gpu0") for fix in fixes]
    made = judge.verdict("ct200", "r", checks, [], "now", 1.0)
    settings = {"host": "ct200", "site": "ansible-playbook site.yml -l ct200 -i f.yml"}
    filled = smoke.run._filled(made, [{"name": "gpu0", "unit": "sglang@gpu0.service"}], settings)
    for one in filled["checks"]:
        assert not re.search(r"\{\w+\}|<\w+>", one["fix"]), one["fix"]
        assert "-l ct200 -i f.yml" in one["fix"] or "sglang@gpu0.service" in one["fix"]
    assert smoke.run.site_of({"host": "h"}) == "ansible-playbook site.yml -l h"
