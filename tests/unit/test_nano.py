# SPDX-License-Identifier: Apache-2.0
"""The bundled pairs are what their cards and their configurations say."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["nano", "nano-hybrid"])
def nano(request: pytest.FixtureRequest, repo: Path) -> Path:
    return repo / "models" / str(request.param)


def header(file: Path) -> dict[str, Any]:
    """Name to dtype and shape of a safetensors file; its data must fill the file exactly."""
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    tensors: dict[str, Any] = json.loads(raw[8 : 8 + size])
    tensors.pop("__metadata__", None)
    assert max(t["data_offsets"][1] for t in tensors.values()) == len(raw) - 8 - size
    return tensors


def test_card_lists_every_file_with_its_hash(nano: Path) -> None:
    listed = dict(
        reversed(line.split())
        for line in re.findall(r"^[0-9a-f]{64}  \S+$", (nano / "MODEL_CARD.md").read_text(), re.M)
    )
    files = {str(f.relative_to(nano)) for f in nano.rglob("*") if f.is_file() and f.name != "MODEL_CARD.md"}
    assert set(listed) == files
    wrong = [f for f in sorted(files) if hashlib.sha256((nano / f).read_bytes()).hexdigest() != listed[f]]
    assert wrong == []


def test_drafter_belongs_to_the_target(nano: Path) -> None:
    target = json.loads((nano / "target" / "config.json").read_text())
    draft = json.loads((nano / "draft" / "config.json").read_text())
    tokenizer = json.loads((nano / "target" / "tokenizer.json").read_text())
    special = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    assert (draft["hidden_size"], draft["vocab_size"]) == (target["hidden_size"], target["vocab_size"])
    assert draft["num_target_layers"] == target["num_hidden_layers"]
    assert len(tokenizer["model"]["vocab"]) == target["vocab_size"]
    dflash = draft["dflash_config"]
    assert special[dflash["mask_token"]] == dflash["mask_token_id"]
    assert all(0 <= layer < target["num_hidden_layers"] for layer in dflash["target_layer_ids"])
    fusion = header(nano / "draft" / "model.safetensors")["fc.weight"]["shape"]
    assert fusion == [draft["hidden_size"], len(dflash["target_layer_ids"]) * target["hidden_size"]]


def test_card_states_the_real_sizes(nano: Path) -> None:
    stated = re.search(r"\| parameters \| ([\d.]+) M \| ([\d.]+) M \|", (nano / "MODEL_CARD.md").read_text())
    assert stated
    for part, text in zip(("target", "draft"), stated.groups(), strict=True):
        count = sum(prod(t["shape"]) for t in header(nano / part / "model.safetensors").values())
        assert f"{count / 1e6:.2f}" == text


def test_prompts_are_many_and_different(repo: Path) -> None:
    rows = [json.loads(line) for line in (repo / "models/nano/prompts.jsonl").read_text().splitlines()]
    assert len(rows) >= 64
    assert len({r["id"] for r in rows}) == len({r["prompt"] for r in rows}) == len(rows)
    # A shared beginning would hit the radix cache and hide prefill errors.
    assert len({r["prompt"][:120] for r in rows}) == len(rows)


def test_pairs_share_tokenizer_and_prompts(repo: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        one, other = (repo / "models" / pair / "target" / name for pair in ("nano", "nano-hybrid"))
        assert one.read_bytes() == other.read_bytes()


def test_weights_are_readable_by_the_engine_user(nano: Path) -> None:
    assert all(f.stat().st_mode & 0o044 == 0o044 for f in nano.rglob("*.safetensors"))
