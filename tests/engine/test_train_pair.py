# SPDX-License-Identifier: Apache-2.0
"""The recipe of the bundled pair runs, and what it writes has the layout of the bundled pair, which the engine serves."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine import engine_venv

LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, recipe = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
text = "def add(a, b):\\n    return a + b\\n"
ids = tokenizer(text, return_tensors="pt").input_ids
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
print(json.dumps({"round_trip": tokenizer.decode(ids[0]) == text, "new": out.shape[1] - ids.shape[1], "chat": chat}))
sys.path.insert(0, recipe)
import train_pair
train_pair.main([folder + "/never", "--target", "fast"])
"""


def run(python: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    """One thread is enough; byte code is kept where the other engine tests keep theirs."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(engine_venv.CACHE / "pycache")}
    return subprocess.run([python, *argv], capture_output=True, text=True, env=env)


def header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Name to dtype and shape of a safetensors file."""
    with file.open("rb") as f:
        tensors = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    return {name: (t["dtype"], t["shape"]) for name, t in tensors.items() if name != "__metadata__"}


@pytest.fixture(scope="module")
def pair(engine_python: Path, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair after three steps, trained on this repository's own files."""
    out = tmp_path_factory.mktemp("pair")
    sources = ["--sources", repo / "fleet", repo / "roles"]
    done = run(engine_python, repo / "models/train_pair.py", out, "--smoke", *sources)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def test_layout_is_that_of_the_bundled_pair(pair: Path, repo: Path) -> None:
    nano = repo / "models/nano"
    for part in ("target", "draft"):
        assert header(pair / part / "model.safetensors") == header(nano / part / "model.safetensors"), part
        made, bundled = (json.loads((f / part / "config.json").read_text()) for f in (pair, nano))
        different = {k for k in made | bundled if made.get(k) != bundled.get(k)}
        assert different <= {"transformers_version"}, {k: (made.get(k), bundled.get(k)) for k in different}
        assert (pair / part / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_target_generates_and_a_bad_budget_is_refused_before_anything_is_written(
    pair: Path, engine_python: Path, repo: Path
) -> None:
    done = run(engine_python, "-c", LOAD, pair / "target", repo / "models")
    assert done.stdout, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer == {"round_trip": True, "new": 4, "chat": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"}
    assert done.returncode == 2
    assert "expected seconds like 240s or a number of steps like 500" in done.stderr
    assert not (pair / "target" / "never").exists()


def test_report_says_what_was_trained(pair: Path) -> None:
    report = json.loads((pair / "training.json").read_text())
    assert (report["arch"], report["size"]) == ("dense", "nano")
    assert report["target"]["steps"] == report["draft"]["steps"] == 3
    # Untrained, a model of 1,024 tokens has a loss of ln 1024 = 6.93.
    assert 5 < report["target"]["loss"] < 8
