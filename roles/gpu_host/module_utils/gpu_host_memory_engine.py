# SPDX-License-Identifier: Apache-2.0
"""What the engine takes for memory where its arguments name nothing: `_handle_gpu_memory_settings` of SGLang 0.5.11. Pure.

tests/patches/test_memory_sizes.py holds it against the engine's own code.
"""

from __future__ import annotations

from typing import Any

from ansible.module_utils.gpu_host_rules import Map

# Below so many GiB of GPU memory: prefill chunk, largest graph on fewer than 4 ranks, on more.
SIZES = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (90, 8192, 256, 512), (160, 8192, 256, 512))
LARGEST = (16384, 512, 512)
PREFILL = 16384  # max_prefill_tokens of ServerArgs


def first(args: Map, *names: str) -> Any:
    return next((args[name] for name in names if args.get(name) is not None), None)


def graph_sizes(largest: int, drafting: bool) -> list[int]:
    """Batch sizes that the engine captures up to `largest`."""
    if drafting:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, largest + 1, 16)]
    else:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32)]
    return sorted({size for size in sizes if size <= largest} | {largest})


def piecewise_sizes(largest: int) -> int:
    """How many sizes of a prefill the engine captures up to `largest` tokens."""
    steps = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1280, 4097, 256))
    return sum(size <= largest for step in (*steps, range(4608, largest + 1, 512)) for size in step)


def prefill_tokens(chunk: int, args: Map) -> int:
    """Tokens of one prefill at most: a chunk, or where chunks are off (0 and below) those of whole prompts."""
    return chunk if chunk > 0 else int(args.get("max-prefill-tokens") or PREFILL)


def engine_defaults(mib: int, ranks: int, args: Map, drafting: bool) -> tuple[int, int, float]:
    """(prefill chunk, largest graph, mem-fraction-static) that the engine takes on a GPU of `mib` where `args` name none."""
    row = next((row[1:] for row in SIZES if mib < row[0] * 1024), LARGEST)
    tp = first(args, "tp-size", "tensor-parallel-size") or ranks
    given = first(args, "chunked-prefill-size")
    chunk = row[0] if given is None else given
    graph = first(args, "cuda-graph-max-bs") or row[2 if tp >= 4 else 1]
    if listed := args.get("cuda-graph-bs"):
        graph = max(listed)
    reserved = 512 + max(prefill_tokens(chunk, args), 2048) * 1.5 + graph * 2 + ranks / 8 * 1024
    if not args.get("disable-piecewise-cuda-graph"):
        reserved += piecewise_sizes(min(max(chunk, 0), args.get("max-total-tokens") or chunk)) * 8
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    reserved += 4 * 1024 if drafting else 0
    fraction = args.get("mem-fraction-static")
    return chunk, graph, float(fraction) if fraction is not None else round((mib - reserved) / mib, 3)
