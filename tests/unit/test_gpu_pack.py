# SPDX-License-Identifier: Apache-2.0
"""What bin/gpu-pack makes, unpack.py unpacks and tests/gpu/run.sh runs, with trees of a few files."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sglang_venv_lock import Pin, parse, select

from fleet import engine as engines
from fleet.gpu import pack

RULE: dict[str, Any] = {
    "provided": {"packages": "torch nvidia-*"},
    "unused": [{"packages": "ipython"}],
    "drop": [{"files": ["*.pyc", "bin/*", "pkg/big_*"]}],
    "stand_ins": {"IPython/__init__.py": "X = 1\n"},
}
LIMIT = 20_000


def pin(name: str) -> Pin:
    return Pin(name, "1", "", ("0" * 64,))


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def write(root: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


def read(root: Path) -> dict[str, bytes]:
    return {f.relative_to(root).as_posix(): f.read_bytes() for f in root.rglob("*") if f.is_file()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pack, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


ENGINE = {"sglang/__init__.py": "VERSION = 1\n", "sglang/worker.py": "plain\n", "sglang/lib.so": noise(45_000)}
PAIR = {"target/config.json": "{}", "draft/config.json": "{}", "target/model.safetensors": noise(15_000, 1)}


def packed(out: Path, series: Mapping[str, bytes | str], source: Path) -> list[Path]:
    """A pack of a small engine, one pair and a series of these files."""

    def tree(name: str, place: str, files: Mapping[str, bytes | str]) -> pack.Archive:
        shutil.rmtree(source / name, ignore_errors=True)
        root = write(source / name, files)
        digest = pack.digest_of([name, sorted((k, len(v), str(v)) for k, v in files.items())])
        return pack.archive(name, place, digest, LIMIT, lambda tar, _: pack.add_tree(tar, root))

    made = [tree("engine", "site", ENGINE), tree("pair-p", "pairs/p", PAIR), tree("series", "site", series)]
    manifest = {
        "series": made[-1].digest,
        "env": {"TORCH_CUDA_ARCH_LIST": "9.0a"},
        "archives": [{"name": a.name, "place": a.place, "digest": a.digest, "files": a.files,
                      "pieces": [vars(p) for p in a.pieces]} for a in made],
    }  # fmt: skip
    return pack.lay_out(out, made, manifest, LIMIT)


def unpack(load: Path, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, load / "unpack.py", home], capture_output=True, text=True, env={**os.environ, **env}
    )


# --- what travels


def test_only_what_the_machine_lacks_and_the_engine_needs_travels() -> None:
    pins = [pin(name) for name in ("sglang", "torch", "nvidia-nccl-cu13", "ipython", "xgrammar")]
    assert [p.name for p in pack.travelling(pins, RULE)] == ["sglang", "xgrammar"]


def test_a_package_that_left_the_lock_is_reported() -> None:
    with pytest.raises(pack.PackError, match="no package ipython"):
        pack.travelling([pin("torch"), pin("nvidia-nccl")], RULE)


@pytest.mark.parametrize("name", [p.stem for p in pack.HERE.glob("sglang-*.yml")])
def test_rules_fit_their_lock_and_say_why(name: str) -> None:
    rule, engine = pack.rules(name), engines.load(name)
    for python in rule["machine"]["python"]:
        pins = select(parse(engine.lock.read_text()), python, rule["machine"]["machine"])
        names = {p.name for p in pack.travelling(pins, rule)}
        assert {"sglang", "sglang-kernel", "transformers", "tokenizers", "xgrammar"} <= names
        assert not names & {"torch", "triton", "numpy", "nvidia-cublas", "flashinfer-cubin"}
    assert rule["provided"]["why"] and rule["provided"]["source"] and rule["provided"]["date"]
    assert all(row["why"] for row in [*rule["unused"], *rule["drop"]])


def test_prune_drops_files_and_empty_folders_and_adds_stand_ins(tmp_path: Path) -> None:
    site = write(tmp_path / "site", {"bin/x": "", "pkg/a.py": "", "pkg/big_1.so": "", "pkg/sub/b.pyc": ""})
    pack.prune(site, RULE)
    assert set(read(site)) == {"pkg/a.py", "IPython/__init__.py"}
    assert not (site / "bin").exists()
    with pytest.raises(pack.PackError, match="would replace a real file"):
        pack.prune(site, RULE)


def test_loads_are_few_and_small_enough() -> None:
    pieces = [pack.Piece(str(i), size, "") for i, size in enumerate((58, 4, 43, 28, 15, 15))]
    groups = pack.loads(pieces, 58)
    assert all(sum(p.size for p in group) <= 58 for group in groups)
    assert sorted(p.name for group in groups for p in group) == list("012345")
    assert len(groups) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--engine", "sglang-9"], "sglang-9"),
        (["--python", "3.10"], "Python 3.10: the lock of sglang-0.5.11 is for 3.11, 3.12"),
        (["--piece-mib", "0"], "--piece-mib 0"),
    ],
)
def test_misuse_is_one_line_and_writes_nothing(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack.main(["--out", str(tmp_path / "out"), *argv]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_pair_has_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(pack.PackError, match=r"no target/config\.json"):
        pack.pair_archive(tmp_path, LIMIT)


# --- there and back


def test_archives_are_made_once(tmp_path: Path) -> None:
    packed(tmp_path / "out", {"sglang/new.py": "1\n"}, tmp_path / "src")
    before = {f: f.stat().st_mtime_ns for f in pack.CACHE.rglob("*.xz.*")}
    packed(tmp_path / "out", {"sglang/new.py": "2\n"}, tmp_path / "src")
    after = {f: f.stat().st_mtime_ns for f in pack.CACHE.rglob("*.xz.*")}
    assert {f: after.get(f) for f in before} == before
    assert {f.name for f in after.keys() - before.keys()} == {"series.tar.xz.00"}
    for number in range(3, 8):
        packed(tmp_path / "out", {"sglang/new.py": f"{number}\n"}, tmp_path / "src")
    kept = list(pack.CACHE.rglob("series.tar.xz.*"))
    assert len(kept) == pack.KEPT, "old series stay in the cache for ever"


def test_what_a_killed_run_left_is_cleared_and_the_rest_stays(tmp_path: Path) -> None:
    packed(tmp_path / "out", {}, tmp_path / "src")
    made = set(pack.CACHE.iterdir())
    write(pack.CACHE / ".engine-x1", {"site/file": "half\n"})
    with pack.own_cache():
        assert {path for path in pack.CACHE.iterdir() if path.name != ".lock"} == made


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    first = {f.name: f.read_bytes() for d in packed(tmp_path / "a", {}, tmp_path / "s") for f in d.glob("*.xz.*")}
    shutil.rmtree(pack.CACHE)
    again = {f.name: f.read_bytes() for d in packed(tmp_path / "b", {}, tmp_path / "t") for f in d.glob("*.xz.*")}
    assert first == again


def test_loads_come_one_after_the_other(tmp_path: Path) -> None:
    series = {"sglang/worker.py": "patched\n", "sglang/tree.py": "tree\n"}
    folders = packed(tmp_path / "out", series, tmp_path / "src")
    *loads, last = folders
    assert last.name == "series"
    assert len(loads) >= 3
    assert all(sum(f.stat().st_size for f in d.glob("*.xz.*")) <= LIMIT for d in folders)
    home = tmp_path / "home"
    for load in loads:
        done = unpack(load, home)
        assert done.returncode == 3, done.stderr
        assert "series" in done.stderr
    done = unpack(last, home, PYTHONPATH="/given")
    assert done.returncode == 0, done.stderr
    assert read(home / "site") == {k: v if isinstance(v, bytes) else v.encode() for k, v in (ENGINE | series).items()}
    assert set(read(home / "pairs/p")) == set(PAIR)
    said = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    assert said["PYTHONPATH"] == f"{home}/site:/given"
    assert said["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert said["TRITON_CACHE_DIR"] == f"{home}/caches/triton"
    assert not list((home / "pieces").iterdir()), "pieces of unpacked archives take room"
    before = {f: f.stat().st_mtime_ns for f in home.rglob("*")}
    assert unpack(last, home).returncode == 0
    assert before == {f: f.stat().st_mtime_ns for f in home.rglob("*")}, "a second call does nothing"


def test_a_newer_series_takes_the_older_one_back(tmp_path: Path) -> None:
    home, source = tmp_path / "home", tmp_path / "src"
    for load in packed(tmp_path / "one", {"sglang/worker.py": "v1\n", "sglang/old.py": "old\n"}, source):
        unpack(load, home)
    (home / "site/sglang/__pycache__").mkdir()
    newer = packed(tmp_path / "two", {"sglang/__init__.py": "VERSION = 2\n", "sglang/new.py": "new\n"}, source)[-1]
    assert unpack(newer, home).returncode == 0
    found = {k: v for k, v in read(home / "site").items() if k != "sglang/lib.so"}
    assert found == {
        "sglang/__init__.py": b"VERSION = 2\n", "sglang/worker.py": b"plain\n", "sglang/new.py": b"new\n",
    }  # fmt: skip
    assert not (home / "site/sglang/__pycache__").exists(), "byte code of the old file"
    again = packed(tmp_path / "three", {"sglang/worker.py": "v1\n"}, source)[-1]
    assert unpack(again, home).returncode == 0
    assert (home / "site/sglang/__init__.py").read_text() == "VERSION = 1\n"


def test_a_damaged_piece_is_refused(tmp_path: Path) -> None:
    load, *_ = packed(tmp_path / "out", {}, tmp_path / "src")
    piece = next(load.glob("*.xz.*"))
    shutil.copyfile(piece, tmp_path / "copy")
    piece.unlink()
    piece.write_bytes((tmp_path / "copy").read_bytes()[:-1] + b"?")
    done = unpack(load, tmp_path / "home")
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    assert not (tmp_path / "home/site").exists()


def test_without_xz_python_unpacks(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (tmp_path / "empty").mkdir()
    done = None
    for load in packed(tmp_path / "out", {"sglang/tree.py": "tree\n"}, tmp_path / "src"):
        done = unpack(load, home, PATH=str(tmp_path / "empty"))
    assert done and done.returncode == 0, done
    assert read(home / "site")["sglang/lib.so"] == ENGINE["sglang/lib.so"]


# --- run.sh


def run(repo: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([repo / "tests/gpu/run.sh", *argv], capture_output=True, text=True, timeout=60)


def test_run_gives_a_command_the_engine_and_its_exit_code(repo: Path, tmp_path: Path) -> None:
    folders, home = packed(tmp_path / "out", {"sglang/tree.py": "X = 7\n"}, tmp_path / "src"), tmp_path / "home"
    code = "import os, sglang.tree; print(sglang.tree.X, os.getcwd()); raise SystemExit(5)"
    done = run(repo, "--to", home, *folders, "--", "python3", "-c", code)
    assert (done.returncode, done.stdout) == (5, f"7 {repo}\n"), done.stderr


def test_run_without_all_pieces_runs_nothing(repo: Path, tmp_path: Path) -> None:
    folders = packed(tmp_path / "out", {"sglang/tree.py": "X = 7\n"}, tmp_path / "src")
    done = run(repo, "--to", tmp_path / "home", folders[-1], "--", "touch", tmp_path / "ran")
    assert done.returncode == 3
    assert "missing engine.tar.xz.00" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("argv", [[], ["--what"], ["--", "true"], ["/nowhere"]])
def test_run_refuses_misuse(repo: Path, argv: list[str]) -> None:
    assert run(repo, *argv).returncode == 2


def test_caches_come_back_and_travel_again(repo: Path, tmp_path: Path) -> None:
    folders, home = packed(tmp_path / "out", {"a.py": ""}, tmp_path / "src"), tmp_path / "home"
    kept = tmp_path / "caches.tar.xz"
    script = 'mkdir -p "$TRITON_CACHE_DIR" && echo kernel >"$TRITON_CACHE_DIR/k"; exit 4'
    done = run(repo, "--to", home, "--keep-caches", kept, *folders, "--", "bash", "-c", script)
    assert done.returncode == 4, done.stderr
    with tarfile.open(kept) as tar:
        assert "./triton/k" in tar.getnames()
    made = pack.caches_archive(kept, LIMIT)
    assert (made.name, made.place, made.files) == ("caches", "caches", 1)
    manifest = json.loads((made.folder / "archive.json").read_text())
    assert manifest["digest"] == made.digest
