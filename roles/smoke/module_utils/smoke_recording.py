# SPDX-License-Identifier: Apache-2.0
"""Baseline recordings: what the engine says without speculation, kept per set of inputs.

A recording belongs to everything that may change a token: release, model files, dtype, the arguments of the baseline
and the prompts. Instances that agree in all of it share one. Python 3.11+, standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils import gpu_units_ended as ended
from ansible.module_utils import smoke_host as sh
from ansible.module_utils import smoke_judge as judge

LOOK_BACK = 200  # lines in which the first error of an engine that ended is looked for
LIKELIEST = 5  # log-probabilities kept per position: enough to rate any token that may come in a near tie
MODEL_FILES = re.compile(r"\.(safetensors|bin|json|model|txt|jinja|gguf)$")
# Arguments that say where an instance listens, what it logs or how it speculates; they change no baseline token.
NO_MATTER = re.compile(
    r"^(port|host|nccl_port|dist_init_addr|base_gpu_id|api_key|admin_api_key|served_model_name|log_\w+"
    r"|enable_metrics|speculative_\w+)$"
)


def config_lines(text: str) -> list[str]:
    """The lines of an instance's flat YAML file that can change baseline's tokens, in one order."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and line != "---" and not line.startswith("#")]
    return sorted(
        line for line in kept if not NO_MATTER.match(line.split(":", 1)[0].strip().strip("\"'").replace("-", "_"))
    )


def env_lines(text: str) -> list[str]:
    """The engine's own variables of an environment file, in one order; what only serves us or DDTREE changes no token."""
    return sorted(
        line.strip()
        for line in text.splitlines()
        if line.startswith("SGLANG_") and not line.startswith(("SGLANG_DDTREE_", "SGLANG_FLEET_"))
    )


def model_inputs(model_path: str) -> list[list[Any]]:
    """Name, size and modification time of a model's files, the configuration by content; [] for a name on a hub."""
    folder = Path(model_path)
    if not folder.is_dir():
        return []
    rows: list[list[Any]] = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and MODEL_FILES.search(path.name):
            stat = path.stat()
            rows.append([path.name, stat.st_size, stat.st_mtime_ns])
    config = folder / "config.json"
    if config.is_file():
        rows.append(["config.json", hashlib.sha256(config.read_bytes()).hexdigest()])
    return rows


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def inputs(
    host: sh.Host, release: str, instance: Mapping[str, Any], prompts: Sequence[Mapping[str, str]], tokens: int
) -> dict[str, Any]:
    """Everything that a recording depends on. Its hash names the recording."""
    name = str(instance["name"])
    config = _read(host.config / f"{name}.baseline.yaml") or _read(host.config / f"{name}.yaml")
    env = _read(host.config / f"{name}.baseline.env") or _read(host.config / f"{name}.env")
    return {
        "release": release,
        "model_path": instance["model_path"],
        "model": model_inputs(str(instance["model_path"])),
        "dtype": instance["dtype"],
        "profile": instance.get("profile"),
        "config": config_lines(config),
        "env": env_lines(env),
        "tokens": tokens,
        "prompts": hashlib.sha256(json.dumps(list(prompts), sort_keys=True).encode()).hexdigest(),
    }


def key(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def path_of(host: sh.Host, ident: str) -> Path:
    return Path(host.state) / "baselines" / f"{ident}.json"


def load(host: sh.Host, ident: str) -> dict[str, Any] | None:
    """The recording of a key; None when there is none. Raises SmokeError for a file that is no recording."""
    path = path_of(host, ident)
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
        if recording["key"] != ident or not recording["prompts"]:
            raise ValueError("it is not the recording of its name")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise sh.SmokeError(
            f"{path} cannot be used ({error!r}); remove it on the host, then `{{site}} --tags activate,smoke`"
        ) from error
    return dict(recording)


def record(
    instance: Mapping[str, Any],
    ident: str,
    values: Mapping[str, Any],
    prompts: Sequence[Mapping[str, str]],
    key_of_api: str | None,
    timeout: float,
) -> dict[str, Any]:
    """Ask a running baseline for every prompt, one at a time. Raises SmokeError for a failed or short answer."""
    started, clock = datetime.now(UTC), time.monotonic()
    tokens = int(values["tokens"])
    rows: dict[str, Any] = {}
    for prompt in prompts:
        answer = sh.generate(str(instance["url"]), prompt["text"], tokens, key_of_api, timeout, LIKELIEST)
        if answer["error"] or len(answer["ids"]) != tokens:
            what = answer["error"] or f"{len(answer['ids'])} of {tokens} tokens"
            raise sh.SmokeError(
                f"baseline of {instance['name']} answered prompt {prompt['id']} with {what}; read its journal"
            )
        if judge.accepted_drafts([answer])[2]:
            raise sh.SmokeError(
                f"{instance['baseline_unit']} speculates: its answers carry spec_* fields; it is no baseline"
            )
        rows[prompt["id"]] = {"ids": answer["ids"], "top": answer["top"]}
    return {
        "key": ident,
        "inputs": dict(values),
        "instance": instance["name"],
        "recorded": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 2),
        "prompts": rows,
    }


# --- the module's work -------------------------------------------------------------------------------------------


def plan(
    host: sh.Host,
    deployment: Mapping[str, Any],
    hooks: Mapping[str, Any],
    prompts: Sequence[Mapping[str, str]],
    tokens: int,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """({key: {instance, values}} to record, keys present), one entry per distinct key of the speculating instances."""
    todo: dict[str, dict[str, Any]] = {}
    present: list[str] = []
    for instance in deployment["instances"]:
        judge.hook_ids(hooks, instance["mode"])
        if not hooks["modes"][instance["mode"]]["speculative"]:
            continue
        values = inputs(host, deployment["release"], instance, prompts, tokens)
        ident = key(values)
        if ident in todo or ident in present:
            continue
        if load(host, ident) is None:
            todo[ident] = {"instance": dict(instance), "values": values}
        else:
            present.append(ident)
    return todo, present


def record_unit(
    host: sh.Host,
    ident: str,
    entry: Mapping[str, Any],
    prompts: Sequence[Mapping[str, str]],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Start the baseline of an instance in its place, record it, stop it, put the instance's unit back as it was.

    Raises SmokeError with the unit's result and last journal lines when it does not start or does not stop.
    """
    instance = entry["instance"]
    unit, baseline = str(instance["unit"]), str(instance["baseline_unit"])
    wait = float(settings["start_timeout"])
    was_active = host.unit(unit)["ActiveState"] in ("active", "activating", "reloading")
    if was_active:
        _stop(host, unit, wait)
    try:
        clock = time.monotonic()
        said = host.systemctl("start", baseline, wait)
        if said is not None:
            raise sh.SmokeError(f"{baseline} did not start: {said}\n{_last_words(host, baseline, settings)}")
        seconds = round(time.monotonic() - clock, 2)
        recording = record(
            instance,
            ident,
            entry["values"],
            prompts,
            host.api_key(instance.get("api_key_file")),
            float(settings["request_timeout"]),
        )
        recording["start_seconds"] = seconds
    finally:
        _stop(host, baseline, wait)
        if was_active:
            said = host.systemctl("start", unit, wait)
            if said is not None:
                raise sh.SmokeError(
                    f"{unit} was stopped for its baseline and does not start again: {said}\n{_last_words(host, unit, settings)}"
                )
    sh.write_json(path_of(host, ident), recording)
    return recording


def _stop(host: sh.Host, unit: str, timeout: float) -> None:
    """Stop a unit and prove it: no longer active, and no process left in its control group."""
    before = host.unit(unit)
    cgroup, main = before["ControlGroup"], int(before["MainPID"])
    if main and main not in host.processes(cgroup):
        raise sh.SmokeError(f"{unit}: its process {main} is not seen in its control group {cgroup!r}; run as root")
    said = host.systemctl("stop", unit, timeout)
    state = host.unit(unit)["ActiveState"]
    left = host.processes(cgroup)
    if said is not None or state not in ("inactive", "failed") or left:
        raise sh.SmokeError(
            f"{unit} did not stop: {said or 'systemctl stop returned'}, state {state}, processes {left or 'none'}; "
            f"expected inactive and no process; end them and run again"
        )


def _last_words(host: sh.Host, unit: str, settings: Mapping[str, Any]) -> str:
    state = host.unit(unit)
    shown = int(settings["journal_lines"])
    lines = host.journal_tail(unit, state.get("InvocationID", ""), max(LOOK_BACK, shown))
    cause = host.why(unit, {**state, "ActiveState": "failed"}, lines, "{site}")
    parts = {"first error": ended.first_error(lines), "found": cause.observed, "fix": cause.fix}
    told = "".join(f"{name}: {text}\n" for name, text in parts.items() if text)
    return f"{told}result {state.get('Result')}; last lines of its journal:\n" + "\n".join(
        f"  {line}" for line in lines[-shown:]
    )
