# SPDX-License-Identifier: Apache-2.0
"""SGLang plugin of the cpu profile (entry point group `sglang.srt.plugins`): the real engine without a GPU.

Scheduler, radix cache, allocators, attention metadata, DFLASH and DDTREE stay the engine's own. Replaced is only what
cannot work without a device or would take minutes per answer:

1. Triton kernels of the hot path: torch functions with the same arguments and results (attention.py, indices.py).
   `SGLANG_FLEET_CPU_KERNELS=interpreter` keeps Triton's own under its interpreter; the other kernels always run there.
2. The drafter's input embeddings stay in the model's dtype (the runner casts them to bfloat16, which a float32 drafter
   cannot read).
3. Triton's autotuner takes a kernel's first configuration instead of timing all of them on a device.
4. Gated delta nets (hybrid models) take the GPU's branches, with torch twins of their kernels (recurrent.py).
5. A grammar's mask is applied by the torch function that the engine keeps for NPUs; for a CPU it has none, and ends.

It acts only with `SGLANG_USE_CPU_ENGINE=1` and ends the process when a CUDA device is visible, so no GPU run can ever
contain it. Any mismatch with the engine ends the process too: SGLang itself would only log the error and serve on.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

KERNELS_SWITCH = "SGLANG_FLEET_CPU_KERNELS"  # torch (default) or interpreter


def stop(problem: str) -> SystemExit:
    """The error that ends the engine; SGLang swallows every Exception of a plugin, but not this."""
    return SystemExit(f"sglang-fleet cpu profile: {problem}")


def parameters(function: Any) -> list[str]:
    """Parameter names of a function, of a Triton kernel or of a kernel's twin (its first one is the grid)."""
    if (twin := getattr(function, "function", None)) is not None:
        return list(inspect.signature(twin).parameters)[1:]
    return list(getattr(function, "arg_names", None) or inspect.signature(function).parameters)


def _swap(path: str, twin: Any) -> None:
    """Put `twin` in the place of the function at dotted `path`, also where it was imported by name already."""
    module_name, name = path.rsplit(".", 1)
    theirs = getattr(importlib.import_module(module_name), name)
    if parameters(theirs) != parameters(twin):
        raise stop(f"{path} takes {parameters(theirs)}, its twin {parameters(twin)}; this engine needs its own twin")
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", {})
        for key in [key for key, value in space.items() if value is theirs]:
            space[key] = twin


def _choice() -> str:
    choice = os.environ.get(KERNELS_SWITCH, "torch")
    if choice not in ("torch", "interpreter"):
        raise stop(f"{KERNELS_SWITCH}={choice} is neither torch nor interpreter")
    return choice


def _kernels() -> None:
    if _choice() == "torch":
        from sglang_fleet_cpu import attention, indices

        for path, twin in {**attention.TWINS, **indices.TWINS}.items():
            _swap(path, twin)


def _embeddings() -> None:
    from sglang.srt.models.dflash import DFlashDraftModel

    upstream: Callable[..., Any] = DFlashDraftModel.forward

    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, **rest: Any
    ) -> Any:
        if input_embeds is not None:
            input_embeds = forward_batch.input_embeds
        return upstream(self, input_ids, positions, forward_batch, input_embeds=input_embeds, **rest)

    DFlashDraftModel.forward = forward


def _autotuner() -> None:
    from triton.runtime.autotuner import Autotuner

    upstream: Callable[..., Any] = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        del self.configs[1:]
        return upstream(self, *args, **kwargs)

    Autotuner.run = run


def _grammar() -> None:
    from sglang.srt.constrained import xgrammar_backend

    def apply_vocab_mask(self: Any, logits: Any, vocab_mask: Any) -> None:
        xgrammar_backend.apply_token_bitmask_inplace_torch(logits, vocab_mask)

    if parameters(xgrammar_backend.XGrammarGrammar.apply_vocab_mask) != parameters(apply_vocab_mask):
        raise stop("XGrammarGrammar.apply_vocab_mask takes other arguments; this engine needs its own")
    xgrammar_backend.XGrammarGrammar.apply_vocab_mask = apply_vocab_mask


def _recurrent() -> None:
    from sglang_fleet_cpu import recurrent

    recurrent.install(interpreted=_choice() == "interpreter")


def register() -> None:
    """Entry point. Does nothing unless the engine was started as a CPU engine.

    Raises:
        SystemExit: a CUDA device is visible, Triton's interpreter is off, or the engine is not the one the twins fit.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import torch

    if torch.cuda.is_available():
        raise stop(
            "a CUDA device is visible; start the engine with CUDA_VISIBLE_DEVICES= or use the profile of the GPU"
        )
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise stop("TRITON_INTERPRET=1 is missing; without it Triton's kernels need a GPU")
    for part in (_kernels, _recurrent, _embeddings, _autotuner, _grammar):
        try:
            part()
        except Exception as error:
            raise stop(f"cannot set up {part.__name__.strip('_')}: {error!r}") from error
    logger.info("sglang-fleet cpu profile is active (kernels: %s)", os.environ.get(KERNELS_SWITCH, "torch"))
