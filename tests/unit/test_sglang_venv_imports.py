# SPDX-License-Identifier: Apache-2.0
"""Do a venv's packages fit the engine? A small engine with small packages, broken one by one. The real one: tests/patches."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import sglang_venv_imports as imports
from ansible.module_utils.sglang_venv_base import BuildError
from ansible.module_utils.sglang_venv_build import build

from tests.unit import release_kit as kit
from tests.unit.test_sglang_venv_elf import make_library

Data = dict[str, Any]
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
CLAIM = {"why": "It is needed.", "source": "https://example.org/1", "date": "2026-12-01"}
DATA: Data = {
    "packages": [{"package": "gram-mar", "module": "grammar", "symbols": {"grammar": ["Tag"]}, **CLAIM}],
    "optional": [{"file": "other.py", "module": "grammar.old", "reason": "another way"}],
    "bounds": [{"package": "kernels", "from": "0.12.0", "below": "0.13", **CLAIM}],
    "same": [{"packages": ["flash", "flash-cubin"], **CLAIM}],
}
FILES = {
    "sglang/srt/constrained/backend.py": "from grammar import Tag, Compiler\nimport grammar.sub\n",
    "sglang/srt/other.py": "try:\n    from grammar.old import Gone\nexcept ImportError:\n    from grammar.sub import Here\n",
    "sglang/srt/far.py": "from grammar_of_others import Nothing\nfrom . import grammar\n",
    "grammar/__init__.py": "from .tag import *\nfrom .sub import Here as Compiler\n",
    "grammar/tag.py": "class Tag:\n    pass\n",
    "grammar/sub.py": "if True:\n    try:\n        def Here(): ...\n    except ImportError:\n        Here = None\n",
}
VERSIONS = {
    "sglang": "0.5.11",
    "gram-mar": "1.2",
    "kernels": "0.12.3",
    "flash": "0.6.8.post1",
    "flash-cubin": "0.6.8.post1",
}
METADATA = """\
Metadata-Version: 2.1
Name: sglang
Version: 0.5.11
Requires-Dist: gram_mar==1.2
Requires-Dist: kernels
Requires-Dist: open>=3
Requires-Dist: elsewhere==1.0; sys_platform == "win32"
Requires-Dist: tracing==2.0; extra == "tracing"
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, text in {**FILES, "sglang-0.5.11.dist-info/METADATA": METADATA}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def faults(site: Path, data: Data | None = None, **versions: str) -> list[str]:
    changed = {**VERSIONS, **{name.replace("_", "-"): value for name, value in versions.items()}}
    return imports.audit_imports(site, DATA if data is None else data, changed).faults


def test_a_venv_that_fits_has_no_fault_and_says_what_was_looked_at(site: Path) -> None:
    found = imports.audit_imports(site, DATA, VERSIONS)
    assert found.faults == []
    assert (found.pins, found.imports, found.symbols) == (3, 5, 0)
    assert set(found.data()) == {"faults", "pins", "imports", "symbols", "imported", "not_imported"}


def test_an_engine_without_data_is_not_judged(site: Path) -> None:
    assert imports.audit_imports(site, {}, VERSIONS) == imports.ImportAudit()


def test_a_symbol_that_is_gone_names_package_version_place_and_fix(site: Path) -> None:
    (site / "grammar/tag.py").write_text("class OldTag:\n    pass\n")
    (said,) = faults(site)
    assert said == (
        "gram-mar 1.2 has no Tag in module grammar, which the engine needs; expected gram-mar 1.2. It is needed. "
        "(https://example.org/1) lock gram-mar 1.2 (engines/<engine>/overrides.yml, then bin/lock) and build again"
    )


def test_what_only_the_engines_source_imports_is_looked_for(site: Path) -> None:
    (site / "grammar/__init__.py").write_text("from .tag import *\n")
    (said,) = faults(site)
    assert "has no Compiler in module grammar, which sglang/srt/constrained/backend.py:1 imports" in said


def test_a_module_that_is_gone_is_named(site: Path) -> None:
    (site / "grammar/sub.py").unlink()
    said = faults(site)
    assert len(said) == 2
    assert all("has no module grammar.sub" in line for line in said)


def test_an_import_inside_try_counts_unless_it_is_listed(site: Path) -> None:
    """A bare except is how an old package goes unnoticed."""
    data = {**DATA, "optional": []}
    (said,) = faults(site, data)
    assert "has no module grammar.old, which sglang/srt/other.py:2 imports" in said


BINDINGS = {
    "lazy": "def __getattr__(name): ...\n",
    "annotated": "Tag: type = object\nCompiler = None\n",
    "as": "import os as Tag\nfrom os import path as Compiler\n",
    "tuple": "with open('x') as f:\n    (Compiler, Tag) = 1, 2\n",
}


@pytest.mark.parametrize("text", BINDINGS.values(), ids=BINDINGS)
def test_every_way_to_bind_a_name_is_known(site: Path, text: str) -> None:
    (site / "grammar/__init__.py").write_text(text)
    assert faults(site) == []


def test_a_native_module_and_a_circle_are_not_judged(site: Path) -> None:
    (site / "grammar/__init__.py").write_text("from .tag import *\nfrom ._core import *\n")
    (site / "grammar/_core.cpython-311.so").touch()
    (site / "grammar/tag.py").write_text("from grammar import *\n")
    assert faults(site) == []


def test_a_package_that_is_not_installed_is_not_judged_unless_the_engine_pins_it(site: Path) -> None:
    few = {name: version for name, version in VERSIONS.items() if name == "sglang"}
    (said,) = imports.audit_imports(site, DATA, few).faults
    assert said.startswith("gram-mar: sglang 0.5.11 asks for 1.2, installed is not at all; lock gram-mar 1.2 ")
    assert imports.audit_imports(site, DATA, {"anyio": "4"}).faults == []


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"gram_mar": "1.1"}, "gram-mar: sglang 0.5.11 asks for 1.2, installed is 1.1; lock gram-mar 1.2"),
        ({"kernels": "0.15.2"}, "kernels 0.15.2: expected 0.12.0 or newer and older than 0.13. It is needed."),
        ({"kernels": "0.11.9"}, "kernels 0.11.9: expected 0.12.0 or newer"),
        ({"flash_cubin": "0.6.7"}, "flash 0.6.8.post1, flash-cubin 0.6.7: expected one version."),
    ],
)
def test_a_version_that_does_not_fit_is_named(site: Path, versions: dict[str, str], words: str) -> None:
    (said,) = faults(site, **versions)
    assert words in said
    assert "build again" in said


def test_a_local_part_of_a_version_changes_nothing(site: Path) -> None:
    assert faults(site, gram_mar="1.2+cu130") == []


@needs_gcc
def test_a_symbol_of_another_torch_is_named(site: Path) -> None:
    row = {"package": "my-kernel", "files": "my_kernel/*.so", "against": "torch", "libraries": "torch/lib/lib*.so*",
           "symbols": "_Z.*(2at|3c10|5torch)", **CLAIM}  # fmt: skip
    data: Data = {"native": [row]}
    for folder in ("my_kernel", "torch/lib"):
        (site / folder).mkdir(parents=True)
    make_library(
        site / "my_kernel/ops.so", code="extern int _ZN3c104warnEv(void); int f(void) { return _ZN3c104warnEv(); }\n"
    )
    make_library(site / "torch/lib/libc10.so", code="int _ZN3c104warnEv(void) { return 1; }\n")
    versions = {"my-kernel": "0.4", "torch": "2.11.0"}
    found = imports.audit_imports(site, data, versions)
    assert (found.faults, found.symbols) == ([], 1)
    make_library(site / "torch/lib/libc10.so", code="int _ZN3c104warnEi(int a) { return a; }\n")
    (said,) = imports.audit_imports(site, data, versions).faults
    assert said.startswith(
        "my_kernel/ops.so of my-kernel 0.4 needs _ZN3c104warnEv, which torch 2.11.0 does not have; expected "
    )


def test_imports_tell_who_failed_and_why(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    (tmp_path / "bad.py").write_text("raise OSError('undefined symbol: x')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    assert imports.import_faults(Path(sys.executable), ["good"], env) == []
    (said,) = imports.import_faults(Path(sys.executable), ["good", "bad", "json"], env)
    assert said.startswith("bad: OSError: 'undefined symbol: x'; lock the package")
    (tmp_path / "worse.py").write_text("import os; os._exit(3)\n")
    (said,) = imports.import_faults(Path(sys.executable), ["worse"], env)
    assert said.startswith("importing worse ended with exit code 3")
    assert not list(tmp_path.rglob("__pycache__"))


# -- in a build --------------------------------------------------------------------------------------------------------


def plan_with(top: Path, data: Data, device: str = "sm90") -> Data:
    folder = kit.make_engine(top)
    (folder / "imports.yml").write_text(yaml.safe_dump(data))
    profile = {
        "name": device,
        "files": {},
        "backends": [{"id": "row", "env": {}, "backends": {"attention": {"allowed": {"triton": "x"}}}}],
    }
    return kit.make_plan(folder, profile)


def test_a_build_keeps_the_verdict_and_the_rows_and_imports_on_a_gpu_host(tmp_path: Path) -> None:
    plan = plan_with(
        tmp_path,
        {"imports": ["alpha", "absent"], "bounds": [{"package": "alpha", "from": "1.0", "below": "2", **CLAIM}]},
    )
    manifest = build(plan, kit.make_options(tmp_path))["manifest"]
    assert (manifest["imports"]["imported"], manifest["imports"]["pins"]) == (["alpha"], 1)
    assert [row["id"] for row in manifest["backends"]] == ["row"]


def test_a_build_for_the_cpu_profile_says_why_nothing_was_imported(tmp_path: Path) -> None:
    manifest = build(plan_with(tmp_path, {"imports": ["alpha"]}, "cpu"), kit.make_options(tmp_path))["manifest"]
    assert manifest["imports"]["imported"] == []
    assert manifest["imports"]["not_imported"].startswith("profile cpu: ")


UNFIT: dict[str, Data] = {
    "alpha 1.0: expected 1.1 or newer": {"bounds": [{"package": "alpha", "from": "1.1", "below": "2", **CLAIM}]},
    "has no Gone in module alpha": {
        "packages": [{"package": "alpha", "module": "alpha", "symbols": {"alpha": ["Gone"]}, **CLAIM}]
    },
}


@pytest.mark.parametrize("words", UNFIT)
def test_a_build_that_does_not_fit_fails_and_leaves_nothing(tmp_path: Path, words: str) -> None:
    plan, options = plan_with(tmp_path, UNFIT[words]), kit.make_options(tmp_path)
    with pytest.raises(BuildError, match=rf"^packages of the release do not fit sglang-0: .*{words}"):
        build(plan, options)
    assert [path.name for path in (tmp_path / "root/releases").iterdir()] == [".lock"]


def test_a_package_that_cannot_be_imported_fails_the_build(tmp_path: Path) -> None:
    folder = kit.make_engine(tmp_path, {"alpha_core/__init__.py": b"raise ImportError('built for another torch')\n"})
    (folder / "imports.yml").write_text(yaml.safe_dump({"imports": ["alpha", "alpha_core"]}))
    with pytest.raises(BuildError, match="do not fit sglang-0: alpha_core: ImportError: 'built for another torch'"):
        build(kit.make_plan(folder), kit.make_options(tmp_path))
    assert [path.name for path in (tmp_path / "root/releases").iterdir()] == [".lock"]


def test_rows_that_decide_otherwise_are_another_release(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, {})
    row: Data = {"id": "row", "env": {}, "backends": {"attention": {"allowed": {"triton": "another source"}}}}

    def ident(rows: list[Data]) -> str:
        folder = tmp_path / "engines" / kit.NAME
        return str(kit.make_plan(folder, {"name": "sm90", "files": {}, "backends": rows})["id"])

    assert ident([row]) == plan["id"], "a source is no input"
    assert ident([{**row, "env": {"A": "1"}}]) != plan["id"]
    row["backends"]["attention"]["allowed"]["fa3"] = "x"
    assert ident([row]) != plan["id"]
