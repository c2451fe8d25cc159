# SPDX-License-Identifier: Apache-2.0
"""What the benchmark is asked for: arms, flags, numbers, instances; bad input is one line and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_core
import bench_files
import pytest

from fleet.bench import arms, asked, cli, hosts, instance
from fleet.bench.arms import Misuse

REPO = Path(__file__).resolve().parents[2]
NANO = REPO / "models/nano"


def settings(*words: str) -> Any:
    argv = ["--pair", str(NANO), "--out", "out", *words]
    return cli.settings(cli.arguments(argv), argv)


def test_every_kind_is_served_as_hosts_serve_it() -> None:
    found = {
        arm.name: arm for arm in arms.arms(["baseline", "dflash:8", "ddtree-shadow:7", "ddtree:auto", "ngram"], NANO)
    }
    assert found["baseline"].flags == {}
    assert found["dflash:8"].flags == {
        "speculative-algorithm": ["DFLASH"], "speculative-draft-model-path": [str(NANO)], "speculative-dflash-block-size": ["8"]
    }  # fmt: skip
    assert "speculative-ddtree-shadow-linear" in found["ddtree-shadow:7"].flags
    assert found["ddtree:auto"].flags["speculative-ddtree-budget"] == ["auto"]
    assert found["ddtree:auto"].flags["speculative-ddtree-topk"] == ["8"]
    assert found["ngram"].flags == {"speculative-algorithm": ["NGRAM"]} and found["ngram"].mode is None
    assert [arm.speculates for arm in found.values()] == [False, True, True, True, True]


def test_the_default_arms_are_in_the_table() -> None:
    assert [arm.name for arm in arms.arms(cli.ARMS.split(","), NANO)] == cli.ARMS.split(",")
    assert all(set(row) <= {"summary", "mode", "number", "args"} for row in arms.table().values())


def test_own_flags_win_and_labels_tell_apart() -> None:
    one, two = arms.arms(["ddtree:22", "ddtree:22@narrow=--speculative-ddtree-topk 4 --trust-remote-code"], NANO)
    assert one.flags["speculative-ddtree-topk"] == ["8"] and two.flags["speculative-ddtree-topk"] == ["4"]
    assert two.flags["trust-remote-code"] == [] and two.slug == "ddtree-22@narrow"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--arms", "medusa"], "unknown arm 'medusa'; known: baseline, "),
        (["--arms", "ddtree:"], "unknown arm 'ddtree:'"),
        (["--arms", "baseline:3"], "arm baseline has no number"),
        (["--arms", "dflash:auto"], "arm dflash takes a number, not auto"),
        (["--arms", "ddtree:7,ddtree:7"], "two arms are named ddtree:7; tell them apart with a label"),
        (["--arms", ""], "no arm to measure"),
        (["--arm", "baseline=x --y"], "'x' comes before any --flag"),
        (["--soak", "ngram", "--arms", "baseline"], "--soak 'ngram' is none of the arms baseline"),
        (["--arms", "ddtree:7,dflash"], "the reference ddtree:7 drafts, and such an engine gives no log-probabilities"),
        (["--reference", "dflash:16"], "the reference dflash:16 drafts"),
        (["--reference", "x"], "--reference 'x' is none of the arms"),
        (["--negative", "x"], "--negative 'x' is none of the arms"),
        (["--concurrency", "1,x"], "--concurrency '1,x' is no list of numbers"),
        (["--concurrency", "0"], "numbers from 1 on, each once"),
        (["--rounds", "1:2"], "--rounds '1:2' has to give a number from 1 on for each of 1,4,8,16"),
        (["--requests", "many"], "--requests 'many' is neither a number nor like 1:10,8:5"),
        (["--new", "0"], "--new has to be at least 1"),
        (["--near-tie", "-1"], "--near-tie can't be negative"),
        (["-i", "x"], "-i names an inventory, but no host is named with -l"),
        (["-l", "ct200", "--arms", "medusa"], "unknown arm 'medusa'"),
        (["--engine-env", "A"], "--engine-env 'A' is not K=V"),
        (["--prompts", "/nowhere"], "prompts /nowhere: FileNotFoundError"),
        (["--target", "/nowhere"], "/nowhere is no model folder: config.json is missing"),
    ],
)
def test_misuse(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--pair", str(NANO), "--out", "out", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("bench: ") and error.count("\n") == 1


def test_a_drafter_is_needed_by_those_that_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--target", str(NANO / "target"), "--out", "out", "--arms", "ddtree:7"]) == 2
    assert "arm 'ddtree:7' needs a drafter" in capsys.readouterr().err
    assert cli.main(["--out", "out"]) == 2
    assert "no model; name a folder" in capsys.readouterr().err


def test_numbers_by_concurrency() -> None:
    got = settings("--concurrency", "1,8", "--rounds", "1:12,8:3")
    assert got.rounds == {1: 12, 8: 3} and got.requests == {1: 6, 8: 16}
    assert settings("--requests", "20").requests == dict.fromkeys((1, 4, 8, 16), 20)


def test_all_arms_have_the_same_base() -> None:
    got = settings(
        "--engine-flags=--context-length 4096 --page-size=16", "--concurrency", "1,4", "--engine-env", "A=b=c"
    )
    assert got.base["attention-backend"] == ["triton"] and got.base["sampling-backend"] == ["pytorch"]
    assert got.base["context-length"] == ["4096"] and got.base["page-size"] == ["16"], "the caller's flags win"
    assert got.base["max-running-requests"] == got.base["cuda-graph-max-bs"] == ["4"]
    assert int(got.base["max-total-tokens"][0]) >= 4 * (256 + 200)
    assert "disable-radix-cache" in got.base and "disable-radix-cache" not in settings("--radix").base
    assert "disable-cuda-graph" not in got.base and got.env == {"A": "b=c"}
    assert settings("--soak", "ngram", "--concurrency", "1").base["max-running-requests"] == ["8"]


def test_own_prompts() -> None:
    rows = asked.prompts(cli.PROMPTS, None)
    assert len(rows) == 64 == len({row["id"] for row in rows}) == len({row["prompt"] for row in rows})
    starts = [row["prompt"][:24] for row in rows]
    assert len(set(starts)) > 56, "different beginnings, or a prefix cache would answer"
    bundled = {row["prompt"] for row in asked.prompts(NANO / "prompts.jsonl", None)}
    assert not bundled & {row["prompt"] for row in rows}


def test_on_hosts_the_rest_goes_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Play:
        def __init__(self, argv: list[str], **_: Any) -> None:
            seen.append(argv)

        def wait(self) -> int:
            return 2

    monkeypatch.setattr(hosts.subprocess, "Popen", Play)
    words = ["-l", "ct200", "-i", "inv", "--instance", "gpu1", "--out", str(tmp_path), "--arms", "baseline,ddtree:15"]
    assert cli.main([*words, "--engine-flags=--context-length 4096"]) == 1
    (argv,) = seen
    assert argv[:6] == ["ansible-playbook", str(REPO / "playbooks/bench.yml"), "-i", "inv", "-l", "ct200"]
    assert json.loads(argv[7]) == {
        "bench_arguments": ["--arms", "baseline,ddtree:15", "--engine-flags=--context-length 4096"],
        "bench_out": str(tmp_path), "bench_instance": "gpu1",
    }  # fmt: skip


def test_the_role_carries_all_that_the_core_reads(tmp_path: Path) -> None:
    """What the lookup lays out runs there, alone."""
    (files,) = bench_core.LookupModule().run([str(cli.PROMPTS)])
    folder = tmp_path / "core"
    bench_files.apply(folder, files, *bench_files.differences(folder, files))
    pair = ["--target", str(NANO / "target"), "--draft", str(NANO / "draft")]
    program = [sys.executable, "-m", "fleet.bench", *pair, "--out", str(tmp_path / "out"), "--arms", "baseline,x"]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, "bench: unknown arm 'x'")
    assert (folder / "prompts.jsonl").read_text() == cli.PROMPTS.read_text()


def test_files_of_a_folder_are_exactly_these(tmp_path: Path) -> None:
    folder = tmp_path / "core"
    files = {"a/b.py": "1\n", "c.yml": "x"}
    bench_files.apply(folder, files, *bench_files.differences(folder, files))
    assert bench_files.differences(folder, files) == ([], [])
    (folder / "a/b.py").write_text("2\n")
    (folder / "c.yml").chmod(0o600)
    (folder / "old").mkdir()
    (folder / "old/d").write_text("")
    assert bench_files.differences(folder, files) == (["a/b.py", "c.yml"], ["old/d"])
    bench_files.apply(folder, files, *bench_files.differences(folder, files))
    assert bench_files.differences(folder, files) == ([], [])
    assert not (folder / "old").exists() and (folder / "a/b.py").read_text() == "1\n"
    for path in ("/etc/x", "../x", "a/../../x", ""):
        with pytest.raises(ValueError, match="is not a path below"):
            bench_files.differences(folder, {path: ""})


YAML = """\
attention-backend: "flashinfer"
disable-cuda-graph: false
host: "127.0.0.1"
max-running-requests: 64
model-path: "/srv/models/target"
port: 30000
speculative-algorithm: "DDTREE"
speculative-ddtree-budget: 15
speculative-draft-model-path: "/srv/models/drafter"
trust-remote-code: true
"""
ENV = '# written\nCUDA_VISIBLE_DEVICES="GPU-1"\nFLEET_API_KEY_FILE="/etc/key"\nPATTERN="a\\\\b\\$c"\n'


def test_an_instance_gives_models_flags_and_environment(tmp_path: Path) -> None:
    (tmp_path / "gpu0.yaml").write_text(YAML)
    (tmp_path / "gpu0.env").write_text(ENV)
    got = instance.load(tmp_path / "gpu0.yaml")
    assert (got.target, got.draft) == (Path("/srv/models/target"), Path("/srv/models/drafter"))
    assert got.flags == {"attention-backend": ["flashinfer"], "trust-remote-code": []}
    assert got.env == {"CUDA_VISIBLE_DEVICES": "GPU-1", "PATTERN": "a\\b$c"}


@pytest.mark.parametrize("text", ["", "- a", "model-path: [", "port: 1"])
def test_an_instance_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    (tmp_path / "x.env").write_text("")
    with pytest.raises(Misuse, match="name its YAML"):
        instance.load(tmp_path / "x.yaml")


def test_needs_nothing_that_a_bare_machine_lacks() -> None:
    """Everything that the local core imports is its own, the standard library, or PyYAML."""
    program = """
import sys
import fleet.bench.cli, fleet.bench.report, fleet.bench.plot
known = {*sys.stdlib_module_names, "fleet", "yaml", "_yaml", "_distutils_hack"}
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
print(*sorted(n for n, file in files.items() if n.partition(".")[0] not in known and "site-packages" in file))
print(*sorted(n for n in files if n.startswith("fleet.") and not n.startswith("fleet.bench")))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "fleet.importer"]
