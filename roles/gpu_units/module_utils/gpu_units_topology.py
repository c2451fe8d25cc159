# SPDX-License-Identifier: Apache-2.0
"""Where an instance runs and how its GPUs exchange data, worked out from facts of the host. Pure.

Topology of a host, as gpu_host_result.topology has it (what is unknown is None or missing):

    {numa: [{node, cpus}], p2p: [{a, b, link, read, write}], iommu: off|passthrough|translated, acs: [pci], virt: metal|vm|..}

GPUs are those of gpu_host_result, each with index, uuid, compute_cap and numa_node.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

Data = dict[str, Any]
OWN_BINDING = "numa-node"  # the engine's flag: it binds its ranks itself, so the unit must not


def nodes_of(topology: Data) -> dict[int, str]:
    """CPUs by NUMA node, as in `0-31,64-95`; empty unless two nodes or more have CPUs, as there is nothing to choose then."""
    nodes = {int(one["node"]): str(one["cpus"]) for one in topology.get("numa") or [] if one.get("cpus")}
    return nodes if len(nodes) > 1 else {}


def directives(node: int, cpus: str) -> list[str]:
    """What keeps a unit's threads and memory on a node. `preferred`: a full node lends from others, with `bind` processes die."""
    return [f"CPUAffinity={cpus}", "NUMAPolicy=preferred", f"NUMAMask={node}"]


def gpus_of(instance: Data, gpus: list[Data]) -> list[Data]:
    """The GPUs of an instance in the order in which its engine counts them."""
    by_uuid = {gpu["uuid"]: gpu for gpu in gpus}
    return [by_uuid[uuid] for uuid in instance["uuids"] if uuid in by_uuid]


def placement(instance: Data, gpus: list[Data], nodes: dict[int, str]) -> tuple[list[str], str]:
    """(directives of the instance's unit, what a person should know, or nothing).

    All instances of a node share all of its CPUs: an idle one lends its own, the kernel is fair between units, and an instance
    that comes or goes restarts none of its neighbours. `nodes` are those that the host was seen to accept.
    """
    if not nodes or not instance["uuids"]:
        return [], ""
    who = f"instance {instance['name']}"
    if instance["args"].get(OWN_BINDING) is not None:
        return [], f"{who}: args has {OWN_BINDING}, so the engine binds its ranks and the unit binds nothing"
    found: list[Any] = [gpu.get("numa_node") for gpu in gpus_of(instance, gpus)]
    several = sorted({str(node) for node in found})
    if None in found or not found:
        return [], ""
    if len(several) > 1:
        return [], (
            f"{who}: its GPUs lie on NUMA nodes {', '.join(several)}, so its unit binds nothing; to bind each rank to its own: "
            f"args: {{{OWN_BINDING}: {found}}} (needs numactl on the host)"
        )
    node = int(found[0])
    return (directives(node, nodes[node]), "") if node in nodes else ([], "")


def exchange_facts(mine: list[Data], topology: Data) -> Data:
    """What rows of nccl.yml ask for, about GPUs of one instance.

    link: nvlink (between every two) or pcie. p2p: ok (every two read and write each other), none (no two), some, unknown (a pair
    that nobody told of). way: redirected (an IOMMU translates or a bridge redirects), direct, unknown. sm: compute capabilities.
    """
    known = {(pair["a"], pair["b"]): pair for pair in topology.get("p2p") or []}
    indices = sorted(gpu["index"] for gpu in mine)
    pairs = [known.get(two) for two in combinations(indices, 2)]
    seen = [pair for pair in pairs if pair]
    reach = [pair["read"] == "ok" and pair["write"] == "ok" for pair in seen]
    if len(seen) < len(pairs) or any("unknown" in (pair["read"], pair["write"]) for pair in seen):
        p2p = "unknown"
    else:
        p2p = "ok" if all(reach) else "some" if any(reach) else "none"
    if topology.get("iommu") == "translated" or topology.get("acs"):
        way = "redirected"
    elif topology.get("iommu") is None or topology.get("acs") is None or topology.get("virt") == "vm":
        way = "unknown"  # a VM does not see the IOMMU that hands it its GPUs
    else:
        way = "direct"
    linked = bool(pairs) and all(pair and pair["link"] == "nvlink" for pair in pairs)
    capabilities = sorted({str(gpu.get("compute_cap")) for gpu in mine})
    return {"link": "nvlink" if linked else "pcie", "p2p": p2p, "way": way, "sm": capabilities}


def exchange(instance: Data, gpus: list[Data], topology: Data, rows: list[Data]) -> Data | None:
    """The row of nccl.yml for an instance, None for one on fewer than two GPUs."""
    mine = gpus_of(instance, gpus)
    if len(mine) < 2:
        return None
    facts = exchange_facts(mine, topology)
    return next((row for row in rows if _holds(row["when"], facts)), None)


def _holds(when: Data, facts: Data) -> bool:
    return all(set(values) & set(facts[key] if key == "sm" else [facts[key]]) for key, values in when.items())


def notes(instances: list[Data], gpus: list[Data], nodes: dict[int, str]) -> list[str]:
    """What a person should know of where instances run."""
    return [note for instance in instances if (note := placement(instance, gpus, nodes)[1])]
