# SPDX-License-Identifier: Apache-2.0
"""What of a config.json tells how much memory a model needs beside its weights. Pure."""

from __future__ import annotations

from ansible.module_utils.gpu_host_gather_base import Facts

LINEAR = "linear_attention"


def _number(config: Facts, *keys: str) -> int | None:
    """The first of these keys that holds a whole number."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def describe_shape(text: Facts) -> Facts:
    """Sizes of a model's text part, None where it does not tell.

    `{layers, linear_layers, heads, kv_heads, head_dim, v_head_dim, latent, hidden, intermediate, vocab, positions, context,
    experts, quantization, tied, net}`. context: [least, most] that the engine can make of it. latent: numbers per token and layer
    where keys and values are compressed (MLA). intermediate: of all units that one token passes, in experts those that it is sent
    to. net: sizes of a gated delta net, `{key_heads, value_heads, key_dim, value_dim, kernel, dtype}`.
    """
    layers, heads, hidden = (_number(text, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    head_dim = _number(text, "head_dim") or (hidden // heads if hidden and heads else None)
    quantization = text.get("quantization_config")
    lora, rope = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
    routed, width = _number(text, "num_experts_per_tok"), _number(text, "moe_intermediate_size")
    shared = _number(text, "shared_expert_intermediate_size") or 0
    return {
        "layers": layers,
        "linear_layers": _linear_layers(text, layers),
        "heads": heads,
        "kv_heads": _number(text, "num_key_value_heads") or heads,
        "head_dim": head_dim,
        "v_head_dim": _number(text, "v_head_dim") or head_dim,
        "latent": lora + rope if lora and rope else None,
        "hidden": hidden,
        "intermediate": routed * width + shared if routed and width else _number(text, "intermediate_size"),
        "vocab": _number(text, "vocab_size"),
        "positions": _number(text, "max_position_embeddings"),
        "context": _context(text),
        "experts": _number(text, "num_experts", "n_routed_experts", "num_local_experts"),
        "quantization": quantization.get("quant_method") if isinstance(quantization, dict) else None,
        "tied": text.get("tie_word_embeddings"),
        "net": _net(text),
    }


def _context(text: Facts) -> list[int] | None:
    """Bounds of the longest context: `get_context_length` of SGLang 0.5.11, utils/hf_transformers/common.py.

    Of a rotary scaling it takes the factor in some forms only, which depends on what the library adds to a config.json.
    """
    length = _number(
        text, "max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings"
    )
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    layers = [scaling, *scaling.values()] if isinstance(scaling, dict) else []
    factors = [one.get("factor") for one in layers if isinstance(one, dict)]
    factor = max([1.0, *(float(one) for one in factors if isinstance(one, (int, float)))])
    return [length, int(length * factor)] if length else None


def _linear_layers(text: Facts, layers: int | None) -> int | None:
    """How many layers keep a recurrent state instead of keys and values."""
    types = text.get("layer_types")
    if isinstance(types, list):
        return sum(1 for kind in types if kind == LINEAR)
    if "linear_num_value_heads" not in text:
        return 0
    period = _number(text, "full_attention_interval")  # every so many layers one with keys and values
    return layers - layers // period if layers and period else None


def _net(text: Facts) -> Facts | None:
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = [_number(text, f"linear_{key}") for key in keys]
    if None in sizes:
        return None
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    return {**dict(zip(names, sizes, strict=True)), "dtype": text.get("mamba_ssm_dtype") or "float32"}
