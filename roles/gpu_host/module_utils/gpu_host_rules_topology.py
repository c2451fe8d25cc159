# SPDX-License-Identifier: Apache-2.0
"""Rules about instances on several GPUs: how these reach each other, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from ansible.module_utils.gpu_host_rules import (
    BLOCK,
    INFO,
    WARN,
    Case,
    Hit,
    Map,
    args_of,
    boot_with,
    inside,
    kernel,
    label,
    on_metal,
    rule,
    spans,
)

NCCL_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
SMALL_BAR1_MIB = 256  # what a card has without resizable BAR
AROUND = "env: {NCCL_P2P_DISABLE: 1} and args: {disable-custom-all-reduce: true}"


def pairs(case: Case, gpus: list[Map]) -> list[Map]:
    """The P2P facts of every two of these GPUs, as far as they are known."""
    known = {(pair["a"], pair["b"]): pair for pair in case.facts.get("gpu", {}).get("p2p") or []}
    indices = sorted(gpu["index"] for gpu in gpus)
    return [known[two] for two in combinations(indices, 2) if two in known]


def p2p_off(instance: Map) -> bool:
    """Whether the inventory keeps both who use it, NCCL and the engine's own kernel, from direct access between GPUs."""
    env = instance.get("env")
    value = str((env if isinstance(env, dict) else {}).get("NCCL_P2P_DISABLE", "0"))
    return value not in ("0", "") and bool(args_of(instance).get("disable-custom-all-reduce"))


def over_pcie(case: Case) -> Iterator[tuple[int, Map, list[Map]]]:
    """Instances whose GPUs reach each other directly over PCIe: (position, instance, those pairs)."""
    for at, instance, gpus in spans(case):
        direct = [
            pair for pair in pairs(case, gpus) if pair["link"] != "nvlink" and "ok" in (pair["read"], pair["write"])
        ]
        if direct and not p2p_off(instance):
            yield at, instance, direct


def _two(pair: Map) -> str:
    return f"{pair['a']}-{pair['b']}"


def _listed(found: list[Map]) -> str:
    """Pairs of GPUs in a message; of many, how many and among which."""
    if len(found) <= 6:
        return ", ".join(map(_two, found))
    ends = sorted({index for pair in found for index in (pair["a"], pair["b"])})
    return f"{', '.join(map(str, ends))} ({len(found)} pairs)"


IOMMU_OFF = f"{boot_with('iommu=pt')} (`cat /proc/cmdline` shows it afterwards)"


def _forced(instance: Map) -> list[str]:
    """What of an instance asks for direct access in so many words; left alone, its unit goes without where it may hang."""
    env, args = instance.get("env"), args_of(instance)
    asked = []
    if isinstance(env, dict) and str(env.get("NCCL_P2P_DISABLE", "1")) in ("0", ""):
        asked.append("NCCL_P2P_DISABLE from env")
    if not args.get("disable-custom-all-reduce", True):  # false, or null, which takes it out of the unit's flags
        asked.append("disable-custom-all-reduce from args")
    return asked


@rule(
    "p2p-deadlock",
    BLOCK,
    "On these cards the first exchange between two GPUs hangs when an IOMMU translates, or a bridge redirects, what one sends.",
    source="https://github.com/vllm-project/vllm/issues/33041",
)
def p2p_deadlock(case: Case) -> Iterator[Hit]:
    """Nobody asks for direct access where it is known to hang: Blackwell cards without NVLink."""
    facts = kernel(case)
    ways = ["the IOMMU translates"] if (facts.get("iommu") or {}).get("mode") == "translated" else []
    ways += ["bridges redirect"] if facts.get("acs") else []
    for at, instance, direct in over_pcie(case) if case.profile == "sm120" and ways else ():
        asked = _forced(instance)
        if asked:
            yield Hit(
                label(instance, at),
                f"{' and '.join(asked).replace(' from ', ' under ')} ask for direct access between GPUs "
                f"{_listed(direct)}, and {' and '.join(ways)}",
                "no direct access, as its unit has it by itself here",
                f"Remove {' and '.join(asked)} of it in {case.where}. If it is known to work here, write there: "
                "gpu_host_waivers: {p2p-deadlock: why it works}.",
            )


@rule(
    "iommu-translated",
    WARN,
    "A translating IOMMU sends exchanges between GPUs through the root complex: they are slow or hang, and cards known to hang "
    "go through the host's memory instead.",
    source=NCCL_GUIDE,
)
def iommu_translated(case: Case) -> Iterator[Hit]:
    """Nothing translates what GPUs that reach each other over PCIe exchange."""
    iommu = kernel(case).get("iommu") or {}
    for at, instance, direct in over_pcie(case) if iommu.get("mode") == "translated" else ():
        yield Hit(
            label(instance, at),
            f"GPUs {_listed(direct)} exchange over PCIe and the IOMMU translates ({iommu.get('source')})",
            "an IOMMU that passes through, or is off",
            f"{on_metal(case, IOMMU_OFF)}; or do without direct access: write {AROUND} for it in {case.where}.",
        )


@rule(
    "acs-redirect",
    WARN,
    "Access control on a PCIe bridge sends what one GPU writes to another through the root complex: slow, and known to hang.",
    source=NCCL_GUIDE,
)
def acs_redirect(case: Case) -> Iterator[Hit]:
    """No bridge above GPUs that exchange over PCIe redirects requests."""
    bridges = kernel(case).get("acs") or []
    for at, instance, direct in over_pcie(case) if bridges else ():
        commands = " && ".join(f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in bridges)
        yield Hit(
            label(instance, at),
            f"GPUs {_listed(direct)} exchange over PCIe below {len(bridges)} bridges with request redirect",
            "no redirect",
            f"{on_metal(case, f'`{commands}`, again after every boot, or ACS off in the firmware')}; or write {AROUND} for it in "
            f"{case.where}.",
        )


@rule(
    "p2p-none",
    INFO,
    "GPUs without direct access exchange through the host's memory, which costs time; many cards have no other way.",
    source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
)
def p2p_none(case: Case) -> Iterator[Hit]:
    """GPUs of one instance reach each other."""
    for at, instance, gpus in spans(case):
        broken = _broken(case, gpus)
        none = [pair for pair in pairs(case, gpus) if "ok" not in (pair["read"], pair["write"], pair["nvlink"])]
        none = [pair for pair in none if pair not in broken]
        if none and not p2p_off(instance):
            why = ", ".join(sorted({str(pair["read"]) for pair in none}))
            yield Hit(
                label(instance, at),
                f"no direct access between GPUs {_listed(none)}: {why}",
                "direct access (`nvidia-smi topo -p2p r`)",
                f"If each GPU can hold the model, give each an instance of its own in {case.where}; else nothing: its unit "
                "exchanges through the host's memory by itself.",
            )


def _broken(case: Case, gpus: list[Map]) -> list[Map]:
    """Pairs without NVLink among GPUs that are all joined by it but for a few; boards with bridges join few of their pairs."""
    known = pairs(case, gpus)
    without = [pair for pair in known if pair["link"] != "nvlink"]
    return without if 0 < len(without) * 2 < len(known) else []


@rule(
    "nvlink-broken",
    WARN,
    "All other GPUs of the instance reach each other over NVLink, so here a link is down: exchanges are slow, or fail.",
    source="https://docs.nvidia.com/deploy/gpu-debug-guidelines/index.html",
)
def nvlink_broken(case: Case) -> Iterator[Hit]:
    """NVLink between all GPUs of an instance, where most of them have it."""
    for at, instance, gpus in spans(case):
        broken = _broken(case, gpus)
        if broken:
            uuids = {gpu["index"]: gpu["uuid"] for gpu in gpus}
            ends = sorted({index for pair in broken for index in (pair["a"], pair["b"])})
            look = " and ".join(f"`nvidia-smi nvlink -s -i {uuids[index]}`" for index in ends[:2])
            yield Hit(
                label(instance, at),
                f"no NVLink between GPUs {_listed(broken)}",
                "NVLink, as between the others",
                on_metal(
                    case,
                    f"{look} show links that are down; `systemctl reboot`, and have the board looked at if it stays.",
                ),
            )


@rule(
    "numa-across",
    WARN,
    "What GPUs of different sockets exchange passes the link between the sockets, beside everything else.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def numa_across(case: Case) -> Iterator[Hit]:
    """GPUs of one instance are of one node, where one node has enough of them and no NVLink makes it equal."""
    for at, instance, gpus in spans(case):
        nodes = {gpu.get("numa_node") for gpu in gpus}
        if len(nodes) < 2 or None in nodes or any(pair["link"] == "nvlink" for pair in pairs(case, gpus)):
            continue
        by_node: dict[int, list[int]] = {}
        for gpu in case.gpus:
            if gpu.get("numa_node") is not None:
                by_node.setdefault(gpu["numa_node"], []).append(gpu["index"])
        if any(len(found) >= len(gpus) for found in by_node.values()):
            where = ", ".join(f"GPU {gpu['index']} on node {gpu['numa_node']}" for gpu in gpus)
            have = "; ".join(f"node {node} has {', '.join(map(str, found))}" for node, found in sorted(by_node.items()))
            yield Hit(
                label(instance, at),
                where,
                "GPUs of one node",
                f"Write gpus of one node for it in {case.where}: {have}.",
            )


@rule(
    "gpu-bar1",
    WARN,
    "Another GPU sees no more of its memory than this window, so direct access over PCIe fails or falls back.",
    source="https://docs.nvidia.com/deploy/nvidia-smi/",
)
def gpu_bar1(case: Case) -> Iterator[Hit]:
    """GPUs that exchange over PCIe show more than the smallest window."""
    for at, instance, gpus in spans(case):
        if any(pair["link"] == "nvlink" for pair in pairs(case, gpus)) or p2p_off(instance):
            continue
        small = [
            gpu
            for gpu in gpus
            if 0 < (gpu.get("bar1_total_mib") or 0) <= SMALL_BAR1_MIB < (gpu["memory_total_mib"] or 0)
        ]
        if small:
            fix = "Switch on Above 4G Decoding and Resizable BAR in the firmware (`nvidia-smi -q -d MEMORY | grep -A1 BAR1`)"
            yield Hit(
                label(instance, at),
                f"BAR1 of GPU {', '.join(str(gpu['index']) for gpu in small)}: {small[0]['bar1_total_mib']} MiB",
                "as much as the GPU's memory",
                f"{on_metal(case, fix)}; or write {AROUND} for it in {case.where}.",
            )


@rule(
    "memlock-low",
    INFO,
    "NCCL pins memory for exchanges between GPUs; the unit asks for no limit, and a container's own limit cuts that silently.",
    source=NCCL_GUIDE,
)
def memlock_low(case: Case) -> Iterator[Hit]:
    """No low limit of locked memory above instances on several GPUs."""
    limit = (case.facts.get("limits") or {}).get("pid1_memlock")
    if inside(case) != "container" or limit is None or not 0 <= limit < 64 << 20 or not list(spans(case)):
        return
    fix = "Start the container with `--ulimit memlock=-1` (LXC: `lxc.prlimit.memlock: unlimited` in its config)."
    yield Hit("the limit of locked memory", f"{limit >> 10} KiB", "none, or 64 MiB and more", fix)
