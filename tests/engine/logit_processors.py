# SPDX-License-Identifier: Apache-2.0
"""Custom logit processors for the tests, run with the engine's Python: prints each as a client sends it.

The engine takes the class as bytes of its code, so what a processor needs has to stand inside of it.
"""

from __future__ import annotations

import json
from typing import Any

import dill


class Forbid:
    """Some tokens are never written: the same at every position, whatever the row."""

    def __call__(self, logits: Any, params: list[dict[str, Any]]) -> Any:
        logits[..., params[0]["forbidden"]] = -1e9
        return logits


class Rhythm:
    """Never the last token again, and every fifth one is given: depends on all tokens before the position."""

    def __call__(self, logits: Any, params: list[dict[str, Any]]) -> Any:
        for row, given in enumerate(params):
            written = given["__req__"].output_ids
            if written:
                logits[row, written[-1]] = -1e9
            if len(written) % 5 == 4:
                logits[row, given["beat"]] = 1e9
        return logits


class Counter:
    """Counts its calls in the request's parameters, and so cannot be asked about several positions at once."""

    def __call__(self, logits: Any, params: list[dict[str, Any]]) -> Any:
        for given in params:
            given["calls"] = given.get("calls", 0) + 1
        return logits


if __name__ == "__main__":
    classes = (Forbid, Rhythm, Counter)
    print(json.dumps({each.__name__: json.dumps({"callable": dill.dumps(each).hex()}) for each in classes}))
