# SPDX-License-Identifier: Apache-2.0
"""Run by the engine's Python: reads each config as the engine does, with a key, and prints what it made of it as JSON.

Beside that, under `flags`, what fleet.flags finds in the engine's own parser; and under `ends` what that parser makes of the
configs in the last argument, JSON of `{name: flags}`: whether it ends at them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])  # folder of sglang_launch.py
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import sglang_launch
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from fleet import flags

KEY = "s3cret-of-this-test"
sglang_launch.guard(ServerArgs, KEY)
found = {}
for path in sys.argv[2:-1]:
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
parser = argparse.ArgumentParser(exit_on_error=False)
ServerArgs.add_cli_args(parser)


def ends(config: dict[str, object]) -> bool:
    """Whether the engine's own reading of a config file ends in an error."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, contextlib.redirect_stderr(io.StringIO()):
        json.dump(config, file)  # YAML too, as the role writes it
        file.flush()
        try:
            words = ConfigArgumentMerger(parser).merge_config_with_args(["--config", file.name])
            parser.parse_args(["--model-path", "/srv/x", *words])
        except (argparse.ArgumentError, ValueError, SystemExit):
            return True
        return False


tried = {name: ends(config) for name, config in json.loads(sys.argv[-1]).items()}
print(json.dumps({"configs": found, "flags": flags.described(parser), "ends": tried}))
