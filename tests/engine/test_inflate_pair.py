# SPDX-License-Identifier: Apache-2.0
"""An inflated pair computes what its source computes, and what cannot be inflated is refused before anything is written."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine import engine_venv

# In float32 sums over more channels round elsewhere; logits reach 20, whose last bit is 2e-6.
BOUND = "1e-4"
DENSE = ["--layers", "7", "--intermediate", "1024"]
HYBRID = ["--layers", "8", "--intermediate", "1024"]
REFUSED = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
import inflate_pair
said = []
for argv in json.loads(sys.argv[2]):
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        code = inflate_pair.main(argv)
    said.append([code, out.getvalue()])
print(json.dumps(said))
"""
DAMAGE = """
import sys
from safetensors.torch import load_file, save_file
tensors = load_file(sys.argv[1])
tensors[sys.argv[2]][:40, :40] += 0.5
save_file(tensors, sys.argv[1])
"""
WALK = """
import json, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import offline_walk, torch, walk_texts
request = json.loads(sys.argv[1])
with torch.no_grad():
    walked = offline_walk.walk(request)
outputs = {arm: walked["greedy"] for arm in request["arms"]}
arms = {arm: tuple(shape) for arm, shape in request["arms"].items()}
pair = Path(request["target"]).parent
print(json.dumps([walked["accepted"], walk_texts.tokens_per_step(pair, walked["prompts"], outputs, arms, "cpu")]))
"""


def run(python: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(engine_venv.CACHE / "pycache")}
    return subprocess.run([python, *argv], capture_output=True, text=True, env=env)


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout.strip(), done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(python: Path, repo: Path, source: Path, copy: Path) -> dict[str, Any]:
    texts = repo / "models/nano/prompts.jsonl"
    argv = ["--texts", texts, "--prompts", "1", "--tokens", "12", "--bound", BOUND]
    found: dict[str, Any] = answer(run(python, repo / "models/check_pair.py", source, copy, *argv))
    return found


def header(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as f:
            found |= json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    return {name: tensor for name, tensor in found.items() if name != "__metadata__"}


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    [
        ("nano", ["--hidden", "512", "--vocab", "2048", *DENSE], "float32"),
        ("nano", ["--hidden", "2048", "--vocab", "1536", *DENSE], "bfloat16"),
        ("nano", ["--hidden", "128", *DENSE], "bfloat16"),
        ("nano", ["--hidden", "512", "--heads", "12", "--kv-heads", "12", *DENSE], "bfloat16"),  # groups of 2 become 1
        ("nano-hybrid", ["--hidden", "512", "--vocab", "2048", "--moe-intermediate", "256", *HYBRID], "float32"),
        ("nano-hybrid", ["--hidden", "2048", "--shared-intermediate", "192", *HYBRID], "bfloat16"),
    ],
    ids=[
        "dense-x4",
        "dense-x16-bf16",
        "dense-wider-only-bf16",
        "dense-split-groups-bf16",
        "hybrid-x4",
        "hybrid-x16-bf16",
    ],
)
def test_same_function(
    name: str, sizes: list[str], dtype: str, engine_python: Path, repo: Path, tmp_path: Path
) -> None:
    """Float32 arithmetic on the stored weights: in bfloat16 they equal the source's only if no bit of them was lost."""
    source, copy = repo / "models" / name, tmp_path / "copy"
    made = run(engine_python, repo / "models/inflate_pair.py", source, copy, *sizes, "--dtype", dtype)
    assert made.returncode == 0, made.stderr[-4000:]
    report = check(engine_python, repo, source, copy)
    assert report["ok"], report
    assert report["largest"] > 10, "logits of a trained model"
    config = json.loads((copy / "target/config.json").read_text())
    assert config["hidden_size"] == int(sizes[1])
    wanted = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    tensors = header(copy / "target") | header(copy / "draft")
    assert {tensor["dtype"] for tensor in tensors.values()} == {wanted}
    assert tensors["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert (copy / "target/tokenizer.json").is_file()
    assert json.loads((copy / "inflated.json").read_text())["source"] == str(source)


def test_a_changed_function_is_seen(engine_python: Path, repo: Path, tmp_path: Path) -> None:
    """The check itself, on a copy with one damaged matrix in each part."""
    source = repo / "models/nano"
    for part, tensor in (
        ("target", "model.layers.0.self_attn.o_proj.weight"),
        ("draft", "layers.0.mlp.down_proj.weight"),
    ):
        copy = tmp_path / part
        made = run(engine_python, repo / "models/inflate_pair.py", source, copy, "--hidden", "512", *DENSE)
        assert made.returncode == 0, made.stderr[-4000:]
        assert run(engine_python, "-c", DAMAGE, copy / part / "model.safetensors", tensor).returncode == 0
        report = check(engine_python, repo, source, copy)
        assert not report["ok"]
        assert report[part] > 0.01


def test_sizes_that_cannot_be_kept_exact_are_refused(engine_python: Path, repo: Path, tmp_path: Path) -> None:
    nano, hybrid, out = (str(p) for p in (repo / "models/nano", repo / "models/nano-hybrid", tmp_path / "out"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    cases = [
        ([nano, out, "--hidden", "384", *DENSE], "expected 128, 512, 2048, 8192"),
        ([nano, out, "--hidden", "64", *DENSE], "expected 128, 512, 2048, 8192"),
        ([nano, out, "--hidden", "512", "--layers", "3", "--intermediate", "1024"], "at least the source's 4"),
        ([nano, out, "--hidden", "512", "--layers", "4", "--intermediate", "100"], "intermediate_size 100"),
        ([nano, out, "--hidden", "512", "--vocab", "1000", *DENSE], "vocab_size 1000"),
        ([nano, out, "--hidden", "128", "--vocab", "2048", *DENSE], "new tokens need a new channel"),
        ([nano, out, "--hidden", "512", "--heads", "16", "--kv-heads", "3", *DENSE], "16 heads for 3 KV heads"),
        ([nano, out, "--hidden", "512", "--heads", "4", "--kv-heads", "2", "--moe-intermediate", "9", *DENSE], "dense"),
        ([hybrid, out, "--hidden", "512", *DENSE], "a multiple of 4"),
        (
            [hybrid, out, "--hidden", "512", "--linear-value-heads", "7", *HYBRID],
            "7 recurrent value heads for 3 key heads",
        ),
        ([hybrid, out, "--hidden", "512", "--moe-intermediate", "64", *HYBRID], "moe_intermediate_size 64"),
        ([nano, str(full), "--hidden", "512", *DENSE], "is there already"),
        ([str(tmp_path), out, "--hidden", "512", *DENSE], "has no config.json"),
    ]
    done = run(engine_python, "-c", REFUSED, repo / "models", json.dumps([argv for argv, _ in cases]))
    for (argv, expected), (code, said) in zip(cases, answer(done), strict=True):
        assert code == 1, argv
        assert expected in said, said
        assert said.count("\n") == 1, said
    assert [p.name for p in tmp_path.iterdir()] == ["full"], "something half-done was left"


def test_walk_of_whole_texts_is_the_walk_step_by_step(engine_python: Path, repo: Path) -> None:
    """tests/gpu/walk_texts.py gives tests/engine/offline_walk.py's numbers, from its own text."""
    prompts = [json.loads(line)["prompt"] for line in (repo / "models/nano/prompts.jsonl").read_text().splitlines()]
    request = {
        "target": str(repo / "models/nano/target"), "draft": str(repo / "models/nano/draft"), "prompts": prompts[:2],
        "new": 40, "arms": {"chain": [15, 1], "tree-7": [7, 8], "tree-31": [31, 8]},
    }  # fmt: skip
    folders = [repo / "models", repo / "tests/engine", repo / "tests/gpu"]
    accepted, found = answer(run(engine_python, "-c", WALK, json.dumps(request), *folders))
    for arm, texts in accepted.items():
        tokens = steps = 0
        for text in texts:
            left = 39  # of 40 tokens, prefill gives one
            for length in text:
                tokens += min(length + 1, left)
                left -= min(length + 1, left)
                steps += 1
        assert found[arm] == pytest.approx(tokens / steps), arm
