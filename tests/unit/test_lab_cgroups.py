# SPDX-License-Identifier: Apache-2.0
"""Which hierarchies a machine has, and the files that are written into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.lab import cgroups
from fleet.lab.cgroups import Layout, detect
from fleet.lab.shell import LabError


def line(point: str, fstype: str, options: str, root: str = "/") -> str:
    return f"31 24 0:26 {root} {point} rw,nosuid shared:4 - {fstype} {fstype} {options}"


V2 = line("/sys/fs/cgroup", "cgroup2", "rw,nsdelegate,memory_recursiveprot")
HYBRID = "\n".join(
    [
        line("/sys/fs/cgroup", "tmpfs", "rw,mode=755"),
        line("/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
        line("/sys/fs/cgroup/cpu", "cgroup", "rw,cpu,cpuacct"),
        line("/sys/fs/cgroup/cpuset", "cgroup", "rw,cpuset"),
        line("/sys/fs/cgroup/systemd", "cgroup", "rw,name=systemd"),
        line("/sys/fs/cgroup/unified", "cgroup2", "rw"),
    ]
)


def test_version_2_only() -> None:
    found = detect(V2)
    assert found.unified
    assert found.roots == (found.tracking,) == (Path("/sys/fs/cgroup"),)
    assert found.memory == Path("/sys/fs/cgroup")


def test_hybrid_uses_every_hierarchy() -> None:
    found = detect(HYBRID)
    assert not found.unified
    assert {p.name for p in found.roots} == {"memory", "cpu", "cpuset", "systemd", "unified"}
    assert found.tracking.name == "systemd"
    assert found.memory is not None
    assert found.memory.name == "memory"
    assert [p.name for p in found.cpusets] == ["cpuset"]
    # a mount on top of another, as an own view gives it, is still one hierarchy
    assert detect(f"{HYBRID}\n{HYBRID}") == found


def test_parts_of_a_hierarchy_and_other_places_do_not_count() -> None:
    assert detect(V2 + "\n" + line("/sys/fs/cgroup/mine", "cgroup2", "rw", root="/docker/1")).roots == (
        Path("/sys/fs/cgroup"),
    )
    assert detect(V2 + "\n" + line("/mnt/x", "cgroup", "rw,memory")).unified


@pytest.mark.parametrize("text", ["", line("/sys/fs/cgroup/memory", "cgroup", "rw,memory"), "nonsense"])
def test_no_hierarchy_for_systemd(text: str) -> None:
    with pytest.raises(LabError, match="name=systemd"):
        detect(text)


def fake(folder: Path, unified: bool, controllers: str = "cpuset cpu io memory hugetlb pids rdma") -> Layout:
    """A folder that looks like a hierarchy: files appear in each new group, as the kernel makes them."""

    for group in (folder, *(folder / p for p in ("fleet-lab", "fleet-lab/lab", "fleet-lab/lab/lab-h1"))):
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.controllers").write_text(controllers)
        (group / "cgroup.subtree_control").write_text("")
        for name in ("memory.max",) if unified else ("memory.limit_in_bytes", "memory.use_hierarchy"):
            if "memory" in controllers:
                (group / name).write_text("?")
        (group / "cpuset.cpus").write_text("0-3\n" if group == folder else "\n")
        (group / "cpuset.mems").write_text("0\n" if group == folder else "\n")
    return Layout(unified, (folder,), folder, folder, () if unified else (folder,))


def test_version_2_hands_controllers_down_to_the_host_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = fake(tmp_path, unified=True)
    written: list[tuple[str, str]] = []
    real = Path.write_text

    def spy(path: Path, text: str, *args: object, **kw: object) -> int:
        written.append((str(path.relative_to(tmp_path)), text))
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", spy)
    cgroups.create(layout, "lab", "lab-h1", 6 << 30)
    wanted = ["+cpuset", "+cpu", "+io", "+memory", "+pids"]
    for group in ("", "fleet-lab/", "fleet-lab/lab/"):
        assert [t for p, t in written if p == f"{group}cgroup.subtree_control"] == wanted
    # nspawn does the rest below the host; a group that hands down may hold no process
    assert not [p for p, _ in written if p == "fleet-lab/lab/lab-h1/cgroup.subtree_control"]
    assert ("fleet-lab/lab/lab-h1/memory.max", str(6 << 30)) in written


def test_version_1_fills_cpusets_and_limits_memory(tmp_path: Path) -> None:
    layout = fake(tmp_path, unified=False)
    cgroups.create(layout, "lab", "lab-h1", 1 << 30)
    group = tmp_path / "fleet-lab/lab/lab-h1"
    assert (group / "cpuset.cpus").read_text() == "0-3\n"
    assert (group / "memory.limit_in_bytes").read_text() == str(1 << 30)
    assert (group / "memory.use_hierarchy").read_text() == "1"
    cgroups.create(layout, "lab", "lab-h1", None)
    assert (group / "memory.limit_in_bytes").read_text() == "-1"
    assert (group / "cgroup.subtree_control").read_text() == ""


def test_a_limit_without_the_controller_is_refused(tmp_path: Path) -> None:
    layout = fake(tmp_path, unified=True, controllers="cpu pids")
    cgroups.create(layout, "lab", "lab-h1", None)
    with pytest.raises(LabError, match="lab-h1: --memory needs the memory controller"):
        cgroups.create(layout, "lab", "lab-h1", 1 << 30)


def test_nothing_there(tmp_path: Path) -> None:
    layout = Layout(True, (tmp_path,), tmp_path, tmp_path, ())
    assert cgroups.processes(layout, "lab", "lab-h1") == []
    assert cgroups.leader(layout, "lab", "lab-h1") is None
    assert cgroups.memory_used(layout, "lab", "lab-h1") is None
    assert cgroups.remove(layout, "lab") == []
