# SPDX-License-Identifier: Apache-2.0
"""What the smoke makes of an engine's word on its backends: recorded answers of real engines, and each silent switch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_units_render as render
from ansible.module_utils import smoke_backends as backends
from ansible.module_utils import smoke_host as sh
from ansible.module_utils import smoke_judge as judge

from fleet import backends as control
from tests.unit.smoke_fakes import DATA, HOOKS, INSTANCE_FILE, SERVER_INFO, FakeHost, engine, log, replay
from tests.unit.test_kernel_backends import profiles

Data = dict[str, Any]
EVERY = {"backend.reported", *HOOKS["backends"]}
ROWS = profiles.load("cpu")["backends"]
FLAGS = backends.flags_of(INSTANCE_FILE)
HYBRID = (DATA / "hybrid.log").read_text().splitlines()


def states(name: str = "dense-ddtree", **changes: Any) -> list[Data]:
    """The schedulers' arguments of a recorded engine, changed as an engine would change them."""
    return [{**copy.deepcopy(state), **changes} for state in SERVER_INFO[name]["internal_states"]]


def judged(
    seen: list[Data] | str | None = None,
    lines: list[str] | None = None,
    mode: str = "ddtree",
    rows: list[Data] = ROWS,
    **flags: Any,
) -> list[judge.Check]:
    scan = judge.JournalScan(HOOKS, mode)
    for line in log(mode) if lines is None else lines:
        scan.feed(line)
    asked = {**FLAGS, **{flag.replace("_", "-"): value for flag, value in flags.items()}}
    return list(
        backends.judge_backends(HOOKS, mode, asked, states() if seen is None else seen, scan.found, rows, "gpu0")
    )


def failed(checks: list[judge.Check]) -> list[str]:
    return [check["id"] for check in checks if not check["ok"]]


@pytest.mark.parametrize("mode", ["baseline", "dflash", "ddtree-shadow", "ddtree"])
def test_a_recorded_engine_runs_what_it_was_asked_for(mode: str) -> None:
    checks = judged(mode=mode)
    assert failed(checks) == []
    assert {check["id"] for check in checks} == (EVERY - {"backend.draft"} if mode == "baseline" else EVERY)
    assert {check["instance"] for check in checks} == {"gpu0"}
    attention = next(check for check in checks if check["id"] == "backend.attention")
    assert attention["observed"] == "prefill_attention_backend triton, decode_attention_backend triton"
    assert attention["expected"] == f"{attention['observed']}; cpu or cpu-hybrid of the matrix allows triton"


def test_a_recorded_hybrid_engine_names_the_kernels_of_its_delta_nets() -> None:
    checks = judged(states("hybrid-ddtree"), HYBRID)
    assert failed(checks) == []
    (nets,) = (check for check in checks if check["id"] == "backend.linear-attention")
    assert "decode (journal) TritonGDNKernel, prefill (journal) TritonGDNKernel" in nets["observed"]


SWITCHES: dict[str, tuple[Data, str]] = {
    "attention of prefill": ({"prefill_attention_backend": "flashinfer"}, "backend.attention"),
    "attention of decode": ({"decode_attention_backend": "torch_native"}, "backend.attention"),
    "sampler": ({"sampling_backend": "flashinfer"}, "backend.sampling"),
    "no grammar": ({"grammar_backend": "none"}, "backend.grammar"),
    "experts": ({"moe_runner_backend": "flashinfer_trtllm"}, "backend.moe"),
    "decode of delta nets": ({"linear_attn_decode_backend": "flashinfer"}, "backend.linear-attention"),
    "fused all-reduce": ({"enable_flashinfer_allreduce_fusion": True}, "backend.all-reduce"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_silent_switch_fails_its_check_and_no_other(switch: str) -> None:
    changes, ident = SWITCHES[switch]
    checks = judged(states(**changes))
    assert failed(checks) == [ident]
    (bad,) = (check for check in checks if not check["ok"])
    ((field, value),) = changes.items()
    assert f"{field} {value}" in bad["observed"]
    assert f"{field} {value}" not in bad["expected"]


def test_one_scheduler_of_many_is_enough_to_fail() -> None:
    assert failed(judged(states() + states(sampling_backend="flashinfer"))) == ["backend.sampling"]


def test_a_drafter_that_fell_back_fails() -> None:
    good = log("dflash")
    bad = [line.replace("attention_backend=triton", "attention_backend=flashinfer") for line in good]
    assert bad != good
    assert failed(judged(lines=bad, mode="dflash")) == ["backend.draft"]
    assert failed(judged(lines=bad, mode="dflash", speculative_draft_attention_backend="flashinfer")) == []
    assert failed(judged(lines=[], mode="dflash")) == ["backend.draft"]


def test_other_kernels_of_delta_nets_fail_though_the_flag_is_right() -> None:
    bad = [line.replace("decode=TritonGDNKernel", "decode=FlashInferGDNKernel") for line in HYBRID]
    assert failed(judged(states("hybrid-ddtree"), bad)) == ["backend.linear-attention"]


def test_what_was_asked_for_but_is_not_in_the_releases_rows_fails() -> None:
    """Somebody changed the instance's file by hand: the engine does what it says, and the matrix does not allow it."""
    seen = states(sampling_backend="flashinfer")
    checks = judged(seen, sampling_backend="flashinfer")
    assert failed(checks) == ["backend.sampling"]
    assert "cpu or cpu-hybrid of the matrix allows pytorch" in next(c["expected"] for c in checks if not c["ok"])
    assert failed(judged(seen, rows=[], sampling_backend="flashinfer")) == [], "a release from before there were rows"


def test_flags_of_one_half_win_over_the_common_one() -> None:
    seen = states(decode_attention_backend="flashinfer")
    assert failed(judged(seen, rows=[], decode_attention_backend="flashinfer")) == []
    assert failed(judged(seen, rows=[])) == ["backend.attention"]


def test_an_engine_that_reports_other_fields_fails() -> None:
    seen = states()
    del seen[0]["sampling_backend"]
    checks = judged(seen)
    assert failed(checks) == ["backend.sampling"]
    assert "not reported" in next(check["observed"] for check in checks if not check["ok"])


@pytest.mark.parametrize("seen", ["HTTP 404 from /server_info", []])
def test_without_an_answer_one_check_says_so(seen: Any) -> None:
    checks = judged(seen)
    assert [check["id"] for check in checks] == failed(checks) == ["backend.reported"]


def test_without_the_instances_file_one_check_says_so() -> None:
    (check,) = backends.judge_backends(HOOKS, "ddtree", None, states(), {}, ROWS, "gpu0")
    assert not check["ok"]
    assert "no file of the instance" in check["observed"]


def test_flags_are_read_as_gpu_units_writes_them() -> None:
    args = {
        "attention-backend": "triton",
        "page-size": 1,
        "x": {"a": 1},
        "enable-torch-symm-mem": True,
        "list": ["a", 1],
    }
    assert backends.flags_of(render.to_yaml(args)) == {**args, "x": '{"a": 1}'}
    assert backends.flags_of("---\nsome_flag: plain\n") == {"some-flag": "plain"}


def test_only_the_needed_fields_are_kept_of_the_engines_answer() -> None:
    """The whole answer holds the API key."""
    whole = copy.deepcopy(SERVER_INFO["dense-ddtree"])
    whole["internal_states"][0]["api_key"] = "s3cret"
    fields = backends.fields_of(HOOKS)
    with engine(replay("ddtree"), info=whole) as url:
        (state,) = sh.scheduler_states(url, None, 5, fields)
        assert isinstance(state, dict)
        assert set(state) == set(fields)
    with engine(replay("ddtree"), info=None) as url:
        assert sh.scheduler_states(url, None, 5, fields) == "HTTP 404 from /server_info"
    with engine(replay("ddtree"), info={"internal_states": 3}) as url:
        assert "TypeError" in sh.scheduler_states(url, None, 5, fields)
    assert "refused" in sh.scheduler_states("http://127.0.0.1:9", None, 5, fields)


def test_rows_come_from_the_manifest_of_the_release(tmp_path: Path) -> None:
    host = FakeHost(tmp_path, "ddtree", "")
    assert host.matrix_rows("abc") == []
    folder = tmp_path / "releases" / "abc"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"backends": ROWS}))
    assert host.matrix_rows("abc") == ROWS
    (folder / "manifest.json").write_text("{")
    with pytest.raises(sh.SmokeError, match=r"manifest\.json cannot be used"):
        host.matrix_rows("abc")


def test_every_entry_is_complete_and_of_a_topic_of_the_matrix() -> None:
    topics = set(control.read()["topics"])
    assert {entry["topic"] for entry in HOOKS["backends"].values()} == topics
    for ident, entry in HOOKS["backends"].items():
        assert ident.startswith("backend.")
        assert (
            {"topic", "why", "fix"}
            <= set(entry)
            <= {"topic", "why", "fix", "fields", "line", "groups", "kernels", "speculative"}
        )
        assert "fields" in entry or ("line" in entry and "groups" in entry), ident
