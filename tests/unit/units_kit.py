# SPDX-License-Identifier: Apache-2.0
"""A folder that stands for a host, for tests of deployments. systemd is a double that keeps states; files are real."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import gpu_units_deploy as d
from ansible.module_utils import gpu_units_render as r
from ansible.module_utils import gpu_units_start as begin
from ansible.module_utils import gpu_units_state as state

MODES = {
    "baseline": {"needs": [], "args": {}},
    "ddtree": {"needs": ["draft_model_path", "budget", "topk"], "args": {"budget": "{budget}"}},
}
PROFILE = {"name": "sm90", "args": {}, "env": {}}
GPUS = [{"index": i, "uuid": f"GPU-{i}"} for i in range(4)]


class Systemd:
    """States by unit. `dies` are units whose start fails; `log` is what was asked for, in order."""

    def __init__(self) -> None:
        self.active: set[str] = set()
        self.enabled: set[str] = set()
        self.dies: set[str] = set()
        self.log: list[str] = []
        self.pids: dict[str, int] = {}
        self.masked: dict[str, str] = {}

    def reload(self) -> None:
        self.log.append("reload")

    def enable(self, units: list[str]) -> None:
        self.enabled |= set(units)

    def disable(self, units: list[str]) -> None:
        self.enabled -= set(units)

    def show(self, units: list[str]) -> dict[str, dict[str, str]]:
        return {
            unit: {
                "ActiveState": "active" if unit in self.active else "inactive",
                "UnitFileState": self.masked.get(unit, "enabled" if unit in self.enabled else "disabled"),
                "ControlGroup": f"/system.slice/{unit}" if unit in self.active else "",
                "MainPID": str(self.pids.get(unit, 0)) if unit in self.active else "0",
                "InvocationID": "1" * 32,
                "Result": "exit-code" if unit in self.dies else "success",
                "ExecMainCode": "1",
                "ExecMainStatus": "1",
            }
            for unit in units
        }

    def stop(self, units: list[str], _timeout_s: float) -> None:
        self.log += [f"stop {unit}" for unit in units]
        self.active -= set(units)

    def begin_start(self, unit: str) -> subprocess.Popen[str]:
        self.log.append(f"start {unit}")
        dies = unit in self.dies
        if not dies:
            self.active.add(unit)
        script = "echo Job failed. >&2; exit 1" if dies else ""
        return subprocess.Popen(["/bin/sh", "-c", script], stderr=subprocess.PIPE, text=True)

    def journal(self, _invocation: str, lines: int) -> list[str]:
        return ["Traceback", "RuntimeError: no such kernel"][-lines:]


class Lab:
    """A host in a folder."""

    def __init__(self, root: Path) -> None:
        self.systemd = Systemd()
        self.holders: list[str] = []
        self.left: list[int] = []
        self.strayed: list[int] = []
        self.unreadable: set[str] = set()
        self.root = root
        for release in ("r1", "r2", "r3"):
            folder = root / "opt/sglang-fleet/releases" / release
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")

    def host(self) -> state.Host:
        return state.Host(
            systemd=self.systemd,
            gpu_holders=lambda uuids: [text for text in self.holders if any(uuid in text for uuid in uuids)],
            can_read=lambda path: path not in self.unreadable,
            uid=os.getuid(),
            gid=os.getgid(),
            root=self.root,
            free_timeout_s=0.1,
            lock_timeout_s=0.3,
            pids_of=lambda group: self.left if group else [],
            strays=lambda units: self.strayed,
        )

    def swap(self, wanted: dict[str, Any], keys: dict[str, str] | None = None, check: bool = False) -> dict[str, Any]:
        return d.swap(self.host(), wanted, keys or {}, check)

    def switch(self, rendered: dict[str, Any], name: str, check: bool = False) -> dict[str, Any]:
        return d.switch(self.host(), rendered, name, check)

    def start(self, **more: Any) -> dict[str, Any]:
        return begin.start(self.host(), **more)

    def rollback(self, **more: Any) -> dict[str, Any]:
        return d.rollback(self.host(), **more)

    def go(self, wanted: dict[str, Any]) -> None:
        self.swap(wanted)
        self.start()

    def live(self, name: str = "current") -> str | None:
        found = state.load(self.host(), name)
        return found and found["id"]

    def link(self, name: str) -> str | None:
        path = self.root / "opt/sglang-fleet" / name
        return str(path.readlink()) if path.is_symlink() else None

    def files(self) -> dict[str, str]:
        """All files that a deployment may have put there."""
        return {
            str(path.relative_to(self.root)): path.read_text()
            for top in ("etc", "opt/sglang-fleet/libexec")
            for path in sorted((self.root / top).rglob("*"))
            if path.is_file() and "keys" not in path.parts
        }

    def agrees(self, wanted: dict[str, Any] | None, *, previous: dict[str, Any] | None) -> None:
        """Everything on the host belongs to one deployment, and the way back is the right one."""
        assert self.files() == (wanted["files"] if wanted else {})
        assert self.link("current") == (f"releases/{wanted['release']}" if wanted else None)
        assert self.link("previous") == (f"releases/{previous['release']}" if previous else None)
        assert self.systemd.enabled == ({i["unit"] for i in wanted["instances"]} if wanted else set())
        assert self.live() == (wanted["id"] if wanted else None)
        assert self.live("previous") == (previous["id"] if previous else None)
        assert not (self.root / "var/lib/sglang-fleet/deployments/swap.json").exists()


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk proves nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _handle: None)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A host with three finished releases and nothing deployed."""
    return Lab(tmp_path)


def wanted(
    release: str, *names: str, unit: str = "v1", more: list[dict[str, Any]] | None = None, **keys: Any
) -> dict[str, Any]:
    instances = [{"name": name, "gpus": [i], "port": 30000 + i, **keys} for i, name in enumerate(names or ("a",))]
    return r.render(
        instances=instances + (more or []),
        defaults={"model_path": "/m", "draft_model_path": "/d"},
        profile=PROFILE,
        modes=MODES,
        gpus=GPUS,
        release=release,
        common={r.UNIT: f"[Unit]\n# {unit}\n", f"{r.LIBEXEC}/sglang_ready.py": "pass\n"},
        start_timeout=900,
    )
