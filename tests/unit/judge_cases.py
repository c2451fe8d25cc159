# SPDX-License-Identifier: Apache-2.0
"""One case or more for every preflight rule: what is done to the good host, and what the message has to hold."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.gpu_host_gather_shape import describe_shape

from tests.unit.judge_cases_control import CONTROL
from tests.unit.judge_cases_deployed import DEPLOYED
from tests.unit.judge_cases_host import HOST, IN_LXC
from tests.unit.judge_cases_inventory import INVENTORY
from tests.unit.judge_cases_models import MODELS
from tests.unit.judge_cases_sizes import SIZES
from tests.unit.judge_kit import (
    CPU,
    GDN,
    GIB,
    HYBRID,
    LISTENER,
    NO_APT,
    NO_HEADERS,
    PYTHON,
    UNSAFE,
    Change,
    both,
    clock,
    compilers,
    first,
    good,
    gpu,
    host,
    inventory,
    kernel,
    libraries,
    limits,
    links,
    on_first,
    on_gpu,
    pair,
    root,
    target,
)

NVCC = good()[1]["nvcc"]
GONE = {"path": None}
NEWER = {"version": "13.3", "candidates": [{"path": "/usr/local/cuda/bin/nvcc", "version": "13.3"}]}
OTHER = {"path": "/usr/local/cuda-13.0/bin/nvcc", "version": "13.0"}
TRANSLATED = kernel(iommu={"mode": "translated", "groups": 90, "source": "type of the GPUs' IOMMU groups"})
AS_H100 = on_gpu(gpus=[gpu(n, compute_cap="9.0", name="NVIDIA H100 PCIe") for n in range(8)])
FLASH = {"attention-backend": "fa3"}
ON_FA3 = first(args=FLASH)
ATTENTION = {"num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
SHAPE = describe_shape({**ATTENTION, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936})
NET = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4, "dtype": "float32"}
NETS = SHAPE | {"linear_layers": 36, "net": NET}
BUDGET31 = {**good()[0]["defaults"], "budget": 31, "args": {"disable-radix-cache": True}}
P2P_OFF: dict[str, Any] = {
    "env": {"NCCL_P2P_DISABLE": 1},
    "args": {"tp-size": 2, "disable-custom-all-reduce": True},
}
FORCED = {"tp-size": 2, "disable-custom-all-reduce": False}
NAMED = inventory(defaults={**good()[0]["defaults"], "env": {"CUDA_HOME": "/usr/local/cuda-13.0"}})


# rule, what is done to the good host, words that the message has to hold
BROKEN: list[tuple[str, Change, list[str]]] = [
    *CONTROL,
    *MODELS,
    *HOST,
    *DEPLOYED,
    *INVENTORY,
    *SIZES,
    ("engine-unknown", inventory(engine="sglang-9"), ["sglang-9", "sglang-0.5.11"]),
    ("engine-unknown", inventory(engine=None), ["nothing"]),
    ("profile-unknown", both(inventory(profile="sm999")), ["sm999", "auto, sm90"]),
    ("defaults-malformed", inventory(defaults={"modus": "x", **good()[0]["defaults"]}), ["modus"]),
    ("instances-malformed", inventory(instances=[]), ["no instance", "{name: gpu0, gpus: [0], port: 30000}"]),
    ("instances-malformed", inventory(instances=None), ["no instance"]),
    ("instances-malformed", inventory(instances="gpu0"), ["a text"]),
    ("instances-malformed", lambda wanted, _: wanted["instances"].append("gpu8"), ["entry 9", "'gpu8'"]),
    ("instance-key-unknown", first(prot=30000), ["gpu0", "'prot'"]),
    ("instance-name", first(name="GPU 0"), ["'GPU 0'"]),
    ("instance-name", first(name=None), ["nothing"]),
    ("instance-name", first(name="../etc"), ["'../etc'"]),
    ("instance-name", first(name="gpu0\n"), ["gpu0"]),
    ("instance-name-twice", first(name="gpu1"), ["gpu1", "2 instances"]),
    ("mode-unknown", first(mode="dtree"), ["gpu0", "'dtree'", "baseline, dflash, ddtree-shadow, ddtree"]),
    ("port-bad", first(port=80), ["80", "1024"]),
    ("port-bad", first(port="30000"), ["'30000'"]),
    ("port-bad", first(port=60000), ["60000", "55535"]),
    ("port-bad", first(port=None), ["nothing", "port: 30000"]),
    ("port-twice", first(port=30001), ["gpu0", "gpu1", "30001"]),
    ("gpus-bad", first(gpus=[]), ["gpu0", "[0]"]),
    ("gpus-bad", first(gpus="0"), ["'0'", "gpus: [0]"]),
    ("gpus-bad", first(gpus=["0"]), ["GPU '0'", "without quotes", "Write gpus: [0] for it in"]),
    ("gpus-bad", pair("0-3", args={}), ["GPU '0-3'", "each by itself", "Write gpus: [0, 1, 2, 3] for it in"]),
    ("gpus-bad", pair("0,1", -1), ["GPU '0,1', -1", "`nvidia-smi -L`"]),
    ("gpus-bad", first(gpus=[True]), ["true"]),
    ("gpus-bad", both(CPU, first(gpus=[0])), ["[0]", "cpu"]),
    ("gpu-twice", first(gpus=[1]), ["gpu0", "gpu1", "GPU 1"]),
    ("gpu-twice", first(gpus=[0, 0]), ["gpu0", "2 times", "Write gpus: [0] for instance gpu0 in"]),
    ("gpu-twice", first(gpus=[0, gpu(0)["uuid"]]), ["2 times", "Write gpus: [0] for instance gpu0 in"]),
    ("gpu-twice", first(gpus=[7]), ["Give instance gpu7 a GPU of its own, such as gpus: [0],"]),
    ("gpu-twice", first(gpus=[gpu(3)["uuid"]]), ["gpu0", "gpu3", gpu(3)["uuid"]]),
    ("address-bad", first(address="1.2.3"), ["'1.2.3'"]),
    ("address-bad", first(address=17), ["17"]),
    (
        "address-bad",
        both(first(address="10.0.0.1:30000"), host(bind={"10.0.0.1:30000": "Name or service not known"})),
        ["Set address: 10.0.0.1, and the port as its key port, for it in"],
    ),
    ("address-bad", first(address="a b"), ["'a b'"]),
    ("address-open", first(address="0.0.0.0"), ["0.0.0.0", "gpu_host_allow_any_address"]),
    ("address-open", first(address="::"), ["::"]),
    ("budget-bad", first(budget=0), ["gpu0", "budget 0", "1 or more"]),
    ("budget-bad", first(budget="15"), ["'15'", "budget: 15"]),
    ("budget-bad", first(budget="atuo"), ["'atuo'", "budget: auto"]),
    ("topk-bad", first(topk=0), ["topk 0"]),
    ("spine-bad", first(spine=16), ["16", "15"]),
    ("spine-bad", first(spine=-1), ["-1"]),
    ("page-size", first(args={"page_size": 16}), ["page-size 16", "ddtree"]),
    ("page-size", first(args={"--page-size": "64"}, mode="ddtree-shadow"), ["64"]),
    ("backend-auto", first(args={"attention_backend": "auto"}), ["attention-backend"]),
    ("backend-refused", ON_FA3, ["attention-backend: fa3", "row sm120", "no kernels above SM90", "triton", "Remove"]),
    ("args-malformed", first(args=["--x"]), ["args is"]),
    ("args-malformed", first(args={"chat template": "x"}), ["chat template"]),
    ("args-malformed", first(args={"chat-template": {"a": 1}}), ["chat-template"]),
    ("args-malformed", first(env={"A-B": "x"}), ["A-B"]),
    ("args-malformed", first(env={"AB": "x\ny"}), ["AB"]),
    ("args-owned", first(args={"port": 1}), ["port under args"]),
    ("args-owned", first(args={"speculative_algorithm": "EAGLE"}), ["speculative-algorithm", "mode"]),
    ("args-owned", first(env={"CUDA_VISIBLE_DEVICES": "1"}), ["CUDA_VISIBLE_DEVICES", "gpus"]),
    ("secret-in-args", first(args={"api_key": "hush"}), ["api-key"]),
    ("secret-in-env", first(env={"HF_TOKEN": "hush"}), ["HF_TOKEN"]),
    ("parallel-size", first(args={"tp_size": 2}), ["tp-size 2", "1 GPUs"]),
    ("parallel-size", first(args={"tensor-parallel-size": "two"}), ["two"]),
    ("waiver-unknown", inventory(waivers={"port-twice": "no"}), ["port-twice"]),
    ("waiver-unknown", inventory(waivers={"nvcc-old": ""}), ["nvcc-old without a reason"]),
    ("nvcc-missing", host(nvcc=None), ["nvcc"]),
    ("nvcc-old", host(nvcc={"path": "/usr/bin/nvcc", "version": "12.4"}), ["12.4", "/usr/bin/nvcc", "12.9"]),
    ("arch-unsupported", host(platform={**good()[1]["platform"], "arch": "riscv64"}), ["riscv64"]),
    ("glibc-old", host(platform={**good()[1]["platform"], "glibc": "2.33"}), ["2.33", "2.34"]),
    ("glibc-old", host(platform={**good()[1]["platform"], "glibc": None}), ["not glibc"]),
    ("compiler-missing", compilers(apt=False, gcc=GONE), ["gcc is not found", "`dnf install -y gcc gcc-c++"]),
    ("compiler-missing", compilers(gcc=GONE), ["gcc is not found", "apt has the package", "install --reinstall -y $("]),
    ("compiler-missing", both(CPU, compilers(gcc=GONE)), ["gcc is not found"]),
    ("compiler-missing", compilers(cxx=GONE), ["g++ is not found; c++ is not found"]),
    (
        "compiler-missing",
        compilers(gcc={"error": "cannot execute 'cc1'"}),
        ["gcc at /usr/bin/gcc: cannot execute 'cc1'"],
    ),
    ("python-headers-missing", both(NO_HEADERS, NO_APT), ["python3.12-dev"]),
    ("python-headers-missing", host(pythons=[{**PYTHON, "headers": False, "system": False}]), ["/usr/bin/python3.12"]),
    (
        "python-headers-missing",
        host(pythons=[{**PYTHON, "headers": False, "headers_package": "libpython3.12-dev"}]),
        ["apt has libpython3.12-dev as installed", "install --reinstall -y libpython3.12-dev"],
    ),
    ("disk-low", host(disk={"path": "/opt", "free": 3 * GIB, "total": 9 * GIB}), ["/opt", "3.0 GiB", "12 GiB"]),
    ("disk-low-for-upgrade", host(current="abc", disk={"path": "/opt", "free": 5 * GIB, "total": GIB}), ["5.0 GiB"]),
    ("shm-low", host(shm={"free": 1, "total": GIB // 16}), ["0.06 GiB", "remount"]),
    (
        "shm-low",
        host(shm={"free": 1, "total": GIB // 16}),
        ["echo 'tmpfs /dev/shm tmpfs nosuid,nodev,size=1024M 0 0' >> /etc/fstab"],
    ),
    ("shm-low", host(shm=None), ["missing"]),
    ("port-busy", host(ports=[LISTENER]), ["gpu0", "30000", "process 77 (python)", "other.service"]),
    ("port-busy", host(ports=[{**LISTENER, "address": "0.0.0.0", "pid": None, "unit": None}]), ["not visible"]),
    (
        "port-busy",
        host(ports=[{**LISTENER, "process": "docker-proxy", "unit": "docker.service"}]),
        ["docker stop $(docker ps -q --filter publish=30000)"],
    ),
    ("address-foreign", both(first(address="192.0.2.9"), host(bind={"192.0.2.9": "Cannot assign"})), ["192.0.2.9"]),
    ("hybrid-radix", GDN, ["mode ddtree", "disable-radix-cache", "extra_buffer"]),
    ("hybrid-tree", HYBRID, ["nemotron_h", "mode: dflash", "speculative-ddtree-allow-hybrid-unsafe"]),
    ("hybrid-unsafe", both(HYBRID, inventory(defaults={**good()[0]["defaults"], "args": UNSAFE})), ["research"]),
    ("facts-stand-in", host(recorded={"machine": "an H200", "date": "2026-11-29"}), ["an H200"]),
    ("cpu-profile", CPU, ["cpu"]),
    # several GPUs
    (
        "p2p-deadlock",
        both(pair(env={"NCCL_P2P_DISABLE": 0}), TRANSLATED),
        ["0-1", "IOMMU translates", "Remove NCCL_P2P_DISABLE"],
    ),
    (
        "p2p-deadlock",
        both(pair(args=FORCED), kernel(acs=["0000:60:01.1"])),
        ["bridges redirect", "disable-custom-all-reduce"],
    ),
    (
        "iommu-translated",
        both(pair(), TRANSLATED),
        ["0-1", "iommu=pt", "/etc/default/grub", "update-grub", "DISABLE: 1"],
    ),
    ("iommu-translated", both(pair(*range(8)), TRANSLATED), ["GPUs 0, 1, 2, 3, 4, 5, 6, 7 (28 pairs)"]),
    ("iommu-translated", both(pair(env={"NCCL_P2P_DISABLE": 1}), TRANSLATED), ["disable-custom-all-reduce"]),
    ("iommu-translated", both(pair(env={"NCCL_P2P_DISABLE": 0}), TRANSLATED, AS_H100), ["0-1", "iommu=pt"]),
    (
        "acs-redirect",
        both(pair(), kernel(acs=["0000:60:01.1", "0000:60:03.1"])),
        ["setpci -s 0000:60:03.1 ECAP_ACS+0x6.w=0000"],
    ),
    (
        "p2p-none",
        both(pair(), links(read="chipset not supported", write="chipset not supported")),
        ["0-1: chipset not supported"],
    ),
    ("numa-across", pair(0, 4), ["GPU 0 on node 0, GPU 4 on node 1", "node 1 has 4, 5, 6, 7"]),
    ("gpu-bar1", both(pair(), on_first(bar1_total_mib=256)), ["BAR1 of GPU 0: 256 MiB", "Resizable BAR"]),
    ("memlock-low", both(pair(), IN_LXC), ["8192 KiB", "memlock"]),
    (
        "shm-low",
        both(pair(0, 1, 2, 3), host(shm={"free": GIB, "total": GIB})),
        ["1.00 GiB", "4 GiB, for an instance on 4 GPUs"],
    ),
    # toolchain
    (
        "nvcc-missing",
        host(nvcc=NVCC | {"path": None, "version": None, "cuda_home": "/opt/cuda"}),
        ["/opt/cuda", "CUDA_HOME"],
    ),
    ("nvcc-mismatch", host(nvcc=NVCC | NEWER), ["13.3", "cuda-toolkit-13-0", "cuda-keyring"]),
    (
        "nvcc-mismatch",
        host(nvcc=NVCC | NEWER | {"candidates": [*NEWER["candidates"], OTHER]}),
        ["also here: 13.0 at /usr/local/cuda-13.0/bin/nvcc", "env: {CUDA_HOME: /usr/local/cuda-13.0}"],
    ),
    # system
    ("library-missing", both(libraries(libnuma=None), NO_APT), ["libnuma.so.1", "dnf install -y numactl-libs"]),
    ("library-missing", both(libraries(libstdcxx=None), NO_APT), ["dnf install -y libstdc++"]),
    ("nofile-low", both(IN_LXC, limits(pid1_nofile=1024)), ["1024", "4096", "nofile=1048576"]),
    ("pids-low", limits(pids_max=4096), ["4096", "16384", "kernel.pid_max"]),
    ("pids-low", both(IN_LXC, limits(pids_max=4096)), ["--pids-limit=-1"]),
    ("map-count-low", limits(map_count=1000), ["1000", "'vm.max_map_count = 1048576' >> /etc/sysctl.d/"]),
    (
        "clock-insane",
        clock(year=1970, before_build=True, synchronized=False),
        ["1970", 'ssh root@192.0.2.200 "date -s @$(date +%s)"', "chronyc makestep"],
    ),
    ("clock-insane", clock(year=2099), ["2099", "not after 2046"]),
    (
        "clock-behind",
        clock(before_build=True, source=None),
        ["earlier", "systemd-timesyncd", "timedatectl set-ntp true"],
    ),
    ("clock-unsynchronized", clock(synchronized=False, source=None), ["no clock service", "timedatectl"]),
    ("cgroup-old", kernel(cgroup=1), ["version 1", "unified_cgroup_hierarchy"]),
    # room
    (
        "disk-full",
        host(current="abc", disk={"path": "/opt", "free": GIB, "total": GIB}),
        ["1.0 GiB", "2 GiB for caches", "12 GiB"],
    ),
    ("root-read-only", root(options=["ro"]), ["/opt/sglang-fleet", 'findmnt -no TARGET -T /opt)"', "remount,rw"]),
    ("root-noexec", root(options=["rw", "noexec"]), ["noexec", "remount,exec"]),
    ("root-network", root(type="nfs4"), ["nfs4", "local disk"]),
    (
        "hugepages-idle",
        kernel(hugepages={"total": 60000, "free": 60000, "size": 2 << 20, "thp": "always"}),
        ["117.2 of 512.0 GiB"],
    ),
    # models
    ("model-too-large", target(weights=200 * GIB), ["202.0 GiB", "95.6 GiB", "tp-size: 3"]),
    ("model-tight", target(weights=90 * GIB), ["leave 3.6 of 95.6 GiB", "15 % left"]),
    (
        "memory-sum",
        both(GDN, target(shape=NETS), inventory(defaults=BUDGET31)),
        [
            "49 x 32 slots",
            "CUDA graphs, about",
            "sum",
            "budget: 19",
            "max-running-requests: 30",
            "the engine's own choice",
        ],
    ),
    (
        "memory-short",
        both(target(shape=SHAPE), inventory(defaults={**good()[0]["defaults"], "args": {"mem-fraction-static": 0.97}})),
        ["0.97 leaves 2.9 GiB", "target's weights 2.0 GiB", "mem-fraction-static: 0.9", "cuda-graph-max-bs: 48"],
    ),
    (
        "symmetric-memory",
        pair(args={"tp-size": 2, "enable_symm_mem": True}),
        ["enable-symm-mem on GPUs of SM 12.x", "Remove enable-symm-mem"],
    ),
    ("ram-low", both(target(weights=60 * GIB), limits(memory_total=32 * GIB)), ["62.0 GiB", "32.0 GiB", "swapon"]),
    ("host-guest", kernel(virt="vm", virt_name="kvm"), ["a VM (kvm)", "IOMMU"]),
]
# Findings that come along with another one and are told apart from it.
GUEST = {"host-guest"}  # where a case is about a container or a VM
WITH = {
    "p2p-deadlock": {"iommu-translated", "acs-redirect"},
    **dict.fromkeys(
        (
            "clock-behind",
            "driver-mismatch",
            "driver-old",
            "gpu-none",
            "gpu-mig",
            "memlock-low",
            "nofile-low",
            "pids-low",
            "systemd",
        ),
        GUEST,
    ),
    "gpus-bad": {"cpu-profile", "gpu-twice"},
    "gpu-twice": set(),
    "compiler-missing": {"cpu-profile"},
    "profile-unknown": set(),
    **{key: {"cpu-profile"} for key in ("instances-malformed", "budget-room", "fraction-whole")},
    "backend-refused": {"env-unknown"},
    "flag-range": {"cpu-profile", "budget-room"},
}
