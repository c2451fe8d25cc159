# SPDX-License-Identifier: Apache-2.0
"""The cpu profile's plugin decides rightly when to act; what it computes is tested in tests/engine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "roles/kernel_backends/files/cpu/sglang_fleet_cpu"


@pytest.fixture
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_fleet_cpu", PACKAGE / "__init__.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a function that another one imported by name."""
    module = ModuleType("fake_engine_kernels")
    exec("def extend(q, k, scale=1.0): return 'kernel'", module.__dict__)
    monkeypatch.setitem(sys.modules, "fake_engine_kernels", module)
    return module


def _cuda(monkeypatch: pytest.MonkeyPatch, visible: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: visible)))


def test_does_nothing_unless_asked(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would raise
    assert plugin.register() is None


def test_refuses_a_visible_gpu(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _cuda(monkeypatch, True)
    with pytest.raises(SystemExit, match="a CUDA device is visible; start the engine with CUDA_VISIBLE_DEVICES="):
        plugin.register()


def test_needs_the_interpreter(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _cuda(monkeypatch, False)
    with pytest.raises(SystemExit, match="TRITON_INTERPRET=1 is missing"):
        plugin.register()


def test_a_failing_part_ends_the_process(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would log an exception and serve on without the twins."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _cuda(monkeypatch, False)

    def _kernels() -> None:
        raise AttributeError("no such kernel")

    monkeypatch.setattr(plugin, "_kernels", _kernels)
    with pytest.raises(SystemExit, match="cannot set up kernels: AttributeError"):
        plugin.register()


def test_unknown_choice_of_kernels(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FLEET_CPU_KERNELS", "fast")
    with pytest.raises(SystemExit, match="SGLANG_FLEET_CPU_KERNELS=fast is neither torch nor interpreter"):
        plugin._kernels()


def test_swap_reaches_names_imported_before(
    plugin: ModuleType, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = ModuleType("fake_engine_user")
    user.extend = engine.extend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_engine_user", user)

    def twin(q: object, k: object, scale: float = 1.0) -> str:
        return "twin"

    plugin._swap("fake_engine_kernels.extend", twin)
    assert engine.extend is user.extend is twin  # type: ignore[attr-defined]


def test_swap_refuses_other_parameters(plugin: ModuleType, engine: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match=r"takes \['q', 'k', 'scale'\], its twin \['q'\]; this engine needs its own twin"
    ):
        plugin._swap("fake_engine_kernels.extend", lambda q: None)


def test_parameters_of_kernels_and_their_twins(plugin: ModuleType) -> None:
    kernel = SimpleNamespace(arg_names=["a", "b"])
    twin = SimpleNamespace(function=lambda requests, a, b: None)
    assert plugin.parameters(kernel) == plugin.parameters(twin) == ["a", "b"]
