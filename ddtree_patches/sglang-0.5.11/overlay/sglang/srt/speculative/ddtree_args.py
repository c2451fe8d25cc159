# SPDX-License-Identifier: Apache-2.0
"""Server arguments of the DDTREE speculative algorithm: flags, defaults, refusals.

`server_args.py` carries only the fields and three calls into this module.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Optional, Union

from sglang.srt.speculative.ddtree_hybrid import check_hybrid_args, check_track_interval

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.server_args import ServerArgs

AUTO = "auto"
DEFAULT_BUDGET = 15
DEFAULT_TOPK = 8
DEFAULT_SPINE = 0

PRESETS = (7, 15, 22, 31)
"""What `auto` chooses the budget from."""

TREE_ATTENTION_BACKENDS = ("triton",)
"""Backends that verify with an ancestor mask over scattered KV slots."""

_FLAGS = {
    "speculative_ddtree_budget": "--speculative-ddtree-budget",
    "speculative_ddtree_topk": "--speculative-ddtree-topk",
    "speculative_ddtree_linear": "--speculative-ddtree-linear",
    "speculative_ddtree_linear_above": "--speculative-ddtree-linear-above",
    "speculative_ddtree_spine": "--speculative-ddtree-spine",
    "speculative_ddtree_shadow_linear": "--speculative-ddtree-shadow-linear",
    "speculative_ddtree_allow_hybrid_unsafe": "--speculative-ddtree-allow-hybrid-unsafe",
}


def add_ddtree_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the DDTREE flags to SGLang's argument parser."""
    parser.add_argument(
        "--speculative-ddtree-budget",
        type=_budget,
        help=f"DDTREE only. Nodes of the draft tree without its root (default {DEFAULT_BUDGET}). "
        "The target verifies budget + 1 tokens per request and step. auto: one of "
        f"{', '.join(map(str, PRESETS))}, by measured cost and the acceptance seen.",
    )
    parser.add_argument(
        "--speculative-ddtree-topk",
        type=int,
        help=f"DDTREE only. Candidates per drafted position (default {DEFAULT_TOPK}). 1 drafts a chain.",
    )
    # Every field of the server arguments has to have a flag; this one is set by the flag above.
    parser.add_argument("--speculative-ddtree-auto-budget", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--speculative-ddtree-linear",
        choices=["auto", "on", "off"],
        help="DDTREE only. Verify large batches linearly. auto (default): where the step's cost, measured at start, "
        "and the tokens seen say that it is faster; on: above --speculative-ddtree-linear-above; off: never.",
    )
    parser.add_argument(
        "--speculative-ddtree-linear-above",
        type=int,
        help="DDTREE only. Largest batch that is verified as trees, with --speculative-ddtree-linear on.",
    )
    parser.add_argument(
        "--speculative-ddtree-spine",
        type=int,
        help="DDTREE only. So many nodes of the drafter's greedy chain are always in the tree "
        f"(default {DEFAULT_SPINE}).",
    )
    parser.add_argument(
        "--speculative-ddtree-shadow-linear",
        action="store_true",
        help="DDTREE only. Build and measure the tree, but verify the greedy chain as DFLASH does.",
    )
    parser.add_argument(
        "--speculative-ddtree-allow-hybrid-unsafe",
        action="store_true",
        help="DDTREE only, research only. Verify trees on models with recurrent layers without forking their "
        "states: one branch leaks into its siblings, outputs are wrong. Without this flag such models are "
        "verified exactly or refused.",
    )


def check_ddtree_args(args: ServerArgs) -> None:
    """Refuse values that cannot work, before anything is loaded and before any rule for one model speaks up.

    Raises:
        ValueError: naming the flag, its value, what was expected and what to do.
    """
    if (args.speculative_algorithm or "").upper() == "DDTREE":
        args.speculative_algorithm = "DDTREE"
    else:
        given = [flag for name, flag in _FLAGS.items() if getattr(args, name) not in (None, False)]
        if given:
            raise ValueError(
                f"{', '.join(given)} given with --speculative-algorithm {args.speculative_algorithm}: "
                "these flags need --speculative-algorithm DDTREE."
            )
        return
    if isinstance(args.speculative_ddtree_budget, str):
        args.speculative_ddtree_budget = _budget(args.speculative_ddtree_budget)
    if args.speculative_ddtree_budget == AUTO:
        args.speculative_ddtree_auto_budget = True
        args.speculative_ddtree_budget = PRESETS[-1]  # what memory is sized for
    _default(args, "speculative_ddtree_budget", DEFAULT_BUDGET, least=1)
    _default(args, "speculative_ddtree_topk", DEFAULT_TOPK, least=1)
    _default(args, "speculative_ddtree_spine", DEFAULT_SPINE, least=0)
    _check_linear(args)
    _check_page_size(args)
    if args.enable_deterministic_inference:
        raise ValueError(
            "DDTREE does not support --enable-deterministic-inference: the verify batch is wider "
            "than the kernels' fixed split. Drop one of the two."
        )
    if args.enable_lora or args.lora_paths:
        raise ValueError(
            f"DDTREE does not support {'--lora-paths' if args.lora_paths else '--enable-lora'}: the drafter reads the "
            "features of the target without an adapter, and the engine runs adapters with NGRAM speculation only. "
            "Merge the adapter into the target, or serve it without speculation."
        )
    if args.disaggregation_mode != "null":
        raise ValueError(
            f"DDTREE does not support --disaggregation-mode {args.disaggregation_mode}: the drafter's state "
            "does not travel with a request. Leave it out."
        )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(args, name) != 1.0:
            raise ValueError(
                f"DDTREE does not support --{name.replace('_', '-')} {getattr(args, name)}: drafts are verified "
                "exactly. Leave it out."
            )
    if not args.speculative_ddtree_shadow_linear:
        check_hybrid_args(args)
    # A second pass over resolved arguments starts from the block size again.
    if args.speculative_dflash_block_size is not None and args.speculative_num_draft_tokens == verify_width(args):
        args.speculative_num_draft_tokens = None


def apply_ddtree_args(args: ServerArgs) -> None:
    """Size target and drafter apart, after DFLASH's own rules have set the block size.

    `speculative_num_draft_tokens` is what the target verifies per request and
    step; the worker gives the drafter a copy of the arguments with the block size.
    `speculative_num_steps` tells the scheduler that a draft block takes as many
    KV slots for a moment (EAGLE's meaning of topk * num_steps).
    """
    _check_page_size(args)
    block_size = int(args.speculative_num_draft_tokens)
    if block_size < 2:
        raise ValueError(
            f"DDTREE needs a drafter block of at least 2 tokens, got {block_size}: the first one is "
            "the token that is already known. Check block_size in the drafter's config.json."
        )
    args.speculative_dflash_block_size = block_size
    check_track_interval(args, block_size)
    if args.speculative_ddtree_shadow_linear:
        return
    # Known here at last: given flags, the engine's own choice and the rules for single models are all in.
    prefill, decode = args.get_attention_backends()
    verify = decode if args.speculative_attention_mode == "decode" else prefill
    if verify not in TREE_ATTENTION_BACKENDS:
        raise ValueError(
            f"DDTREE cannot verify trees with the attention backend {verify}. "
            f"Use --attention-backend {' or '.join(TREE_ATTENTION_BACKENDS)}."
        )
    args.speculative_num_draft_tokens = verify_width(args)
    args.speculative_num_steps = block_size


def verify_width(args: ServerArgs) -> int:
    """Slots per request of the widest verify pass: what KV rows and recurrent states are sized for."""
    tree = int(args.speculative_ddtree_budget) + 1
    return tree if args.speculative_ddtree_linear == "off" else max(tree, int(args.speculative_dflash_block_size))


def validate_ddtree_request(req: Req) -> Optional[str]:
    """The reason why a request cannot be served, or None; DFLASH's own refusals come before."""
    if req.return_hidden_states:
        return (
            "DDTREE speculative decoding does not support return_hidden_states: the target's hidden states are the "
            "drafter's features here, and of other layers. Leave it out."
        )
    return None


def _check_page_size(args: ServerArgs) -> None:
    """Asked twice: for what was given, and for what backend and model have made of it."""
    if args.page_size not in (None, 1):
        raise ValueError(
            f"DDTREE needs --page-size 1, got {args.page_size}: an accepted path takes single KV "
            "slots out of the tree. Leave --page-size out or set it to 1."
        )


def _check_linear(args: ServerArgs) -> None:
    above = args.speculative_ddtree_linear_above
    if args.speculative_ddtree_linear is None:
        args.speculative_ddtree_linear = "auto" if above is None else "on"
    if args.speculative_ddtree_shadow_linear and args.speculative_ddtree_linear != "auto":
        raise ValueError(
            f"--speculative-ddtree-linear {args.speculative_ddtree_linear} given with "
            "--speculative-ddtree-shadow-linear, which verifies every batch linearly. Drop one of the two."
        )
    if args.speculative_ddtree_linear == "on":
        if above is None or above < 0:
            raise ValueError(
                "--speculative-ddtree-linear on needs --speculative-ddtree-linear-above N, the largest batch that is "
                f"verified as trees, got {above}. Set it, or use --speculative-ddtree-linear auto."
            )
    elif above is not None:
        raise ValueError(
            f"--speculative-ddtree-linear-above {above} needs --speculative-ddtree-linear on, "
            f"got {args.speculative_ddtree_linear}."
        )


def _budget(text: str) -> Union[int, str]:
    """`auto` or a number.

    Raises:
        argparse.ArgumentTypeError: argparse puts the flag's name before it.
    """
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number of nodes, or {AUTO} for one of {', '.join(map(str, PRESETS))}, got {text!r}"
        ) from None


def _default(args: ServerArgs, name: str, default: int, *, least: int) -> None:
    value = getattr(args, name)
    if value is None:
        setattr(args, name, default)
    elif value < least:
        raise ValueError(f"{_FLAGS[name]} must be at least {least}, got {value} (default {default}).")
