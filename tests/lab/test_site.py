# SPDX-License-Identifier: Apache-2.0
"""The main job on real hosts with the real engine, told in order: bare host, bad inventories, a crash, two runs at once, the
proven engine, nothing to do, a smoke that fails, the way back. An engine's start is the costly part, so one host tells it all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet import wheelhouse
from fleet.lab.client import LabClient, LabHost
from fleet.lab.shell import until
from tests.lab.plays import REPO, Play, fingerprint, playing, releases, run_play
from tests.patches.test_release import small_engine

TARGET, DRAFTER = "/srv/sglang-fleet-models/nano/target", "/srv/sglang-fleet-models/nano/draft"
DEFAULTS = {"mode": "ddtree", "model_path": TARGET, "draft_model_path": DRAFTER, "budget": 15, "topk": 8}
RECORDED = REPO / "tests/unit/data/gpu_host/h200.json"
HYBRID = "/srv/sglang-fleet-models/nano-hybrid"
MAX_TASKS = 60


@pytest.fixture(scope="module")
def bare(lab: LabClient) -> LabHost:
    """A host as its base system left it."""
    return lab.fresh(1)[0]


def live(host: LabHost) -> list[str]:
    """Names of the instances that run on a host."""
    units = host.ssh("systemctl list-units --no-legend --plain --state=active 'sglang@*'").stdout.split("\n")
    return sorted(unit.split("@")[1].split(".service")[0] for unit in units if unit.startswith("sglang@"))


def current(host: LabHost) -> str:
    """Release that is live, empty if none is."""
    return (
        host.ssh("test ! -L /opt/sglang-fleet/current || readlink /opt/sglang-fleet/current")
        .stdout.strip()
        .rpartition("/")[2]
    )


# --- before anything is changed -----------------------------------------------------------------


def test_check_mode_predicts_the_whole_job_on_a_bare_host(bare: LabHost) -> None:
    before = fingerprint(bare)
    play = run_play("site.yml", "--check", "--diff", hosts=[bare])
    assert play.status == 0, play.text
    assert play.recap[bare.name]["changed"] > 0
    assert "DDTREE" in play.text, "the hunks of the series are shown"
    assert "+ExecStart=/opt/sglang-fleet/current/venv/bin/python" in play.text, "the unit is shown"
    assert fingerprint(bare) == before
    assert bare.ssh("test ! -e /var/lib/sglang-fleet").returncode == 0, "not even the report is written"


@dataclass(frozen=True)
class Bad:
    """A mistake in the inventory: its variables, the rule that finds it, and what its message has to say."""

    rule: str
    words: list[str]
    variables: dict[str, Any]


def one(**keys: Any) -> dict[str, Any]:
    """An inventory with one instance that differs by some keys."""
    return {"gpu_units_instances": [{"name": "cpu0", "gpus": [], "port": 30000, **keys}]}


def two(first: dict[str, Any], second: dict[str, Any], **variables: Any) -> dict[str, Any]:
    instances = [{"name": "a", "gpus": [], "port": 30000, **first}, {"name": "b", "gpus": [], "port": 30001, **second}]
    return {"gpu_units_instances": instances, **variables}


BAD = {
    "mode": Bad("mode-unknown", ["'dtree'", "ddtree-shadow"], one(mode="dtree")),
    "port": Bad("port-twice", ["instance a and instance b", "30000", "port: 30001"], two({}, {"port": 30000})),
    "model": Bad("model-missing", ["/srv/models/none", "no such folder"], one(model_path="/srv/models/none")),
    "drafter": Bad("drafter-kind", ["Qwen3ForCausalLM", "DFlashDraftModel"], one(draft_model_path=TARGET)),
    "budget": Bad("budget-bad", ["budget 0", "1 or more"], one(budget=0)),
    "page": Bad("page-size", ["page-size 16", "mode: dflash"], one(args={"page-size": 16})),
    "hybrid": Bad(
        "hybrid-radix",
        [f"{HYBRID}/target and the radix cache as it is", "disable-radix-cache: true"],
        one(model_path=f"{HYBRID}/target", draft_model_path=f"{HYBRID}/draft"),
    ),
    "backend": Bad("backend-auto", ["attention-backend"], one(args={"attention_backend": "auto"})),
    "key": Bad("instance-key-unknown", ["'bugdet'"], one(bugdet=7)),
    "address": Bad("address-open", ["0.0.0.0", "gpu_host_allow_any_address"], one(address="0.0.0.0")),
    "foreign": Bad("port-busy", ["port 22222", "sshd"], one(port=22222, address="127.0.0.1")),
    "engine": Bad("engine-unknown", ["sglang-0.5.99", "sglang-0.5.11"], {"fleet_engine": "sglang-0.5.99"}),
    "nogpu": Bad(
        "gpu-none", ["gpu_host_profile: cpu", "host_vars/nogpu.yml"], {"gpu_host_profile": "auto", **one(gpus=[0])}
    ),
    "gpu": Bad(
        "gpu-twice",
        ["instance a and instance b", "GPU 0"],
        two({"gpus": [0]}, {"gpus": [0]}, gpu_host_profile="auto", gpu_host_facts_file=str(RECORDED)),
    ),
    "index": Bad(
        "gpu-unknown",
        ["GPU 3", "GPU-5a29fbb1"],
        {"gpu_host_profile": "auto", "gpu_host_facts_file": str(RECORDED), **one(gpus=[3])},
    ),
    "driver": Bad(
        "driver-old",
        ["575.57.08", "580"],
        {"gpu_host_profile": "auto", "gpu_host_facts_file": "OLD DRIVER", **one(gpus=[0])},
    ),
}


def aliases(host: LabHost, folder: Path, variables: dict[str, dict[str, Any]]) -> Path:
    """An inventory in which one host has many names, each with variables of its own over the lab's."""
    argv = [str(Path(sys.executable).parent / "ansible-inventory"), "-i", str(host.inventory), "--host", host.name]
    shared = json.loads(subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True).stdout)
    inventory = folder / "hosts.json"
    inventory.write_text(json.dumps({"lab": {"hosts": {name: {**shared, **own} for name, own in variables.items()}}}))
    return inventory


BadRuns = tuple[Play, str, str, "subprocess.CompletedProcess[str]"]
DOOR = ("foreign", "nogpu", "driver")  # mistakes that only the host shows


@pytest.fixture(scope="module")
def bad_runs(bare: LabHost, tmp_path_factory: pytest.TempPathFactory) -> BadRuns:
    """One run of site.yml on one host under as many names as there are mistakes, the host before and after it, and what
    bin/preflight says of some of these names."""
    folder = tmp_path_factory.mktemp("bad")
    recorded = json.loads(RECORDED.read_text())
    recorded["gpu"]["driver"] = "575.57.08"
    (folder / "old.json").write_text(json.dumps(recorded))
    bare.ssh("systemd-run --unit=other -p Type=exec /usr/sbin/sshd -D -p 22222")
    variables = {name: dict(bad.variables) for name, bad in BAD.items()}
    variables["driver"]["gpu_host_facts_file"] = str(folder / "old.json")
    before = fingerprint(bare)
    inventory = aliases(bare, folder, variables)
    play = run_play(
        "site.yml", "-f", "5", inventory=inventory, fleet_serial="100%"
    )  # sshd takes ten new logins at once
    argv = [str(REPO / "bin/preflight"), "-i", str(inventory), "-l", ",".join(DOOR), "--json"]
    door = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    after = fingerprint(bare)
    bare.ssh("systemctl stop other")
    return play, before, after, door


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_inventory_gets_one_clear_error(bad_runs: BadRuns, name: str) -> None:
    play, bad = bad_runs[0], BAD[name]
    told = play.failure(name)
    assert play.recap[name]["failed"] == 1
    assert told.count("block [") == 1, told
    assert f"{name}: preflight found 1 problem" in told
    assert f"block [{bad.rule}]" in told
    assert "expected" in told
    assert " fix: " in told
    for word in bad.words:
        assert word in told, told


def test_the_door_finds_over_ssh_what_the_play_finds(bad_runs: BadRuns) -> None:
    door = bad_runs[3]
    assert door.returncode == 1, door.stderr
    blocks = {
        verdict["host"]: [finding["id"] for finding in verdict["findings"] if finding["severity"] == "block"]
        for verdict in json.loads(door.stdout)
    }
    assert blocks == {name: [BAD[name].rule] for name in DOOR}


def test_bad_inventories_change_nothing(bad_runs: BadRuns) -> None:
    play, before, after, _ = bad_runs
    assert before == after
    assert all(counts["changed"] == 0 for counts in play.recap.values())


def test_hosts_after_a_failed_batch_are_left_untouched_and_say_so(bare: LabHost, tmp_path: Path) -> None:
    inventory = aliases(bare, tmp_path, {"canary": {"fleet_engine": "sglang-0.5.99"}, "second": {}, "third": {}})
    play = run_play("site.yml", "--tags", "preflight", inventory=inventory, fleet_serial=[2, 1])
    assert play.status != 0
    assert play.recap["second"]["failed"] == 0
    assert "third was left untouched, since canary failed" in play.failure("third")


# --- a crash, two runs, and the proven engine ----------------------------------------------------


@dataclass(frozen=True)
class Way:
    """What happened on the way from the bare host to the proven one."""

    host: LabHost
    build: Play
    refused: Play
    site: Play


@pytest.fixture(scope="module")
def way(bare: LabHost, tmp_path_factory: pytest.TempPathFactory) -> Way:
    """Build; the host crashes before the activation; the next run does the rest, while another one tries at the same time."""
    build = run_play("site.yml", "--tags", "build", hosts=[bare])
    assert build.status == 0, build.text
    bare.crash()
    bare.start()
    log = tmp_path_factory.mktemp("way") / "site.log"
    with playing("site.yml", hosts=[bare], log=log) as first:
        assert until(
            lambda: (
                bare.ssh("systemctl is-active sglang-fleet-run", check=False).returncode == 0
                or first.poll() is not None
            ),
            120,
        )
        refused = run_play("site.yml", "--tags", "build", hosts=[bare])
        status = first.wait(timeout=900)
    site = Play(status, log.read_text())
    assert site.status == 0, site.text
    return Way(bare, build, refused, site)


def test_a_build_touches_nothing_that_serves(way: Way) -> None:
    assert way.build.recap[way.host.name]["failed"] == 0
    assert "Swap" not in way.build.text


def test_the_run_after_a_crash_finds_the_release_and_proves_it(way: Way) -> None:
    assert "sglang_venv : Build the release" not in way.site.text, "the release of the first run is used"
    assert live(way.host) == ["cpu0"]
    assert way.host.ssh("ls -A /opt/sglang-fleet/releases").stdout.split() == [".lock", current(way.host)]


def test_a_second_run_at_once_is_refused_by_name(way: Way) -> None:
    told = way.refused.failure(way.host.name)
    assert way.refused.status != 0
    assert f"{way.host.name}: another run holds this host" in told
    assert "systemctl stop sglang-fleet-run.service" in told
    assert way.refused.recap[way.host.name]["changed"] == 0


def test_the_lock_is_given_back(way: Way) -> None:
    assert way.host.ssh("systemctl is-active sglang-fleet-run", check=False).stdout.strip() == "inactive"


def test_the_everyday_verb_agrees(way: Way) -> None:
    done = subprocess.run(
        [str(REPO / "bin/smoke"), "ddtree", "-i", str(way.host.inventory), "-l", way.host.name, "--json"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [verdict["ok"] for verdict in json.loads(done.stdout)] == [True]


def test_every_kind_of_request_is_answered_or_refused(way: Way) -> None:
    """With what the host has: no C++ compiler, for one. That nothing is left of them shows when the unit is switched."""
    asked = way.host.ssh("python3 - http://127.0.0.1:30000", stdin=(REPO / "tests/asked.py").read_text(), check=False)
    assert asked.returncode == 0, asked.stdout + asked.stderr


def test_a_second_run_changes_nothing_in_few_tasks(way: Way) -> None:
    play = run_play("site.yml", hosts=[way.host])
    assert play.status == 0, play.text
    assert play.recap[way.host.name]["changed"] == 0, play.text
    assert play.tasks(way.host.name) <= MAX_TASKS


def test_check_mode_has_nothing_to_predict_on_a_converged_host(way: Way) -> None:
    before = fingerprint(way.host)
    play = run_play("site.yml", "--check", "--diff", hosts=[way.host])
    assert play.status == 0, play.text
    assert play.recap[way.host.name]["changed"] == 0, play.text
    assert fingerprint(way.host) == before


def test_findings_do_not_hold_up_the_way_back_and_tags_run_alone(way: Way) -> None:
    play = run_play("site.yml", "--tags", "rollback", "--check", hosts=[way.host], fleet_engine="sglang-0.5.99")
    assert "engine-unknown" in play.text
    assert play.failure(way.host.name) == "" or "preflight" not in play.failure(way.host.name)
    for role in ("sglang_venv", "ddtree_patches", "kernel_backends", "smoke"):
        assert f"TASK [{role} :" not in play.text


# --- a smoke that fails, and the way back ----------------------------------------------------------


@dataclass(frozen=True)
class Back:
    """What came after the first deployment: a switch of the mode, a switch and a deployment that fail their smoke."""

    host: LabHost
    switch: dict[str, Any]
    refused: dict[str, Any]
    failed: Play


def mode(host: LabHost, *words: str, status: int) -> dict[str, Any]:
    """The answer of bin/mode for the host's one instance."""
    argv = [str(REPO / "bin/mode"), host.name, "cpu0", *words, "-i", str(host.inventory), "--json"]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def back(way: Way) -> Back:
    """dflash by a switch; then a shadow by a switch and ddtree under a new name, and a drop-in of the site makes both dflash."""
    host = way.host
    switch = mode(host, "dflash", status=0)
    config = "/opt/sglang-fleet/wrong.yaml"
    host.ssh(
        f"install -o root -g sglang -m 640 /etc/sglang-fleet/instances/cpu0.yaml {config} && grep -q DFLASH {config}"
    )
    for name in ("cpu0", "wrong"):
        host.ssh(
            f"mkdir -p /etc/systemd/system/sglang@{name}.service.d && tee /etc/systemd/system/sglang@{name}.service.d/site.conf",
            stdin="[Service]\nExecStart=\nExecStart=/opt/sglang-fleet/current/venv/bin/python -P "
            f"/opt/sglang-fleet/libexec/sglang_launch.py --config {config}\n",
        )
    host.ssh("systemctl daemon-reload")
    refused = mode(host, "ddtree-shadow", status=1)
    host.ssh("rm -r /etc/systemd/system/sglang@cpu0.service.d && systemctl daemon-reload")
    instances = [{"name": "wrong", "gpus": [], "port": 30000}]
    failed = run_play("site.yml", hosts=[host], gpu_units_instances=instances, gpu_units_defaults=DEFAULTS)
    return Back(host, switch, refused, failed)


def test_a_switch_is_proven_and_temporary(back: Back) -> None:
    switch = back.switch
    assert (switch["before"], switch["mode"], switch["state"], switch["ok"]) == ("ddtree", "dflash", "active", True)
    assert switch["inventory"] == "ddtree"
    assert switch["smoke"]["ok"]
    assert {check["id"] for check in switch["smoke"]["checks"]} >= {"hook.dflash-verify", "output.batch"}
    told = back.host.ssh("journalctl -u sglang@cpu0 -o cat").stdout
    assert "Remaining number of requests 0" in told
    assert "'stop-sigterm' timed out" not in told, "an engine was killed at the limit of its stop"


def test_a_switch_that_fails_its_smoke_goes_back(back: Back) -> None:
    refused = back.refused
    assert (refused["before"], refused["mode"], refused["state"], refused["ok"]) == (
        "dflash",
        "dflash",
        "active",
        False,
    )
    assert "Initialized DDTREE draft runner" in refused["message"], refused["message"]
    assert "is back on" in refused["message"]
    assert refused["smoke"]["ok"], "the old mode is proven again"


def test_an_engine_in_the_wrong_mode_fails_the_smoke_by_its_hooks(back: Back) -> None:
    told = back.failed.failure(back.host.name)
    assert back.failed.status != 0
    assert "Initialized DDTREE draft runner" in told, told
    assert "DDTREE verify completed" in told, told


def test_a_failed_smoke_rolls_back_by_itself(back: Back) -> None:
    assert live(back.host) == ["cpu0"]
    assert f"is back on {current(back.host)}" in back.failed.failure(back.host.name)
    assert "DFLASH" in back.host.ssh("cat /etc/sglang-fleet/instances/cpu0.yaml").stdout
    files = back.host.ssh("ls /etc/sglang-fleet/instances").stdout.split()
    assert files
    assert all(name.startswith("cpu0.") for name in files), "nothing of the failed instance stays"
    assert back.host.ssh("systemctl is-active sglang-fleet-run", check=False).stdout.strip() == "inactive"


def test_one_command_goes_back_to_the_deployment_before(back: Back) -> None:
    play = run_play("site.yml", "--tags", "rollback", hosts=[back.host])
    assert play.status == 0, play.text
    assert live(back.host) == ["cpu0"]
    assert "DDTREE" in back.host.ssh("cat /etc/sglang-fleet/instances/cpu0.yaml").stdout
    for role in ("sglang_venv", "ddtree_patches", "smoke"):
        assert f"TASK [{role} :" not in play.text


# --- builds that fail -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builder(lab: LabClient) -> LabHost:
    """A host on which releases are built and nothing is served."""
    return lab.fresh(1)[0]


def test_too_little_room_is_refused_before_the_build(builder: LabHost) -> None:
    play = run_play("site.yml", "--tags", "build", hosts=[builder], gpu_host_min_disk_gib=100000)
    assert "block [disk-low]" in play.failure(builder.name)
    assert play.recap[builder.name]["changed"] == 0


def test_a_disk_that_fills_in_the_build_is_told_and_leaves_nothing(builder: LabHost) -> None:
    builder.ssh("mkdir -p /opt/sglang-fleet && mount -t tmpfs -o size=96m tmpfs /opt/sglang-fleet")
    play = run_play("site.yml", "--tags", "build", hosts=[builder], gpu_host_min_disk_gib=0)
    told = play.failure(builder.name)
    remains = releases(builder)
    builder.ssh("umount /opt/sglang-fleet")
    assert play.status != 0
    assert "disk full" in told, told
    assert [name for name in remains if name != ".lock"] == []


def test_a_wrong_hash_in_the_lock_is_told_and_leaves_nothing(builder: LabHost, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    subprocess.run(["cp", "-r", str(REPO / "engines"), str(engines)], check=True)
    lock = engines / "sglang-0.5.11/lock.txt"
    head, mark, tail = lock.read_text().partition("\nidna==")
    entry, gap, rest = tail.partition("\n\n") if "\n\n" in tail else (tail, "", "")
    lines = (entry + gap + rest).split("\n")
    end = next(at for at, line in enumerate(lines[1:], 1) if line and not line.startswith((" ", "#")))
    wrong = [
        line.replace("--hash=sha256:", "--hash=sha256:" + "0" * 8, 1)[: len(line)] if "--hash" in line else line
        for line in lines[:end]
    ]
    lock.write_text(head + mark + "\n".join(wrong + lines[end:]))
    play = run_play("site.yml", "--tags", "build", hosts=[builder], sglang_venv_engines_dir=str(engines))
    told = play.failure(builder.name)
    assert play.status != 0
    assert "idna" in told, told
    assert [name for name in releases(builder) if name != ".lock"] == []


def test_a_host_that_crashes_in_the_build_recovers_on_the_next_run(builder: LabHost, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    with playing("site.yml", "--tags", "build", hosts=[builder], log=log) as first:
        assert until(
            lambda: any(name.startswith(".build-") for name in releases(builder)) or first.poll() is not None, 300
        )
        assert first.poll() is None, log.read_text()
        builder.crash()
        assert first.wait(timeout=300) != 0
    builder.start()
    assert any(name.startswith(".build-") for name in releases(builder)), "the crash came in the middle of the build"
    play = run_play("site.yml", "--tags", "build", hosts=[builder])
    assert play.status == 0, play.text
    published = releases(builder)
    assert not [name for name in published if name.startswith(".build-")]
    assert builder.ssh(f"test -s /opt/sglang-fleet/releases/{published[-1]}/manifest.json").returncode == 0


def test_a_wheelhouse_serves_a_host_without_a_network(lab: LabClient, tmp_path: Path) -> None:
    """The role's whole way with real wheels of a few small packages; uv comes out of the wheelhouse too."""
    engines = tmp_path / "engines"
    engine = small_engine(engines)
    rules = yaml.safe_load((engine.folder / "engine.yml").read_text())
    rules["audit"]["exceptions"] = []  # they are about packages that this lock lacks
    (engine.folder / "engine.yml").write_text(yaml.safe_dump(rules))
    house = tmp_path / "house"
    assert wheelhouse.fill(engine, house, ["3.11"], [os.uname().machine]) == 0
    host = lab.fresh(1, binds=[f"{house}:/srv/wheelhouse"])[0]
    host.cut()
    update = "apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=3 -o APT::Update::Error-Mode=any update"
    assert host.ssh(update, check=False).returncode != 0, "the host reaches nothing"
    play = run_play(
        str(Path(__file__).parent / "wheelhouse_play.yml"),
        hosts=[host],
        sglang_venv_engines_dir=str(engines),
        sglang_venv_wheelhouse="/srv/wheelhouse",
        sglang_venv_uv_cache="/opt/sglang-fleet/cache/uv",
        sglang_venv_link_mode="hardlink",
    )
    assert play.status == 0, play.text
    python = "/opt/sglang-fleet/releases/[0-9a-f]*/venv/bin/python"
    assert host.ssh(f"{python} -c 'import anyio, msgspec; print(msgspec.__file__)'").stdout.startswith(
        "/opt/sglang-fleet/releases/"
    )
