#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gives a small (target, DFlash drafter) pair the cost of a real model without changing what it computes.

    inflate_pair.py SRC OUT --hidden 6144 --layers 24 --intermediate 8192 --vocab 65536
    inflate_pair.py SRC OUT ... --moe-intermediate 1024 --shared-intermediate 1024     # Qwen3-Next

Speculation only pays where a step costs memory traffic, and no trained pair of that size travels to every machine. SRC and
OUT are folders with target/ (Qwen3 or Qwen3-Next) and draft/ (DFlashDraftModel). Why the function stays:

stream   The residual stream of n channels becomes n * s^2 channels: the old ones multiplied by s, the others silent. Its mean
         square is unchanged, so RMSNorm divides by what it always divided by and gives s times the old result. Matrices that
         write the stream carry s, matrices that read a normed stream carry 1/s. s is 1, 2, 4 or 8, so only exponents
         change and every weight is exact in bfloat16. The drafter lives in the target's stream; its `fc` reads raw streams
         and writes one, so s cancels there.
width    More heads, recurrent heads, MLP units and wider experts compute on random weights, and what they
         write back is silent. So are the layers in between the old ones, which are spread evenly.
silent   is 2^-60 times a random number, not zero: far below the last bit of whatever it is added to, with the
         mantissas of ordinary numbers, since a matrix of zeros draws less power and runs faster.
tokens   Every token's embedding has 2^-30 in the first new channel, which only the new rows of lm_head look at, with
         weight -2^60: their logits are below -10^6 and no new token is ever chosen.

On a GPU, if there is one, 15 GB take seconds to make; several threads write the files at once. OUT appears when complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

SILENT = 2.0**-60
MARK, AVOID = 2.0**-30, -(2.0**60)
CHUNK = 1 << 25  # elements that a worker holds at once
SHARD = 4 << 30  # bytes of a file
KINDS = {"bfloat16": (torch.bfloat16, "BF16", 2), "float32": (torch.float32, "F32", 4)}

Config = dict[str, Any]
Map = list[int]  # new index -> old index, -1 for a new one


class SizeError(ValueError):
    """A size that the pair cannot be brought to; the message says what was expected."""


# --- sizes


def need(held: bool, text: str) -> None:
    if not held:
        raise SizeError(text)


def spread(old: int, new: int, period: int) -> list[int]:
    """New places of the old layers; layers of one period (hybrids: linear x 3, full attention) move together."""
    need(
        old % period == 0 and new % period == 0,
        f"--layers {new}: expected a multiple of {period} (the hybrid's period)",
    )
    need(new >= old, f"--layers {new}: expected at least the source's {old}")
    return [i // period * (new // period) // (old // period) * period + i % period for i in range(old)]


def new_configs(target: Config, draft: Config, args: argparse.Namespace) -> tuple[Config, Config, int, list[int]]:
    """The two new config.json, s, and the places of the old target layers. Raises SizeError."""
    kind = target.get("model_type")
    need(kind in ("qwen3", "qwen3_next"), f"the target is {kind!r}; expected a Qwen3 or a Qwen3-Next")
    for key in ("attention_bias", "use_sliding_window", "mlp_only_layers"):
        need(not target.get(key), f"the target's {key} is set; such models are not known here")
    need(
        target.get("decoder_sparse_step", 1) == 1,
        "the target has layers without experts; such models are not known here",
    )
    for key in ("hidden_size", "head_dim", "rms_norm_eps", "vocab_size"):
        need(draft[key] == target[key], f"{key} of target and drafter differ ({target[key]}, {draft[key]})")
    width, dim = target["hidden_size"], target["head_dim"]
    scale = math.isqrt(args.hidden // width) if args.hidden >= width else 0
    sizes = ", ".join(str(width * 4**i) for i in range(4))
    need(
        scale in (1, 2, 4, 8) and args.hidden == width * scale * scale,
        f"--hidden {args.hidden}: expected {sizes} (1, 4, 16 or 64 times the source's), where every weight stays exact",
    )
    heads = args.heads or args.hidden // dim
    kv_heads = args.kv_heads or max(target["num_key_value_heads"], heads // 4)
    common: Config = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": args.vocab or target["vocab_size"],
    }
    for old in (target, draft):
        for key, value in common.items():
            need(value >= old[key], f"{key} {value}: expected at least the source's {old[key]}")
    need(heads % kv_heads == 0, f"{heads} heads for {kv_heads} KV heads: expected a multiple")
    need(
        common["vocab_size"] == target["vocab_size"] or scale > 1,
        f"--vocab {common['vocab_size']}: new tokens need a new channel, so a larger --hidden",
    )
    period = target.get("full_attention_interval", 4) if kind == "qwen3_next" else 1
    places = spread(target["num_hidden_layers"], args.layers, period)
    more: Config = {"num_hidden_layers": args.layers, "dtype": args.dtype, "tie_word_embeddings": False}
    more["layer_types"] = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(args.layers)]
    if old_types := target.get("layer_types"):
        need(old_types == more["layer_types"][: len(old_types)], "the target's layer_types are not periodic")
    if kind == "qwen3_next":
        values = args.linear_value_heads or max(
            target["linear_num_value_heads"], args.hidden // target["linear_value_head_dim"]
        )
        ratio = target["linear_num_value_heads"] // target["linear_num_key_heads"]
        hybrid = {
            "linear_num_value_heads": values,
            "linear_num_key_heads": args.linear_key_heads or values // ratio,
            "moe_intermediate_size": args.moe_intermediate or target["moe_intermediate_size"],
            "shared_expert_intermediate_size": args.shared_intermediate or target["shared_expert_intermediate_size"],
        }
        for key, value in hybrid.items():
            need(value >= target[key], f"{key} {value}: expected at least the source's {target[key]}")
        keys = hybrid["linear_num_key_heads"]
        need(
            values % keys == 0 and values // keys >= ratio,
            f"{values} recurrent value heads for {keys} key heads: expected a multiple, at least {ratio} times",
        )
        more |= hybrid
    else:
        need(
            not (args.moe_intermediate or args.shared_intermediate or args.linear_key_heads or args.linear_value_heads),
            "the target is dense: it has no experts and no recurrent heads to widen",
        )
    special = draft["dflash_config"]
    moved = {"target_layer_ids": [places[layer] for layer in special["target_layer_ids"]]}
    drafted = {"num_target_layers": args.layers, "torch_dtype": args.dtype, "dflash_config": special | moved}
    return target | common | more, draft | common | drafted, scale, places


# --- which old row or column a new one is


def grown(old: int, new: int) -> Map:
    return [*range(old), *[-1] * (new - old)]


def times(heads: Map, size: int) -> Map:
    """A map of heads as a map of their `size` rows each."""
    return [head * size + i if head >= 0 else -1 for head in heads for i in range(size)]


def attention_heads(old: Config, new: Config) -> tuple[Map, Map]:
    """Query heads and KV heads. An old KV head keeps its queries; where they exceed the new group, it is repeated."""
    group = old["num_attention_heads"] // old["num_key_value_heads"]
    kv_heads = new["num_key_value_heads"]
    wide = new["num_attention_heads"] // kv_heads
    queries: Map = []
    keys: Map = []
    for head in range(old["num_key_value_heads"]):
        mine = list(range(head * group, (head + 1) * group))
        for first in range(0, group, wide):
            part = mine[first : first + wide]
            keys.append(head)
            queries += part + [-1] * (wide - len(part))
    need(
        len(keys) <= kv_heads,
        f"{new['num_attention_heads']} heads in groups of {wide}: the source's groups of {group} need {len(keys)} KV heads",
    )
    queries += [-1] * (new["num_attention_heads"] - len(queries))
    return queries, keys + [-1] * (kv_heads - len(keys))


@dataclass(frozen=True)
class Recurrent:
    """Maps of a Qwen3-Next recurrent layer, whose projections interleave q, k, v, z (and b, a) per key head."""

    values: Map
    out: Map
    qkvz: Map
    ba: Map
    conv: Map

    @staticmethod
    def of(old: Config, new: Config) -> Recurrent:
        key_dim, value_dim = old["linear_key_head_dim"], old["linear_value_head_dim"]
        keys, new_keys = old["linear_num_key_heads"], new["linear_num_key_heads"]
        per = old["linear_num_value_heads"] // keys
        new_per = new["linear_num_value_heads"] // new_keys
        span = 2 * key_dim + 2 * per * value_dim
        values: Map = []
        qkvz: Map = []
        ba: Map = []
        for key in range(new_keys):
            mine = grown(per, new_per) if key < keys else [-1] * new_per
            values += [key * per + v if v >= 0 else -1 for v in mine]
            qkvz += [key * span + i if key < keys else -1 for i in range(2 * key_dim)]
            for part in range(2):
                start = key * span + 2 * key_dim + part * per * value_dim
                qkvz += [start + row if row >= 0 else -1 for row in times(mine, value_dim)]
                ba += [(2 * key + part) * per + v if v >= 0 else -1 for v in mine]
        out = times(values, value_dim)
        key_rows = times(grown(keys, new_keys), key_dim)
        conv: Map = []
        for start, rows in ((0, key_rows), (keys * key_dim, key_rows), (2 * keys * key_dim, out)):
            conv += [start + row if row >= 0 else -1 for row in rows]
        return Recurrent(values, out, qkvz, ba, conv)


# --- tensors


@dataclass
class Made:
    """One tensor of the copy; `rows(first, last)` computes a part of it in float32 on the device."""

    name: str
    shape: list[int]
    rows: Callable[[int, int], Tensor]
    file: Path = Path()
    at: int = 0  # byte in the file

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.count // self.shape[0]


@dataclass
class Side:
    """Target or drafter: its old tensors and how their rows and columns map to the new sizes."""

    old: Config
    new: Config
    tensors: dict[str, Tensor]
    prefix: str  # of the names of layers
    scale: int
    device: torch.device
    seed: int
    stream: Map = field(init=False)
    tables: list[tuple[str, Map, Map]] = field(init=False)  # pattern, rows, columns
    recurrent: Recurrent | None = None

    def __post_init__(self) -> None:
        old, new = self.old, self.new
        next_kind = old["model_type"] == "qwen3_next"
        self.stream = s = grown(old["hidden_size"], new["hidden_size"])
        queries, keys = attention_heads(old, new)
        dim = old["head_dim"]

        def wider(key: str) -> Map:
            return grown(old[key], new[key])

        units = wider("intermediate_size")
        self.tables = [
            # Qwen3-Next's query projection has each head's gate behind its query.
            ("self_attn.q_proj", times(queries, dim * (2 if next_kind else 1)), s),
            ("self_attn.[kv]_proj", times(keys, dim), s),
            ("self_attn.o_proj", s, times(queries, dim)),
            ("mlp.(gate|up)_proj", units, s),
            ("mlp.down_proj", s, units),
        ]
        if next_kind:
            self.recurrent = r = Recurrent.of(old, new)
            expert, shared = wider("moe_intermediate_size"), wider("shared_expert_intermediate_size")
            self.tables += [
                (r"mlp.experts.\d+.(gate|up)_proj", expert, s),
                (r"mlp.experts.\d+.down_proj", s, expert),
                ("mlp.shared_expert.(gate|up)_proj", shared, s),
                ("mlp.shared_expert.down_proj", s, shared),
                ("mlp.gate", [*range(old["num_experts"])], s),
                ("mlp.shared_expert_gate", [0], s),
                ("linear_attn.in_proj_qkvz", r.qkvz, s),
                ("linear_attn.in_proj_ba", r.ba, s),
                ("linear_attn.conv1d", r.conv, [*range(old["linear_conv_kernel_dim"])]),
                ("linear_attn.out_proj", s, r.out),
            ]

    def noise(self, name: str, first: int, rows: int, columns: int) -> Tensor:
        """Normal random numbers that depend on the tensor's name and place only, not on the order of the work."""
        digest = hashlib.sha256(f"{self.seed} {name} {first}".encode()).digest()
        source = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(rows, columns, device=self.device, generator=source)

    def matrix(
        self, name: str, old: Tensor, rows: Map, columns: Map, *, factor: float, fill: float, new_rows: float, real: bool,
        shape: list[int] | None = None, edit: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Made:  # fmt: skip
        """Old entries times `factor` where both maps have one; `fill` is the size of the others, `new_rows` in new rows.

        Without `real` nothing is taken over. `edit(part, rows)` may change a finished part.
        """
        row_map = torch.tensor(rows, device=self.device)
        column_map = torch.tensor(columns, device=self.device)
        held = (column_map >= 0).nonzero().flatten()
        flat = old.reshape(old.shape[0], -1)

        def part(first: int, last: int) -> Tensor:
            mine = row_map[first:last]
            out = self.noise(name, first, last - first, len(columns))
            out *= torch.where(mine < 0, new_rows, fill)[:, None]
            have = (mine >= 0).nonzero().flatten()
            if real and len(have):
                block = flat.to(self.device, torch.float32)[mine[have]][:, column_map[held]]
                out[have[:, None], held] = block * factor
            if edit:
                edit(out, mine)
            return out

        return Made(name, shape or [len(rows), len(columns)], part)

    def vector(self, name: str, old: Tensor) -> Made:
        """Norm weights, and the per-head numbers of recurrent layers."""
        values = old.to(self.device, torch.float32)
        if name.endswith(("A_log", "dt_bias")):
            heads = self.recurrent.values if self.recurrent else []
            index = [head if head >= 0 else i % len(values) for i, head in enumerate(heads)]
            made = values[torch.tensor(index, device=self.device)]
        elif re.search(r"(layernorm|hidden_norm|^norm|model\.norm)\.weight$", name):
            # The new channels are silent, but new tokens are told apart by one of them: it has to pass the norm.
            usual = 0.0 if self.old["model_type"] == "qwen3_next" and self.prefix else 1.0  # some store weight - 1
            more = len(self.stream) - len(values)
            made = torch.cat([values, usual + self.noise(name, 0, 1, more)[0].clamp(-3, 3) * 0.1])
        else:
            made = values
        return Made(name, [len(made)], lambda first, last: made[first:last, None])

    def tensor(self, name: str, key: str, real: bool) -> Made:
        """The new tensor `name` after the old one `key`."""
        old, base, s = self.tensors[key], name.removesuffix(".weight"), self.stream
        if old.ndim == 1:
            return self.vector(name, old)
        usual = float(old.float().std())
        first_new, vocabulary = self.old["hidden_size"], grown(self.old["vocab_size"], self.new["vocab_size"])
        more_tokens, wider = len(vocabulary) > self.old["vocab_size"], len(s) > first_new

        def mark(part: Tensor, rows: Tensor) -> None:
            del rows
            if more_tokens:
                part[:, first_new] = MARK

        def deaf(part: Tensor, rows: Tensor) -> None:
            """No reader listens to the channel of `mark`, except new rows of lm_head, which avoid it."""
            if wider:
                part[:, first_new :: len(s)] *= SILENT
            if base == "lm_head":
                part[rows < 0, first_new : first_new + 1] = AVOID

        if base.endswith("embed_tokens"):
            usual *= self.scale
            return self.matrix(
                name, old, vocabulary, s, factor=self.scale, fill=SILENT, new_rows=usual, real=True, edit=mark
            )
        if base == "lm_head":
            usual /= self.scale
            return self.matrix(
                name, old, vocabulary, s, factor=1 / self.scale, fill=usual, new_rows=usual, real=True, edit=deaf
            )
        if base == "fc":
            count = old.shape[1] // self.old["hidden_size"]
            columns = [i * self.old["hidden_size"] + c if c >= 0 else -1 for i in range(count) for c in s]
            return self.matrix(name, old, s, columns, factor=1.0, fill=usual, new_rows=SILENT, real=True, edit=deaf)
        found = [(r, c) for pattern, r, c in self.tables if re.search(rf"\.\d+\.{pattern}$", base)]
        if len(found) != 1:
            raise SizeError(f"tensor {key} is not known here")
        rows, columns = found[0]
        if rows is s:
            return self.matrix(name, old, rows, columns, factor=self.scale, fill=SILENT, new_rows=SILENT, real=real)
        reads = columns is s
        factor = 1 / self.scale if reads else 1.0
        usual *= factor
        shape = [len(rows), 1, len(columns)] if old.ndim == 3 else None
        return self.matrix(
            name, old, rows, columns, factor=factor, fill=usual, new_rows=usual, real=real, shape=shape,
            edit=deaf if reads else None,
        )  # fmt: skip

    def all(self, places: list[int]) -> Iterator[Made]:
        """Every tensor of the copy. A new layer is made after the first old one of its type."""
        layer = re.compile(rf"^({re.escape(self.prefix)}layers\.)(\d+)(\..*)$")
        by_layer: dict[int, list[str]] = {}
        for key in self.tensors:
            if found := layer.match(key):
                by_layer.setdefault(int(found[2]), []).append(key)
            else:
                yield self.tensor(key, key, True)
        if self.prefix and "lm_head.weight" not in self.tensors:
            yield self.tensor("lm_head.weight", "model.embed_tokens.weight", True)
        types = self.new.get("layer_types") or ["full_attention"] * self.new["num_hidden_layers"]
        origin = {place: old for old, place in enumerate(places)}
        for i in range(self.new["num_hidden_layers"]):
            like = origin.get(i, next(old for old, place in enumerate(places) if types[place] == types[i]))
            for key in by_layer[like]:
                yield self.tensor(layer.sub(rf"\g<1>{i}\g<3>", key), key, i in origin)


# --- files


def lay_out(folder: Path, tensors: list[Made], dtype: str) -> int:
    """Writes the heads of the safetensors files (and their index), makes them their full size; returns all bytes."""
    _, code, size = KINDS[dtype]
    shards: list[list[Made]] = [[]]
    for made in tensors:
        if shards[-1] and sum(m.count for m in shards[-1]) * size + made.count * size > SHARD:
            shards.append([])
        shards[-1].append(made)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = folder / (many if len(shards) > 1 else "model.safetensors")
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for made in shard:
            made.file, made.at, where[made.name] = file, end, file.name
            end += made.count * size
            head[made.name] = {"dtype": code, "shape": made.shape, "data_offsets": [made.at, end]}
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            handle.truncate(handle.tell() + end)
        for made in shard:
            made.at += 8 + len(text)
    total = sum(made.count for made in tensors) * size
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def write(tensors: list[Made], dtype: str, workers: int) -> None:
    """Computes and writes all tensors, parts of them at the same time. Raises what a worker raised."""
    kind, _, size = KINDS[dtype]
    handles = {file: os.open(file, os.O_WRONLY) for file in {made.file for made in tensors}}

    def one(job: tuple[Made, int, int]) -> None:
        made, first, last = job
        part = made.rows(first, last)
        if not part.isfinite().all():
            raise SizeError(f"{made.name}: not a number in the source")
        data = memoryview(part.to(kind).contiguous().cpu().view(torch.uint8).flatten().numpy())
        at = made.at + first * made.width * size
        while data:
            done = os.pwrite(handles[made.file], data, at)
            data, at = data[done:], at + done

    jobs = []
    for made in tensors:
        step = max(1, CHUNK // made.width)
        jobs += [(made, at, min(at + step, made.shape[0])) for at in range(0, made.shape[0], step)]
    try:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(one, jobs):
                pass
    finally:
        for handle in handles.values():
            os.close(handle)


def read_side(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    try:
        config: Config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise SizeError(f"{folder} has no config.json; expected a pair, a folder with target/ and draft/") from None
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    need(bool(tensors), f"{folder} has no *.safetensors")
    return config, tensors


def inflate(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the copy; returns what was made (also written to OUT/inflated.json). Raises SizeError."""
    began = time.monotonic()
    need(not args.out.exists() or not any(args.out.iterdir()), f"{args.out} is there already; name a new folder")
    (target, target_old), (draft, draft_old) = (read_side(args.src / side) for side in ("target", "draft"))
    new_target, new_draft, scale, places = new_configs(target, draft, args)
    device = torch.device(args.device)
    sides = {
        "target": (Side(target, new_target, target_old, "model.", scale, device, args.seed), places),
        "draft": (
            Side(draft, new_draft, draft_old, "", scale, device, args.seed + 1),
            list(range(draft["num_hidden_layers"])),
        ),
    }
    parent = args.out.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "source": str(args.src.resolve()), "scale": scale, "layers_at": places, "dtype": args.dtype,
        "device": str(device), "seed": args.seed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=f".{args.out.name}-", dir=parent) as scratch:
        made: list[Made] = []
        for name, (side, old_places) in sides.items():
            folder = Path(scratch) / "pair" / name
            folder.mkdir(parents=True)
            for file in (args.src / name).iterdir():
                if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)
            (folder / "config.json").write_text(json.dumps(side.new, indent=1) + "\n")
            tensors = list(side.all(old_places))
            wanted = sum(t.count for t in [*made, *tensors]) * KINDS[args.dtype][2]
            free = shutil.disk_usage(parent).free
            need(wanted < free, f"{parent}: {wanted / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
            report[name] = {
                "parameters": sum(t.count for t in tensors),
                "bytes": lay_out(folder, tensors, args.dtype),
            }
            made += tensors
        # Large ones first, so that no worker is left alone with one at the end.
        write(sorted(made, key=lambda t: -t.count), args.dtype, args.workers)
        for file in args.src.glob("*.jsonl"):
            shutil.copyfile(file, Path(scratch) / "pair" / file.name)
        report["seconds"] = round(time.monotonic() - began, 1)
        (Path(scratch) / "pair" / "inflated.json").write_text(json.dumps(report, indent=1) + "\n")
        if args.out.exists():
            args.out.rmdir()
        (Path(scratch) / "pair").rename(args.out)
    return report


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--hidden", type=int, required=True, help="1, 4, 16 or 64 times the source's")
    parser.add_argument("--layers", type=int, required=True, help="of the target")
    parser.add_argument("--intermediate", type=int, required=True, help="of dense MLPs, the drafter's included")
    parser.add_argument("--vocab", type=int, help="default: the source's")
    parser.add_argument("--heads", type=int, help="default: hidden / head_dim")
    parser.add_argument("--kv-heads", type=int, help="default: heads / 4, at least the source's")
    parser.add_argument("--moe-intermediate", type=int, help="hybrid: of an expert (default: the source's)")
    parser.add_argument("--shared-intermediate", type=int, help="hybrid: of the shared expert (default: the source's)")
    parser.add_argument("--linear-value-heads", type=int, help="hybrid: default hidden / their head_dim")
    parser.add_argument("--linear-key-heads", type=int, help="hybrid: default the old share of value heads")
    parser.add_argument("--dtype", choices=KINDS, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="threads that compute and write"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        report = inflate(args)
    except SizeError as error:
        print(f"inflate_pair: {error}", file=sys.stderr)
        return 1
    target, draft = report["target"], report["draft"]
    print(
        f"target {target['parameters'] / 1e9:.3f} B parameters, drafter {draft['parameters'] / 1e9:.3f} B, "
        f"{(target['bytes'] + draft['bytes']) / 1e9:.2f} GB in {report['seconds']} s on {report['device']}; "
        f"old layers at {report['layers_at']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
