# SPDX-License-Identifier: Apache-2.0
"""The lock: its language, its lint, and that the committed ones are in order."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from ansible.module_utils.sglang_venv_lock import (
    LockError,
    applies,
    body_digest,
    is_prerelease,
    lint,
    parse,
    select,
    write_marker,
)
from packaging.markers import Marker
from packaging.version import Version

from fleet import engine as engines
from fleet import lock, wheels

PYTHONS, MACHINES = ("3.11", "3.12"), ("x86_64", "aarch64")
PAIRS = list(itertools.product(PYTHONS, MACHINES))
A, B = "a" * 64, "b" * 64
GOOD = f"""# a comment
alpha==1.0 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
beta==2 ; python_version == '3.11' \\
    --hash=sha256:{A}
"""


def test_a_lock_is_read_as_written() -> None:
    first, second = parse(GOOD)
    assert (first.name, first.version, first.marker, first.hashes) == ("alpha", "1.0", "", (A, B))
    assert (str(second), second.marker) == ("beta==2", "python_version == '3.11'")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("alpha>=1.0", "line 1: expected name==version"),
        ("alpha", "line 1: expected name==version"),
        ("alpha==1.*", "line 1: expected name==version"),
        ("-e ./alpha", "line 1: expected name==version"),
        ("alpha @ https://example.org/alpha.whl", "line 1: expected name==version"),
        ("https://example.org/alpha.whl", "line 1: expected name==version"),
        ("--index-url https://example.org", "line 1: expected name==version"),
        ("-r other.txt", "line 1: expected name==version"),
        ("Alpha==1.0", "line 1: expected name==version"),
        ("alpha==1.0 \\\n    --hash=md5:abc", "line 2: expected --hash=sha256"),
        ("alpha==1.0 \\\n    --hash=sha256:abc", "line 2: expected --hash=sha256"),
        ("alpha==1.0 ; os_name == 'nt' \\\n    --hash=sha256:" + A, "is not one that bin/lock writes"),
    ],
)
def test_anything_but_exact_pins_with_sha256_is_refused(line: str, said: str) -> None:
    assert len(faults := lint(line + "\n", PYTHONS, MACHINES)) == 1
    assert said in faults[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no package at all"),
        ("alpha==1.0\n", "alpha==1.0: no sha256"),
        (f"alpha==1.0 \\\n --hash=sha256:{A} \\\n --hash=sha256:{A}\n", "listed twice"),
        (f"alpha==1.0rc1 \\\n --hash=sha256:{A}\n", "a pre-release"),
        (f"beta==1 \\\n --hash=sha256:{A}\nalpha==1 \\\n --hash=sha256:{A}\n", "alphabetical"),
        (f"alpha==1 \\\n --hash=sha256:{A}\nalpha==2 \\\n --hash=sha256:{B}\n", "also locked as 1"),
        (
            f"alpha==1 \\\n --hash=sha256:{A}\nalpha==2 ; python_version == '3.12' \\\n --hash=sha256:{B}\n",
            "alpha==2: also locked as 1 for Python 3.12",
        ),
    ],
)
def test_lint_names_the_fault(text: str, said: str) -> None:
    assert any(said in fault for fault in lint(text, PYTHONS, MACHINES))


def test_lint_lets_a_good_lock_and_a_named_prerelease_pass() -> None:
    assert lint(GOOD, PYTHONS, MACHINES) == []
    rc = f"alpha==1.0rc1 \\\n --hash=sha256:{A}\n"
    assert lint(rc, PYTHONS, MACHINES, ["Alpha"]) == []


@pytest.mark.parametrize("count", range(1, 5))
def test_a_marker_holds_exactly_where_it_was_written_for(count: int) -> None:
    for wanted in itertools.combinations(PAIRS, count):
        marker = write_marker(wanted, PYTHONS, MACHINES)
        assert [pair for pair in PAIRS if applies(marker, *pair)] == [p for p in PAIRS if p in wanted]
        if marker:  # and installers read it the same way
            for python, machine in PAIRS:
                environment = {"python_version": python, "platform_machine": machine}
                assert Marker(marker).evaluate(environment) == ((python, machine) in wanted)


VERSIONS = "1.0 0.6.8.post1 2026.10.19.post1 1.0+cu130 2.1.1.post7 4.0.0b15 1.0rc1 1.0a2 1.0.dev3 1.0b1.post2"


@pytest.mark.parametrize("version", VERSIONS.split())
def test_prereleases_are_told_as_the_packaging_library_tells_them(version: str) -> None:
    assert is_prerelease(version) == Version(version).is_prerelease


@pytest.mark.parametrize("name", engines.names())
def test_the_committed_lock_is_in_order(name: str) -> None:
    assert lock.faults(engines.load(name)) == []


@pytest.mark.parametrize("name", engines.names())
def test_every_host_gets_the_engine_itself_and_one_version_of_everything(name: str) -> None:
    engine = engines.load(name)
    for python, machine in itertools.product(engine.pythons, engine.machines):
        pins = {pin.name: pin.version for pin in select(parse(engine.lock.read_text()), python, machine)}
        assert pins["sglang"] == engine.data["version"]
        assert len(pins) > 150


@pytest.mark.parametrize("name", engines.names())
def test_only_the_named_packages_are_prereleases(name: str) -> None:
    engine = engines.load(name)
    found = {pin.name for pin in parse(engine.lock.read_text()) if Version(pin.version).is_prerelease}
    assert found == set(engine.prereleases)


@pytest.mark.parametrize("name", engines.names())
def test_no_file_of_an_engine_names_a_registry(name: str) -> None:
    for path in engines.load(name).folder.iterdir():
        assert not re.search(r"pypi|pythonhosted|index-url|find-links|trusted-host", path.read_text(), re.IGNORECASE), (
            path
        )


@pytest.fixture
def copied(tmp_path: Path) -> engines.Engine:
    """A copy of the default engine that a test may spoil."""
    shutil.copytree(engines.ROOT / "engines" / lock.DEFAULT, tmp_path / lock.DEFAULT)
    return engines.load(lock.DEFAULT, tmp_path)


def test_check_finds_a_lock_that_was_changed_by_hand(copied: engines.Engine) -> None:
    text = copied.lock.read_text()
    copied.lock.write_text(text.replace("sha256:0", "sha256:1"))
    assert any("by hand" in fault for fault in lock.faults(copied))


def test_check_finds_inputs_that_moved_on(copied: engines.Engine) -> None:
    (copied.folder / "requirements.in").write_text("sglang==0.5.12\n")
    assert any("inputs changed" in fault for fault in lock.faults(engines.load(lock.DEFAULT, copied.folder.parent)))


def test_reasons_and_dates_are_no_inputs(copied: engines.Engine) -> None:
    path = copied.folder / "overrides.yml"
    path.write_text(path.read_text().replace("reason: sglang 0.5.11 asks", "reason: it asks"))
    assert engines.load(lock.DEFAULT, copied.folder.parent).input_digest() == copied.input_digest()


def test_check_finds_a_wheel_whose_hash_the_lock_lacks(copied: engines.Engine) -> None:
    data = json.loads(copied.files.read_text())
    data["files"][7]["sha256"] = A
    copied.files.write_text(json.dumps(data))
    assert any(data["files"][7]["name"] in fault for fault in lock.faults(copied))


def test_check_finds_a_package_without_a_wheel_for_a_host(copied: engines.Engine) -> None:
    data = json.loads(copied.files.read_text())
    data["files"] = [row for row in data["files"] if not row["package"].startswith("torch==")]
    copied.files.write_text(json.dumps(data))
    assert any("torch==" in fault and "3.11 on x86_64" in fault for fault in lock.faults(copied))


def test_an_override_needs_its_reason(copied: engines.Engine) -> None:
    path = copied.folder / "overrides.yml"
    path.write_text(path.read_text().replace("    date:", "    day:"))
    with pytest.raises(engines.EngineError, match=r"lacks date"):
        engines.load(lock.DEFAULT, copied.folder.parent)


def test_an_unknown_engine_is_misuse_and_the_known_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert lock.main(["sglang-9.9", "--check"]) == 2
    assert lock.DEFAULT in capsys.readouterr().err


def test_check_answers_by_exit_code_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert lock.main([lock.DEFAULT, "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.parametrize("argv", [["--json"], ["--python", "3.11"], ["--wheelhouse", "x", "--python", "3.9"]])
def test_options_that_do_not_go_together_are_misuse(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        lock.main(argv)


def test_body_digest_sees_pins_and_hashes_only() -> None:
    assert body_digest(GOOD) == body_digest("\n# another comment\n" + GOOD.split("\n", 1)[1])
    assert body_digest(GOOD) != body_digest(GOOD.replace("1.0", "1.1"))


def test_a_wheel_is_chosen_by_the_c_library() -> None:
    tags = "cp311-abi3-manylinux_2_28_x86_64 cp311-abi3-manylinux_2_34_x86_64 cp311-abi3-manylinux_2_34_aarch64"
    names = [f"x-1-{tag}.whl" for tag in f"{tags} cp313-cp313-manylinux_2_28_x86_64 cp311-abi3-win_amd64".split()]
    assert wheels.choose(names, "3.12", "x86_64", 31) == names[0]
    assert wheels.choose(names, "3.12", "x86_64", 36) == names[1]
    assert wheels.choose(names, "3.11", "aarch64", 33) is None
    assert wheels.needed(names, "3.12", "x86_64") == {names[0]: 28, names[1]: 34}


def test_uv_is_pinned_once() -> None:
    pin = lock.pinned_uv()
    assert f"uv=={pin} " in (engines.ROOT / "requirements" / "uv.txt").read_text()


def test_a_lock_with_a_url_line_is_not_read_as_a_pin() -> None:
    with pytest.raises(LockError, match="line 2"):
        parse("# head\nalpha @ file:///tmp/alpha.whl\n")
