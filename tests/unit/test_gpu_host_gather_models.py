# SPDX-License-Identifier: Apache-2.0
"""Model folders: what a config.json says, what a download left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_models as gather


def model(folder: Path, config: object, weights: tuple[str, ...] = ("model.safetensors",)) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in weights:
        (folder / name).write_bytes(b"12345")
    return str(folder)


def test_the_bundled_pair(repo: Path) -> None:
    target = gather.gather_model(str(repo / "models/nano/target"))
    drafter = gather.gather_model(str(repo / "models/nano/draft"))
    assert (target["exists"], target["missing"], target["error"], target["hybrid"]) == (True, [], None, False)
    assert drafter["architectures"] == ["DFlashDraftModel"]
    assert drafter["block_size"] == 16
    assert drafter["vocab_size"] == target["vocab_size"]
    assert drafter["num_target_layers"] == target["num_layers"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next"},
        {"model_type": "x", "layer_types": ["full_attention", "linear_attention"]},
        {"model_type": "qwen3_5_moe", "text_config": {"model_type": "y"}},
        {"model_type": "x", "text_config": {"model_type": "y", "layer_types": ["linear_attention"]}},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
        {"model_type": "x", "linear_attn_config": {}},
    ],
)
def test_hybrid_models(config: dict[str, object]) -> None:
    assert gather.describe_config(config)["hybrid"]


@pytest.mark.parametrize(
    "config",
    [{"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, {"model_type": "llama"}, {}],
)
def test_dense_models(config: dict[str, object]) -> None:
    assert not gather.describe_config(config)["hybrid"]


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    assert not gather.gather_model(str(tmp_path / "no"))["exists"]
    (tmp_path / "empty").mkdir()
    assert gather.gather_model(str(tmp_path / "empty"))["missing"] == ["config.json", "*.safetensors"]
    assert "config.json" in gather.gather_model(model(tmp_path / "broken", "{"))["error"]
    assert "no map" in gather.gather_model(model(tmp_path / "list", "[]"))["error"]
    assert gather.gather_model(model(tmp_path / "bare", {}, ()))["missing"] == ["*.safetensors"]


def test_a_download_that_was_cut_short(tmp_path: Path) -> None:
    names = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    path = model(tmp_path / "m", {}, (names[0],))
    index = tmp_path / "m/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    facts = gather.gather_model(path)
    assert facts["missing"] == [names[1]]
    assert facts["weights"] == 5
    index.write_text("{}")
    assert gather.gather_model(path)["missing"][0].startswith("model.safetensors.index.json")


def test_weights_that_lie_there_twice_count_once(tmp_path: Path) -> None:
    names = ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors", "pytorch_model.bin")
    path = model(tmp_path / "m", {"model_type": "mistral"}, names)
    for name in names:
        (tmp_path / "m" / name).write_bytes(b"12345")
    assert gather.gather_model(path)["weights"] == 15, "without an index all of the better kind"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
    facts = gather.gather_model(path)
    assert (facts["weights"], facts["missing"]) == (10, [])
