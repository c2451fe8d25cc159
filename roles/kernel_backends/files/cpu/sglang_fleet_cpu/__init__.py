# SPDX-License-Identifier: Apache-2.0
"""SGLang plugin of the cpu profile (entry point group `sglang.srt.plugins`): the real engine without a GPU.

Scheduler, radix cache, allocators, attention metadata, DFLASH and DDTREE stay the engine's own; Triton's small index
kernels run under its interpreter (`TRITON_INTERPRET=1`). Three things are replaced, because without a device they cannot
work or would take minutes per answer:

1. attention arithmetic: torch instead of interpreted Triton (`SGLANG_FLEET_CPU_ATTENTION=interpreter` keeps Triton's);
2. the drafter's input embeddings stay in the model's dtype (the runner casts them to bfloat16, which a float32
   drafter cannot read);
3. Triton's autotuner takes a kernel's first configuration instead of timing all of them on a device.

It acts only with `SGLANG_USE_CPU_ENGINE=1` and ends the process when a CUDA device is visible, so no GPU run can ever
contain it. Any mismatch with the engine ends the process too: SGLang itself would only log the error and serve on.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

ATTENTION_SWITCH = "SGLANG_FLEET_CPU_ATTENTION"  # torch (default) or interpreter
PARTS = ("attention", "embeddings", "autotuner")


def _stop(problem: str) -> SystemExit:
    """The error that ends the engine; SGLang swallows every Exception of a plugin, but not this."""
    return SystemExit(f"sglang-fleet cpu profile: {problem}")


def _swap(path: str, twin: Callable[..., Any]) -> None:
    """Put `twin` in the place of the function at dotted `path`; the parameter lists must be the same."""
    module_name, name = path.rsplit(".", 1)
    module = importlib.import_module(module_name)
    theirs = list(inspect.signature(getattr(module, name)).parameters)
    ours = list(inspect.signature(twin).parameters)
    if theirs != ours:
        raise _stop(
            f"{path} of this engine takes {theirs}, its twin takes {ours}; the profile needs a twin for this engine"
        )
    setattr(module, name, twin)


def _attention() -> None:
    choice = os.environ.get(ATTENTION_SWITCH, "torch")
    if choice not in ("torch", "interpreter"):
        raise _stop(f"{ATTENTION_SWITCH}={choice} is neither torch nor interpreter")
    if choice == "torch":
        from sglang_fleet_cpu.attention import TWINS

        for path, twin in TWINS.items():
            _swap(path, twin)


def _embeddings() -> None:
    from sglang.srt.models.dflash import DFlashDraftModel

    upstream = DFlashDraftModel.forward

    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, **rest: Any
    ) -> Any:
        if input_embeds is not None:
            input_embeds = forward_batch.input_embeds
        return upstream(self, input_ids, positions, forward_batch, input_embeds=input_embeds, **rest)

    DFlashDraftModel.forward = forward


def _autotuner() -> None:
    from triton.runtime.autotuner import Autotuner

    upstream = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        del self.configs[1:]
        return upstream(self, *args, **kwargs)

    Autotuner.run = run


def register() -> None:
    """Entry point. Does nothing unless the engine was started as a CPU engine."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import torch

    if torch.cuda.is_available():
        raise _stop(
            "a CUDA device is visible; start the engine with CUDA_VISIBLE_DEVICES= or use the profile of the GPU"
        )
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise _stop("TRITON_INTERPRET=1 is missing; without it Triton's kernels need a GPU")
    for part in (_attention, _embeddings, _autotuner):
        try:
            part()
        except Exception as error:
            raise _stop(f"cannot set up {part.__name__.strip('_')}: {error!r}") from error
    logger.info("sglang-fleet cpu profile is active: %s", ", ".join(PARTS))
