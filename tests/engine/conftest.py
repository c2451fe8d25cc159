# SPDX-License-Identifier: Apache-2.0
"""One real server per mode and session, one after the other; the tests of a mode run together.

Without ddtree_patches/<engine>/series there is no patched engine to test: that fails, it is no reason to skip.
`SGLANG_FLEET_TEST_PYTHON` names the Python of another engine venv to test instead of building one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import smoke_backends, smoke_host, smoke_judge

from tests import venv
from tests.engine import abilities, cases, engine_venv
from tests.engine.launch import Engine, serve

HERE = Path(__file__).parent
NANO = HERE.parents[1] / "models/nano"
EOS = 17  # ".": an end of sequence that the model often writes in the middle of an accepted path
DEPTH = 15  # drafted positions of the pair


def wrong_backends(engine: Engine, mode: str) -> list[dict[str, Any]]:
    """What the product's smoke finds wrong with the backends of a running engine in a mode."""
    hooks = yaml.safe_load((HERE.parents[1] / "roles/smoke/files/hooks.yml").read_text())
    scan = smoke_judge.JournalScan(hooks, mode)
    for line in engine.log().splitlines():
        scan.feed(line)
    states = smoke_host.scheduler_states(engine.url, None, 30, smoke_backends.fields_of(hooks))
    rows = venv.profile("cpu")["backends"]
    checks = smoke_backends.judge_backends(hooks, mode, engine.args, states, scan.found, rows, mode)
    assert {check["id"] for check in checks} >= set(hooks["backends"]) - {"backend.draft"}
    return [check for check in checks if not check["ok"]]


@dataclass(frozen=True)
class Mode:
    """What is served. `hooks` is the mode's name for operators, `arm` its name in the offline walk.

    `by_size`: larger batches are verified in another way, so that only single requests take the walk's steps.
    """

    name: str
    hooks: str
    arm: str | None
    args: dict[str, Any] = field(default_factory=dict)
    by_size: bool = False

    @property
    def tree(self) -> bool:
        return self.hooks == "ddtree"


def _tree(budget: int | str, topk: int = 8) -> dict[str, Any]:
    return {"speculative-algorithm": "DDTREE", "speculative-ddtree-budget": budget, "speculative-ddtree-topk": topk}


ARMS = {"chain": (DEPTH, 1), "tree-7": (7, 8), "tree-15": (15, 8), "tree-31": (31, 8)}
MODES = [
    Mode("baseline", "baseline", None),
    Mode("dflash", "dflash", "chain", {"speculative-algorithm": "DFLASH"}),
    Mode("ddtree-shadow", "ddtree-shadow", "chain", _tree(15) | {"speculative-ddtree-shadow-linear": True}),
    Mode("ddtree-15", "ddtree", "tree-15", _tree(15)),
    # auto for one or two requests: without CUDA graphs nothing is measured and the widest tree is taken; chains for more
    Mode("ddtree-by-size", "ddtree", "tree-31", _tree("auto") | {"speculative-ddtree-linear-above": 2}, by_size=True),
]
# Both abilities have to be asked for.
ASKED = {"enable-custom-logit-processor": True, "enable-return-hidden-states": True}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "modes(name, ..): run only in these served modes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what a test's `modes` marker does not name, before pytest groups the tests by server; own servers come first."""

    def wanted(item: pytest.Item) -> bool:
        marker = item.get_closest_marker("modes")
        call = getattr(item, "callspec", None)
        return marker is None or call is None or call.params["served"].name in marker.args

    dropped = [item for item in items if not wanted(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if wanted(item)]
    # The last mode's server runs until the end of the package, and a second one would wait for it for ever.
    items.sort(key=_asks_a_mode)


def _asks_a_mode(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return call is not None and isinstance(call.params.get("served"), Mode)


class Offline:
    """A computation in the engine's Python beside the server: starts now, is waited for when its answer is needed."""

    def __init__(self, python: Path, request: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [python, HERE / "offline_walk.py"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "HF_HUB_OFFLINE": "1",
                 "PYTHONPYCACHEPREFIX": str(engine_venv.CACHE / "pycache")},
        )  # fmt: skip
        self._said: tuple[str, str] = ("", "")
        self._reader = threading.Thread(target=self._talk, args=(json.dumps(request),), daemon=True)
        self._reader.start()

    def _talk(self, request: str) -> None:
        self._said = self.process.communicate(request)

    @cached_property
    def answer(self) -> dict[str, Any]:
        self._reader.join()
        assert self.process.returncode == 0, f"offline_walk.py failed:\n{self._said[1][-4000:]}"
        return dict(json.loads(self._said[0]))


@dataclass
class Served:
    """A running mode and what it answered so far."""

    mode: Mode
    engine: Engine
    walk: cases.Walk
    processors: dict[str, str]

    @cached_property
    def alone(self) -> list[dict[str, Any]]:
        """The plain requests, one after the other, on a cold cache (the first call of a mode)."""
        return cases.ask(self.engine, cases.plain(self.walk), together=1)

    @cached_property
    def batch(self) -> list[dict[str, Any]]:
        """The plain requests in batches of 8, again without their prompts in the cache."""
        self.flush()
        return cases.ask(self.engine, cases.plain(self.walk))

    @cached_property
    def endings(self) -> list[dict[str, Any]]:
        walk = self.walk
        chosen = cases.lengths(walk) + cases.stops(walk, EOS) + cases.ends(walk, EOS)
        return cases.ask(self.engine, [case.body for case in chosen])

    @cached_property
    def mixed(self) -> list[dict[str, Any]]:
        return cases.ask(self.engine, cases.mixed(self.walk))

    @cached_property
    def asked(self) -> list[dict[str, Any]]:
        """Requests that change the logits, and plain ones between them."""
        return cases.ask(self.engine, [body for _, body in abilities.asking(self.walk, self.processors)])

    def load(self) -> dict[str, Any]:
        return dict(self.engine.get("/v1/loads?include=core")["loads"][0])

    def wait_for(self, reached: Callable[[dict[str, Any]], bool], limit: float = 30.0) -> dict[str, Any]:
        """Wait until the load is as wanted; return it."""
        deadline = time.monotonic() + limit
        while not reached(load := self.load()):
            assert time.monotonic() < deadline, f"not reached after {limit:.0f} s: {load}"
            time.sleep(0.05)
        return load

    def idle(self) -> dict[str, Any]:
        """Wait until nothing runs; return the load. Slots of finished requests are either free or in the radix cache."""
        return self.wait_for(lambda load: load["num_running_reqs"] == load["num_waiting_reqs"] == 0)

    def flush(self) -> None:
        """Empty the radix cache."""
        self.idle()
        self.engine.post("/flush_cache?timeout=30", {})


@dataclass
class Book:
    """What modes have answered in this session, for comparison."""

    answers: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def take(self, served: Served) -> None:
        if served.mode.name not in self.answers:
            self.seconds[served.mode.name] = served.engine.start_seconds
            self.answers[served.mode.name] = {
                "alone": served.alone, "batch": served.batch, "endings": served.endings, "mixed": served.mixed,
                "asked": served.asked,
            }  # fmt: skip


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Python of the patched engine."""
    if given := os.environ.get("SGLANG_FLEET_TEST_PYTHON"):
        return Path(given)
    return engine_venv.build()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target with a second end-of-sequence token."""
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(NANO / "target", folder, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": [config["eos_token_id"], EOS]}))
    return folder


@pytest.fixture(scope="session")
def offline(engine_python: Path) -> Offline:
    lines = (NANO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:16]
    return Offline(
        engine_python,
        {
            "what": "walk", "target": str(NANO / "target"), "draft": str(NANO / "draft"), "new": cases.NEW, "arms": ARMS,
            "prompts": [json.loads(line)["prompt"] for line in lines],
        },
    )  # fmt: skip


@pytest.fixture(scope="session")
def walk(offline: Offline) -> cases.Walk:
    return cases.Walk(**offline.answer)


@pytest.fixture(scope="session")
def book() -> Book:
    return Book()


@pytest.fixture(scope="session")
def start(engine_python: Path, target: Path, offline: Offline, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Start a mode: `with start(mode) as engine`."""

    def run(mode: Mode) -> Any:
        args = {"model-path": target, "max-running-requests": 32, **ASKED, **mode.args}
        if mode.arm:
            args["speculative-draft-model-path"] = NANO / "draft"
        return serve(engine_python, tmp_path_factory.mktemp(mode.name), args)

    return run


@pytest.fixture(scope="session")
def processors(engine_python: Path) -> dict[str, str]:
    """Custom logit processors as a client sends them, by class name."""
    done = subprocess.run([engine_python, HERE / "logit_processors.py"], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="package", params=MODES, ids=lambda mode: mode.name)
def served(
    request: pytest.FixtureRequest, start: Any, book: Book, offline: Offline, processors: dict[str, str],
    record_testsuite_property: Any,
) -> Iterator[Served]:  # fmt: skip
    """Every mode in turn. What it is compared with is asked first, in its own server where that is another mode."""
    wanted: Mode = request.param
    needed = {"baseline"} | ({"dflash"} if wanted.arm == "chain" else set())
    for mode in MODES:
        if mode.name in needed - {wanted.name} - set(book.answers):
            with start(mode) as engine:
                book.take(Served(mode, engine, cases.Walk(**offline.answer), processors))
    with start(wanted) as engine:
        served = Served(wanted, engine, cases.Walk(**offline.answer), processors)
        book.take(served)
        record_testsuite_property(f"start-seconds-{wanted.name}", round(engine.start_seconds, 1))
        yield served
        if wanted.name == "ddtree-15":
            assert engine.end() == 0, "the engine still knows requests that have ended (0010-requests.patch)"


@pytest.fixture
def reference(served: Served, book: Book) -> dict[str, list[dict[str, Any]]]:
    """Baseline's answers."""
    return book.answers["baseline"]
