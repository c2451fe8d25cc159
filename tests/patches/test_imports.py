# SPDX-License-Identifier: Apache-2.0
"""imports.yml of the engine on the real wheels: they fit, and a package that does not is found, in a copy broken on purpose."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import sglang_venv_imports as imports
from ansible.module_utils import sglang_venv_release as releases

from tests import venv

DATA: dict[str, Any] = yaml.safe_load((venv.ROOT / "engines" / venv.ENGINE / "imports.yml").read_text())


@pytest.fixture
def view(engine_site: Path, tmp_path: Path) -> Path:
    """The real site-packages by links, of which a test replaces what it breaks."""
    for path in engine_site.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def own(view: Path, name: str) -> Path:
    """A copy of a package in place of the link to it."""
    real = (view / name).resolve()
    (view / name).unlink()
    shutil.copytree(real, view / name, ignore=shutil.ignore_patterns("*.so"))
    return view / name


def change(path: Path, pattern: str, text: str) -> None:
    new, count = re.subn(pattern, text, path.read_text(), flags=re.M)
    assert count, f"{path} has no {pattern}"
    path.write_text(new)


def faults(site: Path) -> list[str]:
    return imports.audit_imports(site, DATA, releases.installed(site)).faults


def test_the_release_says_that_its_packages_fit(release: Path) -> None:
    manifest = json.loads((release / "manifest.json").read_text())
    found = manifest["imports"]
    assert found["faults"] == []
    assert found["pins"] >= 15
    assert found["imports"] > 250
    assert found["symbols"] > 300
    assert found["not_imported"].startswith("profile cpu")
    assert manifest["seconds"]["imports"] < 20
    assert [row["id"] for row in manifest["backends"]] == ["cpu", "cpu-hybrid"]
    assert manifest["backends"] == venv.profile("cpu")["backends"]


def test_every_exception_is_one_that_is_needed(engine_site: Path) -> None:
    modules = imports.Modules(engine_site)
    packages = [row["module"] for row in DATA["packages"]]
    missing = {
        (where.partition(":")[0], module)
        for module, name, where in imports.engine_imports(engine_site, packages)
        if modules.file(module) is None or (name and not modules.has(module, name))
    }
    assert missing == {(row["file"], row["module"]) for row in DATA["optional"]}


def test_imports_found_by_pattern_are_those_that_a_parser_finds(engine_site: Path) -> None:
    packages = [row["module"] for row in DATA["packages"]]
    root, parsed = engine_site / "sglang/srt", []
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        if not any(name.encode() in text for name in packages):
            continue
        for node in ast.walk(ast.parse(text)):
            where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] in packages:
                parsed += [(node.module, alias.name, where) for alias in node.names]
            elif isinstance(node, ast.Import):
                parsed += [(alias.name, "", where) for alias in node.names if alias.name.split(".")[0] in packages]
    found = list(imports.engine_imports(engine_site, packages))
    assert [one for one in parsed if one not in found] == []
    (example,) = (one for one in found if one not in parsed)
    assert example[2].startswith("utils/custom_op.py:"), "the one that stands in a docstring"


def old_xgrammar(view: Path) -> None:
    package = own(view, "xgrammar")
    change(package / "__init__.py", r"^from \.structural_tag import StructuralTag\n", "")
    own(view, "xgrammar-0.1.32.dist-info")
    change(view / "xgrammar-0.1.32.dist-info/METADATA", r"^Version: .*", "Version: 0.1.30")


def old_flashinfer(view: Path) -> None:
    change(own(view, "flashinfer") / "sampling.py", r"^def min_p_sampling_from_probs\(", "def min_p_sampling(")


def flashinfer_of_two_versions(view: Path) -> None:
    own(view, "flashinfer_cubin-0.6.8.post1.dist-info")
    change(view / "flashinfer_cubin-0.6.8.post1.dist-info/METADATA", r"^Version: .*", "Version: 0.6.7")


def new_kernels(view: Path) -> None:
    own(view, "kernels-0.12.3.dist-info")
    change(view / "kernels-0.12.3.dist-info/METADATA", r"^Version: .*", "Version: 0.15.2")


def other_torch(view: Path) -> None:
    """One without the names of its larger libraries, as another version lacks some."""
    real = (view / "torch").resolve()
    (view / "torch").unlink()
    (view / "torch/lib").mkdir(parents=True)
    for library in (real / "lib").glob("lib*.so*"):
        if library.name.startswith("libc10"):
            (view / "torch/lib" / library.name).symlink_to(library)


def old_kernel_package(view: Path) -> None:
    package = own(view, "sgl_kernel")
    change(package / "__init__.py", r"^    tree_speculative_sampling_target_only,\n", "")


BROKEN: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "xgrammar without StructuralTag": (
        old_xgrammar,
        [
            r"^xgrammar: sglang 0\.5\.11 asks for 0\.1\.32, installed is 0\.1\.30; lock xgrammar 0\.1\.32 ",
            r"^xgrammar 0\.1\.30 has no StructuralTag in module xgrammar, .* expected xgrammar 0\.1\.32\. .*pull/21722",
        ],
    ),
    "flashinfer without a sampler": (
        old_flashinfer,
        [r"has no min_p_sampling_from_probs in module flashinfer\.sampling"],
    ),
    "flashinfer and other kernels of it": (
        flashinfer_of_two_versions,
        [
            r"^flashinfer-cubin: sglang 0\.5\.11 asks for 0\.6\.8\.post1, installed is 0\.6\.7",
            r"0\.6\.7: expected one version",
        ],
    ),
    "kernels that transformers cannot read": (
        new_kernels,
        [r"^kernels 0\.15\.2: expected 0\.12\.0 or newer and older than 0\.13"],
    ),
    "kernels for another torch": (
        other_torch,
        [
            r"^sgl_kernel/\S+ of sglang-kernel 0\.4\.2 needs _Z\w+ and \d+ more symbols, which torch 2\.11\.0 does not have"
        ]
        * 5,
    ),
    "an older kernel package": (
        old_kernel_package,
        [r"has no tree_speculative_sampling_target_only in module sgl_kernel"],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_package_that_does_not_fit_is_found(view: Path, what: str) -> None:
    breaks, expected = BROKEN[what]
    breaks(view)
    found = faults(view)
    assert len(found) == len(expected), found
    for line, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, line), line
        assert line.endswith("and build again")


def test_a_view_that_nobody_broke_fits(view: Path) -> None:
    assert faults(view) == []


def test_what_is_imported_on_gpu_hosts_can_be_imported_here_too(release: Path) -> None:
    """With the cpu profile's stub of the driver; the last one shows that a failure is told."""
    env = {name: value.replace("{release}", str(release)) for name, value in venv.profile("cpu")["env"].items()}
    python = release / "venv/bin/python"
    (said,) = imports.import_faults(python, [*DATA["imports"], "fleet_absent"], env)
    assert said.startswith("fleet_absent: ModuleNotFoundError")


def test_every_row_has_a_source_and_a_date() -> None:
    rows = [*DATA["packages"], *DATA["bounds"], *DATA["same"], *DATA["native"]]
    for row in rows:
        assert row["source"].startswith("https://"), row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row
        assert row["why"].endswith("."), row
