# SPDX-License-Identifier: Apache-2.0
"""Every mode of every pair in $GPU_PAIRS on this GPU: one start of all servers per pair, one test per kind of check.

GPU_PAIRS: folders, separated by commas (default: every pair that was unpacked). GPU_OUT: folder for the reports. Other
variables are in modes.from_environment. Two GPUs or more also get the pair with tensor parallelism.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

import modes
import pytest

ROOM = Path(os.environ.get("GPU_HOME", "/tmp/engine")) / "pairs"
NAMED = [Path(name) for name in os.environ.get("GPU_PAIRS", "").split(",") if name]
PAIRS: list[Path | None] = [*(NAMED or sorted(config.parents[1] for config in ROOM.glob("*/target/config.json")))] or [
    None
]
NAMES = [pair.name if pair else "none" for pair in PAIRS]

pytestmark = pytest.mark.usefixtures("engine")


def there(pair: Path | None) -> Path:
    """The pair; skips where none was carried along, since pairs of that size are no part of the repository."""
    if pair is None:
        pytest.skip(f"no pair below {ROOM}; name folders in GPU_PAIRS")
    if not (pair / "draft/config.json").is_file():
        pytest.fail(f"{pair} of GPU_PAIRS is no pair: no draft/config.json")
    return pair


def run(name: str, options: modes.Options) -> modes.Report:
    """Checks a pair; the report goes to $GPU_OUT, logs stay on the machine."""
    report = modes.check(options)
    if out := os.environ.get("GPU_OUT"):
        Path(out).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(options.out / "report.json", Path(out) / f"{name}.json")
    return report


@pytest.fixture(scope="module", params=PAIRS, ids=NAMES)
def report(request: pytest.FixtureRequest, engine: None) -> modes.Report:
    pair = there(request.param)
    out = Path(mkdtemp(prefix=f"gpu-{pair.name}-"))
    print(f"logs in {out}")
    return run(pair.name, modes.from_environment(pair, out, os.environ))


def hold(report: modes.Report, kind: str) -> None:
    """All checks of a kind hold, and there is at least one."""
    mine = [check for check in report.checks if check["id"].startswith(kind)]
    assert mine, f"no check {kind}*: {report.failed or report.checks}"
    bad = [check for check in mine if not check["ok"]]
    assert not bad, "\n".join(f"{c['id']}: {c['observed']}; expected {c['expected']}" for c in bad)


@pytest.mark.parametrize("kind", ["start.", "answers.", "path.", "output.", "walk.", "soak.", "gpu.memory"])
def test_mode_checks(report: modes.Report, kind: str) -> None:
    hold(report, kind)


def test_states_that_leak_are_caught(report: modes.Report) -> None:
    """Negative control: trees verified without forking recurrent states must fail the check that all others pass."""
    if not any("leak" in name for name in report.arms) and not any("leak" in check["id"] for check in report.checks):
        pytest.skip("a dense target has no recurrent state")  # so nothing can leak, and no arm was served for it
    hold(report, "caught.")


@pytest.mark.skipif(modes.gpus() < 2, reason="tensor parallelism needs two GPUs")
@pytest.mark.parametrize("named", PAIRS, ids=NAMES)
def test_two_ranks_answer_as_the_walk_says(named: Path | None) -> None:
    """Every rank grows the same tree: tokens per step are the walk's, outputs baseline's, and no rank waits for another."""
    pair = there(named)
    options = modes.from_environment(pair, Path(mkdtemp(prefix=f"gpu-tp2-{pair.name}-")), os.environ)
    options.flags.append("--tp-size 2")
    options.env["SGLANG_DDTREE_CHECK_RANKS"] = "1"  # a rank that grows another tree ends the engine
    options.names, options.negative, options.soak = ["ddtree:15"], [], None
    report = run(f"{pair.name}-tp2", options)
    for kind in ("start.", "answers.", "path.", "output.", "walk."):
        hold(report, kind)
