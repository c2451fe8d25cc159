# SPDX-License-Identifier: Apache-2.0
"""Stand-in for a GPU's driver: replays recorded answers of NVML behind the real pynvml's constants and errors.

A recording is `{system: {call: value}, devices: [{call: value}], pairs: [{a, b, ancestor, p2p: [4 numbers]}]}`. A call
with further arguments is named with them: `nvmlDeviceGetTotalEccErrors 0 1`. A structure is a map of its fields, an
error is `{"!": number of the NVML error}`, and a call that the recording lacks is one that the GPU does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml


class NvmlStandIn:
    """Has everything that the module pynvml has, except that calls are answered from a recording."""

    def __init__(self, recording: dict[str, Any]) -> None:
        self.recording = recording
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            return self._call(name)
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's name
        self._answer(self.recording.get("system", {}).get("nvmlInit"))
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - pynvml's name
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - pynvml's name
        return len(self.recording["devices"])

    def nvmlDeviceGetHandleByIndex(self, at: int) -> int:  # noqa: N802 - pynvml's name
        self._answer(self.recording["devices"][at].get("handle"))
        return at

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:  # noqa: N802 - pynvml's name
        return int(self._answer(self._pair(a, b)["ancestor"]))

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, cap: int) -> int:  # noqa: N802 - pynvml's name
        return int(self._answer(self._pair(a, b)["p2p"][cap]))

    def nvmlDeviceGetGpuFabricInfo(self, at: int, info: Any) -> int:  # noqa: N802 - pynvml's name
        info._obj.state = self._answer(self.recording["devices"][at].get("fabric", UNSUPPORTED))
        return 0

    def _pair(self, a: int, b: int) -> dict[str, Any]:
        return next(pair for pair in self.recording["pairs"] if {pair["a"], pair["b"]} == {a, b})

    def _call(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self.open == 1, f"{name} outside of nvmlInit and nvmlShutdown"
            if name.startswith("nvmlDevice"):
                answers, arguments = self.recording["devices"][arguments[0]], arguments[1:]
            else:
                answers = self.recording.get("system", {})
            return self._answer(answers.get(" ".join([name, *map(str, arguments)]), UNSUPPORTED))

        return call

    def _answer(self, value: Any) -> Any:
        if isinstance(value, dict):
            if "!" in value:
                raise pynvml.NVMLError(value["!"])
            return _structure(value)
        return [_structure(one) for one in value] if isinstance(value, list) else value


def _structure(value: Any) -> Any:
    """A structure, with those inside of it, for a map of its fields."""
    return SimpleNamespace(**{key: _structure(one) for key, one in value.items()}) if isinstance(value, dict) else value


UNSUPPORTED = {"!": pynvml.NVML_ERROR_NOT_SUPPORTED}
V2 = f"nvmlDeviceGetMemoryInfo {pynvml.nvmlMemory_v2}"


def device(pci: str, uuid: str, **answers: Any) -> dict[str, Any]:
    """A device with an address and a UUID, and whatever else it is said to answer."""
    return {"nvmlDeviceGetPciInfo": {"busId": pci}, "nvmlDeviceGetUUID": uuid, **answers}
