# SPDX-License-Identifier: Apache-2.0
"""Flags and variables of an engine that follow from an instance's keys: a second way to say the same could contradict the first.

Read by the role that writes them and by the preflight, which is why ansible.cfg names this folder.
"""

from __future__ import annotations

OWNED_FLAGS = {
    "model-path": "model_path",
    "model": "model_path",
    "host": "address",
    "port": "port",
    "api-key": "api_key_file",
    "admin-api-key": "api_key_file",
    "config": "args",
    "base-gpu-id": "gpus",
    "speculative-algorithm": "mode",
    "speculative-draft-model-path": "draft_model_path",
    "speculative-draft-model": "draft_model_path",
    "speculative-ddtree-budget": "budget",
    "speculative-ddtree-auto-budget": "budget",
    "speculative-ddtree-topk": "topk",
    "speculative-ddtree-spine": "spine",
    "speculative-ddtree-shadow-linear": "mode",
}
OWNED_ENV = {"CUDA_VISIBLE_DEVICES": "gpus", "CUDA_DEVICE_ORDER": "gpus"}
