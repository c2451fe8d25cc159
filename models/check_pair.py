#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does an inflated pair (inflate_pair.py) compute what its source computes?

    check_pair.py SRC OUT [--prompts 4] [--tokens 32] [--bound 1e-4] [--dtype float32] [--device cpu]

Compares the target's logits over whole prompts, the drafter's logits of a block behind each prompt (read from the target's
hidden states as the engine reads them), and greedy continuations. Prints the largest differences as JSON. Exits 1 if logits
differ by more than the bound, tokens differ, or a new token could be chosen. The bound is for float32 arithmetic: sums over
more channels are rounded elsewhere, which moves logits of up to 20 by about 3e-5. In bfloat16 arithmetic logits move as
they do from one kernel to the next (0.1 and more), so give a larger bound there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from train_pair import BLOCK, DRAFT_THETA, EPS, Drafter, Size, blocks_at
from transformers import AutoModelForCausalLM, AutoTokenizer


class Pair:
    """Target and drafter of one folder."""

    def __init__(self, root: Path, dtype: torch.dtype, device: str) -> None:
        self.target: Any = AutoModelForCausalLM.from_pretrained(root / "target", dtype=dtype).to(device).eval()
        config = json.loads((root / "draft" / "config.json").read_text())
        if (config["rms_norm_eps"], config["rope_theta"], config["block_size"]) != (EPS, DRAFT_THETA, BLOCK):
            raise SystemExit(f"check_pair: {root}/draft is not of the recipe of train_pair.py")
        special = config["dflash_config"]
        self.layers, self.mask = list(special["target_layer_ids"]), int(special["mask_token_id"])
        self.drafter = Drafter(
            Size(
                config["vocab_size"], config["hidden_size"], config["intermediate_size"], config["num_target_layers"],
                config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"],
                config["num_hidden_layers"], tuple(self.layers), (0, 0), 0, 0,
            )
        )  # fmt: skip
        weights = {k: t for f in sorted((root / "draft").glob("*.safetensors")) for k, t in load_file(f).items()}
        self.drafter.load_state_dict(weights, strict=True)
        self.drafter.to(device, dtype).eval()
        self.device = device

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of a text `[1, n]`: the target's logits `[n, vocabulary]` and the features `[n, layers * hidden]` it drafts from."""
        out = self.target(ids, output_hidden_states=True, use_cache=False)
        return out.logits[0].float(), torch.cat([out.hidden_states[layer + 1][0] for layer in self.layers], -1)

    def drafts(self, features: Tensor, at: list[int], roots: list[int]) -> Tensor:
        """Drafter logits `[blocks, 15, vocabulary]`: block i starts with token `roots[i]` at position `at[i]`."""
        seen, asked, visible = blocks_at(torch.tensor([at], device=self.device), len(features))
        ids = torch.tensor([[token, *[self.mask] * (BLOCK - 1)] for token in roots], device=self.device)
        hidden = self.drafter(
            self.target.get_input_embeddings()(ids.view(1, -1)), features[None], (seen, asked), visible
        )
        return self.target.lm_head(hidden[0].unflatten(0, (-1, BLOCK))[:, 1:]).float()

    def greedy(self, ids: Tensor, new: int) -> list[int]:
        self.target.generation_config.eos_token_id = None
        text = self.target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        tokens: list[int] = text[0, ids.shape[1] :].tolist()
        return tokens


@torch.no_grad()
def compare(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(args.src / "target")
    dtype = getattr(torch, args.dtype)
    source, copy = Pair(args.src, dtype, args.device), Pair(args.out, dtype, args.device)
    texts = [json.loads(line)["prompt"] for line in args.texts.read_text().splitlines()][: args.prompts]
    report: dict[str, Any] = {
        "target": 0.0,
        "draft": 0.0,
        "largest": 0.0,
        "new_tokens_below": None,
        "tokens_differ": [],
    }
    for number, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :256].to(args.device)
        expected = source.greedy(ids, args.tokens)
        if copy.greedy(ids, args.tokens) != expected:
            report["tokens_differ"].append(number)
        read: dict[str, list[Tensor]] = {"target": [], "draft": []}
        for pair in (source, copy):
            logits, features = pair.read(ids)
            read["target"].append(logits)
            read["draft"].append(pair.drafts(features, [ids.shape[1]], expected[:1])[0])
        for name, (old, new) in read.items():
            known = old.shape[1]
            report[name] = max(report[name], float((old - new[:, :known]).abs().max()))
            report["largest"] = max(report["largest"], float(old.abs().max()))
            if new.shape[1] > known:
                below = float((new[:, :known].amax(1) - new[:, known:].amax(1)).min())
                report["new_tokens_below"] = min(below, report["new_tokens_below"] or below)
    report["ok"] = (
        max(report["target"], report["draft"]) <= args.bound
        and not report["tokens_differ"]
        and (report["new_tokens_below"] is None or report["new_tokens_below"] > 1e4)
    )
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, help="JSON lines with a prompt each (default: SRC/prompts.jsonl)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--bound", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    args.texts = args.texts or args.src / "prompts.jsonl"
    report = compare(args)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
