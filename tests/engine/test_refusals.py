# SPDX-License-Identifier: Apache-2.0
"""Arguments that cannot work are refused before a model is loaded, with one message that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine import engine_venv, launch
from tests.engine.conftest import NANO

# What makes a model hybrid is in its config; these are the keys of a Qwen3-Next with tiny sizes of our own.
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 1024, "hidden_size": 128,
    "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25, "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": 0,
}  # fmt: skip
MAMBA = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "vocab_size": 1024, "hidden_size": 128,
    "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1,
    "max_position_embeddings": 4096, "dtype": "bfloat16", "eos_token_id": 0,
}  # fmt: skip

TREE: dict[str, Any] = {"speculative-algorithm": "DDTREE", "speculative-draft-model-path": str(NANO / "draft")}
NO_RADIX = {"disable-radix-cache": True}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "budget 0": ({**TREE, "speculative-ddtree-budget": 0}, ["--speculative-ddtree-budget", "at least 1", "got 0"]),
    "topk 0": ({**TREE, "speculative-ddtree-topk": 0}, ["--speculative-ddtree-topk", "at least 1", "got 0"]),
    "spine -1": ({**TREE, "speculative-ddtree-spine": -1}, ["--speculative-ddtree-spine", "at least 0", "got -1"]),
    "page size 16": ({**TREE, "page-size": 16}, ["--page-size 1", "got 16"]),
    "backend": ({**TREE, "attention-backend": "torch_native"}, ["backend torch_native", "--attention-backend triton"]),
    # verification takes the prefill half, whatever decodes
    "backend of the wrong half": (
        {**TREE, "attention-backend": "torch_native", "decode-attention-backend": "triton"},
        ["backend torch_native", "--attention-backend triton"],
    ),
    "disaggregation": ({**TREE, "disaggregation-mode": "decode"}, ["--disaggregation-mode decode"]),
    "lossy acceptance": (
        {**TREE, "speculative-accept-threshold-single": 0.5},
        ["--speculative-accept-threshold-single 0.5", "exactly"],
    ),
    "lossy acceptance in shadow mode": (
        {**TREE, "speculative-ddtree-shadow-linear": True, "speculative-accept-threshold-acc": 0.5},
        ["--speculative-accept-threshold-acc 0.5", "exactly"],
    ),
    "deterministic": ({**TREE, "enable-deterministic-inference": True}, ["--enable-deterministic-inference", "Drop"]),
    "LoRA": (
        {**TREE, "enable-lora": True, "max-lora-rank": 4, "lora-target-modules": "q_proj"},
        ["DDTREE does not support --enable-lora", "Merge the adapter"],
    ),
    "LoRA by path": (
        {**TREE, "lora-paths": "some=/srv/adapter"},
        ["DDTREE does not support --lora-paths", "without speculation"],
    ),
    "data parallel attention": (
        {**TREE, "tp-size": 2, "dp-size": 2, "enable-dp-attention": True},
        ["DFLASH", "dp attention"],
    ),
    "pipeline": ({**TREE, "pp-size": 2}, ["pp_size == 1"]),
    "budget in words": (
        {**TREE, "speculative-ddtree-budget": "many"},
        ["--speculative-ddtree-budget", "a number of nodes, or auto for one of 7, 15, 22, 31", "got 'many'"],
    ),
    "budget with a fraction": (
        {**TREE, "speculative-ddtree-budget": "7.5"},
        ["--speculative-ddtree-budget", "a number of nodes, or auto", "got '7.5'"],
    ),
    "negative budget": (
        {**TREE, "speculative-ddtree-budget": -3},
        ["--speculative-ddtree-budget", "at least 1", "got -3"],
    ),
    "linear on, no batch size": (
        {**TREE, "speculative-ddtree-linear": "on"},
        ["--speculative-ddtree-linear on needs --speculative-ddtree-linear-above N", "got None"],
    ),
    "linear above a negative batch": (
        {**TREE, "speculative-ddtree-linear-above": -1},
        ["--speculative-ddtree-linear-above N", "got -1"],
    ),
    "linear off, with a batch size": (
        {**TREE, "speculative-ddtree-linear": "off", "speculative-ddtree-linear-above": 4},
        ["--speculative-ddtree-linear-above 4 needs --speculative-ddtree-linear on", "got off"],
    ),
    "linear by cost, with a batch size": (
        {**TREE, "speculative-ddtree-linear": "auto", "speculative-ddtree-linear-above": 4},
        ["--speculative-ddtree-linear-above 4 needs --speculative-ddtree-linear on", "got auto"],
    ),
    "linear sometimes": (
        {**TREE, "speculative-ddtree-linear": "sometimes"},
        ["--speculative-ddtree-linear", "invalid choice: 'sometimes'", "auto", "on", "off"],
    ),
    "linear off in shadow mode": (
        {**TREE, "speculative-ddtree-shadow-linear": True, "speculative-ddtree-linear": "off"},
        ["--speculative-ddtree-linear off", "--speculative-ddtree-shadow-linear", "Drop one"],
    ),
    "linear without algorithm": (
        {"speculative-ddtree-linear-above": 4},
        ["--speculative-ddtree-linear-above", "--speculative-algorithm DDTREE"],
    ),
    "draft window below the block": (
        {**TREE, "speculative-dflash-draft-window-size": 8},
        ["--speculative-dflash-draft-window-size must be >=", "window_size=8", "block_size=16"],
    ),
    "no drafter": ({"speculative-algorithm": "DDTREE"}, ["--speculative-draft-model-path"]),
    "flag without algorithm": (
        {"speculative-ddtree-budget": 7},
        ["--speculative-ddtree-budget", "--speculative-algorithm DDTREE"],
    ),
    "hybrid": ({**TREE, **NO_RADIX, "model-path": "HYBRID"}, []),
    "hybrid, radix cache without its buffer": (
        {**TREE, "model-path": "HYBRID"},
        ["HYBRID", "linear_attention", "--mamba-scheduler-strategy extra_buffer", "--disable-radix-cache"],
    ),
    "hybrid, FlashInfer decodes": (
        {**TREE, **NO_RADIX, "model-path": "HYBRID", "linear-attn-decode-backend": "flashinfer"},
        ["HYBRID", "--linear-attn-decode-backend flashinfer", "Use --linear-attn-backend triton", "leak"],
    ),
    "hybrid, FlashInfer for all": (
        {**TREE, **NO_RADIX, "model-path": "HYBRID", "linear-attn-backend": "flashinfer"},
        ["--linear-attn-decode-backend flashinfer", "Use --linear-attn-backend triton"],
    ),
    "hybrid, another kind": (
        {**TREE, **NO_RADIX, "model-path": "MAMBA"},
        [
            "MAMBA",
            "FalconH1Config",
            "no gated delta nets",
            "--speculative-ddtree-shadow-linear",
            "--speculative-ddtree-allow-hybrid-unsafe is for research",
        ],
    ),
    "good": (TREE, []),
    "good, budget auto": ({**TREE, "speculative-ddtree-budget": "auto"}, []),
    "good, linear above 0": ({**TREE, "speculative-ddtree-linear-above": 0}, []),
    "good, linear off": ({**TREE, "speculative-ddtree-linear": "off"}, []),
    "good, shadow": ({**TREE, "speculative-ddtree-shadow-linear": True}, []),
    "good, draft window": ({**TREE, "speculative-dflash-draft-window-size": 16}, []),
    "good, all flags": (
        {**TREE, "speculative-ddtree-budget": 31, "speculative-ddtree-topk": 4, "speculative-ddtree-spine": 6},
        [],
    ),
}

SCRIPT = """
import contextlib, io, json, sys
from sglang.srt.server_args import prepare_server_args
said = {}
for name, words in json.load(sys.stdin).items():
    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            prepare_server_args(words)
        said[name] = None
    except SystemExit:
        said[name] = usage.getvalue().splitlines()[-1]  # argparse: PROGRAM: error: argument FLAG: ..
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
# What is switched off, and a target that only its model runner tells; the rest of a worker needs a loaded model.
LATER = """
import json, logging, sys
from types import SimpleNamespace
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.ddtree_worker import DDTreeWorker

logging.basicConfig(level=logging.WARNING)
args = prepare_server_args(sys.argv[1:])
told = {"disable_overlap_schedule": args.disable_overlap_schedule, "enable_mixed_chunk": args.enable_mixed_chunk}
for window in (None, 128):
    runner = SimpleNamespace(
        attn_backend=TritonAttnBackend.__new__(TritonAttnBackend), sliding_window_size=window, model_config=None,
        mambaish_config=None, model=None,
    )
    try:
        DDTreeWorker._refuse_what_cannot_verify_trees(SimpleNamespace(server_args=args, model_runner=runner))
        told[str(window)] = None
    except ValueError as error:
        told[str(window)] = str(error)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hybrid targets without weights: they have to be refused by their config alone."""
    folders = {}
    for name, config in {"HYBRID": HYBRID, "MAMBA": MAMBA}.items():
        folders[name] = tmp_path_factory.mktemp(name)
        (folders[name] / "config.json").write_text(json.dumps(config))
    return folders


def run(python: Path, env: dict[str, str], *words: str, stdin: str = "") -> tuple[Any, str]:
    """(JSON of the last line, what was logged) of a script in the engine's Python."""
    base = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "PYTHONPYCACHEPREFIX": str(engine_venv.CACHE / "pycache"),
    }
    done = subprocess.run([python, "-c", *words], input=stdin, env=base | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def said(
    engine_python: Path, targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str | None]:
    """What the engine says to each case; one process, since its imports take seconds."""
    profile, env = launch.lay_out(tmp_path_factory.mktemp("release"))
    wanted = {}
    for name, (args, _) in CASES.items():
        model = {"model-path": str(targets.get(args.get("model-path", ""), NANO / "target"))}
        wanted[name] = launch.flags({**profile, **args, **model})
    return dict(run(engine_python, env, SCRIPT, stdin=json.dumps(wanted))[0])


@pytest.mark.parametrize("case", CASES)
def test_arguments(said: dict[str, str | None], case: str) -> None:
    words = CASES[case][1]
    answer = said[case]
    if not words:
        assert answer is None
        return
    assert answer is not None, "was taken"
    assert [word for word in words if word not in answer] == [], answer
    assert answer.startswith("ValueError: ") or ": error: argument --" in answer


def test_what_is_switched_off_and_a_sliding_window(engine_python: Path, tmp_path: Path) -> None:
    profile, env = launch.lay_out(tmp_path)
    del profile["disable-overlap-schedule"]
    args = {**profile, **TREE, "enable-mixed-chunk": True, "model-path": str(NANO / "target")}
    told, logged = run(engine_python, env, LATER, *launch.flags(args))
    assert told["disable_overlap_schedule"] is True and told["enable_mixed_chunk"] is False
    assert "Overlap scheduler is disabled" in logged and "Mixed chunked prefill is disabled" in logged
    assert told["None"] is None, "without a window the same target is taken"
    for words in (str(NANO / "target"), "sliding window (128)", "Use --speculative-algorithm DFLASH"):
        assert words in told["128"]


def test_server_does_not_start(engine_python: Path, targets: dict[str, Path], tmp_path: Path) -> None:
    """The real door: the process ends by itself, and its last line is the reason."""
    args = {**TREE, **NO_RADIX, "model-path": str(targets["MAMBA"])}
    with (
        pytest.raises(launch.EngineFailed, match="engine ended with 1 before it was ready") as failure,
        launch.serve(engine_python, tmp_path, args, turn=False),
    ):
        pass
    last = [line for line in str(failure.value).splitlines() if line.strip()][-1]
    assert last.startswith("ValueError: DDTREE cannot verify trees on ")
    assert str(targets["MAMBA"]) in last
