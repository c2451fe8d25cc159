# SPDX-License-Identifier: Apache-2.0
"""Model folders: what a config.json says, whether weights and tokenizer are there, and what lies there in place of a model."""

from __future__ import annotations

import json
from pathlib import Path

from ansible.module_utils.gpu_host_gather_access import barred
from ansible.module_utils.gpu_host_gather_base import Facts, read
from ansible.module_utils.gpu_host_gather_shape import describe_shape
from ansible.module_utils.gpu_host_gather_weights import faults, leftovers, weight_files

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
DRAFTER = "DFlashDraftModel"
# Files of which each alone holds a vocabulary; `vocab.json` needs its `merges.txt`.
TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.txt", "tokenization_*.py")
WHOLE = ("tokenizer.json", "tokenizer.model")  # those whose wholeness can be told
NEEDED = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
FEW = 8


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
        # Where the engine looks for them: dflash_utils.py of SGLang 0.5.11.
        "block_size": draft.get("block_size", config.get("block_size")),
        "num_target_layers": draft.get("num_target_layers", config.get("num_target_layers")),
        "target_layer_ids": draft.get("target_layer_ids", config.get("target_layer_ids")),
        "mask_token_id": draft.get("mask_token_id"),
        "shape": describe_shape({"quantization_config": config.get("quantization_config"), **text}),
    }


def gather_model(path: str, user: Facts | None = None) -> Facts:
    """What lies at the path of a model, `describe_config` included.

    `{exists, error, missing: [words], weights: bytes, broken: [..], partial: [paths], git, tokenizer: {found, broken: [..]},
    barred: [..], leads: [folders], instead}`. broken: as `faults`; barred: as `gpu_host_gather_access.barred`, for a user as
    `engine_user` gives it; leads: the folders that hold its files, links followed; instead: as `_instead`, None for a model.
    """
    try:
        return _gather(Path(path), user)
    except OSError as error:  # root may not look into it: a network file system, most likely
        return {"exists": True, "error": f"{error.filename}: {error.strerror}", "missing": [], "weights": 0}


def _gather(folder: Path, user: Facts | None) -> Facts:
    facts: Facts = {"exists": folder.is_dir(), "error": None, "missing": [], "weights": 0}
    facts["instead"] = None if (folder / "config.json").exists() else _instead(folder)
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
    loaded, missing = weight_files(folder)
    tokenizer = [] if DRAFTER in facts.get("architectures", []) else tokenizer_files(folder)
    facts["missing"] += missing
    facts["weights"] = sum(path.stat().st_size for path in loaded)
    facts["broken"] = faults(loaded)
    facts["partial"] = leftovers(folder)
    facts["git"] = (folder / ".git").exists()
    facts["tokenizer"] = {"found": bool(tokenizer), "broken": faults([one for one in tokenizer if one.name in WHOLE])}
    needed = [*(path for name in NEEDED if (path := folder / name).is_file()), *loaded, *tokenizer]
    facts["barred"] = barred(folder, needed, user) if user else []
    facts["leads"] = sorted({str(folder.resolve()), *(str(path.resolve().parent) for path in needed)})
    return facts


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that hold the vocabulary; none where an engine can make no tokenizer of what is there."""
    found = sorted(path for pattern in TOKENIZERS for path in folder.glob(pattern) if path.is_file())
    pair = [folder / "vocab.json", folder / "merges.txt"]
    if all(path.is_file() for path in pair):
        found += pair
    try:
        # A tokenizer of the model's own code, which may keep its words under any name.
        if not found and "auto_map" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")):
            found = [folder / "tokenizer_config.json"]
    except (OSError, ValueError, TypeError):
        return found
    return found


def _instead(path: Path) -> Facts:
    """What there is in place of a model: `{file, link: [link, where it leads] or None, models: [{path, drafter}]}`.

    models: folders with a config.json below the path, the one that holds a file, or beside one that is not there.
    """
    here = path if path.is_dir() else path.parent
    dangling = [one for one in (*path.parents[::-1], path) if one.is_symlink() and not one.exists()]
    return {
        "file": path.is_file(),
        "link": [str(dangling[0]), str(dangling[0].readlink())] if dangling else None,
        "models": _models(here, path.is_file()) if here.is_dir() else [],
    }


def _models(folder: Path, itself: bool) -> list[Facts]:
    """Folders with a config.json: a folder's own, one below, or the last snapshot in Hugging Face's cache."""
    found = [folder / "config.json"] if itself else []
    found += sorted(folder.glob("*/config.json"))[:FEW]
    for cache in [folder, *sorted(folder.glob("models--*"))[:FEW], *sorted(folder.glob("hub/models--*"))[:FEW]]:
        snapshots = sorted(cache.glob("snapshots/*/config.json"), key=lambda file: file.parent.lstat().st_mtime)
        current = cache / "snapshots" / (read(cache / "refs/main") or "none") / "config.json"
        found += [current] if current in snapshots else snapshots[-1:]
    found = [file for file in found if file.is_file()][:FEW]
    return [{"path": str(file.parent), "drafter": DRAFTER in (read(file) or "")} for file in found]
