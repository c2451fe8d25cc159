# SPDX-License-Identifier: Apache-2.0
"""Facts of one host, read only: GPUs, driver, toolchain, room, ports, models.

Standard library only, so that it also runs alone on a machine without Ansible; this is how a real machine's GPU facts
are recorded for tests:

    python3 gpu_host_gather.py --record "8x H200, Ubuntu 24.04" > facts.json

Shapes are those of the functions below; sizes are bytes unless the name ends in _mib, versions are strings.
A fact that cannot be read is None or an empty list, never a guess; the judge decides what that means.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

GPU_FIELDS = (
    "pci.bus_id",
    "uuid",
    "name",
    "compute_cap",
    "memory.total",
    "memory.used",
    "driver_version",
)
SHM = "/dev/shm"  # noqa: S108 - looked at, not written to
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")

# A target whose layers keep a recurrent state: a tree of drafts would need one state per branch.
HYBRID_MODEL_TYPES = frozenset(
    {
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "kimi_linear",
        "nemotron_h",
        "falcon_h1",
        "granitemoehybrid",
        "jamba",
        "bamba",
        "zamba2",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "bailing_moe_linear",
        "minimax",
    }
)
RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "gdn")


def run(argv: list[str], timeout: float = 60.0) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command; 127 when it is not there, 124 when it hangs."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        return 127, "", str(error)
    except PermissionError as error:
        return 126, "", str(error)
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]} gave no answer within {timeout:.0f} s"
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def which(name: str, extra: tuple[str, ...] = ()) -> str | None:
    """Path of a program: sudo and cron shorten PATH, so the usual folders are always looked at."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", *extra]
    return shutil.which(name, path=os.pathsep.join(folders))


# --- GPUs ---------------------------------------------------------------------------------------


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]
    return [row for row in rows if len(row) == width]


def _number(cell: str) -> int | None:
    """nvidia-smi writes [N/A] or [Not Supported] where a device has no such value."""
    try:
        return int(float(cell))
    except ValueError:
        return None


def parse_gpus(text: str) -> tuple[list[Facts], str | None]:
    """GPUs in PCI order (the index that an inventory means) and the driver's version."""
    gpus: list[Facts] = []
    driver = None
    for bus, uuid, name, capability, total, used, version in _rows(text, len(GPU_FIELDS)):
        driver = version
        gpus.append(
            {
                "pci": bus.lower(),
                "uuid": uuid,
                "name": name,
                "compute_cap": capability,
                "memory_total_mib": _number(total),
                "memory_used_mib": _number(used),
            }
        )
    gpus.sort(key=lambda gpu: [int(part, 16) for part in re.split("[:.]", gpu["pci"])])
    return [{"index": index, **gpu} for index, gpu in enumerate(gpus)], driver


def parse_processes(text: str) -> list[Facts]:
    """Compute processes on GPUs as nvidia-smi lists them."""
    return [
        {"gpu_uuid": uuid, "pid": _number(pid), "name": name, "memory_mib": _number(memory)}
        for uuid, pid, name, memory in _rows(text, len(PROCESS_FIELDS))
    ]


def parse_cuda_driver(text: str) -> str | None:
    """The newest CUDA that the driver speaks, from `nvidia-smi --version` or the table of `nvidia-smi`."""
    found = re.search(r"CUDA (?:UMD |DRIVER )?Version\s*:\s*(\d+\.\d+)", text, re.IGNORECASE)
    return found.group(1) if found else None


def gather_gpu() -> Facts:
    """`{nvidia_smi, error, driver, cuda_driver, gpus, processes}`; error says why nvidia-smi gave nothing."""
    facts: Facts = {
        "nvidia_smi": which("nvidia-smi", ("/usr/local/nvidia/bin",)),  # containers get it there
        "error": None,
        "driver": None,
        "cuda_driver": None,
        "gpus": [],
        "processes": [],
    }
    smi = facts["nvidia_smi"]
    if smi is None:
        return facts
    status, out, err = run([smi, "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"])
    if status != 0:
        facts["error"] = (out.strip() or err.strip() or f"exit status {status}").splitlines()[-1]
        return facts
    facts["gpus"], facts["driver"] = parse_gpus(out)
    status, out, _ = run([smi, "--query-compute-apps=" + ",".join(PROCESS_FIELDS), "--format=csv,noheader,nounits"])
    if status == 0:
        facts["processes"] = [{**process, "unit": unit_of(process["pid"])} for process in parse_processes(out)]
    for argv in ([smi, "--version"], [smi]):
        facts["cuda_driver"] = parse_cuda_driver(run(argv)[1])
        if facts["cuda_driver"]:
            break
    return facts


# --- processes and ports ------------------------------------------------------------------------


def unit_from_cgroup(text: str) -> str | None:
    """The systemd service in the text of /proc/PID/cgroup (both cgroup versions), None outside of one."""
    services = re.findall(r"/([^/\s]+\.service)", text)
    return services[-1] if services else None


def unit_of(pid: int | None) -> str | None:
    """The systemd service that a process belongs to."""
    if pid is None:
        return None
    try:
        return unit_from_cgroup(Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8"))
    except OSError:
        return None


def parse_proc_net_tcp(text: str) -> list[tuple[str, int, int]]:
    """(address, port, inode) of the listening sockets in /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        cells = line.split()
        if len(cells) < 10 or cells[3] != "0A":
            continue
        raw, port = cells[1].split(":")
        # The kernel prints each 32-bit word in the machine's own byte order.
        words = [int(raw[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(raw), 8)]
        packed = b"".join(words)
        family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
        found.append((socket.inet_ntop(family, packed), int(port, 16), int(cells[9])))
    return found


def _sockets_of_processes() -> dict[int, int]:
    owner: dict[int, int] = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue  # closed meanwhile, or not ours to see
        if target.startswith("socket:["):
            owner[int(target[8:-1])] = int(link.parts[2])
    return owner


def gather_ports() -> list[Facts]:
    """Listening TCP ports: `[{address, port, pid, process, unit}]`; pid is None without the right to see it."""
    sockets: list[tuple[str, int, int]] = []
    for name in ("tcp", "tcp6"):
        try:
            sockets += parse_proc_net_tcp(Path(f"/proc/net/{name}").read_text(encoding="ascii"))
        except OSError:
            continue
    owner = _sockets_of_processes() if sockets else {}
    ports = []
    for address, port, inode in sorted(sockets, key=lambda row: (row[1], row[0])):
        pid = owner.get(inode)
        ports.append({"address": address, "port": port, "pid": pid, "process": _comm(pid), "unit": unit_of(pid)})
    return ports


def _comm(pid: int | None) -> str | None:
    if pid is None:
        return None
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def bindable(addresses: list[str]) -> dict[str, str | None]:
    """For each address None when a server can bind it on this host, else the reason why not."""
    answers: dict[str, str | None] = {}
    for address in addresses:
        try:
            family, kind, proto, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, proto) as probe:
                probe.bind(where)
            answers[address] = None
        except OSError as error:
            answers[address] = error.strerror or str(error)
    return answers


# --- toolchain ----------------------------------------------------------------------------------

PYTHON_PROBE = (
    "import json,sys,sysconfig,os,importlib.util as u;"
    "json.dump({'full':'.'.join(map(str,sys.version_info[:3])),"
    "'version':'.'.join(map(str,sys.version_info[:2])),"
    "'venv':u.find_spec('venv') is not None,"
    "'headers':os.path.exists(os.path.join(sysconfig.get_paths()['include'],'Python.h'))},sys.stdout)"
)


def gather_pythons(versions: list[str]) -> list[Facts]:
    """Interpreters of the wanted versions: `[{version, full, path, venv, headers, system}]`, /usr/bin before others."""
    found: dict[str, Facts] = {}
    system = os.path.realpath("/usr/bin/python3")  # what the distribution's python3-dev belongs to
    for name in [f"python{version}" for version in versions] + ["python3"]:
        for path in filter(None, (f"/usr/bin/{name}", which(name))):
            real = os.path.realpath(path)
            if real in found or not os.access(path, os.X_OK):
                continue
            status, out, _ = run([path, "-I", "-c", PYTHON_PROBE])
            if status == 0:
                found[real] = {**json.loads(out), "path": path, "system": real == system}
    return [python for version in versions for python in found.values() if python["version"] == version]


def parse_nvcc(text: str) -> str | None:
    """`13.0` from the last lines of `nvcc --version`."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else None


def gather_nvcc() -> Facts | None:
    """`{path, version}` of the nvcc that just-in-time compilation finds; CUDA_HOME's comes before PATH's."""
    homes = tuple(f"{home}/bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home)
    path = which("nvcc", homes)
    if path is None:
        return None
    return {"path": path, "version": parse_nvcc(run([path, "--version"])[1])}


def gather_compiler() -> Facts | None:
    """`{path, version}` of the C compiler that Triton's launcher is built with."""
    for name in ("cc", "gcc", "clang"):
        path = which(name)
        if path:
            out = run([path, "--version"])[1].splitlines()
            return {"path": path, "version": out[0] if out else ""}
    return None


# --- the system ---------------------------------------------------------------------------------


def gather_platform() -> Facts:
    """`{arch, glibc, kernel, os, apt}`; glibc is None on another C library."""
    library, version = platform.libc_ver()
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return {
        "arch": platform.machine(),
        "glibc": version if library == "glibc" else None,
        "kernel": platform.release(),
        "os": f"{release.get('ID', 'unknown')} {release.get('VERSION_ID', '')}".strip(),
        "apt": which("apt-get") is not None,
    }


def parse_systemd(text: str) -> int | None:
    """252 from the first line of `systemctl --version`."""
    found = re.match(r"systemd (\d+)", text)
    return int(found.group(1)) if found else None


def gather_systemd() -> Facts:
    """`{version, running}`; running is false in a container whose process 1 is something else."""
    return {
        "version": parse_systemd(run(["systemctl", "--version"])[1]),
        "running": Path("/run/systemd/system").is_dir(),
    }


def gather_room(root: str) -> Facts:
    """Room of the file system that holds `root` (or its nearest existing parent) and of /dev/shm, and the live release."""
    folder = next(path for path in (Path(root), *Path(root).parents) if path.is_dir())
    disk = os.statvfs(folder)
    current = Path(root) / "current"
    facts: Facts = {
        "disk": {"path": str(folder), "free": disk.f_bavail * disk.f_frsize, "total": disk.f_blocks * disk.f_frsize},
        "current": current.readlink().name if current.is_symlink() else None,
        "shm": None,
    }
    if Path(SHM).is_dir():
        shm = os.statvfs(SHM)
        facts["shm"] = {"free": shm.f_bavail * shm.f_frsize, "total": shm.f_blocks * shm.f_frsize}
    return facts


# --- models -------------------------------------------------------------------------------------


def _inner(config: Facts, key: str) -> Facts:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def describe_config(config: Facts) -> Facts:
    """What the judge needs of a config.json; a multimodal model keeps its text part in text_config."""
    text = _inner(config, "text_config") or config
    layers = [str(layer) for layer in text.get("layer_types") or []]
    types = {str(config.get("model_type")), str(text.get("model_type"))}
    hybrid = (
        any(word in layer for layer in layers for word in RECURRENT_LAYERS)
        or bool(types & HYBRID_MODEL_TYPES)
        or "hybrid_override_pattern" in text
        or "linear_attn_config" in text
    )
    draft = _inner(config, "dflash_config")
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures") or [],
        "hybrid": hybrid,
        "dtype": config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype"),
        "vocab_size": text.get("vocab_size"),
        "hidden_size": text.get("hidden_size"),
        "num_layers": text.get("num_hidden_layers"),
        "block_size": draft.get("block_size") or config.get("block_size"),
        "num_target_layers": config.get("num_target_layers"),
        "target_layer_ids": draft.get("target_layer_ids"),
    }


def gather_model(path: str) -> Facts:
    """`{exists, error, missing: [files], weights: bytes, ...describe_config}` of a model folder."""
    folder = Path(path)
    facts: Facts = {"exists": folder.is_dir(), "error": None, "missing": [], "weights": 0}
    if not facts["exists"]:
        return facts
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("config.json holds no map")
        facts.update(describe_config(config))
    except FileNotFoundError:
        facts["missing"].append("config.json")
    except (OSError, ValueError) as error:
        facts["error"] = f"config.json: {error}"
    files = [file for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern) if file.exists()]
    facts["weights"] = sum(file.stat().st_size for file in files)
    facts["missing"] += _missing_shards(folder) if files else ["*.safetensors"]
    return facts


def _missing_shards(folder: Path) -> list[str]:
    """Files that the weights' index names and the folder lacks: a download that was cut short."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return [f"model.safetensors.index.json ({error})"]
    return [shard for shard in shards if not (folder / shard).exists()]


# --- all of it ----------------------------------------------------------------------------------


def gather(root: str, pythons: list[str], models: list[str], addresses: list[str]) -> Facts:
    """Every fact that `gpu_host_judge.judge` takes."""
    return {
        "gpu": gather_gpu(),
        "nvcc": gather_nvcc(),
        "compiler": gather_compiler(),
        "pythons": gather_pythons(pythons),
        "platform": gather_platform(),
        "systemd": gather_systemd(),
        **gather_room(root),
        "ports": gather_ports(),
        "bind": bindable(addresses),
        "models": {path: gather_model(path) for path in models},
    }


def main() -> int:
    """Record this machine's GPU facts for the tests."""
    parser = argparse.ArgumentParser(description="Record the GPU facts of this machine as JSON")
    parser.add_argument("--record", required=True, metavar="WORDS", help="what the machine is, in a few words")
    machine = parser.parse_args().record
    json.dump(
        {
            "recorded": {
                "machine": machine,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "source": "gpu_host_gather.py on the machine itself",
            },
            "gpu": gather_gpu(),
            "nvcc": gather_nvcc(),
        },
        sys.stdout,
        indent=2,
    )
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
