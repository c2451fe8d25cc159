# SPDX-License-Identifier: Apache-2.0
"""What chains and trees must reach on a (target, DFlash drafter) pair, computed without any engine.

Run with the engine's Python (torch, transformers, safetensors, scipy); reads one JSON request from stdin, answers on stdout:

    {"what": "walk", "target": DIR, "draft": DIR, "prompts": [TEXT, ..], "new": 64, "arms": {"chain": [15, 1], ..}}
        -> {"prompts": [[id, ..], ..], "greedy": [[id, ..], ..], "pieces": [[text of each greedy token, ..], ..],
            "accepted": {arm: [[accepted drafts of step 1, 2, ..] per prompt]}}
    {"what": "distribution", "target": DIR, "prompt": [id, ..], "length": 3, "draws": 2000, "expected": 20, "alpha": 1e-4,
     "temperature": 1.0}
        -> {"leaves": [[[id, ..], probability], ..], "rests": the same for prefixes, "critical": chi-square at alpha}

The walk follows the target's own greedy text. A step stands at a root token that is known but not yet in the cache; the
drafter sees the features of everything before it and gives 15 distributions; an arm `[budget, topk]` keeps the `budget`
most probable prefixes out of the `topk` best tokens of each position. The step takes every token of the text that is a
prefix in the tree, and one more from the target. Prefill gives the first token. Counted as the engine counts: a step that
reaches `new` tokens is cut there.
"""

from __future__ import annotations

import heapq
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

Prefix = tuple[int, ...]


class Drafter:
    """A DFlash drafter read from its checkpoint: features of the context in, one block of distributions out."""

    def __init__(self, folder: Path, target: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        special = config["dflash_config"]
        self.block = int(config["block_size"])
        self.features = [int(layer) for layer in special["target_layer_ids"]]
        self.mask = int(special["mask_token_id"])
        self.heads, self.kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        self.dim, self.layers = int(config["head_dim"]), int(config["num_hidden_layers"])
        self.eps = float(config["rms_norm_eps"])
        self.theta = float(config["rope_theta"])
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embed, self.head = target.get_input_embeddings(), target.lm_head

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name]
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name])

    def _turn(self, x: Tensor, first: int) -> Tensor:
        """Rotary positions `first, first + 1, ..` on `[tokens, heads, dim]`."""
        rate = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angle = torch.arange(first, first + x.shape[0], dtype=torch.float32)[:, None, None] * rate
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def log_probs(self, context: Tensor, root: int) -> Tensor:
        """`context` `[n, features * hidden]` of the n tokens before `root`; returns `[block - 1, vocabulary]`."""
        start = context.shape[0]
        memory = self._norm(self._linear(context, "fc.weight"), "hidden_norm.weight")
        x = self.embed(torch.tensor([root] + [self.mask] * (self.block - 1)))
        for layer in range(self.layers):
            at = f"layers.{layer}."
            own = self._norm(x, at + "input_layernorm.weight")
            both = torch.cat([memory, own])
            q = self._linear(own, at + "self_attn.q_proj.weight").view(-1, self.heads, self.dim)
            k = self._linear(both, at + "self_attn.k_proj.weight").view(-1, self.kv_heads, self.dim)
            v = self._linear(both, at + "self_attn.v_proj.weight").view(-1, self.kv_heads, self.dim)
            q = self._turn(self._norm(q, at + "self_attn.q_norm.weight"), start)
            k = self._turn(self._norm(k, at + "self_attn.k_norm.weight"), 0)
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1).reshape(self.block, -1)
            x = x + self._linear(seen, at + "self_attn.o_proj.weight")
            own = self._norm(x, at + "post_attention_layernorm.weight")
            gate = F.silu(self._linear(own, at + "mlp.gate_proj.weight"))
            x = x + self._linear(gate * self._linear(own, at + "mlp.up_proj.weight"), at + "mlp.down_proj.weight")
        return torch.log_softmax(self.head(self._norm(x, "norm.weight"))[1:], -1)


def best_prefixes(log_probs: Tensor, budget: int, topk: int) -> set[Prefix]:
    """The `budget` most probable token prefixes under the product of the positions' distributions."""
    values, tokens = (part.tolist() for part in log_probs.topk(min(topk, log_probs.shape[1]), -1))
    return grow(values, tokens, budget)


def grow(values: list[list[float]], tokens: list[list[int]], budget: int) -> set[Prefix]:
    """`best_prefixes` of candidates already ranked: log-probabilities and tokens by position, best first."""
    # (cost, depth, token, ranks): grows by the next sibling and by the first child, so cost never falls
    queue: list[tuple[float, int, int, Prefix]] = [(-values[0][0], 1, tokens[0][0], (0,))]
    kept: set[Prefix] = set()
    while queue and len(kept) < budget:
        cost, depth, _, ranks = heapq.heappop(queue)
        kept.add(tuple(tokens[level][rank] for level, rank in enumerate(ranks)))
        last = ranks[-1]
        if last + 1 < len(values[depth - 1]):
            step = values[depth - 1][last] - values[depth - 1][last + 1]
            heapq.heappush(queue, (cost + step, depth, tokens[depth - 1][last + 1], (*ranks[:-1], last + 1)))
        if depth < len(values):
            heapq.heappush(queue, (cost - values[depth][0], depth + 1, tokens[depth][0], (*ranks, 0)))
    return kept


def _load_target(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # an end-of-sequence token is a token like any other here
    return model


def walk(request: dict[str, Any]) -> dict[str, Any]:
    """Accepted drafts of every step of every arm (see the module's head)."""
    target = _load_target(request["target"])
    drafter = Drafter(Path(request["draft"]), target)
    tokenizer = Tokenizer.from_file(str(Path(request["target"]) / "tokenizer.json"))
    prompts: list[list[int]] = [tokenizer.encode(text).ids for text in request["prompts"]]
    new: int = request["new"]
    accepted: dict[str, list[list[int]]] = {arm: [] for arm in request["arms"]}
    greedy: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        more = new + drafter.block  # the last step's tree may look past the end
        text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=more, do_sample=False)[0]
        states = target.model(input_ids=text[None], output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in drafter.features], -1)
        tokens: list[int] = text.tolist()
        greedy.append(tokens[len(prompt) : len(prompt) + new])
        drafts: dict[int, Tensor] = {}
        for arm, (budget, topk) in request["arms"].items():
            root, steps = len(prompt), []
            while root - len(prompt) + 1 < new:
                if root not in drafts:
                    drafts[root] = drafter.log_probs(features[:root], tokens[root])
                tree = best_prefixes(drafts[root], budget, topk)
                length = 0
                while tuple(tokens[root + 1 : root + 2 + length]) in tree:
                    length += 1
                steps.append(length)
                root += length + 1
            accepted[arm].append(steps)
    pieces = [[tokenizer.decode([token]) for token in tokens] for tokens in greedy]
    return {"prompts": prompts, "greedy": greedy, "pieces": pieces, "accepted": accepted}


def distribution(request: dict[str, Any]) -> dict[str, Any]:
    """Exact probabilities of continuations, merged into cells that `draws` samples fill well.

    A cell is a whole continuation (`leaves`), or everything that leaves the listed prefixes after one of them (`rests`,
    the empty prefix collects what is too rare for a cell of its own).
    """
    from scipy.stats import chi2

    target = _load_target(request["target"])
    least = request["expected"] / request["draws"]
    rests: dict[Prefix, float] = {}
    front: dict[Prefix, float] = {(): 1.0}
    for _ in range(request["length"]):
        batch = torch.tensor([[*request["prompt"], *prefix] for prefix in front])
        chance = torch.softmax(target(input_ids=batch).logits[:, -1].double() / request["temperature"], -1)
        longer: dict[Prefix, float] = {}
        for (prefix, mass), row in zip(front.items(), chance * torch.tensor([*front.values()])[:, None], strict=True):
            likely = (row >= least).nonzero().flatten().tolist()
            longer |= {(*prefix, token): float(row[token]) for token in likely}
            rests[prefix] = mass - float(row[likely].sum())
        front = longer
    common = sum(mass for mass in rests.values() if mass < least) + (rests[()] if rests[()] >= least else 0.0)
    rests = {prefix: mass for prefix, mass in rests.items() if mass >= least} | {(): common}
    cells = len(rests) + len(front)
    return {
        "leaves": [[list(path), mass] for path, mass in front.items()],
        "rests": [[list(path), mass] for path, mass in rests.items()],
        "critical": float(chi2.isf(request["alpha"], cells - 1)),
    }


def main() -> int:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    request = json.load(sys.stdin)
    verbs = {"walk": walk, "distribution": distribution}
    json.dump(verbs[request["what"]](request), sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
