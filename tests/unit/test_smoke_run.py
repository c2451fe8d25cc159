# SPDX-License-Identifier: Apache-2.0
"""The probe and the recording of baselines against a stand-in host and a real HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import smoke_files
from ansible.module_utils import smoke_host as sh
from ansible.module_utils import smoke_recording as recordings
from ansible.module_utils import smoke_run as run

from tests.unit.smoke_fakes import HOOKS, PROMPTS, RECORDED, RELEASE, SETTINGS, FakeHost, engine, log, replay

PATH = Path("verdicts/smoke.json")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"dtype": "bfloat16"}')
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gpu0.baseline.yaml").write_text('dtype: "float32"\nport: 30000\n')
    return tmp_path


def recorded(host: FakeHost) -> str:
    """Record the baseline of the only instance, as the engine of `host` gives it."""
    with engine(replay("baseline")) as url:
        deployment = {"release": RELEASE, "instances": [{**host.instance, "url": url}]}
        todo, _ = recordings.plan(host, deployment, HOOKS, PROMPTS[:16], 24)
        for ident, entry in todo.items():
            recordings.record_unit(host, ident, entry, PROMPTS[:16], SETTINGS)
    host.calls.clear()
    host.states.clear()
    return next(iter(todo), "")


@pytest.fixture(params=["baseline", "dflash", "ddtree-shadow", "ddtree"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def host(tree: Path, mode: str) -> Iterator[FakeHost]:
    with engine(replay(mode)) as url:
        made = FakeHost(tree, mode, url)
        recorded(made)
        yield made


def verdict(host: FakeHost, **settings: Any) -> dict[str, Any]:
    return dict(run.probe(host, HOOKS, PROMPTS, {**SETTINGS, **settings}))


def unit_active(result: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in result["checks"] if c["id"] == "unit.active")


def failed(result: dict[str, Any]) -> list[str]:
    return [c["id"] for c in result["checks"] if not c["ok"]]


@pytest.mark.parametrize("mode", ["baseline", "dflash", "ddtree-shadow", "ddtree"], indirect=True)
def test_a_healthy_instance_passes(host: FakeHost, mode: str) -> None:
    result = verdict(host)
    assert failed(result) == []
    assert result["ok"]
    assert (result["host"], result["release"], result["verb"]) == ("ct200", RELEASE, "smoke")
    (instance,) = result["instances"]
    speculates = HOOKS["modes"][mode]["speculative"]
    assert instance["requests"] == (20 if speculates else 32)
    assert instance["tokens"] == instance["requests"] * 24
    assert instance["identical"] == (20 if speculates else 16)
    if speculates:
        assert instance["tokens_per_step"] > 1.2
    ids = {c["id"] for c in result["checks"]}
    assert set(HOOKS["modes"][mode]["must"]) | set(HOOKS["modes"][mode]["never"]) <= ids
    assert ("output.alone" in ids) is speculates
    assert json.loads((host.state / PATH).read_text()) == result


@pytest.mark.parametrize("mode", ["ddtree"], indirect=True)
class TestDdtree:
    def test_an_unpatched_engine_fails(self, host: FakeHost) -> None:
        host.lines = log("dflash")
        assert failed(verdict(host)) == [
            "hook.ddtree-runner", "hook.ddtree-verify", "hook.ddtree-metrics", "never.dflash-verify",
        ]  # fmt: skip

    def test_a_shadow_is_not_ddtree(self, host: FakeHost) -> None:
        host.lines = log("ddtree-shadow")
        assert failed(verdict(host)) == ["hook.ddtree-verify", "never.shadow-linear", "never.dflash-verify"]

    def test_another_release_in_memory_fails(self, host: FakeHost) -> None:
        host.releases_running = ["0000", RELEASE]
        assert failed(verdict(host)) == ["release.running"]
        host.releases_running = []
        assert failed(verdict(host)) == ["release.running"]

    def test_a_lost_start_of_the_journal_fails_unless_an_earlier_smoke_saw_it(self, host: FakeHost) -> None:
        whole = host.lines
        assert verdict(host)["ok"]
        host.has_start, host.lines = False, [whole[-1]]  # the metrics line is still there
        assert verdict(host)["ok"], "the earlier verdict has the evidence of this invocation"
        host.states["sglang@gpu0.service"] = {"InvocationID": "bb22"}
        assert failed(verdict(host)) == ["hook.ddtree-runner", "hook.ddtree-verify", "journal.whole", "backend.draft"]

    def test_a_bad_line_that_an_earlier_smoke_saw_is_not_forgotten(self, host: FakeHost) -> None:
        good = host.lines
        host.lines = [*good, "DFLASH verify completed. num_accepted_drafts_per_req=[1]"]
        assert failed(verdict(host)) == ["never.dflash-verify"]
        host.lines = good
        assert failed(verdict(host)) == ["never.dflash-verify"]

    def test_an_empty_journal_is_one_failure_with_its_cause(self, host: FakeHost) -> None:
        host.lines, host.has_start = [], False
        host.settings = "# /etc/systemd/journald.conf\n[Journal]\n#Storage=auto\n"
        result = verdict(host)
        assert failed(result) == ["journal.whole"]
        other = next(c for c in result["checks"] if not c["ok"])
        assert "`systemctl cat sglang@gpu0.service`" in other["fix"]
        drop = "/etc/systemd/journald.conf.d/a.conf"
        host.settings += f"\n# {drop}\n[Journal]\n Storage = none\n"
        (silent,) = (c for c in verdict(host)["checks"] if not c["ok"])
        assert silent["observed"].startswith(f"0 lines of this invocation; Storage=none in {drop} ")
        assert f"Storage=auto/' {drop} && systemctl restart systemd-journald.service" in silent["fix"]
        assert "&& systemctl restart sglang@gpu0.service`" in silent["fix"]

    def test_a_file_that_was_changed_by_hand_fails(self, host: FakeHost) -> None:
        file = host.config / "gpu0.yaml"
        file.write_text(file.read_text() + "max-running-requests: 1\n")
        result = verdict(host)
        assert failed(result) == ["deployment.files"]
        (changed_file,) = (c for c in result["checks"] if not c["ok"])
        assert changed_file["observed"] == f"{file}: changed"
        assert changed_file["fix"].startswith("`ansible-playbook site.yml -l ct200 --tags activate`")
        file.unlink()
        assert failed(verdict(host))[0] == "deployment.files"

    @pytest.mark.parametrize("text", ["{", "[]", '{"release": "abc", "instances": []}'])
    def test_a_damaged_record_is_told_as_such(self, host: FakeHost, text: str) -> None:
        path = host.state / "deployments/current.json"
        path.write_text(text)
        (broken,) = verdict(host)["checks"]
        assert (broken["id"], broken["ok"]) == ("deployment.current", False)
        assert broken["fix"].startswith(f"`rm {path}` on the host, then `ansible-playbook site.yml -l ct200`")

    def test_a_late_hook_is_waited_for(self, host: FakeHost) -> None:
        whole, looks = host.lines, []
        early = [line for line in whole if "DDTREE metrics" not in line]

        def journal(_invocation: str) -> Iterator[str]:
            looks.append(1)
            yield from whole if len(looks) > 2 else early

        host.journal = journal  # type: ignore[method-assign]
        assert verdict(host, hook_timeout=30)["ok"]
        assert len(looks) == 3

    def test_a_restart_during_the_smoke_fails(self, host: FakeHost) -> None:
        def journal(_invocation: str) -> Iterator[str]:
            host.states["sglang@gpu0.service"] = {"InvocationID": "cc33", "NRestarts": "1"}
            yield from host.lines

        host.journal = journal  # type: ignore[method-assign]
        result = verdict(host)
        assert failed(result) == ["unit.steady"]
        assert "NRestarts 0 -> 1" in result["checks"][-1]["observed"]

    def test_a_dead_unit_is_one_clear_failure(self, host: FakeHost) -> None:
        dead = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}
        host.states["sglang@gpu0.service"] = dead
        result = verdict(host)
        assert failed(result) == ["unit.active"]
        dead_unit = unit_active(result)
        assert dead_unit["observed"] == (
            "failed (failed, result exit-code); first error: RuntimeError: CUDA out of memory; last lines: RuntimeError: CUDA "
            "out of memory | Main process exited, code=exited, status=1/FAILURE"
        )
        assert dead_unit["fix"] == (
            "on the host: read `journalctl -u sglang@gpu0.service -e`, put its first error right, then "
            "`systemctl reset-failed sglang@gpu0.service && systemctl restart sglang@gpu0.service`"
        )

    def test_the_end_of_a_loop_is_told_with_its_restarts(self, host: FakeHost) -> None:
        dead = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "ExecMainCode": "2"}
        dead |= {"ExecMainStatus": "9", "NRestarts": "4", "StartLimitBurst": "4"}
        host.states["sglang@gpu0.service"] = dead
        told = "failed (failed, result exit-code), not started again after 3 restarts; its process was killed by SIGKILL; first"
        assert unit_active(verdict(host))["observed"].startswith(told)

    @pytest.mark.parametrize("sub", ["start-post", "auto-restart"])
    def test_a_unit_that_is_starting_is_waited_for(self, host: FakeHost, sub: str) -> None:
        host.states["sglang@gpu0.service"] = {"ActiveState": "activating", "SubState": sub, "NRestarts": "1"}
        check = unit_active(verdict(host))
        assert check["observed"].startswith(f"activating ({sub}, result success); it is starting; ")
        assert "`systemctl start sglang@gpu0.service` returns when it serves or has failed" in check["fix"]

    def test_a_unit_without_a_file_is_deployed_by_the_sites_command(self, host: FakeHost) -> None:
        gone = {"ActiveState": "inactive", "SubState": "dead", "LoadState": "not-found"}
        host.states["sglang@gpu0.service"] = gone
        assert unit_active(verdict(host, site="SITE"))["fix"] == "`SITE --tags activate`"

    def test_an_engine_that_does_not_answer_fails(self, host: FakeHost) -> None:
        host.deploy([{**host.instance, "url": "http://127.0.0.1:9"}])
        result = verdict(host)
        assert failed(result) == ["engine.health"]
        assert "refused" in next(c for c in result["checks"] if c["id"] == "engine.health")["observed"]

    def test_without_a_recording_there_is_nothing_to_compare(self, host: FakeHost) -> None:
        for path in (host.state / "baselines").iterdir():
            path.unlink()
        result = verdict(host)
        assert failed(result) == ["baseline.recorded"]
        assert not result["ok"]

    def test_changed_model_arguments_or_prompts_need_a_new_recording(self, host: FakeHost) -> None:
        assert verdict(host)["ok"]
        assert failed(verdict(host, tokens=25)) == ["baseline.recorded"]
        assert failed(verdict(host, requests=15)) == ["baseline.recorded"]
        (host.config / "gpu0.baseline.yaml").write_text('attention-backend: "fa3"\ndtype: "float32"\nport: 30000\n')
        assert failed(verdict(host)) == ["baseline.recorded"]

    def test_a_damaged_recording_is_named(self, host: FakeHost) -> None:
        (path,) = (host.state / "baselines").iterdir()
        path.write_text("{")
        with pytest.raises(sh.SmokeError, match=str(path)):
            verdict(host)

    def test_only_a_smoke_of_every_instance_is_kept(self, host: FakeHost) -> None:
        other = {**host.instance, "name": "gpu1", "mode": "dflash", "unit": "sglang@gpu1.service"}
        host.deploy([host.instance, other])
        result = verdict(host, mode="ddtree")
        assert [i["name"] for i in result["instances"]] == ["gpu0"]
        assert not (host.state / PATH).exists()
        assert verdict(host, instance="gpu9")["ok"] is False
        assert verdict(host, mode="ddtree", write=False)["ok"]
        verdict(host)
        assert (host.state / PATH).exists()

    def test_the_key_is_read_from_its_file_and_never_kept(self, host: FakeHost, tree: Path) -> None:
        key = tree / "key"
        key.write_text("s3cret\n")
        with engine(replay("ddtree"), key="s3cret") as url:
            host.deploy([{**host.instance, "url": url, "api_key_file": str(key)}])
            assert verdict(host)["ok"]
            assert "s3cret" not in (host.state / PATH).read_text()
            host.deploy([{**host.instance, "url": url}])
            assert failed(verdict(host)) == ["engine.answers", "draft.accepted", "output.compared", "backend.reported"]
        key.unlink()
        host.deploy([{**host.instance, "api_key_file": str(key)}])
        with pytest.raises(sh.SmokeError, match="API key"):
            verdict(host)


def test_the_last_storage_holds() -> None:
    files = "# /etc/a.conf\n[Journal]\nStorage=none\n# /etc/b.conf\n[Journal]\nStorage=volatile\n# a comment of it\n"
    assert smoke_files.storage(files) == ("volatile", "/etc/b.conf")
    assert smoke_files.storage("# /etc/a.conf\n#Storage=none\n") is None


def changed(mode: str, **meta: Any) -> Any:
    """The recorded engine, with one token of every third answer or the meta information changed."""
    plain, count = replay(mode), [0]

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        got = plain(path, body)
        count[0] += 1
        if not meta and count[0] % 3 == 0:
            got["output_ids"][7] += 1
        got["meta_info"] |= meta
        return got

    return answer


def test_other_output_than_baseline_fails(tree: Path) -> None:
    with engine(changed("ddtree")) as url:
        host = FakeHost(tree, "ddtree", url)
        recorded(host)
        result = verdict(host)
    assert failed(result) == ["output.batch", "output.alone"]
    assert len(result["instances"][0]["different"]) == 6
    assert "token 7 is" in next(c for c in result["checks"] if c["id"] == "output.batch")["observed"]


def test_no_accepted_draft_fails(tree: Path) -> None:
    with engine(changed("ddtree", spec_accepted_drafts=0)) as url:
        host = FakeHost(tree, "ddtree", url)
        recorded(host)
        assert failed(verdict(host)) == ["draft.accepted"]


def test_a_batch_that_changes_the_baselines_own_output_fails(tree: Path) -> None:
    plain = replay("baseline")

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        got = plain(path, body)
        if not body.get("return_logprob"):
            got["output_ids"][3] += 1
        return got

    with engine(answer) as url:
        result = verdict(FakeHost(tree, "baseline", url))
    assert "output.batch" in failed(result)


def test_a_failing_request_fails(tree: Path) -> None:
    plain = replay("dflash")

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["text"] == PROMPTS[7]["text"]:
            raise RuntimeError("scheduler died")
        return plain(path, body)

    with engine(answer) as url:
        host = FakeHost(tree, "dflash", url)
        recorded(host)
        result = verdict(host)
    assert failed(result) == ["engine.answers"]
    assert "scheduler died" in next(c for c in result["checks"] if c["id"] == "engine.answers")["observed"]


def test_no_deployment_is_a_failure_that_says_what_to_run(tree: Path) -> None:
    host = FakeHost(tree, "ddtree", "")
    (host.state / "deployments" / "current.json").unlink()
    result = verdict(host)
    assert failed(result) == ["deployment.current"]
    assert "site.yml" in result["checks"][0]["fix"]
    (host.state / "deployments" / "current.json").write_text('{"instances": {}}')
    with pytest.raises(sh.SmokeError, match=r"current\.json cannot be used"):  # what records baselines has no verdict
        host.deployment()


# --- recording ---------------------------------------------------------------------------------------------------


def plan(host: FakeHost, instances: list[dict[str, Any]]) -> dict[str, Any]:
    todo, _ = recordings.plan(host, {"release": RELEASE, "instances": instances}, HOOKS, PROMPTS[:16], 24)
    return dict(todo)


def test_one_recording_for_instances_that_differ_in_place_and_mode_only(tree: Path) -> None:
    host = FakeHost(tree, "ddtree", "")
    row = 'dtype: "float32"\nhost: "127.0.0.1"\nport: {}\nspeculative-ddtree-budget: {}\n'
    env = '# comment\nCUDA_VISIBLE_DEVICES="{0}"\nSGLANG_FLEET_URL="http://127.0.0.1:{0}"\nSGLANG_X="1"\n'
    for name, port in (("gpu0", 30000), ("gpu1", 30001), ("gpu2", 30002)):
        (host.config / f"{name}.baseline.yaml").write_text(row.format(port, port))
        (host.config / f"{name}.baseline.env").write_text(env.format(port))
    instances = [
        {**host.instance, "name": "gpu0"},
        {**host.instance, "name": "gpu1", "mode": "dflash"},
        {**host.instance, "name": "gpu2", "mode": "baseline"},
    ]
    assert len(plan(host, instances)) == 1
    assert plan(host, instances[2:]) == {}, "a baseline is its own reference"
    (host.config / "gpu1.baseline.env").write_text(env.format(1).replace('SGLANG_X="1"', 'SGLANG_X="2"'))
    assert len(plan(host, instances)) == 2


@pytest.mark.parametrize("change", ["release", "model", "dtype", "path"])
def test_every_input_gives_a_new_key(tree: Path, change: str) -> None:
    host = FakeHost(tree, "ddtree", "")
    before = recordings.key(recordings.inputs(host, RELEASE, host.instance, PROMPTS, 24))
    release, instance = RELEASE, dict(host.instance)
    if change == "release":
        release = "other"
    elif change == "model":
        (tree / "model" / "model.safetensors").write_bytes(b"others!")
    elif change == "dtype":
        instance["dtype"] = "bfloat16"
    else:
        (tree / "model").rename(tree / "model2")
        instance["model_path"] = str(tree / "model2")
    assert recordings.key(recordings.inputs(host, release, instance, PROMPTS, 24)) != before


@pytest.mark.parametrize("state", ["active", "inactive"])
def test_recording_takes_the_units_place_and_gives_it_back(tree: Path, state: str) -> None:
    host = FakeHost(tree, "ddtree", "")
    host.states[host.instance["unit"]] = {"ActiveState": state}
    with engine(replay("baseline")) as url:
        (ident, entry), *_ = plan(host, [{**host.instance, "url": url}]).items()
        recordings.record_unit(host, ident, entry, PROMPTS[:16], SETTINGS)
    unit, baseline = host.instance["unit"], host.instance["baseline_unit"]
    around = state == "active"
    assert host.calls == [
        *([("stop", unit)] if around else []), ("start", baseline), ("stop", baseline), *([("start", unit)] if around else []),
    ]  # fmt: skip
    stored = recordings.load(host, ident)
    assert stored is not None
    first = PROMPTS[0]["id"]
    assert stored["prompts"][first]["ids"] == RECORDED["baseline"][first]["output_ids"][:24]
    assert plan(host, [{**host.instance, "url": url}]) == {}, "a second run has nothing to do"


def test_a_baseline_that_does_not_start_is_told_with_its_last_words(tree: Path) -> None:
    host = FakeHost(tree, "ddtree", "http://127.0.0.1:9")
    baseline = host.instance["baseline_unit"]
    host.fail["start", baseline] = "Job failed."
    ((ident, entry),) = plan(host, [host.instance]).items()
    with pytest.raises(sh.SmokeError, match=r"(?s)did not start: Job failed.*exit-code.*CUDA out of memory") as caught:
        recordings.record_unit(host, ident, entry, PROMPTS[:16], SETTINGS)
    assert "first error: RuntimeError: CUDA out of memory\nfix: on the host: read " in str(caught.value)
    assert "put its first error right, then `{site}`" in str(caught.value)
    assert host.calls[-1] == ("start", host.instance["unit"]), "the instance that was stopped runs again"
    assert recordings.load(host, ident) is None


def test_a_baseline_whose_processes_stay_is_an_error(tree: Path) -> None:
    host = FakeHost(tree, "ddtree", "")
    host.states[host.instance["unit"]] = {"ActiveState": "inactive"}
    with engine(replay("baseline")) as url:
        ((ident, entry),) = plan(host, [{**host.instance, "url": url}]).items()
        host.left = [4711]
        with pytest.raises(sh.SmokeError, match=r"did not stop.*4711"):
            recordings.record_unit(host, ident, entry, PROMPTS[:16], SETTINGS)


def test_a_speculating_baseline_or_a_failed_answer_is_refused(tree: Path) -> None:
    plain = replay("baseline")

    def speculating(path: str, body: dict[str, Any]) -> dict[str, Any]:
        got = plain(path, body)
        got["meta_info"]["spec_accepted_drafts"] = 1
        return got

    def failing(_path: str, _body: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no memory")

    for answer, word in ((speculating, "it is no baseline"), (failing, "no memory")):
        host = FakeHost(tree, "ddtree", "")
        with engine(answer) as url:
            ((ident, entry),) = plan(host, [{**host.instance, "url": url}]).items()
            with pytest.raises(sh.SmokeError, match=word):
                recordings.record_unit(host, ident, entry, PROMPTS[:16], SETTINGS)
        assert recordings.load(host, ident) is None


def test_dtype_auto_is_what_the_engine_makes_of_it(tree: Path) -> None:
    instance = {"name": "gpu0", "dtype": "auto", "model_path": str(tree / "model")}
    assert sh.dtype_of(instance) == "bfloat16"
    (tree / "model" / "config.json").write_text('{"torch_dtype": "float32"}')
    assert sh.dtype_of(instance) == "float16"
    (tree / "model" / "config.json").unlink()
    with pytest.raises(sh.SmokeError, match="name the dtype"):
        sh.dtype_of(instance)


def test_a_journal_message_may_be_bytes() -> None:
    assert sh._message([72, 105]) == "Hi"
    assert sh._message(["a", [98]]) == "a\nb"
    assert sh._message(None) == ""
