# SPDX-License-Identifier: Apache-2.0
"""The smoke on real hosts: systemd, journal, SSH, sudo, host keys, Ansible. The engine is a stand-in (stand_in_engine.py), so
that every flaw can be had at will; a real engine is smoked by the tests of site.yml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.lab.client import LabClient, LabHost
from tests.unit.smoke_fakes import DATA, INSTANCE_FILE, PROMPTS, SERVER_INFO, log

REPO = Path(__file__).resolve().parents[2]
RELEASE = "feedc0de00000001"
HOME = f"/opt/sglang-fleet/releases/{RELEASE}"
STATE = "/var/lib/sglang-fleet"
INSTANCES = "/etc/sglang-fleet/instances"
UNIT = f"""\
[Unit]
Conflicts=sglang@%i.baseline.service
After=sglang@%i.baseline.service
[Service]
Type=exec
ExecStart=/usr/bin/python3 {HOME}/engine.py {INSTANCES}/%i.yaml
ExecStartPost=/usr/bin/python3 {HOME}/engine.py {INSTANCES}/%i.yaml wait
"""
PLAY = """\
- hosts: lab
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.include_role: {name: smoke, tasks_from: baseline}
    - ansible.builtin.include_role: {name: smoke}
"""


def lines() -> dict[str, dict[str, list[str]]]:
    """Journal lines by mode: up to the first verify, and from there on."""
    made = {}
    for mode in ("baseline", "dflash", "ddtree-shadow", "ddtree"):
        every = log(mode)
        cut = next((n for n, line in enumerate(every) if "verify completed" in line), len(every))
        made[mode] = {"start": every[:cut], "verify": every[cut:]}
    return made


def put(host: LabHost, path: str, text: str) -> None:
    host.ssh(f"mkdir -p {Path(path).parent} && cat > {path}", stdin=text)


def configure(host: LabHost, mode: str, flaw: str = "", baseline_flaw: str = "") -> None:
    """Write what gpu_units would write for one instance; `flaw` is the engine's, `baseline_flaw` its baseline's."""
    files = {}
    for name, what, bad in (("gpu0", mode, flaw), ("gpu0.baseline", "baseline", baseline_flaw)):
        text = f"{INSTANCE_FILE}mode: {what}\nport: 30000\ndata: {HOME}/data.json\n" + (f"flaw: {bad}\n" if bad else "")
        put(host, f"{INSTANCES}/{name}.yaml", text)
        files[f"{INSTANCES}/{name}.yaml".lstrip("/")] = text
    instance = {
        "name": "gpu0", "mode": mode, "unit": "sglang@gpu0.service", "baseline_unit": "sglang@gpu0.baseline.service",
        "url": "http://127.0.0.1:30000", "gpus": [], "budget": 15, "topk": 8, "model_path": "/srv/models/target",
        "dtype": "float32", "profile": "cpu", "api_key_file": None,
    }  # fmt: skip
    deployed = {"release": RELEASE, "instances": [instance], "files": files}
    put(host, f"{STATE}/deployments/current.json", json.dumps(deployed))


def serve(host: LabHost, mode: str = "ddtree", flaw: str = "") -> None:
    configure(host, mode, flaw)
    host.ssh("systemctl reset-failed 'sglang@*'; systemctl restart sglang@gpu0")


@pytest.fixture(scope="module")
def host(lab: LabClient) -> Iterator[LabHost]:
    """A host with a stand-in release and a recorded baseline."""
    made = lab.fresh(1)[0]
    data = json.loads((DATA / "answers.json").read_text())
    data |= {
        "prompts": {p["id"]: p["text"] for p in PROMPTS},
        "lines": lines(),
        "server_info": SERVER_INFO["dense-ddtree"],
    }
    put(made, f"{HOME}/data.json", json.dumps(data))
    put(made, f"{HOME}/engine.py", (Path(__file__).parent / "stand_in_engine.py").read_text())
    put(made, "/etc/systemd/system/sglang@.service", UNIT)
    made.ssh("systemctl daemon-reload")
    serve(made)
    play(made)
    yield made
    made.remove()


def play(host: LabHost, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    book = host.inventory.parent / "smoke-test.yml"
    book.write_text(PLAY)
    env = {**os.environ, "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    argv = ["ansible-playbook", "-i", str(host.inventory), str(book), "-l", host.name, *words]
    try:
        done = subprocess.run(argv, cwd=REPO, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    finally:
        book.unlink()
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def smoke(*words: str, inventory: Path, limit: str | None) -> subprocess.CompletedProcess[str]:
    argv = [str(REPO / "bin/smoke"), *words, "-i", str(inventory), *(["-l", limit] if limit else [])]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def smoke_json(host: LabHost, *words: str) -> tuple[int, dict[str, Any]]:
    done = smoke("--json", *words, inventory=host.inventory, limit=host.name)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)[0]


def failed(verdict: dict[str, Any]) -> list[str]:
    return [c["id"] for c in verdict["checks"] if not c["ok"]]


def recap(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.rsplit("PLAY RECAP", 1)[-1]


def test_a_second_play_changes_nothing_and_check_mode_tells_so(host: LabHost) -> None:
    serve(host)
    invocation = host.ssh("systemctl show -P InvocationID sglang@gpu0").stdout
    for words in ((), ("--check", "--diff")):
        assert "changed=0" in recap(play(host, *words))
    assert host.ssh("systemctl show -P InvocationID sglang@gpu0").stdout == invocation, "nothing was restarted"
    recordings = host.ssh(f"ls {STATE}/baselines").stdout.split()
    assert len(recordings) == 1
    verdict = json.loads(host.ssh(f"cat {STATE}/verdicts/smoke.json").stdout)
    assert verdict["ok"]
    assert verdict["host"] == host.name


def test_a_missing_baseline_is_predicted_then_recorded(host: LabHost) -> None:
    serve(host)
    host.ssh(f"rm {STATE}/baselines/*")
    predicted = play(host, "--check", "--diff")
    assert "changed=1" in recap(predicted)
    assert "recorded by sglang@gpu0.baseline.service" in predicted.stdout
    assert host.ssh(f"ls {STATE}/baselines").stdout == ""
    assert host.ssh("systemctl is-active sglang@gpu0").stdout.strip() == "active"
    assert "changed=1" in recap(play(host))
    states = host.ssh("systemctl is-active sglang@gpu0 sglang@gpu0.baseline", check=False).stdout.split()
    assert states == ["active", "inactive"]


@pytest.mark.parametrize("mode", ["baseline", "dflash", "ddtree-shadow", "ddtree"])
def test_every_mode_passes_over_ssh_in_time(host: LabHost, mode: str) -> None:
    serve(host, mode)
    begin = time.monotonic()
    done = smoke(mode, inventory=host.inventory, limit=host.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{host.name}: ok (release {RELEASE}")
    assert time.monotonic() - begin < 15


def test_lines_of_an_earlier_invocation_prove_nothing(host: LabHost) -> None:
    serve(host)
    assert smoke_json(host)[0] == 0
    serve(host, flaw="silent")
    code, verdict = smoke_json(host)
    expected = ["hook.ddtree-runner", "hook.ddtree-verify", "hook.ddtree-metrics", "backend.draft"]
    assert (code, failed(verdict)) == (1, expected)


def test_a_backend_that_the_engine_changed_by_itself_fails_over_ssh(host: LabHost) -> None:
    serve(host, flaw="other attention")
    code, verdict = smoke_json(host)
    assert (code, failed(verdict)) == (1, ["backend.attention"])
    (bad,) = (c for c in verdict["checks"] if not c["ok"])
    assert "decode_attention_backend torch_native" in bad["observed"]
    assert "decode_attention_backend triton" in bad["expected"]


@pytest.mark.parametrize(
    ("flaw", "expected"),
    [
        ("forbidden", ["never.fallback"]),
        ("different", ["output.batch", "output.alone"]),
        ("rejected", ["draft.accepted"]),
    ],
)
def test_a_flaw_fails_its_check_over_ssh_and_in_the_play(host: LabHost, flaw: str, expected: list[str]) -> None:
    serve(host, flaw=flaw)
    code, verdict = smoke_json(host)
    assert (code, failed(verdict)) == (1, expected)
    done = play(host, check=False)
    assert done.returncode == 2
    for ident in expected:
        assert f"{ident} (gpu0): observed" in done.stdout
    warned = play(host, "--check")
    assert f"before the change: {expected[0]}" in " ".join((warned.stdout + warned.stderr).split())


def test_an_engine_that_dies_under_load_fails(host: LabHost) -> None:
    serve(host, flaw="dies")
    code, verdict = smoke_json(host)
    assert code == 1
    assert {"engine.answers", "unit.steady"} <= set(failed(verdict))


def test_a_stopped_unit_is_one_failure_with_the_way_out(host: LabHost) -> None:
    serve(host)
    host.ssh("systemctl stop sglang@gpu0")
    done = smoke(inventory=host.inventory, limit=host.name)
    assert done.returncode == 1
    assert "FAIL unit.active (gpu0)" in done.stdout
    assert "systemctl restart sglang@gpu0.service" in done.stdout


def test_a_baseline_that_does_not_start_says_why_and_the_instance_runs_again(host: LabHost) -> None:
    serve(host)
    configure(host, "ddtree", baseline_flaw="no start")
    done = play(host, check=False)
    assert done.returncode == 2
    text = " ".join(done.stdout.split())
    assert "sglang@gpu0.baseline.service did not start" in text
    assert "not enough memory for the KV cache" in text
    assert host.ssh("systemctl is-active sglang@gpu0").stdout.strip() == "active"
    assert host.ssh("systemctl is-active sglang@gpu0.baseline", check=False).stdout.strip() != "active"


def test_misuse(host: LabHost) -> None:
    serve(host)
    for words in (("dflash",), ("--instance", "gpu7"), ("ddtre",)):
        done = smoke(*words, inventory=host.inventory, limit=host.name)
        assert done.returncode == 2
        assert f"{host.name} has gpu0 (ddtree)" in done.stderr or "known: baseline" in done.stderr
    assert smoke(inventory=host.inventory, limit="nobody").returncode == 2


# --- connection --------------------------------------------------------------------------------------------------


def inventory(host: LabHost, tmp_path: Path, **given: Any) -> Path:
    """The lab's inventory with one host and other connection variables."""
    lab = yaml.safe_load(host.inventory.read_text())["lab"]
    variables = {**lab["vars"], "ansible_host": host.address, **given}
    path = tmp_path / f"hosts-{len(list(tmp_path.iterdir()))}.yml"
    path.write_text(yaml.safe_dump({"lab": {"hosts": {host.name: variables}}}))
    return path


@pytest.fixture
def operator(host: LabHost) -> Iterator[str]:
    """A user that logs in with the lab's key and may use sudo."""
    install = "apt-get -qq update && apt-get -qq install -y --no-install-recommends sudo"
    host.ssh(f"command -v sudo >/dev/null || ({install}) >/dev/null 2>&1")
    host.ssh("useradd -m -s /bin/bash ops && echo ops:hunter2 | chpasswd && install -d -m 700 -o ops ~ops/.ssh")
    host.ssh("install -o ops -m 600 ~/.ssh/authorized_keys ~ops/.ssh/authorized_keys")
    yield "ops"
    host.ssh(
        "rm -f /etc/sudoers.d/ops /etc/sudoers.d/60-sglang-fleet; loginctl terminate-user ops; userdel -rf ops",
        check=False,
    )


def test_a_user_with_sudo_sees_what_root_sees(host: LabHost, operator: str, tmp_path: Path) -> None:
    serve(host)
    plain = smoke(inventory=inventory(host, tmp_path, ansible_user=operator, ansible_become=False), limit=None)
    assert plain.returncode == 1
    assert "fix:      set ansible_become: true" in plain.stdout

    sudo = inventory(host, tmp_path, ansible_user=operator)  # as in the plays, root is become by itself
    host.ssh("echo 'ops ALL=(ALL) ALL' > /etc/sudoers.d/ops && chmod 440 /etc/sudoers.d/ops")
    refused = smoke(inventory=sudo, limit=None)
    assert refused.returncode == 1
    assert "sudo wants a password of ops" in refused.stdout
    (fix,) = re.findall(r"on its console as root: `([^`]+)`", refused.stdout)
    asked = smoke(
        inventory=inventory(
            host, tmp_path, ansible_user=operator, ansible_become=True, ansible_become_password="hunter2"
        ),
        limit=None,
    )
    assert asked.returncode == 0, asked.stdout
    assert "hunter2" not in asked.stdout + asked.stderr
    host.ssh(f"rm /etc/sudoers.d/ops; {fix}")
    assert smoke(inventory=sudo, limit=None).returncode == 0


def test_an_unknown_or_changed_host_key_is_refused(host: LabHost, tmp_path: Path) -> None:
    serve(host)
    known = tmp_path / "known_hosts"
    key = subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    assert key.returncode == 0
    other = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    options = f"-F /dev/null -o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null"
    for text, word in (
        ("", "its host key is not known here; it shows SHA256:"),
        (f"{host.address} {other}\n", "its host key has changed: it shows SHA256:"),
    ):
        known.write_text(text)
        done = smoke(inventory=inventory(host, tmp_path, ansible_ssh_common_args=options), limit=None)
        assert done.returncode == 1
        assert "FAIL host.reachable" in done.stdout
        assert word in done.stdout


def test_a_host_that_is_gone_or_bare_is_named_and_the_others_are_proven(host: LabHost, lab: LabClient) -> None:
    serve(host)
    bare, gone = lab.fresh(2)
    try:
        gone.partition()
        done = smoke("--json", inventory=host.inventory, limit=f"{host.name},{bare.name},{gone.name}")
        assert done.returncode == 1
        found = {v["host"]: failed(v) for v in json.loads(done.stdout)}
        assert found == {host.name: [], bare.name: ["deployment.current"], gone.name: ["host.reachable"]}
        assert "changed=1" in recap(play(bare, "--check")), "a bare host is predicted, not refused"
    finally:
        bare.remove()
        gone.remove()
