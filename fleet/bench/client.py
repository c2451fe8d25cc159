# SPDX-License-Identifier: Apache-2.0
"""Asks a server: one call, or a load of several requests at once with times.

Threads and http.client. In a streaming load a chunk is only noted with its time; its JSON is read when the load is over, so
that 16 streams cost the client little. `cpu_share` says how much of one core it took.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Refused(Exception):
    """The engine answered with an error."""


@dataclass
class Answer:
    """One answered request; times in seconds, `at` are those of tokens: (seconds since sent, tokens so far)."""

    prompt: int
    ids: list[int]
    text: str
    seconds: float
    steps: int
    error: str | None = None
    at: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Load:
    """What a load gave: wall seconds from the first request sent to the last answer."""

    seconds: float
    answers: list[Answer]
    cpu_share: float

    @property
    def tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.answers)


def _call(port: int, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body).encode()
        link.request(method, path, data, {"content-type": "application/json"})
        answer = link.getresponse()
        text = answer.read()
    except http.client.HTTPException as error:
        raise Refused(f"{method} {path}: {error or type(error).__name__}") from error
    finally:
        link.close()
    if answer.status != 200:
        raise Refused(f"{method} {path}: {answer.status} {text.decode(errors='replace')[:500]}")
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def get(port: int, path: str, timeout: float = 30) -> Any:
    """GET; JSON, or text where it is none. Raises Refused or OSError."""
    return _call(port, "GET", path, None, timeout)


def post(port: int, path: str, body: Mapping[str, Any], timeout: float = 300) -> Any:
    """POST JSON. Raises Refused or OSError."""
    return _call(port, "POST", path, body, timeout)


def request_body(ids: Sequence[int], new: int, stream: bool) -> dict[str, Any]:
    """A greedy request for exactly `new` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, "stream": stream}


def _plain(link: http.client.HTTPConnection, body: bytes) -> tuple[Mapping[str, Any], list[tuple[float, int]]]:
    link.request("POST", "/generate", body, {"content-type": "application/json"})
    answer = link.getresponse()
    data = answer.read()
    if answer.status != 200:
        raise Refused(f"{answer.status} {data.decode(errors='replace')[:500]}")
    return json.loads(data), []


def _stream(link: http.client.HTTPConnection, body: bytes, sent: float) -> list[tuple[float, bytes]]:
    link.request("POST", "/generate", body, {"content-type": "application/json"})
    answer = link.getresponse()
    if answer.status != 200:
        raise Refused(f"{answer.status} {answer.read().decode(errors='replace')[:500]}")
    chunks = []
    while line := answer.readline():
        if line.startswith(b"data:"):
            chunks.append((time.monotonic() - sent, line))
    return chunks


def read_stream(chunks: Sequence[tuple[float, bytes]]) -> tuple[Mapping[str, Any], list[tuple[float, int]]]:
    """The last message of a stream and (seconds, tokens so far) of every message that brought tokens."""
    last: dict[str, Any] = {}
    at: list[tuple[float, int]] = []
    for seconds, line in chunks:
        payload = line.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            continue
        last = json.loads(payload)
        if "error" in last:
            raise Refused(str(last["error"])[:500])
        ids = last["output_ids"]  # every message repeats all tokens
        if len(ids) > (at[-1][1] if at else 0):
            at.append((seconds, len(ids)))
    if not last:
        raise Refused("the stream ended without a message")
    return last, at


def load(
    port: int,
    prompts: Sequence[tuple[int, Sequence[int]]],
    new: int,
    together: int,
    *,
    stream: bool = False,
    timeout: float = 300,
    until: float | None = None,
) -> Load:
    """Ask `(number, token ids)` prompts, `together` at a time, in order; with `until` (monotonic) again and again till then.

    A request that fails is an answer with an `error`. Threads are daemons: a caller that is interrupted leaves at once.
    """
    todo: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    bodies = [(number, json.dumps(request_body(ids, new, stream)).encode()) for number, ids in prompts]
    for item in bodies:
        todo.put(item)
    kept: list[tuple[int, Any, float]] = []

    def work() -> None:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        while True:
            if until is not None and time.monotonic() >= until:
                break
            try:
                number, body = todo.get_nowait()
            except queue.Empty:
                break
            sent = time.monotonic()
            result: Any
            try:
                result = _stream(link, body, sent) if stream else _plain(link, body)
            except (OSError, http.client.HTTPException, ValueError, Refused) as error:
                link.close()  # the next request opens it again
                result = f"{type(error).__name__}: {error}"
            kept.append((number, result, time.monotonic() - sent))
            if until is not None:
                todo.put((number, body))
        link.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(together, len(bodies)))]
    begin, busy = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    share = (time.process_time() - busy) / seconds if seconds else 0.0
    return Load(seconds, [_answer(*item) for item in sorted(kept, key=lambda item: item[0])], round(share, 4))


def _answer(number: int, result: Any, seconds: float) -> Answer:
    if isinstance(result, str):
        return Answer(number, [], "", seconds, 0, error=result)
    try:
        message, at = read_stream(result) if isinstance(result, list) else result
        ids, meta = list(message["output_ids"]), message["meta_info"]
    except (Refused, ValueError, KeyError, TypeError) as error:
        return Answer(number, [], "", seconds, 0, error=f"{type(error).__name__}: {error}")
    steps = int(meta.get("spec_verify_ct", 0)) or max(len(ids) - 1, 0)
    return Answer(number, ids, str(message.get("text", "")), seconds, steps, at=at)
