# SPDX-License-Identifier: Apache-2.0
"""Cases of the rules about driver, GPUs, their health, systemd and Python; judge_cases has the others and tells what a row is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.unit.judge_kit import (
    BUSY,
    LISTENER,
    PYTHON,
    UUID0,
    Change,
    both,
    card,
    first,
    good,
    gpu,
    host,
    inventory,
    kernel,
    libraries,
    links,
    lose,
    on_first,
    on_gpu,
    pair,
    systemd,
)

CONTAINER = "0123456789ab" + "0" * 52
# Control group of a process on a GPU, and what the message has to hold.
OWNERS = {
    "/system.slice/train.service": ["of train.service of user ann", "(`systemctl stop train.service`), or"],
    "/system.slice/ssh.service": ["of ssh.service", "(`kill 78`; the service itself stays), or"],
    "/system.slice/system-sshd.slice/sshd@3-22.service": ["(`kill 78`; the service"],
    "/system.slice/systemd-logind.service": ["(`kill 78`; the service"],
    "/user.slice/user-1000.slice/session-5.scope": [
        "of login session session-5.scope",
        "(`kill 78`, which leaves the login open)",
    ],
    "/user.slice/user-1000.slice/user@1000.service/app.slice/lab.service": [
        "`systemctl --user --machine=ann@.host stop lab.service`"
    ],
    "/user.slice/user-1000.slice/user@1000.service/init.scope": ["(`kill 78`; the service"],
    "/user.slice/user-1000.slice": ["process 78 (train) of user ann", "(`kill 78`), or"],
    f"/system.slice/docker-{CONTAINER}.scope": ["of Docker container 0123456789ab", "(`docker stop 0123456789ab`)"],
    f"/docker/{CONTAINER}": ["(`docker stop 0123456789ab`)"],
    f"/machine.slice/libpod-{CONTAINER}.scope/container": ["(`podman stop 0123456789ab`)"],
    f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{CONTAINER}.scope": [
        "`sudo -iu ann podman stop 0123456789ab`"
    ],
    f"/kubepods.slice/kubepods-pod7.slice/cri-containerd-{CONTAINER}.scope": [
        "of a Kubernetes pod",
        "`crictl ps --id 0123456789ab0`",
        "kubectl delete pod",
    ],
    "/kubepods.slice/kubepods-burstable.slice": ["`crictl ps`"],
    "/lxc.payload.box/system.slice/train.service": ["of container box", "(`kill 78`), or"],
    "/machine.slice/systemd-nspawn@box.service/payload/system.slice/train.service": ["of container box", "(`kill 78`)"],
    "/system.slice/slurmstepd.scope/job_42/step_0": ["of Slurm job 42", "`scancel 42`"],
}


def xid(number: int, pci: str = gpu(0)["pci"], text: str = "") -> dict[str, Any]:
    """An error of the driver as the kernel log has it."""
    told = f"NVRM: Xid (PCI:{pci[4:12]}): {number}{text}"
    return {"pci": pci, "xid": number, "when": "2026-11-30T09:00:00Z", "text": told}


def system(name: str, **other: Any) -> Change:
    """A host of another distribution."""
    return host(platform={**good()[1]["platform"], "os": name, **other})


def each(indices: Iterable[int], **keys: Any) -> Change:
    """Set facts of several GPUs."""
    return lambda _, facts: [facts["gpu"]["gpus"][index].update(keys) for index in indices] and None


LINK = gpu(0)["pcie"]
AS_B200 = on_gpu(gpus=[gpu(n, compute_cap="10.0", name="NVIDIA B200", fabric="completed") for n in range(8)])
CUDA13 = "/usr/local/cuda-13.0/bin/nvcc"
LOST3 = gpu(3)["pci"]
NO_GPU = on_gpu(gpus=[], p2p=[], processes=[], nvidia_smi=None, driver=None, cuda_driver=None)
IN_LXC = kernel(virt="container", virt_name="lxc")
REFUSED = "Failed to initialize NVML: Driver/library version mismatch"
SILENT = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"
MISMATCH = both(
    NO_GPU, on_gpu(nvidia_smi="/usr/bin/nvidia-smi", error=REFUSED, nvml={"version": None, "error": REFUSED})
)
UNSIGNED = both(
    NO_GPU,
    host(secure_boot=True),
    kernel(modules={"nvidia": None}),
    on_gpu(nvidia_smi="/usr/bin/nvidia-smi", error="couldn't communicate with the NVIDIA driver"),
)
NO_DRIVER = both(on_gpu(nvidia_smi="/usr/bin/nvidia-smi", error=SILENT, gpus=[]), kernel(modules={"nvidia": None}))
PENDING = {"remapped": {"pending": True, "failed": False}}  # the same reset is asked for once
BAD_MEMORY = {"ecc": {"mode": True, "uncorrected": 3, "corrected": 0}}
NO_WORD = on_first(recovery=None)  # a driver that does not tell what it wants
RECOVERY = ", GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
AGAIN = ", GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
BY_UUID = inventory(instances=[{"name": "a", "gpus": [gpu(7)["uuid"]], "port": 30000}])

MASKED = ["systemd-journald-dev-log.socket"]
HOST: list[tuple[str, Change, list[str]]] = [
    ("gpu-none", on_gpu(nvidia_smi=None, gpus=[]), ["host_vars/ct200.yml", "gpu_host_profile: cpu", "no nvidia-smi"]),
    ("gpu-none", on_gpu(gpus=[], error="couldn't communicate"), ["couldn't communicate"]),
    ("gpu-none", on_gpu(gpus=[]), ["lists no GPU"]),
    ("gpu-capability", on_gpu(gpus=[gpu(n, compute_cap="8.6") for n in range(8)]), ["8.6", "12.0"]),
    (
        "gpu-mixed",
        on_gpu(gpus=[gpu(n) for n in range(7)] + [gpu(7, compute_cap="9.0", name="NVIDIA H200")]),
        ["sm90", "sm120", "7 (NVIDIA H200)"],
    ),
    ("profile-mismatch", inventory(profile="sm90"), ["sm90", "sm120"]),
    ("gpu-unknown", first(gpus=[8]), ["GPU 8", UUID0]),
    ("gpu-unknown", first(gpus=["GPU-x"]), ["GPU-x"]),
    ("driver-old", on_gpu(driver="575.57.08"), ["575.57.08", "580"]),
    ("driver-old", on_gpu(cuda_driver="12.9"), ["12.9", "13.0"]),
    ("gpu-busy", on_gpu(processes=[BUSY]), ["GPU 0", "78", "train", "kill 78"]),
    ("gpu-busy", on_gpu(processes=[{**BUSY, "unit": "train.service"}]), ["systemctl stop train.service"]),
    *[("gpu-busy", on_gpu(processes=[{**BUSY, "user": "ann", "cgroup": path}]), told) for path, told in OWNERS.items()],
    # An older recording has the unit alone.
    ("gpu-busy", on_gpu(processes=[{**BUSY, "unit": "ssh.service"}]), ["(`kill 78`; the service itself stays), or"]),
    (
        "port-busy",
        host(ports=[{**LISTENER, "unit": "ssh.service", "cgroup": "/system.slice/ssh.service"}]),
        ["of ssh.service", "(`kill 77`; the service itself stays), or set"],
    ),
    ("gpu-memory-held", on_gpu(gpus=[gpu(0, memory_used_mib=5000)] + [gpu(n) for n in range(1, 8)]), ["5000 MiB"]),
    # driver
    ("driver-mismatch", MISMATCH, ["kernel module 580.95.05", "version mismatch", "`systemctl reboot`"]),
    ("driver-mismatch", both(MISMATCH, IN_LXC), ["Restart this container"]),
    (
        "driver-nouveau",
        both(NO_GPU, kernel(nouveau=True, modules={"nvidia": None})),
        ["nouveau", "nvidia-open", "update-initramfs"],
    ),
    ("driver-unsigned", UNSIGNED, ["secure boot", "mokutil --import", "/var/lib/shim-signed/mok/MOK.der"]),
    ("nvml-missing", on_gpu(nvml={"version": None, "error": "no module named pynvml"}), ["pynvml", "nvidia-smi -q"]),
    ("libcuda-hidden", libraries(libcuda=None), ["libcuda.so.1", "ldconfig"]),
    (
        "libcuda-hidden",
        both(libraries(libcuda=None), on_gpu(nvidia_smi="/usr/local/nvidia/bin/nvidia-smi")),
        ["echo /usr/local/nvidia/lib64 > /etc/ld.so.conf.d/nvidia.conf"],
    ),
    # GPUs
    ("gpu-none", both(NO_GPU, IN_LXC), ["nvidia.runtime"]),
    ("gpu-busy", on_gpu(processes=[{**BUSY, "pid": None, "name": None}]), ["another container", "nvidia-smi"]),
    ("gpu-busy", on_gpu(processes=[{**BUSY, "user": "ann"}]), ["of user ann"]),
    (
        "gpu-orphan",
        on_gpu(processes=[{**BUSY, "user": "ann", "orphan": True}]),
        ["78 (train)", "ann", "`kill -KILL 78`", "ps -o"],
    ),
    ("gpu-mig", on_first(mig=True), ["MIG mode is on", f"nvidia-smi -i {UUID0} -mig 0", "leave it out"]),
    ("gpu-mig", both(on_first(mig=True), IN_LXC), ["On the machine that runs this container"]),
    ("gpu-compute-prohibited", on_first(compute_mode="prohibited"), [f"nvidia-smi -i {UUID0} -c DEFAULT"]),
    ("gpu-compute-exclusive", on_first(compute_mode="exclusive"), ["exclusive", "-c DEFAULT"]),
    # health
    ("gpu-remap-failed", on_first(remapped={"pending": True, "failed": True}), ["replaced", "ROW_REMAPPER"]),
    ("gpu-remap-pending", on_first(remapped={"pending": True, "failed": False}), ["waits for a reset", "--gpu-reset"]),
    ("gpu-xid-program", on_gpu(xids=[xid(31), xid(31), xid(43)]), ["Xid 31 (2 times), Xid 43 (1 times)"]),
    ("gpu-throttled", on_first(throttle=["hw_thermal", "hw_slowdown"]), ["too hot", "fans", "-q -d PERFORMANCE"]),
    ("gpu-throttled", on_first(throttle=["hw_power_brake"]), ["power brake", "power cables"]),
    (
        "gpu-pcie-width",
        on_first(pcie={**LINK, "width": 8}),
        ["x8", "x16", "`grep . /sys/bus/pci/devices/0000:01:00.0/*_link_*`"],
    ),
    (
        "gpu-pcie-speed",
        both(
            on_first(pcie={**LINK, "gen": 3}, idle=False), on_gpu(processes=[{**BUSY, "unit": "sglang@gpu0.service"}])
        ),
        ["generation 3", "generation 5", "0000:01:00.0/*_link_*"],
    ),
    ("gpu-pcie-slot", on_first(pcie={**LINK, "gen_max": 4}), ["generation 4 x16 in this slot", "generation 5 x16"]),
    ("gpu-persistence", on_first(persistence=False), ["GPU 0", "nvidia-persistenced"]),
    # a driver that does not work
    ("gpu-none", NO_DRIVER, ["module nvidia is not loaded", "modprobe nvidia", "dkms autoinstall"]),
    ("gpu-none", both(NO_GPU, on_gpu(on_bus=[], cards=[])), ["no NVIDIA card on the PCI bus", "seat"]),
    ("gpu-none", both(NO_GPU, on_gpu(on_bus=[], cards=[]), kernel(virt="vm")), ["pass it through"]),
    (
        "gpu-none",
        both(on_gpu(gpus=[], error="GPU is lost", xids=[xid(79)])),
        ["Xid 79, fallen off the bus, at 0000:01:00", "off and on", "dmesg | grep -i xid"],
    ),
    (
        "gpu-none",
        both(NO_GPU, system("debian 13")),
        ["repos/debian13/x86_64/", "linux-image-amd64 linux-headers-amd64 nvidia-open"],
    ),
    ("driver-old", both(on_gpu(driver="575.57.08"), AS_B200), ["nvidia-open nvidia-fabricmanager nvlsm"]),
    ("driver-old", both(on_gpu(driver="575.57.08"), kernel(release="6.8.12-9-pve")), ["proxmox-headers-$(uname -r)"]),
    (
        "driver-old",
        both(on_gpu(driver="575.57.08"), on_first(fabric="completed")),
        ["linux-headers-$(uname -r) nvidia-open nvidia-fabricmanager", "apt-get install -y curl ca-certificates"],
    ),
    ("driver-unsigned", both(UNSIGNED, system("debian 12")), ["mokutil --import /var/lib/dkms/mok.pub"]),
    (
        "driver-nouveau",
        both(NO_GPU, kernel(nouveau=True, modules={}), system("fedora 42", apt=False)),
        ["dracut --force"],
    ),
    (
        "gpu-desktop",
        both(on_first(memory_used_mib=40000, idle=False), on_gpu(graphics=[{**BUSY, "pid": 900, "name": "Xorg"}])),
        ["40000 MiB used", "Xorg (900)", "systemctl isolate multi-user.target"],
    ),
    ("driver-old", both(on_gpu(driver="550.54.14"), IN_LXC), ["the package nvidia-open, 580 or newer, by https://"]),
    ("nvcc-missing", both(host(nvcc=None), system("debian 13")), ["debian13", "'^cuda-toolkit-13'"]),
    ("gpu-busy", on_gpu(processes=[{**BUSY, "pid": None, "name": None, "memory_mib": None}]), ["container is on it"]),
    ("gpu-mig", both(on_first(name=None, mig=True)), [f"GPU 0 ({UUID0})"]),
    (
        "nvcc-missing",
        host(
            nvcc={"path": None, "version": None, "cuda_home": None, "candidates": [{"path": CUDA13, "version": "13.0"}]}
        ),
        [f"only at {CUDA13}, where nothing looks", "env: {CUDA_HOME: /usr/local/cuda-13.0}"],
    ),
    ("nvcc-old", host(nvcc={"path": "/usr/bin/nvcc", "version": None}), ["one that tells no version at /usr/bin/nvcc"]),
    # several GPUs with one fault
    ("gpu-compute-prohibited", each(range(8), compute_mode="prohibited"), ["GPU 0, 1, 2", "`nvidia-smi -c DEFAULT`"]),
    (
        "gpu-compute-prohibited",
        each((0, 1), compute_mode="prohibited"),
        [f"`for gpu in {UUID0} {gpu(1)['uuid']}; do nvidia-smi -i $gpu -c DEFAULT; done`"],
    ),
    ("gpu-mig", each(range(8), mig=True), ["`nvidia-smi mig -dci; nvidia-smi mig -dgi; nvidia-smi -mig 0`"]),
    ("gpu-capability", each((2,), compute_cap=None), ["does not tell", "--query-gpu=index,name,compute_cap"]),
    ("gpu-capability", each((2,), compute_cap="7.5"), ["GPU 2", "Take GPU 2 out of gpus"]),
    ("gpu-capability", each(range(8), compute_cap="7.5"), ["No card of this host", "gpu_host_profile: cpu"]),
    # GPUs that do not answer
    (
        "gpu-lost",
        both(lose(3), on_gpu(xids=[xid(79, LOST3)])),
        [
            f"7 answer, {LOST3} does not: Xid 79 (it fell off the bus)",
            "off and on",
            "dmesg | grep -iE",
            f"for instance gpu4 gpus: [{gpu(4)['uuid']}]",
            "take instance gpu3 out",
        ],
    ),
    ("gpu-lost", lose(3, driver=None), [f"7 answer, {LOST3} does not"]),
    ("gpu-lost", both(lose(7), pair(0, 7)), ["take instance pair out"]),
    (
        "gpu-lost",
        both(lose(7), on_gpu(cards=[card(n) for n in range(7)], xids=[xid(79, gpu(7)["pci"])])),
        [gpu(7)["pci"], "take instance gpu7 out"],
    ),
    ("gpu-lost", both(lose(7), BY_UUID), ["take instance a out"]),
    (
        "gpu-lost",
        on_gpu(nvml={"version": "580", "error": "device 3: GPU is lost"}),
        ["8 answer, not all: device 3: GPU is lost", "nvidia-smi -L"],
    ),
    (
        "gpu-lost",
        both(lose(3), on_gpu(nvml={"version": "580", "error": "device 3: GPU requires reset"})),
        [f"`nvidia-smi -i {LOST3} --gpu-reset`", "off and on"],
    ),
    (
        "gpu-unknown",
        both(lose(7), lambda _, facts: facts["gpu"]["cards"].pop() and None),
        [
            "GPU 7; the inventory names 8 GPUs by index and the host has 7",
            "take GPU 7 out",
            "indices may mean other cards",
        ],
    ),
    ("gpu-unknown", lose(7, driver="vfio-pci"), ["GPU 7", f"the card at {gpu(7)['pci']} is driven by vfio-pci"]),
    ("gpu-lost-elsewhere", both(lose(7), pair(0, 1)), ["7 answer", gpu(7)["pci"], "off and on"]),
    ("gpu-lost-elsewhere", both(lose(0), BY_UUID), ["7 answer", gpu(0)["pci"]]),
    (
        "gpu-fabric",
        on_first(fabric="in progress"),
        ["in progress", "systemctl enable --now nvidia-fabricmanager", "'nvidia-fabricmanager=580.95.05-*'"],
    ),
    # what the driver reports
    (
        "gpu-recovery",
        both(on_first(recovery="reset", **BAD_MEMORY, **PENDING), on_gpu(xids=[xid(95)])),
        ["wants a reset of it after 3 uncorrected memory errors, Xid 95", f"nvidia-smi -i {UUID0} --gpu-reset"],
    ),
    ("gpu-recovery", on_first(recovery="reboot"), ["wants a reboot", "`systemctl reboot`"]),
    ("gpu-recovery", on_first(recovery="drain p2p"), ["exchange with other GPUs"]),
    ("gpu-recovery", both(NO_WORD, on_gpu(xids=[xid(62), xid(154, text=RECOVERY)])), ["wants a reset", "Xid 62"]),
    ("gpu-recovery-later", on_first(recovery="drain and reset", **BAD_MEMORY), ["once nothing runs", "--gpu-reset"]),
    (
        "gpu-ecc-uncorrected",
        both(on_first(recovery=None, **BAD_MEMORY, **PENDING), on_gpu(xids=[xid(48)])),
        ["3 uncorrected memory errors, Xid 48", "--gpu-reset"],
    ),
    ("gpu-ecc-contained", on_first(**BAD_MEMORY), ["3 uncorrected memory errors, contained", "--gpu-reset"]),
    (
        "gpu-ecc-contained",
        both(on_first(recovery=None, **BAD_MEMORY), on_gpu(xids=[xid(94)])),
        ["contained"],
    ),
    (
        "gpu-xid",
        both(NO_WORD, on_gpu(xids=[xid(119)])),
        ["Xid 119", "dmesg | grep 'Xid.*0000:01:00'", "gpu_host_waivers: {gpu-xid: it was reset since}"],
    ),
    ("gpu-xid", both(on_first(recovery=None, ecc={}), on_gpu(xids=[xid(95)])), ["Xid 95", "not contained"]),
    ("gpu-xid-seen", on_gpu(xids=[xid(119)]), ["Xid 119", "dmesg | grep 'Xid.*0000:01:00'"]),
    ("gpu-xid-seen", both(NO_WORD, on_gpu(xids=[xid(95)])), ["Xid 95"]),  # its count of uncorrected errors is 0
    (
        "gpu-xid-seen",
        both(NO_WORD, on_gpu(xids=[xid(119), xid(154, text=RECOVERY), xid(154, text=AGAIN)])),
        ["Xid 119"],
    ),
    ("gpu-xid-seen", both(NO_WORD, on_gpu(xids=[xid(74)])), ["NVLink error"]),
    (
        "nvlink-broken",
        both(
            pair(0, 1, 2, 3),
            links(link="nvlink", nvlink="ok"),
            lambda _, facts: facts["gpu"]["p2p"][0].update(
                link="node", read="unknown", write="unknown", nvlink="unknown"
            ),
        ),
        ["no NVLink between GPUs 0-1", f"nvidia-smi nvlink -s -i {UUID0}"],
    ),
    # systemd and its journal
    ("systemd", systemd(version=247), ["247", "249"]),
    ("systemd", systemd(running=False, pid1=None), ["does not run", "apt-get install -y systemd-sysv"]),
    (
        "systemd",
        both(systemd(running=False, pid1="tini"), IN_LXC),
        ["process 1 of this host is tini", "--systemd=always"],
    ),
    (
        "systemd",
        both(systemd(running=False, pid1="init"), kernel(virt="container", virt_name="wsl")),
        ["is init", "/etc/wsl.conf", "wsl --shutdown"],
    ),
    ("systemd", systemd(version=None), ["no systemctl", "apt-get install -y systemd"]),
    (
        "journal-off",
        systemd(journal={"masked": ["systemd-journald.service"], "active": False, "kept": False}),
        ["masked: systemd-journald.service", "`systemctl unmask systemd-journald.service && systemctl restart"],
    ),
    (
        "journal-off",
        systemd(journal={"masked": [*MASKED, "systemd-journald.service"], "active": False, "kept": False}),
        ["`systemctl unmask systemd-journald-dev-log.socket systemd-journald.service && systemctl restart"],
    ),
    (
        "journal-off",
        systemd(
            journal={**good()[1]["systemd"]["journal"], "storage": {"value": "none", "file": "/etc/systemd/a.conf"}}
        ),
        [
            "Storage=none in /etc/systemd/a.conf",
            "Storage=auto/' /etc/systemd/a.conf && systemctl restart systemd-journald",
        ],
    ),
    (
        "journal-off",
        systemd(journal={**good()[1]["systemd"]["journal"], "storage": {"value": "none", "file": "/usr/lib/z.conf"}}),
        ["printf '[Journal]\\nStorage=auto\\n' > /etc/systemd/journald.conf.d/zz.conf && systemctl restart"],
    ),
    (
        "journal-off",
        systemd(journal={"masked": [], "active": False, "kept": True}),
        ["is stopped", "`systemctl restart systemd-journald.socket"],
    ),
    (
        "journal-off",
        both(systemd(journal={"masked": [], "active": True, "kept": False}), host(current="abc")),
        ["no message", "Storage=auto", "try-restart 'sglang@*'"],
    ),
    # Python
    (
        "python-missing",
        both(host(pythons=[]), inventory(pythons=["3.12"]), system("debian 12")),
        ["Take gpu_host_pythons out of host_vars/ct200.yml", "apt-get install -y python3.11 python3.11-venv"],
    ),
    (
        "python-missing",
        both(host(pythons=[{**PYTHON, "version": "3.13"}]), inventory(pythons=["3.13"])),
        ["gpu_host_pythons is 3.13, for which no lock is made", "Take gpu_host_pythons out", "python3.12-venv"],
    ),
    (
        "python-missing",
        both(host(pythons=[]), system("debian 13")),
        ["Python-3.12.12.tar.xz", "make -j$(nproc) altinstall", "libssl-dev"],
    ),
    (
        "python-missing",
        both(host(pythons=[]), system("rhel 9", apt=False)),
        ["dnf install -y python3.12 python3.12-devel"],
    ),
    (
        "python-missing",
        host(pythons=[]),
        ["not found", "3.12 or 3.11", "apt-get install -y python3.12 python3.12-venv"],
    ),
    (
        "python-missing",
        both(host(pythons=[]), system("ubuntu 22.04")),
        ["ppa:deadsnakes/ppa", "python3.12-venv", "software-properties-common"],
    ),
    (
        "python-missing",
        host(pythons=[{**PYTHON, "version": "3.11", "venv": False}]),
        ["without the venv", "python3.11-venv"],
    ),
]

QUIET_HOST: dict[str, Change] = {
    "a driver that does not tell its version": on_gpu(driver=None),
    "a card that a VM has": both(lose(7, driver="vfio-pci"), pair(0, 1)),
    "an old card without a driver": both(lose(0, driver=None, device="0x1b80"), pair(0, 1)),
    "cards of other containers": both(lose(7), BY_UUID, first(gpus=[0]), IN_LXC),
    "an error of a GPU that fell off in another container": both(on_gpu(xids=[xid(79, "00000000:63:00.0")]), IN_LXC),
    "a login screen": both(
        on_first(memory_used_mib=200, idle=False), on_gpu(graphics=[{**BUSY, "pid": 900, "name": "Xorg"}])
    ),
    "a fabric in a VM": both(on_first(fabric="in progress"), kernel(virt="vm")),
    "boards with bridges between two": both(
        pair(0, 1, 2, 3), lambda _, facts: facts["gpu"]["p2p"][0].update(link="nvlink", nvlink="ok")
    ),
    "a row that was replaced, and a program's end": on_gpu(xids=[xid(63), xid(45)]),
    "facts without a journal": systemd(journal=None),
    "a journal without a socket for syslog": systemd(journal={"masked": MASKED, "active": True, "kept": True}),
    "a journal in memory": systemd(
        journal={**good()[1]["systemd"]["journal"], "storage": {"value": "volatile", "file": "/etc/a.conf"}}
    ),
    "a driver that tells nothing and has nothing to tell": NO_WORD,
}
