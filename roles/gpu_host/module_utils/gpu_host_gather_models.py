# SPDX-License-Identifier: Apache-2.0
"""Model folders: what a config.json says, how much the weights take, what a download left out."""

from __future__ import annotations

import json
from pathlib import Path

from ansible.module_utils.gpu_host_gather_base import Facts
from ansible.module_utils.gpu_host_gather_shape import describe_shape

# A target whose layers keep a recurrent state: a tree of drafts would need one state per branch.
HYBRID_MODEL_TYPES = frozenset(
    {
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "kimi_linear",
        "nemotron_h",
        "falcon_h1",
        "granitemoehybrid",
        "jamba",
        "bamba",
        "zamba2",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "bailing_moe_linear",
        "minimax",
    }
)
RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "gdn")


def _inner(config: Facts, key: str) -> Facts:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def describe_config(config: Facts) -> Facts:
    """What the judge needs of a config.json; a multimodal model keeps its text part in text_config."""
    text = _inner(config, "text_config") or config
    layers = [str(layer) for layer in text.get("layer_types") or []]
    types = {str(config.get("model_type")), str(text.get("model_type"))}
    hybrid = (
        any(word in layer for layer in layers for word in RECURRENT_LAYERS)
        or bool(types & HYBRID_MODEL_TYPES)
        or "hybrid_override_pattern" in text
        or "linear_attn_config" in text
    )
    draft = _inner(config, "dflash_config")
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures") or [],
        "hybrid": hybrid,
        "dtype": config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype"),
        "vocab_size": text.get("vocab_size"),
        "hidden_size": text.get("hidden_size"),
        "num_layers": text.get("num_hidden_layers"),
        "block_size": draft.get("block_size") or config.get("block_size"),
        "num_target_layers": config.get("num_target_layers"),
        "target_layer_ids": draft.get("target_layer_ids"),
        "shape": describe_shape({"quantization_config": config.get("quantization_config"), **text}),
    }


def gather_model(path: str) -> Facts:
    """`{exists, error, missing: [files], weights: bytes, ...describe_config}` of a model folder."""
    folder = Path(path)
    facts: Facts = {"exists": folder.is_dir(), "error": None, "missing": [], "weights": 0}
    if not facts["exists"]:
        return facts
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("config.json holds no map")
        facts.update(describe_config(config))
    except FileNotFoundError:
        facts["missing"].append("config.json")
    except (OSError, ValueError) as error:
        facts["error"] = f"config.json: {error}"
    found = [path for path in folder.glob("*.safetensors") if path.exists()]
    found = found or [path for path in folder.glob("*.bin") if path.exists()]
    shards, broken = _shards(folder)
    # What the engine loads: a folder may hold the same weights twice, as shards and in one file.
    loaded = [path for path in found if not shards or path.name in shards]
    facts["weights"] = sum(path.stat().st_size for path in loaded)
    facts["missing"] += (
        (broken or [name for name in shards if not (folder / name).exists()]) if found else ["*.safetensors"]
    )
    return facts


def _shards(folder: Path) -> tuple[list[str], list[str]]:
    """(files that the weights' index names, what is wrong with the index); a download cut short lacks some of the first."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [], []
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())), []
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return [], [f"model.safetensors.index.json ({error})"]
