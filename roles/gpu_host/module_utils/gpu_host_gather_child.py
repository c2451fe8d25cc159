# SPDX-License-Identifier: Apache-2.0
"""Work in a child process that may hang for good: a driver that lost its GPU can hold a caller where no signal reaches it."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

OPEN_FILES = 1024  # a module has a handful


class ChildError(Exception):
    """The child gave no result; the message says whether it hung or died."""


def in_child(work: Callable[[], Any], seconds: float) -> Any:
    """The JSON-like result of `work`. ChildError if it takes longer or dies, RuntimeError if it raises."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        _work(work, there)
    os.close(there)
    try:
        answer = _read(here, time.monotonic() + seconds)
    finally:
        os.close(here)
        # Not waited for: a child in an uninterruptible call ends when it likes, and is reaped after this process.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, os.WNOHANG)
    if answer is None:
        raise ChildError(f"no answer within {seconds:g} s")
    if not answer:
        raise ChildError("the process that asked died")
    told = json.loads(answer)
    if "error" in told:
        raise RuntimeError(told["error"])
    return told["result"]


def _work(work: Callable[[], Any], there: int) -> None:
    """Never returns. Lets go of all that the parent has open: whoever reads it waits until nobody holds it."""
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.closerange(3, there)
        os.closerange(there + 1, OPEN_FILES)
        try:
            told = {"result": work()}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(there, "w", encoding="utf-8") as pipe:
            json.dump(told, pipe)
        status = 0
    finally:
        os._exit(status)


def _read(pipe: int, deadline: float) -> bytes | None:
    """Everything that is written until the writer closes; None when the deadline comes first."""
    found = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return found
        found += piece
