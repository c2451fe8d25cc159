#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small target model and a DFlash drafter for it, on the Python source files of this machine.

    train_pair.py OUT --arch dense --size nano --target 240s --generate 60s --draft 240s
    train_pair.py OUT --smoke          # a few steps of everything, for a CPU: proves the path, learns nothing

Writes OUT/target and OUT/draft in Hugging Face layout and OUT/training.json (inputs, steps, losses). The target is a Qwen3
(`dense`) or Qwen3-Next (`hybrid`) with its own byte-level BPE vocabulary. The drafter has the layout of SGLang's
DFlashDraftModel: it shares the target's embedding and head, reads the hidden states of some target layers as context, and
fills a block of mask tokens in one pass. It learns from the target's own continuations (three steps of four) and from the
corpus (one of four). Budgets are seconds ("240s") or optimizer steps ("500"). One GPU is expected, a CPU works for --smoke.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, MASK = "<|endoftext|>", "<|mask|>"
SPECIAL = [END, "<|im_start|>", "<|im_end|>", MASK]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCK = 16  # tokens of a drafter block: the last accepted token and 15 guesses
DECAY = 7.0  # guesses further out weigh exp(-i / DECAY): they count only if all before them hold
DRAFT_THETA, EPS = 1e6, 1e-6


@dataclass(frozen=True)
class Size:
    """Shapes of a pair; `capture` are the target layers whose outputs the drafter reads."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_layers: int
    capture: tuple[int, ...]
    linear_heads: tuple[int, int]  # hybrid: key and value heads of a recurrent layer
    expert: int  # hybrid: intermediate size of an expert
    corpus_mb: int


SIZES = {
    "nano": Size(1024, 128, 384, 4, 4, 2, 32, 2, (0, 1, 2), (2, 4), 128, 30),
    "small": Size(4096, 384, 1024, 8, 6, 2, 64, 3, (1, 3, 5, 6), (4, 8), 384, 90),
}


@dataclass(frozen=True)
class Load:
    """How much goes through the device at once."""

    target_batch: int
    target_tokens: int
    generate_batch: int
    prefix: int
    total: int  # tokens of a generated text, prefix included
    draft_batch: int
    anchors: int  # blocks per text in one drafter step
    corpus_mb: float


def load_for(size: Size, arch: str, smoke: bool) -> Load:
    """A load that fits one large GPU, or next to nothing for a smoke run."""
    if smoke:
        return Load(4, 64, 4, 16, 40, 4, 4, 1.0)
    return Load(64 if arch == "dense" else 32, 1024, 768, 64, 512, 32, 32, size.corpus_mb)


@dataclass(frozen=True)
class Budget:
    """An end of training: wall seconds or steps, exactly one is above zero."""

    seconds: float = 0.0
    steps: int = 0

    @staticmethod
    def parse(text: str) -> Budget:
        try:
            budget = Budget(seconds=float(text[:-1])) if text.endswith("s") else Budget(steps=int(text))
        except ValueError:
            budget = Budget()
        if max(budget.seconds, budget.steps) <= 0:
            raise argparse.ArgumentTypeError(f"{text!r}: expected seconds like 240s or a number of steps like 500")
        return budget

    def spent(self, started: float, done: int) -> float:
        """The part that is used up, 1.0 or more when it is over."""
        return done / self.steps if self.steps else (time.monotonic() - started) / self.seconds


STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:7.1f}s] {text}", flush=True)


# Corpus and vocabulary


def read_corpus(roots: Iterable[Path], megabytes: float, seed: int) -> list[str]:
    """Texts of Python files below `roots` in an order given by `seed`, up to `megabytes`."""
    files = sorted(
        {f for root in roots for f in root.rglob("*.py") if f.is_file() and 500 < f.stat().st_size < 200_000}
    )
    random.Random(seed).shuffle(files)
    texts: list[str] = []
    room = megabytes * 1e6
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # some test data is not UTF-8 on purpose
        room -= len(texts[-1])
        if room <= 0:
            break
    if not texts:
        raise SystemExit(f"train_pair: no Python file below {', '.join(map(str, roots))}; name folders with --sources")
    return texts


def train_tokenizer(texts: list[str], vocab: int, out: Path) -> Tokenizer:
    """Byte-level BPE over a sample of the corpus, saved beside the target."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:1500], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, additional_special_tokens=SPECIAL[1:]
    )
    wrapped.chat_template = CHAT
    wrapped.save_pretrained(out)
    return tokenizer


class Stream:
    """The corpus as one row of tokens on the device."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], device: str) -> None:
        end = tokenizer.token_to_id(END)
        ids = [
            t
            for i in range(0, len(texts), 500)
            for e in tokenizer.encode_batch(texts[i : i + 500])
            for t in (*e.ids, end)
        ]
        self.tokens = torch.tensor(ids, dtype=torch.int32, device=device)

    def sample(self, rows: int, length: int) -> Tensor:
        """Random windows, int64 `[rows, length]`."""
        starts = torch.randint(0, len(self.tokens) - length, (rows, 1), device=self.tokens.device)
        return self.tokens[starts + torch.arange(length, device=self.tokens.device)].long()


# Target


def make_target(arch: str, size: Size, end: int) -> nn.Module:
    common: dict[str, Any] = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "pad_token_id": end,
        "bos_token_id": None,
        "attn_implementation": "sdpa",
    }
    if arch == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    keys, values = size.linear_heads
    recurrent = {
        "full_attention_interval": 4,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.expert,
        "shared_expert_intermediate_size": size.expert,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**common, **recurrent))


def save_target(target: Any, arch: str, out: Path) -> None:
    target.config.architectures = [type(target).__name__]
    target.save_pretrained(out)
    if arch == "hybrid":  # the engine reads this key, transformers leaves it out
        file = out / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "full_attention_interval": 4}, indent=1) + "\n")


def optimize(
    name: str, module: nn.Module, loss_of: Callable[[], Tensor], budget: Budget, rate: float
) -> dict[str, Any]:
    """AdamW with warm-up and cosine decay over the budget; returns steps, seconds and the last loss."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.05, fused=parameters[0].is_cuda
    )
    started, step, loss = time.monotonic(), 0, torch.tensor(math.nan)
    while (spent := budget.spent(started, step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * max(0.02, 0.5 + 0.5 * math.cos(math.pi * spent))
        loss = loss_of()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            say(f"{name}: step {step}, loss {loss.item():.3f}")
    seconds = time.monotonic() - started
    say(f"{name}: {step} steps in {seconds:.0f} s, loss {loss.item():.3f}")
    return {"steps": step, "seconds": round(seconds, 1), "loss": round(loss.item(), 4)}


def continuations(target: Any, stream: Stream, load: Load, budget: Budget) -> Tensor:
    """Texts that the target itself writes, greedy and sampled in turn: int32 `[n, load.total]`."""
    texts: list[Tensor] = []
    started, length = time.monotonic(), load.total - load.prefix
    while budget.spent(started, len(texts)) < 1:
        prefix = stream.sample(load.generate_batch, load.prefix)
        how = {"do_sample": True, "temperature": 0.7, "top_k": 0} if len(texts) % 2 else {"do_sample": False}
        with torch.no_grad():
            text = target.generate(
                prefix, attention_mask=torch.ones_like(prefix), max_new_tokens=length, min_new_tokens=length, **how
            )
        texts.append(text.to(torch.int32))
    say(f"continuations: {sum(t.numel() for t in texts) / 1e6:.1f} M tokens")
    return torch.cat(texts)


# Drafter: parameter names are those that SGLang's DFlashDraftModel loads


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), EPS)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, halves convention: x `[batch, tokens, heads, dim]`, positions `[batch, tokens]`."""
    half = x.shape[-1] // 2
    frequency = DRAFT_THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None].float() * frequency)[:, :, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context features and the block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.q_proj = linear(size.hidden, size.heads * size.head_dim)
        self.k_proj = linear(size.hidden, size.kv_heads * size.head_dim)
        self.v_proj = linear(size.hidden, size.kv_heads * size.head_dim)
        self.o_proj = linear(size.heads * size.head_dim, size.hidden)
        self.q_norm, self.k_norm = Norm(size.head_dim), Norm(size.head_dim)

    def forward(self, x: Tensor, context: Tensor, places: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, self.size.head_dim))

        both, positions = torch.cat([context, x], dim=1), torch.cat(places, dim=1)
        q = rotate(self.q_norm(heads(self.q_proj(x))), places[1]).transpose(1, 2)
        k = rotate(self.k_norm(heads(self.k_proj(both))), positions).transpose(1, 2)
        v = heads(self.v_proj(both)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = linear(size.hidden, size.intermediate)
        self.up_proj = linear(size.hidden, size.intermediate)
        self.down_proj = linear(size.intermediate, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(size.hidden), Norm(size.hidden)
        self.self_attn, self.mlp = Attention(size), FeedForward(size)

    def forward(self, x: Tensor, context: Tensor, places: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, places, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.fc = linear(len(size.capture) * size.hidden, size.hidden)
        self.hidden_norm, self.norm = Norm(size.hidden), Norm(size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.draft_layers))

    def forward(self, x: Tensor, features: Tensor, places: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x: embedded blocks `[batch, blocks * BLOCK, hidden]`; features: captured target layers side by side."""
        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            x = layer(x, context, places, mask)
        return self.norm(x)


def blocks_at(anchors: Tensor, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the context, positions of the blocks at `anchors` `[batch, n]`, and who may look at whom.

    A block at anchor p sees the context before p and all of itself, never another block: this is what it meets in the
    engine, where the anchor is the last accepted token and its features are not there yet.
    """
    batch, count = anchors.shape
    seen = torch.arange(context, device=anchors.device).expand(batch, context)
    asked = (anchors[..., None] + torch.arange(BLOCK, device=anchors.device)).flatten(1)
    before = seen[:, None, :] < anchors.repeat_interleave(BLOCK, dim=1)[..., None]
    owner = torch.arange(count, device=anchors.device).repeat_interleave(BLOCK)
    same = (owner[:, None] == owner).expand(batch, -1, -1)
    return seen, asked, torch.cat([before, same], dim=-1)


def draft_loss(
    target: Any, drafter: nn.Module, texts: Tensor, size: Size, load: Load, mask_id: int
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of the guesses, and how many guesses in a row were right on average."""
    context = load.total - BLOCK
    with torch.no_grad():
        states = target.model(input_ids=texts[:, :context], output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer + 1] for layer in size.capture], dim=-1)
    anchors = torch.randint(1, context, (len(texts), load.anchors), device=texts.device)
    seen, asked, mask = blocks_at(anchors, context)
    ids = torch.full((*anchors.shape, BLOCK), mask_id, device=texts.device)
    ids[..., 0] = texts.gather(1, anchors)
    hidden = drafter(target.model.embed_tokens(ids.flatten(1)), features, (seen, asked), mask)
    guesses = hidden.unflatten(1, (-1, BLOCK))[:, :, 1:]
    logits = target.lm_head(guesses.to(target.lm_head.weight.dtype)).float()
    truth = texts.gather(1, asked).unflatten(1, (-1, BLOCK))[:, :, 1:]
    losses = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none").view(truth.shape)
    weights = torch.exp(-torch.arange(BLOCK - 1, device=texts.device) / DECAY)
    right = (logits.argmax(-1) == truth).float().cumprod(-1).sum(-1).mean()
    return (losses * weights).sum(-1).mean() / weights.sum(), right.detach()


def save_drafter(drafter: nn.Module, size: Size, mask_id: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in drafter.state_dict().items()}
    save_file(tensors, out / "model.safetensors")
    dflash = {"mask_token": MASK, "mask_token_id": mask_id, "target_layer_ids": list(size.capture), "block_size": BLOCK}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.draft_layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "rms_norm_eps": EPS,
        "rope_theta": DRAFT_THETA,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "block_size": BLOCK,
        "num_target_layers": size.layers,
        "dflash_config": dflash,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    paths = sysconfig.get_paths()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write, made if it is missing")
    parser.add_argument("--arch", choices=["dense", "hybrid"], default="dense")
    parser.add_argument("--size", choices=sorted(SIZES), default="nano")
    parser.add_argument("--target", type=Budget.parse, default="240s", metavar="BUDGET", help="training of the target")
    parser.add_argument("--generate", type=Budget.parse, default="60s", metavar="BUDGET", help="its continuations")
    parser.add_argument("--draft", type=Budget.parse, default="240s", metavar="BUDGET", help="training of the drafter")
    parser.add_argument(
        "--sources",
        type=Path,
        nargs="+",
        default=[Path(paths["stdlib"]), Path(paths["purelib"])],
        help="folders with Python files (default: this Python's library and packages)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--smoke", action="store_true", help="3 steps of each, 1 MB of corpus: minutes of a GPU become seconds of a CPU"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.target = args.draft = Budget(steps=3)
        args.generate = Budget(steps=2)
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    size, gpu = SIZES[args.size], args.device.startswith("cuda")
    load = load_for(size, args.arch, args.smoke)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    out: Path = args.out

    texts = read_corpus(args.sources, load.corpus_mb, args.seed)
    tokenizer = train_tokenizer(texts, size.vocab, out / "target")
    end, mask_id = tokenizer.token_to_id(END), tokenizer.token_to_id(MASK)
    stream = Stream(tokenizer, texts, args.device)
    say(f"corpus: {len(texts)} files, {len(stream.tokens) / 1e6:.1f} M tokens")

    target: Any = make_target(args.arch, size, end).to(args.device)
    core = torch.compile(target.model) if gpu and args.arch == "dense" else target.model

    def target_loss() -> Tensor:
        rows = stream.sample(load.target_batch, load.target_tokens + 1)
        with torch.autocast("cuda", torch.bfloat16, enabled=gpu):
            hidden = core(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            return F.cross_entropy(target.lm_head(hidden).flatten(0, 1).float(), rows[:, 1:].flatten())

    report: dict[str, Any] = {"target": optimize("target", target, target_loss, args.target, 2e-3)}
    target.to(torch.bfloat16).eval().requires_grad_(False)
    save_target(target, args.arch, out / "target")

    own = continuations(target, stream, load, args.generate)
    drafter = Drafter(size).to(args.device)
    fast = torch.compile(drafter) if gpu else drafter
    turn, right = 0, torch.tensor(0.0)

    def step() -> Tensor:
        nonlocal turn, right
        turn += 1
        if turn % 4:
            rows = own[torch.randint(0, len(own), (load.draft_batch,), device=own.device)].long()
        else:
            rows = stream.sample(load.draft_batch, load.total)
        with torch.autocast(args.device.split(":")[0], torch.bfloat16):
            loss, hits = draft_loss(target, fast, rows, size, load, mask_id)
        right = hits if turn % 4 else right
        return loss

    report["draft"] = optimize("draft", drafter, step, args.draft, 1.5e-3)
    report["draft"]["right_in_a_row"] = round(right.item(), 3)
    save_drafter(drafter, size, mask_id, out / "draft")
    report |= {
        "arch": args.arch,
        "size": args.size,
        "seed": args.seed,
        "shapes": asdict(size),
        "torch": torch.__version__,
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)  # its writer makes private files; the engine runs as another user
    say(f"drafter: {right.item():.2f} guesses in a row are right on the target's own text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
