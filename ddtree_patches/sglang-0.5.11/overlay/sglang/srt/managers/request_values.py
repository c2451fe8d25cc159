# SPDX-License-Identifier: Apache-2.0
"""Values of a request that would end the scheduler, refused before it has them.

The engine looks at ranges (`SamplingParams.verify`), which NaN, huge numbers and values of another type pass; a token outside of
the vocabulary is looked up as it is. Whoever may send requests could end the engine so, and a few times in a row keep it from
starting. Upstream: sgl-project/sglang pull 31908 for token ids.
"""

from __future__ import annotations

from typing import Any, Optional

_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_COUNTS = ("max_new_tokens", "min_new_tokens", "top_k")
_LARGEST = 1e30  # what is added to logits or divides them stays finite in float32
_INT32 = 1 << 31


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST


def _count(value: Any) -> bool:
    return isinstance(value, int) and -_INT32 <= value < _INT32


def _tokens(values: Any, vocab_size: int) -> bool:
    return isinstance(values, list) and all(isinstance(token, int) and 0 <= token < vocab_size for token in values)


def check_values(obj: Any, vocab_size: int, algorithm: Optional[str]) -> None:
    """Refuse one request of `GenerateReqInput` or `EmbeddingReqInput`.

    Args:
        obj: the request; `sampling_params` is a dict as it was sent, `input_ids` token ids or None.
        vocab_size: tokens of the target.
        algorithm: the server's speculative algorithm. Log-probabilities are refused here too, since a stream has begun once the
            scheduler refuses them, and ends in an error of the server.

    Raises:
        ValueError: told as HTTP 400, or as an error event of a stream.
    """
    params = obj.sampling_params or {}
    for name in _NUMBERS:
        if params.get(name) is not None and not _number(params[name]):
            raise ValueError(f"{name} must be a finite number, got {params[name]!r}.")
    for name in _COUNTS:
        if params.get(name) is not None and not _count(params[name]):
            raise ValueError(f"{name} must be a whole number below 2^31, got {params[name]!r}.")
    bias = params.get("logit_bias")
    if bias is not None and not (isinstance(bias, dict) and all(_number(value) for value in bias.values())):
        raise ValueError("logit_bias must be an object of token ids and finite numbers.")
    stops = params.get("stop_token_ids")
    if params.get("min_new_tokens") and stops is not None and not _tokens(stops, vocab_size):
        raise ValueError(f"stop_token_ids must be token ids below {vocab_size} where min_new_tokens holds them up.")
    if obj.input_ids is not None and not _tokens(obj.input_ids, vocab_size):
        raise ValueError(f"input_ids must be token ids from 0 to {vocab_size - 1}, the model's vocabulary.")
    wanted = getattr(obj, "token_ids_logprob", None)
    if wanted is not None and not _tokens(wanted, vocab_size):
        raise ValueError(f"token_ids_logprob must be token ids below {vocab_size}.")
    if algorithm in ("DFLASH", "DDTREE") and getattr(obj, "return_logprob", False):
        raise ValueError(f"{algorithm} speculative decoding does not support return_logprob. Ask a baseline instance.")
