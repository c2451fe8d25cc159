# SPDX-License-Identifier: Apache-2.0
"""Rules about the files in the folders of target and drafter: whole, readable for the engine's user, with a tokenizer."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, Map, args_of, rule
from ansible.module_utils.gpu_host_rules_files import (
    DRAFTER,
    FEW,
    Use,
    copied,
    copy,
    hidden,
    once,
    read_from_files,
    some,
)


@rule(
    "weights-broken",
    BLOCK,
    "The engine would fail while it loads them, for a large model after minutes.",
    source="https://huggingface.co/docs/safetensors/index",
)
def weights_broken(case: Case) -> Iterator[Hit]:
    """Every file of weights is as long as its own header says; none is empty, a pointer or an error page."""
    for use in once(case):
        broken = use.model.get("broken") or []
        if broken and read_from_files(use):
            yield Hit(
                use.thing,
                f"{use.key} {use.path}: {_broken(broken)}",
                f"{broken[0]['expected']} bytes" if broken[0]["expected"] else "whole files",
                _refetched(case, use, broken),
            )


def _broken(broken: list[Map]) -> str:
    more = [one["file"] for one in broken[1:]]
    also = f"; not whole either: {some(more)}" if more else ""
    return f"{broken[0]['file']} has {broken[0]['size']} bytes, {broken[0]['what']}{also}"


def _refetched(case: Case, use: Use, broken: list[Map]) -> str:
    """The fix for files that are there and not whole."""
    names = [one["file"] for one in broken]
    again = copied(case, use.path, names if len(names) <= FEW else None)
    if not any(one["lfs"] for one in broken) or not use.model.get("git"):
        return again
    pull = f"git -C {shlex.quote(use.path)} lfs pull"
    return f"Fetch what the pointers stand for, on the host with git-lfs: `{pull}`. Or {again[:1].lower()}{again[1:]}"


@rule(
    "model-unreadable",
    BLOCK,
    "The engine does not run as root: its user has to search every folder on the way to the model and read its files.",
    source="https://man7.org/linux/man-pages/man7/path_resolution.7.html",
)
def model_unreadable(case: Case) -> Iterator[Hit]:
    """The engine's user may read the models."""
    user = case.facts.get("user") or {}
    who = f"user {user.get('name')}" + ("" if user.get("uid") is not None else ", who will be one of the others")
    for use in once(case):
        barred = use.model.get("barred") or []
        if barred and not hidden(use.path, use.model):  # those have to move anyway
            words = [f"{one['path']} (mode {one['mode']}, owner {one['owner']})" for one in barred]
            yield Hit(
                use.thing,
                f"{use.key} {use.path}: {some(words)} closed to {who}",
                "folders that it may search and files that it may read",
                _opened(barred),
            )


def _opened(barred: list[Map]) -> str:
    """The command that opens what is closed; folders on the way become searchable only."""
    ways = [one["real"] for one in barred if one["need"] == "search"]
    trees = {one["real"] for one in barred if one["need"] == "read and search"}
    files = [one["real"] for one in barred if one["need"] == "read"]
    if len(files) > FEW:
        trees |= {file.rpartition("/")[0] for file in files}
    files = [file for file in files if file.rpartition("/")[0] not in trees]
    commands = [
        f"{verb} {' '.join(map(shlex.quote, paths))}"
        for verb, paths in (("chmod a+x", ways), ("chmod -R a+rX", sorted(trees)), ("chmod a+r", files))
        if paths
    ]
    return f"On the host: `{' && '.join(commands)}`; or move the model to a folder that everybody may read."


@rule(
    "tokenizer-missing",
    BLOCK,
    "Without the target's vocabulary the engine fails at its start, or serves and understands no word. A drafter needs none.",
    source="https://huggingface.co/docs/transformers/main_classes/tokenizer",
)
def tokenizer_missing(case: Case) -> Iterator[Hit]:
    """The target's folder, or the one that tokenizer-path names, holds a tokenizer that is whole."""
    for use in _tokenizers(case):
        found = use.model.get("tokenizer", {"found": use.model["exists"], "broken": []})
        broken = found["broken"]
        if broken:
            fix = _refetched(case, use, broken)
            yield Hit(use.thing, f"{use.key} {use.path}: {_broken(broken)}", "a whole tokenizer", fix)
        elif not found["found"]:
            yield Hit(
                use.thing,
                f"{use.key} {use.path}: no tokenizer",
                "tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
                f"Copy it from where the model comes from: `{copy(case, use.path, ['tokenizer*'])}` (or its vocab.json and "
                f"merges.txt); or name a folder that has it as tokenizer-path under args in {case.where}.",
            )


def _tokenizers(case: Case) -> Iterator[Use]:
    """Folders from which engines read tokenizers; none that is no model, which is told already."""
    found: dict[tuple[str, str], Use] = {}
    for at, instance in enumerate(case.instances):
        args = args_of(instance)
        own = args.get("tokenizer-path")
        key, path = ("tokenizer-path", own) if own else ("model_path", instance.get("model_path"))
        model = case.model(path)
        if args.get("skip-tokenizer-init") or not model or model["error"]:
            continue
        if own or (model["exists"] and not model.get("instead") and DRAFTER not in model.get("architectures", [])):
            found.setdefault((key, str(path)), Use(str(path), key, [], model)).instances.append((at, instance))
    yield from found.values()
