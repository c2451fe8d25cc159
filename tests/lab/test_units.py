# SPDX-License-Identifier: Apache-2.0
"""Units on a real host: real systemd, journal, control groups and roles. The engine is a double (units_engine_double.py)."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fleet.lab.client import LabClient, LabHost

HERE = Path(__file__).parent
STATE = "/var/lib/sglang-fleet/deployments"
PREPARE = r"""
set -eu
getent passwd sglang > /dev/null || useradd --system --home-dir /var/lib/sglang-fleet --shell /usr/sbin/nologin sglang
install -d /srv/model && echo '{}' > /srv/model/config.json
for r in r1 r2; do
  d=/opt/sglang-fleet/releases/$r
  install -d $d
  python3 -m venv --without-pip $d/venv
  mkdir -p $(echo $d/venv/lib/python3*/site-packages)/sglang/srt
  cp /root/launch_server.py $d/venv/lib/python3*/site-packages/sglang/
  printf 'class ServerArgs:\n    api_key = None\n    def __post_init__(self): pass\n' \
    > $(echo $d/venv/lib/python3*/site-packages)/sglang/srt/server_args.py
  echo '{}' > $d/manifest.json
done
"""


@dataclass
class Units:
    """A prepared host and the play that works on it."""

    host: LabHost
    repo: Path
    ran: list[str] = field(default_factory=list)

    def play(self, verb: str = "both", *options: str, ok: bool = True, **values: Any) -> dict[str, Any]:
        """Result of the play: {changed, failed, text}; `values` are variables."""
        argv = [
            sys.executable,
            "-m",
            "ansible",
            "playbook",
            str(HERE / "units_play.yml"),
            "-i",
            str(self.host.inventory),
        ]
        argv += ["--limit", self.host.name, "-e", json.dumps({"verb": verb, **values}), *options]
        env = {
            **os.environ,
            "ANSIBLE_CONFIG": str(self.repo / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(self.repo / "roles"),
        }
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=env, cwd=self.repo)
        text = done.stdout + done.stderr
        assert (done.returncode == 0) is ok, text
        recap = re.search(r"changed=(\d+)", text)
        return {"changed": int(recap.group(1)) if recap else None, "text": text}

    def instance(self, name: str = "a", does: str = "well", port: int = 30000, **keys: Any) -> dict[str, Any]:
        return {"name": name, "port": port, "args": {"double-does": does}, **keys}

    def show(self, unit: str, *names: str) -> list[str]:
        text = self.host.ssh(f"systemctl show {unit} --property={','.join(names)}").stdout
        values = dict(line.split("=", 1) for line in text.splitlines())
        return [values[name] for name in names]

    def ask(self, port: int = 30000) -> dict[str, Any]:
        code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/double').read().decode())"
        return dict(json.loads(self.host.ssh(f"python3 -c {shlex.quote(code)}").stdout))

    def live(self, name: str = "current") -> str | None:
        done = self.host.ssh(f"readlink /opt/sglang-fleet/{name}", check=False)
        return done.stdout.strip().removeprefix("releases/") or None

    def clear(self) -> None:
        """As new, but for the releases."""
        self.host.ssh(
            "systemctl stop 'sglang@*.service'; systemctl reset-failed; systemctl disable --quiet sglang@a sglang@b;"
            f"rm -rf {STATE} /opt/sglang-fleet/current /opt/sglang-fleet/previous /opt/sglang-fleet/libexec"
            " /etc/sglang-fleet /etc/systemd/system/sglang@*; systemctl daemon-reload",
            check=False,
        )


@pytest.fixture(scope="module")
def prepared(lab: LabClient, repo: Path) -> Units:
    (host,) = lab.fresh(1)
    host.ssh("cat > /root/launch_server.py", stdin=(HERE / "units_engine_double.py").read_text())
    host.ssh(PREPARE)
    return Units(host, repo)


@pytest.fixture
def units(prepared: Units) -> Units:
    prepared.clear()
    return prepared


def until(what: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.2)
    return found


def test_start_returns_with_a_token_and_a_second_run_changes_nothing(units):
    first = units.play(gpu_units_instances=[units.instance("a"), units.instance("b", port=30001)])
    assert first["changed"] == 2
    for port, unit in ((30000, "sglang@a"), (30001, "sglang@b")):
        seen = units.ask(port)
        # Healthy came before a token could: the start waited for the token.
        assert (seen["generate"], seen["early"] > 0, seen["health"] > 1) == (1, True, True)
        assert units.show(unit, "ActiveState", "UnitFileState") == ["active", "enabled"]
        assert seen["release"] == "/opt/sglang-fleet/releases/r1/cache"
    again = units.play(gpu_units_instances=[units.instance("a"), units.instance("b", port=30001)])
    assert again["changed"] == 0
    assert units.ask()["pid"] == seen["pid"] or units.ask(30001)["pid"] == seen["pid"]


@pytest.mark.parametrize("does", ["die", "die-as-worker"])
def test_start_that_dies_fails_at_once_with_the_journal(units, does):
    result = units.play(gpu_units_instances=[units.instance(does=does)], ok=False)
    text = result["text"]
    assert "sglang@a.service did not start" in text
    assert "CUDA error: no kernel image is available" in text
    assert "ended before it gave a token" in text
    (after,) = set(re.findall(r"([\d.]+) s after its process ended", text))
    assert float(after) < 15
    # Left stopped: no loop goes on behind the operator's back.
    assert units.show("sglang@a", "ActiveState")[0] in ("failed", "inactive")
    starts = units.host.ssh("journalctl -u sglang@a -o cat | grep 'double: worker' | wc -l").stdout
    time.sleep(3)  # longer than the pause between restarts: what is counted is that nothing happens
    assert units.host.ssh("journalctl -u sglang@a -o cat | grep 'double: worker' | wc -l").stdout == starts


def test_start_that_hangs_ends_long_before_its_limit_with_what_was_seen(units):
    begin = time.monotonic()
    result = units.play(
        gpu_units_instances=[units.instance(does="hang")],
        ok=False,
        gpu_units_start_timeout=600,
        gpu_units_quiet_timeout=2,
    )
    assert time.monotonic() - begin < 60
    text = " ".join(result["text"].split())
    assert re.search(r"first error: sglang-fleet: not ready: it hangs: for \d s no CPU time, no byte read", text)
    assert re.search(r"last seen: /health: .*Connection refused.*; python3? \(pid \d+\) S in \w+", text)
    assert units.show("sglang@a", "MainPID")[0] == "0"


def test_a_stranger_on_the_port_is_no_readiness(units):
    """Another process answers with tokens on the instance's port, the engine itself listens on nothing."""
    config = 'host: "127.0.0.1"\nport: 30000\n'
    units.host.ssh("cat > /root/stranger.yaml", stdin=config)
    units.host.ssh(
        "systemctl reset-failed stranger.service 2>/dev/null; systemd-run --unit=stranger --working-directory=/root "
        "/opt/sglang-fleet/releases/r2/venv/bin/python -m sglang.launch_server --config /root/stranger.yaml"
    )
    try:
        until(lambda: units.host.ssh("ss -ltn | grep -q :30000", check=False).returncode == 0, 20)
        result = units.play(gpu_units_instances=[units.instance(does="deaf")], ok=False)
    finally:
        units.host.ssh("systemctl stop stranger")
    assert "another process answers on http://127.0.0.1:30000" in result["text"]


def test_stop_is_clean_and_empties_the_control_group(units):
    units.play(gpu_units_instances=[units.instance()])
    (group,) = units.show("sglang@a", "ControlGroup")
    workers = f"grep -l '{group}$' /proc/[0-9]*/cgroup 2>/dev/null | wc -l"
    assert int(units.host.ssh(workers).stdout) == 2
    units.host.ssh("systemctl stop sglang@a")
    assert units.show("sglang@a", "ActiveState", "Result") == ["inactive", "success"]
    assert int(units.host.ssh(workers).stdout) == 0


def test_a_request_in_flight_is_finished_before_the_stop(units):
    units.play(gpu_units_instances=[units.instance()])
    body = json.dumps({"sampling_params": {"max_new_tokens": 5}, "double_seconds": 3})
    code = (
        "import urllib.request as u, subprocess, threading, time;"
        "t = threading.Timer(1, lambda: subprocess.run(['systemctl', 'stop', 'sglang@a'])); t.start();"
        f"print(u.urlopen('http://127.0.0.1:30000/generate', {body!r}.encode()).read().decode()); t.join()"
    )
    assert '"completion_tokens": 5' in units.host.ssh(f"python3 -c {shlex.quote(code)}").stdout
    assert units.show("sglang@a", "ActiveState", "Result") == ["inactive", "success"]


def test_a_crash_in_service_restarts_and_a_loop_ends_in_failed(units):
    units.play(gpu_units_instances=[units.instance()], gpu_units_restart_limit=2)
    # Restarts by hand are no loop, however many; and byte code that a full disk has cut ends none of them.
    cut = "find /opt/sglang-fleet/current/cache/pycache -name '*.pyc' -exec truncate -s 512 {} +"
    units.host.ssh(f"{cut}; for n in 1 2 3; do systemctl restart sglang@a || exit 1; done")
    assert "byte code that a full disk had cut was removed" in units.host.ssh("journalctl -u sglang@a -o cat").stdout
    old = units.ask()["pid"]
    units.host.ssh(f"kill -9 {old}")
    until(lambda: units.show("sglang@a", "ActiveState", "NRestarts") == ["active", "1"], 20)
    assert units.ask()["pid"] != old
    units.host.ssh(
        'sed -i \'s/"well"/"die-as-worker"/\' /etc/sglang-fleet/instances/a.yaml && kill -9 ' + str(units.ask()["pid"])
    )
    until(lambda: units.show("sglang@a", "ActiveState")[0] == "failed", 60)
    # The verdict says what happened, not only that it did.
    active = smoke(units)
    assert re.match(r"failed \(failed, result [\w-]+\), not started again after 2 restarts; ", active["observed"])
    assert "first error: RuntimeError: CUDA error: no kernel image is available" in active["observed"]
    assert len(active["observed"]) < 1000
    assert active["fix"].endswith(
        "then `systemctl reset-failed sglang@a.service && systemctl restart sglang@a.service`"
    )
    # The next run mends the file and starts it, whatever the counter of restarts says.
    assert units.play(gpu_units_instances=[units.instance()])["changed"] == 2
    assert units.show("sglang@a", "ActiveState") == ["active"]


def smoke(units: Units) -> dict[str, Any]:
    """The check of the everyday verb that the unit runs."""
    argv = [str(units.repo / "bin/smoke"), "-i", str(units.host.inventory), "-l", units.host.name, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=units.repo)
    assert done.returncode in (0, 1), done.stderr
    (verdict,) = json.loads(done.stdout)
    return next(check for check in verdict["checks"] if check["id"] == "unit.active")


def test_a_process_that_left_its_unit_keeps_the_old_deployment(units):
    """A real process with the mark of the engine's children, in another unit: as a worker that was re-parented."""
    units.play(gpu_units_instances=[units.instance()], release="r1")
    units.host.ssh("systemd-run --unit=escaped --uid=sglang -p Environment=FLEET_UNIT=sglang@a.service sleep 600")
    try:
        result = units.play(
            "swap", gpu_units_instances=[units.instance()], release="r2", gpu_units_free_timeout=1, ok=False
        )
    finally:
        units.host.ssh("systemctl stop escaped")
    text = " ".join(result["text"].split())
    holder = r"pid \d+ \(sglang: /\S*sleep, in escaped.service, left by sglang@a.service, its par"
    assert re.search(rf"processes are left: {holder}", text)
    assert "running again: sglang@a.service" in text
    assert units.live() == "r1"


def test_swap_and_rollback_go_through_the_running_engine(units):
    one, two = [units.instance("a"), units.instance("b", port=30001)], [units.instance("a", env={"NEW": "1"})]
    units.play(gpu_units_instances=one, release="r1")
    units.play(gpu_units_instances=two, release="r2")
    assert (units.live(), units.live("previous")) == ("r2", "r1")
    assert units.ask()["release"].endswith("/r2/cache")
    assert units.show("sglang@b", "ActiveState", "UnitFileState")[0] == "inactive"
    units.play("rollback")
    assert (units.live(), units.live("previous")) == ("r1", "r2")
    assert units.ask()["release"].endswith("/r1/cache")
    assert units.show("sglang@b", "ActiveState", "UnitFileState") == ["active", "enabled"]
    units.play("rollback")
    assert (units.live(), units.ask()["env"]["NEW"]) == ("r2", "1")


def test_failed_deployment_is_taken_back_for_good(units):
    units.play(gpu_units_instances=[units.instance()], release="r1")
    units.play(gpu_units_instances=[units.instance(does="die")], release="r2", ok=False)
    failed = json.loads(units.host.ssh(f"cat {STATE}/current.json").stdout)["id"]
    units.play("auto", failed=failed)
    assert (units.live(), units.live("previous")) == ("r1", None)
    assert units.ask()["release"].endswith("/r1/cache")
    assert json.loads(units.host.ssh(f"cat {STATE}/failed.json").stdout)["id"] == failed


def test_rollback_of_the_first_deployment_says_that_nothing_was_before(units):
    units.play(gpu_units_instances=[units.instance()])
    refused = units.play("rollback", ok=False)["text"]
    assert "rollback_to_nothing=true" in refused
    assert units.show("sglang@a", "ActiveState") == ["active"]
    result = units.play("rollback", rollback_to_nothing=True)
    assert "nothing was deployed before" in result["text"]
    assert "no release is live" in result["text"]
    assert units.live() is None
    assert units.host.ssh("systemctl list-units --plain --no-legend 'sglang@*'").stdout == ""


def test_the_baseline_and_its_instance_never_run_together(units):
    units.play(gpu_units_instances=[units.instance()])
    units.host.ssh("systemctl start sglang@a.baseline")
    assert units.show("sglang@a", "ActiveState") == ["inactive"]
    assert units.show("sglang@a.baseline", "ActiveState", "UnitFileState") == ["active", "disabled"]
    units.play("start")
    assert units.show("sglang@a.baseline", "ActiveState", "Result") == ["inactive", "success"]
    assert units.show("sglang@a", "ActiveState") == ["active"]


def test_check_mode_shows_the_change_and_makes_none(units):
    result = units.play(
        "both", "--check", "--diff", gpu_units_instances=[units.instance(), units.instance("b", port=30001)]
    )
    assert "+port: 30001" in result["text"]
    assert "+release r1" in result["text"]
    assert units.host.ssh("ls /etc/sglang-fleet /etc/systemd/system/sglang@.service", check=False).returncode == 2
    units.play(gpu_units_instances=[units.instance()])
    result = units.play("both", "--check", "--diff", gpu_units_instances=[units.instance()])
    assert result["changed"] == 0


def test_bad_instances_change_nothing(units):
    units.play(gpu_units_instances=[units.instance()])
    pid = units.ask()["pid"]
    result = units.play(gpu_units_instances=[units.instance(mode="tree", budget=0)], ok=False)
    assert f"{units.host.name}: the instances can't be served." in result["text"]
    assert "instance a: unknown mode 'tree'" in result["text"]
    assert units.ask()["pid"] == pid


def test_key_is_seen_by_the_engine_alone(units, tmp_path):
    (tmp_path / "key").write_text("s3cret-key-of-a\n")
    result = units.play(
        "both", "-vvv", "--diff", gpu_units_instances=[units.instance(api_key_file=str(tmp_path / "key"))]
    )
    assert "s3cret-key-of-a" not in result["text"]
    assert units.host.ssh("stat -c '%a %U:%G' /etc/sglang-fleet/keys/a").stdout.strip() == "600 root:root"
    assert units.host.ssh("cat /etc/sglang-fleet/keys/a").stdout == "s3cret-key-of-a\n"
    assert units.host.ssh(
        "grep -rl s3cret /etc/sglang-fleet /var/lib/sglang-fleet /opt/sglang-fleet/libexec"
    ).stdout.split() == ["/etc/sglang-fleet/keys/a"]
    assert units.host.ssh("journalctl | grep -c s3cret", check=False).stdout.strip() == "0"
    # Both the engine and its waiter have it: the engine answers to nobody else, and the start came through.
    body = shlex.quote(json.dumps({"sampling_params": {"max_new_tokens": 1}}))
    for header, status in (("", "401"), ("-H 'Authorization: Bearer s3cret-key-of-a'", "200")):
        asked = f"curl -s -o /dev/null -w %{{http_code}} {header} -d {body} http://127.0.0.1:30000/generate"
        assert units.host.ssh(asked).stdout == status
    pid = units.ask()["pid"]
    assert units.host.ssh(f"tr '\\0' '\\n' < /proc/{pid}/environ | grep -c s3cret", check=False).stdout.strip() == "0"


def descendants(pid: int) -> list[int]:
    """Every process below one, as /proc has them now."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    direct = [int(word) for word in children.read_text().split()] if children.exists() else []
    return [*direct, *(below for child in direct for below in descendants(child))]


def test_a_host_that_dies_in_a_swap_comes_back_with_one_deployment(units):
    """The swap is held at a file in the middle, then the host is killed and booted again."""
    units.play(gpu_units_instances=[units.instance()], release="r1")
    hold = (
        "import os, time\n_replace = os.replace\n"
        "def replace(a, b, **k):\n    _replace(a, b, **k)\n"
        "    if str(b).endswith('/a.yaml'):\n        open('/root/held', 'w').close(); time.sleep(600)\n"
        "os.replace = replace\n"
    )
    site = units.host.ssh("python3 -c 'import site; print(site.getsitepackages()[0])'").stdout.strip()
    units.host.ssh(f"mkdir -p {site} && cat > {site}/hold_swap.py", stdin=hold)
    units.host.ssh(f"echo import hold_swap > {site}/hold_swap.pth")
    argv = [sys.executable, "-m", "ansible", "playbook", str(HERE / "units_play.yml"), "-i", str(units.host.inventory)]
    argv += [
        "--limit",
        units.host.name,
        "-e",
        json.dumps(
            {
                "release": "r2",
                "gpu_units_instances": [
                    units.instance(mode="baseline", env={"N": "1"}, args={"double-does": "well", "x": 1})
                ],
            }
        ),
    ]
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(units.repo / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(units.repo / "roles"),
    }
    run = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
        cwd=units.repo,
    )
    try:
        until(lambda: units.host.ssh("test -e /root/held", check=False).returncode == 0, 60)
    finally:
        # With its workers, which have sessions of their own: one would try again on the host that is back.
        for pid in (run.pid, *descendants(run.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait()
    units.host.crash()
    units.host.start()
    units.host.ssh(f"rm {site}/hold_swap.* /root/held")
    # Half of the new deployment lies there, so nothing starts, at boot or by hand.
    assert (
        units.host.ssh(
            f"test -e {STATE}/swap.json && grep -q ^x: /etc/sglang-fleet/instances/a.yaml", check=False
        ).returncode
        == 0
    )
    assert units.show("sglang@a", "ActiveState", "AssertResult") == ["inactive", "no"]
    result = units.play(gpu_units_instances=[units.instance()], release="r1")
    assert "an earlier change was cut short; the host agrees again with deployment" in " ".join(result["text"].split())
    assert (units.live(), units.ask()["release"].endswith("/r1/cache")) == ("r1", True)
    assert units.host.ssh("grep -c ^x: /etc/sglang-fleet/instances/a.yaml", check=False).stdout.strip() == "0"
    units.play(gpu_units_instances=[units.instance()], release="r2")
    assert (units.live(), units.live("previous")) == ("r2", "r1")


def test_unit_is_sound_and_hardened(units):
    units.play(gpu_units_instances=[units.instance()])
    assert units.host.ssh("systemd-analyze verify /etc/systemd/system/sglang@.service 2>&1", check=False).stdout == ""
    exposure = units.host.ssh("systemd-analyze security --no-pager sglang@a.service").stdout
    (level,) = re.findall(r"Overall exposure level for sglang@a.service: ([\d.]+)", exposure)
    assert float(level) <= 3.0
    pid = units.ask()["pid"]
    status = units.host.ssh(f"grep -E '^(NoNewPrivs|CapEff|CapBnd):' /proc/{pid}/status").stdout.split()
    assert status == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    user = units.host.ssh(f"stat -c %U /proc/{pid}").stdout.strip()
    assert user == "sglang"
