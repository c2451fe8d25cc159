# SPDX-License-Identifier: Apache-2.0
"""bin/mode: what is chosen, what a person reads, exit codes. The switch itself is proven on a lab host (test_site.py)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_units_live as units

from fleet import mode, remote

HOSTS = """
gpu_hosts:
  hosts:
    ct200:
      ansible_host: 192.0.2.200
      gpu_units_defaults: {mode: dflash}
      gpu_units_instances: [{name: gpu0, port: 30000}, {name: gpu1, port: 30001, mode: baseline}]
    ct201: {ansible_host: 192.0.2.201}
"""


@pytest.fixture
def inventory(tmp_path: Path) -> str:
    path = tmp_path / "hosts.yml"
    path.write_text(HOSTS)
    return str(path)


def serving(monkeypatch: pytest.MonkeyPatch, *states: dict[str, Any]) -> None:
    """Hosts answer with these states, one after the other."""
    answers = iter(states)
    monkeypatch.setattr(mode, "live", lambda target, limit=60.0: {"release": "r1", "instances": next(answers)})


def state(name: str, serves: str, active: str = "active") -> dict[str, Any]:
    return {name: {"mode": serves, "unit": f"sglang@{name}.service", "state": active, "result": "success"}}


def test_the_inventorys_mode_is_the_instances_own_or_the_default(inventory: str) -> None:
    assert mode.choose([inventory], "ct200", "gpu0", None)[1] == "dflash"
    assert mode.choose([inventory], "ct200", "gpu1", "ddtree")[1] == "baseline"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ct299", "gpu0"], "no host matches 'ct299' .*it has ct200, ct201"),
        (["all", "gpu0"], r"all names 2 hosts \(ct200, ct201\). Next: name one"),
        (["ct200", "gpu9", "ddtree"], "ct200 has no instance 'gpu9'; known: gpu0, gpu1"),
        (["ct201", "gpu0"], "ct201 has no instance 'gpu0'; known: none"),
        (["ct200", "gpu0", "tree"], "unknown mode 'tree'; known: baseline, dflash, ddtree-shadow, ddtree"),
    ],
)
def test_misuse(words: list[str], told: str, inventory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mode.main([*words, "-i", inventory]) == 2
    with pytest.raises(remote.Misuse, match=told):
        mode.choose([inventory], words[0], words[1], words[2] if len(words) > 2 else None)
    error = capsys.readouterr().err
    assert "mode: " in error
    assert "bin/mode" not in error or f" -i {inventory}" in error, "the next step is copied as it is"


def test_without_a_mode_it_only_tells(
    inventory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(monkeypatch, state("gpu0", "ddtree"))
    assert mode.main(["ct200", "gpu0", "-i", inventory]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ct200 gpu0: ddtree (active)\n")
    assert "the next site.yml makes it that" in out


@pytest.mark.parametrize("now", [{}, state("gpu0", "dflash", "failed")])
def test_what_does_not_serve_is_no_success(
    now: dict[str, Any], inventory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, now)
    assert mode.main(["ct200", "gpu0", "-i", inventory]) == 1


@pytest.mark.parametrize("words", [[], ["dflash"]])
def test_what_is_not_deployed_is_not_switched(
    words: list[str], inventory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(monkeypatch, {})
    assert mode.main(["ct200", "gpu0", *words, "-i", inventory]) == 1
    out = capsys.readouterr().out
    assert "(not deployed)" in out
    assert f"nothing was changed; first: ansible-playbook site.yml -l ct200 -i {inventory}" in out


def test_a_host_that_gives_no_answer(
    inventory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(target: remote.Target, limit: float = 60.0) -> dict[str, Any]:
        raise remote.Unreachable("no route", "`this` helps.")

    monkeypatch.setattr(mode, "live", silent)
    assert mode.main(["ct200", "gpu0", "dflash", "-i", inventory]) == 1
    assert capsys.readouterr().err == "mode: ct200 gave no answer: no route; fix: `this` helps.\n"


@pytest.mark.parametrize(
    ("code", "after", "ok"),
    [
        (0, state("gpu0", "ddtree"), True),
        (2, state("gpu0", "dflash"), False),  # it went back
        (0, state("gpu0", "dflash"), False),
        (0, state("gpu0", "ddtree", "failed"), False),
        (0, {}, False),
    ],
)
def test_a_switch_is_what_the_host_says_afterwards(
    code: int,
    after: dict[str, Any],
    ok: bool,
    inventory: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serving(monkeypatch, state("gpu0", "dflash"), after)
    done = {"code": code, "log": "logs/mode.log", "failure": None, "smoke": {"ok": ok}}
    monkeypatch.setattr(mode, "play", lambda *_: done)
    assert mode.main(["ct200", "gpu0", "ddtree", "-i", inventory, "--json"]) == (0 if ok else 1)
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is ok
    assert answer["before"] == "dflash"
    assert ok or f"ended with {code}; read logs/mode.log" in answer["message"]


def test_live_reads_the_deployment_and_systemd(tmp_path: Path) -> None:
    class Systemd:
        def show(self, names: list[str]) -> dict[str, dict[str, str]]:
            return {name: {"ActiveState": "active", "Result": "success"} for name in names}

    current = tmp_path / "current.json"
    assert units.live(current, Systemd()) == {"release": None, "instances": {}}
    deployed = [{"name": "gpu0", "mode": "ddtree", "unit": "sglang@gpu0.service"}]
    current.write_text(json.dumps({"release": "r1", "instances": deployed}))
    assert units.live(current, Systemd()) == {"release": "r1", "instances": state("gpu0", "ddtree")}


def test_a_damaged_record_is_no_missing_answer(
    inventory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    current = tmp_path / "current.json"
    current.write_text('{"release": "r1", "inst')
    told = units.MARK + json.dumps(units.live(current, None))
    monkeypatch.setattr(remote, "run_python", lambda *_: told)
    assert mode.main(["ct200", "gpu0", "-i", inventory]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"mode: ct200: {current} cannot be used (JSONDecodeError(")
    assert f"fix: `rm {current}` on the host, then `ansible-playbook site.yml -l ct200 -i {inventory}`" in said


def test_a_password_goes_to_the_play_by_a_file_that_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Path] = []

    def run(argv: list[str], log: Path, *views: Any) -> int:
        assert views[-1]["ANSIBLE_DISPLAY_SKIPPED_HOSTS"] == "1", "else a task's banner comes with its end"
        seen.append(Path(argv[argv.index("--become-password-file") + 1]))
        assert seen[0].read_text() == "hunter2"
        assert seen[0].stat().st_mode & 0o077 == 0
        assert "hunter2" not in " ".join(argv)
        log.parent.mkdir(exist_ok=True)
        log.write_text("what it said\n")
        return 1

    monkeypatch.setattr(mode, "run_logged", run)
    monkeypatch.setattr(mode, "ROOT", tmp_path)
    target = remote.Target("ct200", "192.0.2.200", become="root", become_password="hunter2")
    done = mode.play(target, [], "gpu0", "dflash", mode.Progress(io.StringIO()))
    assert (done["code"], done["failure"]) == (1, "what it said")
    assert not seen[0].exists()


@pytest.mark.parametrize("junk", [3.5, True, "x", [1], [[]], [{"name": None}], {"a": 1}])
def test_junk_in_the_inventory_is_no_instance(junk: Any) -> None:
    for name in ("gpu_units_instances", "gpu_units_defaults"):
        variables = {"gpu_units_instances": [{"name": "gpu0"}], name: junk}
        known = mode.instances(remote.Target("h", "h", variables=variables))
        kept = name == "gpu_units_defaults" and isinstance(junk, dict)
        assert known == ({"gpu0": "ddtree"} if kept else {})
