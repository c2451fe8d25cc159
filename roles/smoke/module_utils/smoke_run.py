# SPDX-License-Identifier: Apache-2.0
"""The smoke of one host: ask every instance, read its journal, compare with baseline, give the verdict.

`bin/smoke` sends this file and its neighbours over SSH and runs `main`; the role's module calls `probe`.
Python 3.11+, standard library only.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from ansible.module_utils import gpu_units_ended as ended
from ansible.module_utils import smoke_backends as backends
from ansible.module_utils import smoke_files as files
from ansible.module_utils import smoke_host as sh
from ansible.module_utils import smoke_judge as judge
from ansible.module_utils import smoke_recording as recordings

MARK = "SMOKE-VERDICT "
PAUSE = 0.2  # seconds between two looks at the journal while a hook is awaited


def choose(deployment: Mapping[str, Any], mode: str | None, name: str | None) -> list[dict[str, Any]]:
    """Instances of a deployment in a mode and of a name, None meaning any."""
    return [
        dict(i)
        for i in deployment["instances"]
        if (mode is None or i["mode"] == mode) and (name is None or i["name"] == name)
    ]


def probe(
    host: sh.Host, hooks: Mapping[str, Any], prompts: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The verdict on a host. `settings` are the role's variables without their prefix, and host, mode, instance."""
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    name = str(settings.get("host") or socket.gethostname())
    try:
        deployment = host.deployment()
    except sh.DeploymentError as error:
        broken = judge.check(
            "deployment.current",
            False,
            error.told,
            "a deployment in JSON",
            "nothing tells what should serve",
            error.fix,
        )
        none: dict[str, Any] = judge.verdict(name, None, [broken], [], started, time.monotonic() - clock)
        return _filled(none, [], settings)
    if deployment is None or not deployment["instances"]:
        nothing = judge.check(
            "deployment.current",
            False,
            "no deployment" if deployment is None else "a deployment without instances",
            f"{host.state}/deployments/current.json with at least one instance",
            "there is nothing to prove on this host",
            "`{site}`",
        )
        release = None if deployment is None else deployment["release"]
        empty: dict[str, Any] = judge.verdict(name, release, [nothing], [], started, time.monotonic() - clock)
        return {**_filled(empty, [], settings), "deployed": {}}
    chosen = choose(deployment, settings.get("mode"), settings.get("instance"))
    earlier = _evidence(host)
    with ThreadPoolExecutor(max_workers=max(1, len(chosen))) as pool:
        done = list(
            pool.map(lambda i: _instance(host, deployment["release"], i, hooks, prompts, settings, earlier), chosen)
        )
    checks = [files.judge_files(deployment["files"], host.root)] if chosen else []
    checks += [c for some, _ in done for c in some]
    result: dict[str, Any] = judge.verdict(
        name, deployment["release"], checks, [s for _, s in done], started, time.monotonic() - clock
    )
    result = {
        **_filled(result, deployment["instances"], settings),
        "deployed": {i["name"]: i["mode"] for i in deployment["instances"]},
    }
    if chosen and len(chosen) == len(deployment["instances"]) and settings.get("write", True):
        sh.write_json(host.state / "verdicts" / "smoke.json", result)
    return result


def site_of(settings: Mapping[str, Any]) -> str:
    """The command that deploys this host; the door knows the inventory, else the one of ansible.cfg is meant."""
    return str(settings.get("site") or f"ansible-playbook site.yml -l {settings.get('host') or socket.gethostname()}")


def _filled(
    verdict: dict[str, Any], instances: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The verdict with fixes that run as they stand: {site}, {unit} and {name} are this host's and the instance's."""
    units = {i["name"]: str(i["unit"]) for i in instances}
    for one in verdict["checks"]:
        name = one["instance"] or ""
        for mark, word in (("{site}", site_of(settings)), ("{unit}", units.get(name, "")), ("{name}", name)):
            one["fix"] = one["fix"].replace(mark, word)
    return verdict


def _evidence(host: sh.Host) -> dict[str, dict[str, Any]]:
    """Hook lines that the last smoke found, by invocation: start-up lines of a long run may have left the journal."""
    try:
        last = json.loads((host.state / "verdicts" / "smoke.json").read_text(encoding="utf-8"))
        return {
            i["invocation"]: dict(i["evidence"]) for i in last["instances"] if i.get("invocation") and i.get("whole")
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # no earlier verdict, or one of another format: the journal alone has to do


def _instance(
    host: sh.Host,
    release: str,
    instance: Mapping[str, Any],
    hooks: Mapping[str, Any],
    prompts: Sequence[Mapping[str, str]],
    settings: Mapping[str, Any],
    earlier: Mapping[str, Mapping[str, Any]],
) -> tuple[list[judge.Check], dict[str, Any]]:
    name, mode, url = str(instance["name"]), str(instance["mode"]), str(instance["url"])
    scan = judge.JournalScan(hooks, mode)
    speculative = bool(hooks["modes"][mode]["speculative"])
    before = host.unit(str(instance["unit"]))
    summary: dict[str, Any] = {
        "name": name,
        "mode": mode,
        "unit": instance["unit"],
        "invocation": before["InvocationID"],
        "requests": 0,
        "tokens": 0,
        "tokens_per_step": None,
    }
    active = before["ActiveState"] == "active"
    checks = [_judge_active(host, instance, before, active, settings)]
    if not active:
        return checks, summary

    checks.append(_judge_release(host, release, before, name))
    key = host.api_key(instance.get("api_key_file"))
    status = sh.health(url, key, min(30.0, float(settings["request_timeout"])))
    checks.append(_judge_health(status, url, name))
    answers: list[dict[str, Any]] = []
    states: list[dict[str, Any]] | str = "the engine does not answer"
    if status == "200":
        states = sh.scheduler_states(url, key, float(settings["request_timeout"]), backends.fields_of(hooks))
        used = list(prompts)[: int(settings["requests"])]
        answers = _ask(url, used, key, settings, speculative)
        checks += _judge_all(host, release, instance, hooks, used, answers, settings, summary)
    checks += _judge_journal(host, hooks, scan, before["InvocationID"], name, settings, earlier, summary)
    if status == "200":
        text = host.instance_text(name)
        asked = None if text is None else backends.flags_of(text)
        rows = host.matrix_rows(release)
        found = scan.found if scan.lines or scan.found else None
        checks += backends.judge_backends(hooks, mode, asked, states, found, rows, name)
    checks.append(_judge_steady(before, host.unit(str(instance["unit"])), name))
    return checks, summary


def _ask(
    url: str, prompts: Sequence[Mapping[str, str]], key: str | None, settings: Mapping[str, Any], speculative: bool
) -> list[dict[str, Any]]:
    """All prompts `concurrency` at a time, and the first `alone` of them one by one.

    Without speculation every prompt is asked alone too, with log-probabilities: those answers are the reference.
    """
    tokens, timeout = int(settings["tokens"]), float(settings["request_timeout"])

    def one(prompt: Mapping[str, str], way: str, likeliest: int = 0) -> dict[str, Any]:
        clock = time.monotonic()
        answer = sh.generate(url, prompt["text"], tokens, key, timeout, likeliest)
        return {"prompt": prompt["id"], "way": way, **answer, "seconds": round(time.monotonic() - clock, 3)}

    count = min(len(prompts), int(settings["alone"])) if speculative else len(prompts)
    alone = [one(p, "alone", 0 if speculative else recordings.LIKELIEST) for p in prompts[:count]]
    with ThreadPoolExecutor(max_workers=int(settings["concurrency"])) as pool:
        batch = list(pool.map(lambda p: one(p, "batch"), prompts))
    return batch + alone


def _judge_all(
    host: sh.Host,
    release: str,
    instance: Mapping[str, Any],
    hooks: Mapping[str, Any],
    used: Sequence[Mapping[str, str]],
    answers: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    summary: dict[str, Any],
) -> list[judge.Check]:
    name, tokens = str(instance["name"]), int(settings["tokens"])
    good = [a for a in answers if not a["error"]]
    drafts, steps, _ = judge.accepted_drafts(good)
    summary |= {
        "requests": len(answers),
        "tokens": sum(len(a["ids"]) for a in good),
        "accepted_drafts": drafts,
        "verify_steps": steps,
        "tokens_per_step": round(1 + drafts / steps, 3) if steps else None,
    }
    dtype = sh.dtype_of(instance)
    bound = judge.near_tie_gap(dtype, settings.get("near_tie_gaps"))
    checks = [judge.judge_answers(answers, tokens, name, int(settings["requests"]))]
    if hooks["modes"][instance["mode"]]["speculative"]:
        checks.append(judge.judge_accepted(good, name, int(settings["min_accepted"])))
        ident = recordings.key(recordings.inputs(host, release, instance, used, tokens))
        recording, compared = recordings.load(host, ident), answers
        checks.append(_judge_recorded(recording, ident, name))
        reference = "baseline"
    else:
        recording = {"prompts": {a["prompt"]: {"ids": a["ids"], "top": a["top"]} for a in good if a["way"] == "alone"}}
        compared = [a for a in answers if a["way"] == "batch"]
        reference = "the same prompt asked alone"
    if recording is not None:
        output, figures = judge.judge_output(recording, compared, tokens, bound, name, reference)
        checks += output
        summary |= {"near_tie_gap": bound, **figures}
    return checks


def _judge_recorded(recording: Mapping[str, Any] | None, ident: str, name: str) -> judge.Check:
    return judge.check(
        "baseline.recorded",
        recording is not None,
        f"recorded {recording['recorded']}" if recording else f"no recording {ident[:16]}",
        "a recording of this release, model, dtype, arguments and prompts",
        "without it there is nothing to compare the output with",
        "`{site} --tags activate,smoke` records it; a model file that changed under a running engine is the usual reason",
        name,
    )


def _judge_active(
    host: sh.Host, instance: Mapping[str, Any], state: Mapping[str, str], active: bool, settings: Mapping[str, Any]
) -> judge.Check:
    unit, fix = str(instance["unit"]), "read `journalctl -u {unit} -e` on the host"
    observed = f"{state['ActiveState']} ({state['SubState']}, result {state['Result']})"
    if not active:
        if state["ActiveState"] == "failed" and (count := ended.restarts(state)):
            observed += f", not started again after {count} restarts"
        tail = host.journal_tail(unit, state["InvocationID"], max(recordings.LOOK_BACK, int(settings["journal_lines"])))
        cause = host.why(unit, state, tail)
        told = [ended.ending(state) if state["ActiveState"] == "failed" else "", cause.observed, judge.last_words(tail)]
        observed, fix = "; ".join([observed, *filter(None, told)]), cause.fix
    return judge.check(
        "unit.active",
        active,
        observed,
        f"{unit} active",
        "an engine that does not run proves nothing",
        fix,
        str(instance["name"]),
    )


def _judge_release(host: sh.Host, release: str, state: Mapping[str, str], name: str) -> judge.Check:
    running = host.running_releases(state["ControlGroup"])
    return judge.check(
        "release.running",
        running == [release],
        ", ".join(running) or "no file of any release is in use",
        release,
        "the link may point to one release while the processes still run another",
        "`systemctl restart {unit}` on the host, or `{site} --tags activate`",
        name,
    )


def _judge_health(status: str, url: str, name: str) -> judge.Check:
    return judge.check(
        "engine.health",
        status == "200",
        status,
        f"200 from {url}/health",
        "the unit runs but its engine does not answer",
        "read `journalctl -u {unit} -e` on the host; if the engine hangs, `systemctl restart {unit}` there",
        name,
    )


def _judge_steady(before: Mapping[str, str], after: Mapping[str, str], name: str) -> judge.Check:
    fields = ("ActiveState", "InvocationID", "NRestarts")
    moved = [f"{f} {before[f]} -> {after[f]}" for f in fields if before[f] != after[f]]
    return judge.check(
        "unit.steady",
        not moved,
        "; ".join(moved) or f"same invocation, {after['NRestarts']} restarts",
        "no restart during the smoke",
        "an engine that dies under sixteen short requests will not last",
        "read `journalctl -u {unit} -e` on the host, from where the invocation ended upwards",
        name,
    )


def _judge_journal(
    host: sh.Host,
    hooks: Mapping[str, Any],
    scan: judge.JournalScan,
    invocation: str,
    name: str,
    settings: Mapping[str, Any],
    earlier: Mapping[str, Mapping[str, Any]],
    summary: dict[str, Any],
) -> list[judge.Check]:
    """Read the journal until it has every line that must be there, at most `hook_timeout` seconds."""
    known = earlier.get(invocation)
    deadline = time.monotonic() + float(settings["hook_timeout"])
    while True:
        scan.reset(known or {})
        for line in host.journal(invocation):
            scan.feed(line)
        if not scan.missing() or time.monotonic() >= deadline:
            break
        time.sleep(PAUSE)  # journald takes a moment to store what the engine has just written
    silent = known is None and not scan.lines
    whole = known is not None or (not silent and host.journal_has_start(invocation))
    summary |= {"journal_lines": scan.lines, "evidence": scan.found, "whole": whole}
    if silent:
        return [files.judge_silent(host.journal_settings(), name)]
    checks: list[judge.Check] = judge.judge_hooks(hooks, scan, name)
    checks.append(
        judge.check(
            "journal.whole",
            whole,
            "reaches back to the start" if whole else "begins after the start of this invocation",
            "the whole journal of this invocation",
            "what has been dropped can neither prove nor rule out a line",
            "`systemctl restart {unit}` on the host and smoke at once, or raise SystemMaxUse in /etc/systemd/journald.conf",
            name,
        )
    )
    return checks


def main(payload: Mapping[str, Any]) -> None:
    """Entry for `bin/smoke`: print the verdict after a mark, as the login shell may print lines of its own."""
    try:
        sh.require_root()
        result = probe(sh.Host(), payload["hooks"], payload["prompts"], payload["settings"])
    except sh.SmokeError as error:
        sys.exit(f"smoke: {error}".replace("{site}", site_of(payload["settings"])))
    print(MARK + json.dumps(result))
