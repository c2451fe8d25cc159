# SPDX-License-Identifier: Apache-2.0
"""Rules about what the driver says of a GPU: the step it wants now, memory errors since it was loaded, its log of this boot.

What the driver wants now comes first. Only where it does not tell, its log has to do, and that does not forget an error which a
reset has mended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    INFO,
    WARN,
    Case,
    Hit,
    Map,
    called,
    on_kernel,
    rule,
    wanted_gpus,
)
from ansible.module_utils.gpu_host_rules_bus import bus, logged

MEMORY_GUIDE = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html"
XID_CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
# The catalogue's "immediate action" (read 2026-12-01) is a reset of the GPU, or of the machine for 79; 48, 171 and 172 are the
# same event: "a GPU reset or node reboot is needed to clear this error".
FATAL_XIDS = {
    46: "it stopped working",
    48: "memory error that could not be corrected",
    62: "halt of its power controller",
    64: "bad memory row that could not be replaced",
    79: "it fell off the bus",
    95: "memory error that was not contained",
    109: "timeout of a context switch",
    110: "security fault",
    119: "no answer of its system processor (GSP)",
    120: "error of its system processor (GSP)",
    140: "memory error without recovery",
    143: "failed initialization",
    158: "fatal timeout",
    171: "memory error that could not be corrected",
    172: "error of its on-chip memory that could not be corrected",
}
# Of these the count of uncorrected errors tells whether they are over: a reset sets it to 0.
MEMORY_XIDS = (48, 64, 95, 140, 171, 172)
# The GPU goes on; a reset can wait, or somebody has to look.
LATER_XIDS = {
    54: "a power cable is not connected",
    74: "NVLink error",
    92: "many memory errors that were corrected",
    94: "memory error that was contained: only the program that met it died",
    136: "an NVLink could not be trained",
    **dict.fromkeys(range(144, 151), "NVLink error"),
    155: "an NVLink went down",
    156: "a reset will replace a bad part",
    157: "a bad part could not be replaced",
    167: "timeout on PCIe",
    168: "less memory than the card has",
}
RECOVERY_CHANGED = 154  # what the driver wants done from now on
WORDS = {
    "None": "none",
    "GPU Reset Required": "reset",
    "Node Reboot Required": "reboot",
    "Drain P2P": "drain p2p",
    "Drain and Reset": "drain and reset",
}


def _events(case: Case, gpu: Map) -> list[Map]:
    return [one for one in case.facts.get("gpu", {}).get("xids") or [] if bus(one["pci"]) == bus(gpu["pci"])]


def wants(case: Case, gpu: Map) -> str | None:
    """What the driver wants done with a GPU: its present word, else the last one in its log; None if it says neither."""
    if gpu.get("recovery"):
        return str(gpu["recovery"])
    told = None
    for event in _events(case, gpu):
        if event["xid"] == RECOVERY_CHANGED:
            found = re.search(r"to 0x\w+ \((.*?)\)", str(event["text"]))
            told = WORDS.get(found[1], told) if found else told
    return told


def _told(case: Case, gpu: Map, known: dict[int, str]) -> list[str]:
    numbers = dict.fromkeys(event["xid"] for event in _events(case, gpu))
    return [f"Xid {number} ({known[number]})" for number in numbers if number in known]


def _uncorrected(gpu: Map) -> int:
    return (gpu.get("ecc") or {}).get("uncorrected") or 0


def _errors(gpu: Map) -> str:
    count = _uncorrected(gpu)
    return f"{count} uncorrected memory error{'s' if count > 1 else ''}"


def reset(case: Case, gpu: Map) -> str:
    """The step that resets a GPU."""
    return on_kernel(
        case, f"Stop what runs on it, then `nvidia-smi -i {gpu['uuid']} --gpu-reset`, or `systemctl reboot`."
    )


def _look(gpu: Map) -> str:
    return f"`dmesg | grep 'Xid.*{logged(gpu['pci'])}'` has the log."


@rule(
    "gpu-recovery",
    BLOCK,
    "The driver says that the GPU, or the system's side of it, is in a state that only this step ends.",
    source=MEMORY_GUIDE,
)
def gpu_recovery(case: Case) -> Iterator[Hit]:
    """The driver wants nothing done before a GPU is used."""
    for gpu in wanted_gpus(case):
        asked = wants(case, gpu)
        if asked not in ("reset", "reboot", "drain p2p"):
            continue
        errors = [_errors(gpu)] if _uncorrected(gpu) else []
        why = ", ".join(errors + _told(case, gpu, FATAL_XIDS | LATER_XIDS))
        fix = reset(case, gpu) if asked == "reset" else on_kernel(case, "`systemctl reboot`.")
        if asked == "drain p2p":
            fix = on_kernel(
                case, "Stop everything on all GPUs that exchange with it; if it still says so, `systemctl reboot`."
            )
        words = {"reset": "a reset of it", "reboot": "a reboot", "drain p2p": "an end of all exchange with other GPUs"}
        yield Hit(
            called(gpu),
            f"the driver wants {words[asked]}" + (f" after {why}" if why else ""),
            f"nothing (`nvidia-smi -i {gpu['uuid']} -q | grep 'Recovery Action'`)",
            f"{fix} {_look(gpu)} If it comes back, have the card replaced.",
        )


@rule(
    "gpu-recovery-later",
    WARN,
    "The GPU works with less than it has; what runs may run on, and a reset brings the rest back.",
    source=MEMORY_GUIDE,
)
def gpu_recovery_later(case: Case) -> Iterator[Hit]:
    """No reset is due."""
    for gpu in wanted_gpus(case):
        if wants(case, gpu) == "drain and reset":
            yield Hit(called(gpu), "the driver wants a reset once nothing runs on it", "nothing", reset(case, gpu))


def _contained(case: Case, gpu: Map) -> bool:
    numbers = {event["xid"] for event in _events(case, gpu)}
    return wants(case, gpu) in ("none", "drain and reset") or (94 in numbers and not numbers & set(MEMORY_XIDS))


@rule(
    "gpu-ecc-uncorrected",
    BLOCK,
    "Memory gave wrong data that could not be corrected since the driver was loaded, and the driver does not say that it "
    "was contained; a reset or a reboot clears that.",
    source=XID_CATALOGUE,
)
def gpu_ecc_uncorrected(case: Case) -> Iterator[Hit]:
    """No uncorrected memory errors that may still be there."""
    for gpu in wanted_gpus(case):
        if _uncorrected(gpu) and not _contained(case, gpu) and wants(case, gpu) is None:
            told = _told(case, gpu, {number: FATAL_XIDS[number] for number in MEMORY_XIDS})
            yield Hit(
                called(gpu),
                ", ".join([_errors(gpu), *told]),
                "0 since the driver was loaded",
                f"{reset(case, gpu)} If they come back, have the card replaced.",
            )


@rule(
    "gpu-ecc-contained",
    WARN,
    "Memory gave wrong data that could not be corrected. The program that met it died; the driver keeps others off that place.",
    source=MEMORY_GUIDE,
)
def gpu_ecc_contained(case: Case) -> Iterator[Hit]:
    """No uncorrected memory errors."""
    for gpu in wanted_gpus(case):
        if _uncorrected(gpu) and _contained(case, gpu) and wants(case, gpu) in (None, "none"):
            yield Hit(
                called(gpu),
                f"{_errors(gpu)}, contained",
                "0 since the driver was loaded",
                f"When there is time: {reset(case, gpu)} If they come back, have the card replaced.",
            )


def reset_asked(case: Case, gpu: Map) -> bool:
    """Whether another finding asks for a reset of this GPU already."""
    return wants(case, gpu) not in (None, "none") or bool(_uncorrected(gpu) and not _contained(case, gpu))


def _open(case: Case, gpu: Map) -> dict[int, str]:
    """Fatal Xids that nothing says are over, or that another finding has."""
    if wants(case, gpu) is not None:
        return {}
    ecc = gpu.get("ecc") or {}
    memory_known = ecc.get("mode") is True and ecc.get("uncorrected") is not None
    return {number: word for number, word in FATAL_XIDS.items() if not (memory_known and number in MEMORY_XIDS)}


@rule(
    "gpu-xid",
    BLOCK,
    "After such an error the catalogue wants the GPU reset before it is used again, and nothing says that it was.",
    source=XID_CATALOGUE,
)
def gpu_xid(case: Case) -> Iterator[Hit]:
    """No error of this boot after which a GPU is of no use."""
    for gpu in wanted_gpus(case):
        told = _told(case, gpu, _open(case, gpu))
        if told:
            alone = f"`nvidia-smi -i {gpu['uuid']} --gpu-reset`"
            fix = on_kernel(case, f"`systemctl reboot`, or switch the machine off and on. {_look(gpu)}")
            yield Hit(
                called(gpu),
                ", ".join(told),
                "no such Xid since the last boot",
                f"{fix} A reset alone ({alone}) leaves the log as it is: after one, write in {case.where}: "
                "gpu_host_waivers: {gpu-xid: it was reset since}.",
            )


@rule(
    "gpu-xid-seen",
    WARN,
    "The driver reported an error of the hardware since the last boot, and the GPU is in use again or still; it may come again.",
    source=XID_CATALOGUE,
)
def gpu_xid_seen(case: Case) -> Iterator[Hit]:
    """No error of this boot that speaks of the hardware."""
    for gpu in wanted_gpus(case):
        over = {number: word for number, word in FATAL_XIDS.items() if number not in _open(case, gpu)}
        if _uncorrected(gpu):  # told by the count
            over = {number: word for number, word in over.items() if number not in MEMORY_XIDS}
        later = {number: word for number, word in LATER_XIDS.items() if number != 94 or not _uncorrected(gpu)}
        told = _told(case, gpu, later | over)
        if told and wants(case, gpu) in (None, "none"):
            yield Hit(
                called(gpu),
                ", ".join(told),
                "no such Xid since the last boot",
                f"{_look(gpu)} If it repeats: {reset(case, gpu)}",
            )


@rule(
    "gpu-xid-program",
    INFO,
    "The driver reported an error since the last boot that programs usually bring about; it explains a crash of that time.",
    source=XID_CATALOGUE,
)
def gpu_xid_program(case: Case) -> Iterator[Hit]:
    """No other Xid of this boot."""
    known = {*FATAL_XIDS, *LATER_XIDS, RECOVERY_CHANGED, 45, 63}  # 45 goes with another, 63 with a pending row
    for gpu in wanted_gpus(case):
        numbers = [event["xid"] for event in _events(case, gpu) if event["xid"] not in known]
        if numbers:
            counts = ", ".join(f"Xid {number} ({numbers.count(number)} times)" for number in sorted(set(numbers)))
            yield Hit(called(gpu), counts, "none", f"Look each up in the catalogue. {_look(gpu)}")
