# SPDX-License-Identifier: Apache-2.0
"""The first command that a newcomer runs, as it is, on a host of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.timeout(1800)
def test_quickstart_ends_with_a_verdict_and_takes_its_host_away(repo: Path) -> None:
    lab = f"t{os.getpid()}-quick"
    try:
        argv = [repo / "bin/quickstart", "--lab", lab, "--json", "--down"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
        report = json.loads(done.stdout)
        assert report["ok"]
        assert set(report["seconds"]) == {"setup", "lab", "play", "smoke", "total"}
        assert report["play"]["changed"] > 0
        assert report["play"]["tasks"] <= 60
        (instance,) = report["verdict"]["instances"]
        assert instance["mode"] == "ddtree"
        assert instance["requests"] >= 16
        assert instance["identical"] == instance["requests"]
        assert instance["tokens_per_step"] > 1
        ids = {check["id"] for check in report["verdict"]["checks"]}
        assert {"backend.reported", "backend.attention", "backend.draft", "backend.sampling", "backend.grammar"} <= ids
        assert Path(report["log"]).read_text().count("PLAY RECAP") == 1
        listed = subprocess.run(
            [repo / "bin/lab", "list", "--all", "--json"], capture_output=True, text=True, check=True
        )
        assert lab not in listed.stdout
    finally:
        subprocess.run([repo / "bin/lab", "down", "--lab", lab], stdin=subprocess.DEVNULL, capture_output=True)
