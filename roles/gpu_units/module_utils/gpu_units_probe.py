# SPDX-License-Identifier: Apache-2.0
"""Whether the host really lets a unit be bound to a NUMA node: tried with a unit that does nothing, before any is rendered.

In containers and below cpusets the kernel may refuse it, and an engine with such a line would not start at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from ansible.module_utils.gpu_units_host import run
from ansible.module_utils.gpu_units_topology import directives, nodes_of

MARK = "Cpus_allowed_list:"
# Exit codes of systemd for a unit that it could not set up; systemd.exec(5), "Process Exit Codes".
REFUSED = {215: "its CPUs are not there for it", 242: "its NUMA policy is not allowed"}
SECONDS = 30.0


def cpus_in(text: str) -> set[int]:
    """`0-3,8` as numbers; systemd's lists may have spaces, too."""
    found: set[int] = set()
    for part in text.replace(",", " ").split():
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def refusal(node: int, cpus: str) -> str:
    """Why a unit can't be bound to a node, empty if it can. Raises TimeoutExpired: then nothing is known."""
    tool = shutil.which("systemd-run")
    if tool is None:
        return "systemd-run is not there"
    properties = [word for line in directives(node, cpus) for word in ("--property", line)]
    words = [tool, "--quiet", "--wait", "--collect", "--pipe", *properties, "/bin/cat", "/proc/self/status"]
    done = run(words, SECONDS)
    if done.returncode:
        why = REFUSED.get(done.returncode) or done.stderr.strip() or "no word"
        return f"systemd-run ended with {done.returncode}: {why}"
    allowed = next((line.removeprefix(MARK).strip() for line in done.stdout.splitlines() if line.startswith(MARK)), "")
    if not allowed or not cpus_in(allowed) <= cpus_in(cpus):
        return f"asked for CPUs {cpus}, a unit got {allowed or 'an unknown set'}"
    return ""


def usable_nodes(
    topology: dict[str, Any], gpus: list[dict[str, Any]], ask: Callable[[int, str], str] = refusal
) -> tuple[dict[int, str], list[str]]:
    """(nodes with GPUs that units can be bound to, with their CPUs; what a person should know)."""
    nodes = nodes_of(topology)
    wanted = sorted({gpu["numa_node"] for gpu in gpus if gpu.get("numa_node") in nodes})
    answers = {node: ask(node, nodes[node]) for node in wanted}
    refused = [f"node {node}: {why}" for node, why in answers.items() if why]
    told = (
        f"units are not bound to all NUMA nodes here ({'; '.join(refused)}); give this machine all CPUs and nodes, or set "
        "gpu_units_numa: off"
    )
    return {node: nodes[node] for node in wanted if not answers[node]}, [told] if refused else []
