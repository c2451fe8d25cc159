# SPDX-License-Identifier: Apache-2.0
"""Run by the engine's Python: reads each config as the engine does, with a key, and prints what it made of it as JSON."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])  # folder of sglang_launch.py
import sglang_launch
from sglang.srt.server_args import ServerArgs, prepare_server_args

KEY = "s3cret-of-this-test"
sglang_launch.guard(ServerArgs, KEY)
found = {}
for path in sys.argv[2:]:
    args = prepare_server_args(["--config", path])
    text = f"{args=} {args}"
    found[Path(path).stem] = {
        "key": args.api_key == KEY,
        "hidden": KEY not in text and sglang_launch.MASK in text,
        "child": pickle.loads(pickle.dumps(args)).api_key == KEY,
        "algorithm": args.speculative_algorithm,
        "budget": getattr(args, "speculative_ddtree_budget", None),
        "shadow": getattr(args, "speculative_ddtree_shadow_linear", None),
        "port": args.port,
    }
print(json.dumps(found))
