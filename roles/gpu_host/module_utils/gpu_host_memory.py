# SPDX-License-Identifier: Apache-2.0
"""Memory of an instance, added up for one of its GPUs before anything is started. Pure; bytes unless a name says otherwise.

What the engine itself counts (weights, KV entries, recurrent states, its default fraction) is counted as it does, by
model_runner_kv_cache_mixin.py, pool_configurator.py, mamba_utils.py and server_args.py of SGLang 0.5.11 and by
ddtree_hybrid.py of the series. What only a start can tell (graphs, activations, the CUDA context) is an estimate, marked
with `about` in every text; nothing is refused for an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from ansible.module_utils.gpu_host_memory_engine import engine_defaults, first, graph_sizes, prefill_tokens
from ansible.module_utils.gpu_host_rules import GIB, Map, args_of, whole

MIB = 1 << 20
# Context of CUDA, libraries, NCCL: "about 1 GiB" beside all else on an H200, docs/bench.md, 2026-11-30.
CONTEXT = GIB
# One captured CUDA graph. From 18 to 20 GiB of a server on a pair of 7 B that holds 15.7 GiB of weights and KV (docs/bench.md,
# 2026-11-30); the 5 GB of graphs, drafter and context on an RTX 5090 (sgl-project/sglang#35777) come out as well.
GRAPH = 48 * MIB
# Numbers of 2 bytes that a token of a prefill holds at a time, in widths of the stream and of the MLP: residuals, q, k, v, the
# features for the drafter; gate, up and their product. Counted from the engine's layers, not measured.
STREAMS, UNITS = 16, 4
# A file may hold what the engine leaves out (layers for MTP); only more than this share of it counts for a refusal.
SURE = 0.9
INDEX_LIMIT = 1 << 31  # elements of one layer's states: the kernels index with 32 bits
PRESETS = 31  # `budget: auto` is sized for the largest of its presets
DRAFTING_REQUESTS = 48  # the engine's own limit where a drafting mode names none
BLOCK_SIZE = 16
KV_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_entry(shape: Map, tp: int, args: Map) -> int | None:
    """Bytes of one token in the KV cache of a rank; None where the model does not tell."""
    size = KV_BYTES.get(str(args.get("kv-cache-dtype") or "auto"))
    layers, linear = shape.get("layers"), shape.get("linear_layers")
    if size is None or layers is None or linear is None:
        return None
    if shape.get("latent"):
        return int(shape["latent"] * (layers - linear) * size)
    if not shape.get("kv_heads") or not shape.get("head_dim"):
        return None
    return int(max(1, shape["kv_heads"] // tp) * (shape["head_dim"] + shape["v_head_dim"]) * (layers - linear) * size)


def state_bytes(shape: Map, tp: int, args: Map) -> tuple[int, int] | None:
    """(bytes of one state of all recurrent layers, elements of one layer's recurrent part) of a rank; None if unknown."""
    net, layers = shape.get("net"), shape.get("linear_layers")
    width = STATE_BYTES.get(str(args.get("mamba-ssm-dtype") or (net or {}).get("dtype")))
    if not net or not layers or not width or net["value_heads"] % tp:
        return None
    groups = net["key_heads"] if net["key_heads"] % tp == 0 else tp
    window = (net["value_dim"] * net["value_heads"] + 2 * groups * net["key_dim"]) // tp * (net["kernel"] - 1)
    elements = net["value_heads"] // tp * net["value_dim"] * net["key_dim"]
    return (window * 2 + elements * width) * layers, elements


def verify_slots(instance: Map, draft: Map | None) -> tuple[int, int]:
    """(slots per running request that a step verifies at most, kinds of captured passes)."""
    mode, args = instance.get("mode"), args_of(instance)
    if mode == "baseline":
        return 0, 1
    block = first(args, "speculative-dflash-block-size") or (draft or {}).get("block_size") or BLOCK_SIZE
    if mode != "ddtree":
        return int(block), 2
    auto = instance.get("budget") == "auto"
    tree = (PRESETS if auto else int(instance["budget"])) + 1
    if args.get("speculative-ddtree-linear") == "off":
        return tree, 5 if auto else 2
    return max(tree, int(block)), 6 if auto else 3  # the drafter, trees, the chain


@dataclass(frozen=True)
class Plan:
    """Memory of one GPU of an instance.

    total: of the GPU. fraction, chunk, graph: what the engine takes, given or its own. target, draft: weights. entry: KV of one
    token in both. state: one recurrent state (0 without); elements: of one layer of it. requests: running at most. slots:
    verified per request; tree: as a tree. kept: states outside of trees at least. tokens: KV entries that are asked for, None for
    all that fit. captured: graphs. prefill: activations of the largest prefill. logits: of the largest verify pass.
    """

    total: int
    fraction: float
    given: bool
    chunk: int
    graph: int
    target: int
    draft: int
    entry: int
    state: int
    elements: int
    requests: int
    slots: int
    tree: bool
    kept: int
    tokens: int | None
    captured: int
    prefill: int
    logits: int
    positions: int | None

    @property
    def static(self) -> int:
        """What weights of the target, KV and states may take."""
        return int(self.total * self.fraction)

    @property
    def tree_states(self) -> int:
        """States of all slots of a step; the engine keeps one spare row."""
        return self.state * (self.requests + 1) * self.slots

    @property
    def states(self) -> int:
        """All recurrent states."""
        return self.tree_states + (self.state * (self.kept + 1) if self.state else 0)

    @property
    def free(self) -> int:
        """What is left of the static part for KV."""
        return self.static - self.target - self.states

    @property
    def fitting(self) -> int:
        """Tokens whose KV fits."""
        return max(0, self.free // self.entry)

    @property
    def beside(self) -> int:
        """What the start takes beside the static part, about."""
        return self.draft + CONTEXT + self.captured * GRAPH + self.logits + self.prefill

    @property
    def sum(self) -> int:
        """All of it, about, with the KV that is asked for or one request's."""
        return self.target + self.states + self.entry * self.wanted_tokens + self.beside

    @property
    def wanted_tokens(self) -> int:
        """KV entries that are asked for, else of one request of 2048 tokens; at least a hybrid's trees of one step."""
        least = self.tokens if self.tokens is not None else min(2048, self.positions or 2048)
        return max(least, self.requests * self.slots) if self.tree else least

    def impossible(self) -> str:
        """Why a start must fail, whatever the estimates are; empty if it need not."""
        weights = int(SURE * self.target)
        if weights + int(SURE * self.draft) > self.total:
            return "the weights alone are more than the GPU has"
        if weights + self.states >= self.static:
            return "weights and states are more than mem-fraction-static leaves, so no token's KV fits"
        if self.tree and self.requests * self.slots * self.elements > INDEX_LIMIT:
            return f"{self.requests} requests x {self.slots} slots x {self.elements} elements pass the 2^31 of the kernels' index"
        return ""

    def short(self) -> str:
        """What is likely to go wrong; empty if nothing is."""
        if self.beside > self.total - self.static:
            return (
                f"mem-fraction-static {self.fraction:g} leaves {gib(self.total - self.static)} beside the static part, and "
                f"drafter, graphs and prefills need about {gib(self.beside)}"
            )
        if self.fitting < self.wanted_tokens:
            return f"KV of {self.fitting} tokens fits, and {self.wanted_tokens} are asked for"
        return ""

    def largest_budget(self) -> int:
        """The largest tree whose states fit with these requests, 0 for none. Asked only where there are states."""
        each = self.state * (self.requests + 1) + self.entry * self.requests
        by_memory = (self.static - self.target - self.state * (self.kept + 1)) // each - 1
        return max(0, min(by_memory, INDEX_LIMIT // (self.requests * self.elements) - 1))

    def most_requests(self) -> int:
        """The most running requests whose states fit with this tree, each with one state outside of it; 0 for none."""
        each = (self.state + self.entry) * self.slots + self.state
        by_memory = (self.static - self.target - self.state * (self.slots + 1)) // each
        by_index = INDEX_LIMIT // (self.slots * self.elements) if self.slots else by_memory
        return max(0, min(by_memory, by_index))

    def recommended(self) -> float | None:
        """The largest mem-fraction-static that leaves what the start takes beside it; None if KV has no room then."""
        fraction = int((self.total - self.beside) / self.total * 100) / 100
        least = self.target + self.states + self.entry * self.wanted_tokens
        return fraction if fraction > 0 and self.total * fraction >= least else None

    def lines(self) -> list[str]:
        """The sum, one line per part."""
        own = "" if self.given else ", the engine's own choice"
        rows = [("target's weights", self.target, "")]
        if self.state:
            slots = f"{self.requests + 1} x {self.slots} slots of a step and " if self.slots else ""
            rows.append(
                ("recurrent states", self.states, f"{slots}{self.kept + 1} others, {self.state / MIB:.1f} MiB each")
            )
        kv = f"{self.wanted_tokens} tokens, {self.entry / 1024:.0f} KiB each in target and drafter; {self.fitting} would fit"
        rows.append(("KV cache", self.entry * self.wanted_tokens, kv))
        rows += [("drafter's weights", self.draft, "")] if self.draft else []
        rows += [
            ("CUDA graphs, about", self.captured * GRAPH, f"{self.captured} of them, largest batch {self.graph}"),
            ("logits of a step, about", self.logits, ""),
            ("prefill, about", self.prefill, f"{self.chunk} tokens at a time"),
            ("CUDA context and libraries, about", CONTEXT, ""),
        ]
        told = [f"{name} {gib(size)}{f' ({note})' if note else ''}" for name, size, note in rows]
        has = f"the GPU has {gib(self.total)}, of it static {gib(self.static)} (mem-fraction-static {self.fraction:g}{own})"
        return [*told, f"sum, about {gib(self.sum)}; {has}"]


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.1f} GiB"


def plan(instance: Map, target: Map, draft: Map | None, mib: int, count: int) -> Plan | None:
    """The plan of an instance (inventory's defaults under it) on `count` GPUs of `mib` MiB; None where sizes are unknown.

    target, draft: facts of the model folders. Data-parallel attention shares out memory in other ways and is not planned.
    """
    args, drafting = args_of(instance), instance.get("mode") != "baseline"
    budget = instance.get("budget")
    if (
        not _numbers(args)
        or args.get("enable-dp-attention")
        or (budget != "auto" and (not whole(budget) or budget < 1))
    ):
        return None
    pp = first(args, "pp-size", "pipeline-parallel-size") or 1
    dp = first(args, "dp-size", "data-parallel-size") or 1
    if pp != 1 or count % dp:
        return None
    tp = count // dp
    shape = target.get("shape") or {}
    entry, state = kv_entry(shape, tp, args), state_bytes(shape, tp, args)
    if not entry or (target.get("hybrid") and state is None):
        return None
    full = shape["layers"] - shape["linear_layers"]
    if drafting:
        if not draft or not draft.get("num_layers"):
            return None
        entry = -(-entry * (full + draft["num_layers"]) // full)
    chunk, graph, fraction = engine_defaults(mib, tp, args, drafting)
    limit = args.get("max-running-requests") or (DRAFTING_REQUESTS if drafting else None)
    requests = limit or graph
    slots, kinds = verify_slots(instance, draft)
    graph = 0 if args.get("disable-cuda-graph") else min(graph, requests)
    longest = min(
        value
        for value in (prefill_tokens(chunk, args), args.get("max-total-tokens"), args.get("context-length"))
        if value
    )
    wide = STREAMS * (shape.get("hidden") or 0) + UNITS * (shape.get("intermediate") or 0) // tp
    return Plan(
        total=mib * MIB,
        fraction=fraction,
        given=args.get("mem-fraction-static") is not None,
        chunk=longest,
        graph=graph,
        target=_weights(target) // tp,
        draft=_weights(draft) // tp if drafting and draft else 0,
        entry=entry,
        state=state[0] if state else 0,
        elements=state[1] if state else 0,
        requests=requests,
        slots=slots,
        tree=instance.get("mode") == "ddtree" and state is not None,
        kept=_kept(args, limit),
        tokens=args.get("max-total-tokens") or args.get("context-length"),
        captured=len(graph_sizes(graph, drafting)) * kinds if graph else 0,
        prefill=longest * wide * 2,
        logits=max(graph, 1) * max(slots, 1) * (shape.get("vocab") or 0) // tp * 4,
        positions=shape.get("positions"),
    )


COUNTS = (
    *("tp-size", "tensor-parallel-size", "pp-size", "pipeline-parallel-size", "dp-size", "data-parallel-size"),
    *("max-running-requests", "max-total-tokens", "context-length", "cuda-graph-max-bs", "max-mamba-cache-size"),
    *("speculative-dflash-block-size", "max-prefill-tokens"),
)


def _numbers(args: Map) -> bool:
    """Whether every size that the plan reads is one; what is none is for the engine to refuse."""
    fraction, sizes, chunk = (
        args.get(name) for name in ("mem-fraction-static", "cuda-graph-bs", "chunked-prefill-size")
    )
    return (
        all(whole(args[name]) and args[name] > 0 for name in COUNTS if args.get(name) is not None)
        and (fraction is None or (isinstance(fraction, (int, float)) and 0 < fraction < 1))
        and (sizes is None or (isinstance(sizes, list) and bool(sizes) and all(whole(size) for size in sizes)))
        and (chunk is None or whole(chunk))
    )


def _weights(model: Map) -> int:
    """Bytes in memory: the engine loads float32 files as 16 bits unless it is told otherwise."""
    return int(model["weights"]) // (2 if "32" in str(model.get("dtype")) else 1)


def _kept(args: Map, requests: int | None) -> int:
    """States outside of trees at least: of running requests, or what the engine keeps for the radix cache."""
    if args.get("max-mamba-cache-size"):
        return int(args["max-mamba-cache-size"])
    if args.get("disable-radix-cache"):
        return requests or 1
    return 4 if args.get("mamba-scheduler-strategy") == "extra_buffer" else 3
