# SPDX-License-Identifier: Apache-2.0
"""Torch twins of the two small Triton kernels that run in every step: KV index lists and request-to-slot bookkeeping.

They copy integers, so the result is the same bit for bit; interpreted they took two thirds of a step (engine
sglang-0.5.11, `sglang/srt/layers/attention/utils.py` and `sglang/srt/speculative/spec_utils.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Twin:
    """A function that is launched like a Triton kernel: `twin[(requests,)](*arguments)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.function(grid[0], *args, **kwargs)

        return launch


def _kv_indices(
    requests: int,
    req_to_token_ptr: Tensor,
    req_pool_indices_ptr: Tensor,
    page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor,
    kv_start_idx: Tensor | None,
    kv_indices_ptr: Tensor,
    req_to_token_ptr_stride: int,
) -> None:
    """Gather each request's pool slots, `lens[i]` of them from `start[i]` on, to `kv_indices[kv_indptr[i]:]`."""
    rows = req_pool_indices_ptr[:requests].tolist()
    lengths = page_kernel_lens_ptr[:requests].tolist()
    targets = kv_indptr[:requests].tolist()
    starts = kv_start_idx[:requests].tolist() if kv_start_idx is not None else [0] * requests
    for row, length, target, start in zip(rows, lengths, targets, starts, strict=True):
        kv_indices_ptr[target : target + length] = req_to_token_ptr[row, start : start + length]


def _assign_slots(
    requests: int,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    bs_upper: int,
) -> None:
    """Write the packed new slots `out_cache_loc` to positions `start[i]:end[i]` of each request's row."""
    rows = req_pool_indices[:requests].tolist()
    starts, ends = start_offset[:requests].tolist(), end_offset[:requests].tolist()
    source = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        length = max(0, end - start)
        req_to_token[row, start : start + length] = out_cache_loc[source : source + length].to(req_to_token.dtype)
        source += length


TWINS: dict[str, Twin] = {
    "sglang.srt.layers.attention.utils.create_flashinfer_kv_indices_triton": Twin(_kv_indices),
    "sglang.srt.speculative.spec_utils.assign_req_to_token_pool": Twin(_assign_slots),
}
TWINS_BY_NAME = {path.rsplit(".", 1)[1]: twin for path, twin in TWINS.items()}
