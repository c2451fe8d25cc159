# SPDX-License-Identifier: Apache-2.0
"""One request of each kind that users send, to a server that runs; standard library only, so it runs on a host as it is.

    python3 tests/asked.py URL        a line per kind: its name, the HTTP status, seconds, the reason of a refusal

A request is answered (200) or refused with a reason (400); anything else is a failure, and so is a server that answers no plain
request afterwards. Exit codes: 0 all well, 1 a failure, 2 misuse.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 8},
    "logit_bias": {"logit_bias": {"7": 5}},
    "temperature": {"temperature": 0.8},
    "seed": {"temperature": 0.8, "seed": 5},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
    "stop": {"stop": ["e", "."]},
    "stop_regex": {"stop_regex": "[aeiou]{2}"},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "n": {"n": 2, "temperature": 0.8},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "regex": {"regex": "(yes|no)"},
    "ebnf": {"ebnf": 'root ::= "yes" | "no"'},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "logprobs, stream": {"stream": True, "logprobs": True},
    "temperature NaN": {"temperature": float("nan")},
    "top_k 2^40": {"temperature": 0.8, "top_k": 2**40},
    "bias without end": {"logit_bias": {"7": float("inf")}},
}


def ask(url: str, kind: str) -> tuple[int, str]:
    """(HTTP status or 0, what was answered) of a chat request of that kind."""
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "Say it."}],
        "max_tokens": 24,
        "temperature": 0,
        **KINDS[kind],
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError as broken:
        return 0, str(broken)


def whole(kind: str, code: int, text: str) -> bool:
    """Whether an answer is one, or a refusal with its reason."""
    if code == 400:
        return bool(json.loads(text).get("message"))
    if code != 200:
        return False
    if KINDS[kind].get("stream"):
        return text.rstrip().endswith("data: [DONE]") and '"completion_tokens"' in text
    choices = json.loads(text)["choices"]
    return len(choices) == KINDS[kind].get("n", 1) and all(choice["finish_reason"] for choice in choices)


def main(argv: list[str]) -> int:
    """See the module."""
    if len(argv) != 1 or not argv[0].startswith("http"):
        print("usage: asked.py URL", file=sys.stderr)
        return 2
    url, failed = argv[0].rstrip("/"), 0
    for kind in [*KINDS, "plain"]:
        began = time.monotonic()
        code, text = ask(url, kind)
        good = whole(kind, code, text)
        failed += not good
        shown = "" if good and code == 200 else "  " + " ".join(text.split())[:300]
        print(f"{'ok' if good else 'FAILED':7}{kind:20}{code:4} {time.monotonic() - began:7.2f} s{shown}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
