# SPDX-License-Identifier: Apache-2.0
"""Serve a pair in every mode on a GPU and compare: hooks, outputs, tokens per step.

Runs on the GPU machine, with the Python that has the patched engine:

    python tests/gpu/modes.py --pair DIR --prompts FILE --out DIR [--modes baseline,dflash,ddtree-shadow,ddtree]

One engine at a time. Per mode it writes the engine's log and the answers; at the end `report.json` and a short text on
stdout. Exits 1 if a check fails: a hook, an output that differs at anything but a near tie, or tokens per step more
than 3 % off the offline walk over the same text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

PORT = 30100
# Log-probability gap between the target's two best tokens under which bf16 rounding may swap them: logits of 16 to 32
# are spaced 0.125 apart, and one swap takes a rounding on either side.
NEAR_TIE = 0.25
FLAGS = {
    "baseline": [],
    "dflash": ["--speculative-algorithm", "DFLASH"],
    "ddtree-shadow": ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-shadow-linear"],
    "ddtree": ["--speculative-algorithm", "DDTREE"],
}
_HOOKS = yaml.safe_load((Path(__file__).resolve().parents[2] / "roles/smoke/files/hooks.yml").read_text())


def patterns(mode: str, kind: str) -> list[str]:
    """The smoke's own patterns of a mode; `kind` is `must` or `never`."""
    return [_HOOKS["hooks"][name]["pattern"] for name in _HOOKS["modes"][mode][kind]]


def post(path: str, body: dict[str, Any]) -> Any:
    """POST JSON to the engine on this machine."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def ask(prompt: str, new: int, logprobs: bool) -> dict[str, Any]:
    """One greedy answer; `gaps` are top-1 minus top-2 log-probabilities per token, where asked for."""
    body: dict[str, Any] = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    }
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    answer = post("/generate", body)
    meta = answer["meta_info"]
    result = {"ids": answer["output_ids"], "steps": meta.get("spec_verify_ct", 0)}
    if logprobs:
        result["gaps"] = [pair[0][0] - pair[1][0] for pair in meta["output_top_logprobs"]]
    return result


def ready(process: subprocess.Popen[bytes], log: Path, limit: float) -> float:
    """Seconds until the engine answers one real token."""
    start = time.monotonic()
    while time.monotonic() - start < limit:
        if process.poll() is not None:
            raise SystemExit(f"engine ended with {process.returncode} before it was ready:\n{log.read_text()[-3000:]}")
        try:
            ask("x", 1, False)
            return time.monotonic() - start
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"engine not ready after {limit:.0f} s:\n{log.read_text()[-3000:]}")


def serve(mode: str, args: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    """Start one mode, ask everything alone and eight at a time, stop it."""
    name = mode.split(":", maxsplit=1)[0]
    flags = list(FLAGS[name])
    if name != "baseline":
        flags += ["--speculative-draft-model-path", f"{args.pair}/draft"]
    if name.startswith("ddtree"):
        flags += ["--speculative-ddtree-budget", mode.partition(":")[2] or "15", "--speculative-ddtree-topk", "8"]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", f"{args.pair}/target"]
    command += ["--port", str(PORT), "--attention-backend", "triton", "--sampling-backend", "pytorch"]
    command += ["--mem-fraction-static", "0.4", "--cuda-graph-max-bs", "8", "--max-running-requests", "8"]
    command += ["--disable-piecewise-cuda-graph", "--skip-server-warmup", *flags, *args.flag]
    log = args.out / f"{mode.replace(':', '-')}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        result: dict[str, Any] = {"mode": mode, "start_seconds": round(ready(process, log, 400), 1)}
        ask(prompts[0], 32, False)
        begin = time.monotonic()
        result["alone"] = [ask(prompt, args.new, name == "baseline") for prompt in prompts]
        result["alone_seconds"] = time.monotonic() - begin
        begin = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            result["batch"] = list(pool.map(lambda prompt: ask(prompt, args.new, name == "baseline"), prompts))
        result["batch_seconds"] = time.monotonic() - begin
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = [line for line in log.read_text(errors="replace").splitlines() if not re.search(_HOOKS["ignore"], line)]
    result["hooks"] = {p: any(re.search(p, line) for line in text) for p in patterns(name, "must")}
    result["forbidden"] = [line for p in patterns(name, "never") for line in text if re.search(p, line)]
    return result


def compare(baseline: dict[str, Any], result: dict[str, Any], way: str) -> dict[str, Any]:
    """First differences against the baseline asked alone, sorted into near ties and others."""
    same, ties, others = 0, [], []
    for index, (want, got) in enumerate(zip(baseline["alone"], result[way], strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(want["ids"], got["ids"], strict=True)) if a != b), None)
        if at is None:
            same += 1
        elif want["gaps"][at] <= NEAR_TIE:
            ties.append(round(want["gaps"][at], 4))
        else:
            others.append({"prompt": index, "position": at, "gap": want["gaps"][at]})
    return {"same": same, "near_ties": ties, "others": others}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", default="baseline,dflash,ddtree-shadow,ddtree:15")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--flag", action="append", default=[], help="a further engine flag, repeated")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()][: args.requests]
    results = []
    for mode in args.modes.split(","):
        results.append(serve(mode, args, prompts))
        print(f"{mode}: ready after {results[-1]['start_seconds']} s", flush=True)
    (args.out / "answers.json").write_text(json.dumps(results))
    from walk_texts import tokens_per_step  # torch on the CPU, only now: nothing else runs beside it

    baseline, failed, report = results[0], [], []
    for result in results:
        row: dict[str, Any] = {key: result[key] for key in ("mode", "start_seconds", "hooks", "forbidden")}
        for way in ("alone", "batch"):
            tokens = sum(len(a["ids"]) for a in result[way])
            row[f"{way}_tok_s"] = round(tokens / result[f"{way}_seconds"], 1)
            row[f"{way}_equal"] = compare(baseline, result, way)
            failed += [f"{result['mode']} {way}: {other}" for other in row[f"{way}_equal"]["others"]]
        failed += [f"{result['mode']}: no line {p!r}" for p, seen in row["hooks"].items() if not seen]
        failed += [f"{result['mode']}: forbidden line {line!r}" for line in row["forbidden"]]
        steps = sum(a["steps"] for a in result["alone"])
        if steps:
            name, _, budget = result["mode"].partition(":")
            arm = (int(budget or 15), 8) if name == "ddtree" else (15, 1)
            row["tokens_per_step"] = round(sum(len(a["ids"]) - 1 for a in result["alone"]) / steps, 4)
            row["offline_walk"] = round(
                tokens_per_step(args.pair, prompts, [a["ids"] for a in result["alone"]], *arm), 4
            )
            if abs(row["tokens_per_step"] / row["offline_walk"] - 1) > 0.03:
                failed.append(f"{result['mode']}: {row['tokens_per_step']} tokens per step, walk {row['offline_walk']}")
        report.append(row)
        print(json.dumps(row), flush=True)
    (args.out / "report.json").write_text(json.dumps({"failed": failed, "modes": report}, indent=1))
    print("FAILED" if failed else "ok", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
