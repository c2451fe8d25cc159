# SPDX-License-Identifier: Apache-2.0
"""Tells an engine that is still starting from one that hangs, by what its processes do.

A start may print nothing for minutes: loading reads bytes, compilers burn CPU, graph capture moves GPU memory and prints. A
hang does none of it: it sleeps (a lock, a peer that never comes, a dead disk), or it spins (a collective on a broken link
burns CPU and changes nothing). `Judge` decides from samples alone; `Processes` and `GpuMemory` take them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
BUSY = 0.05  # cores; below it are timers and health probes
CHANGED = 8 * MIB  # of memory
READ = MIB // 16  # bytes between two samples
SHARE = 0.05  # of the weights that has to be read before the rate is theirs and not that of imports
WRITTEN = 32  # bytes between two samples: a line of a log, not a counter of an event loop
UNKNOWN_S = 60.0  # patience while the rate of reading is unknown
LONGEST_S = 300.0
GRACE_S = 5.0  # the engine ends itself, with the reason, when a worker dies; this long it may take
WORKER = "sglang::"  # how the engine names its schedulers and detokenizers
# A compiler works, however long it is silent; the names are those of /proc, 15 characters at most.
COMPILERS = frozenset(
    ["nvcc", "cicc", "ptxas", "ptxas-blackwell", "fatbinary", "nvlink", "cudafe++", "cc1plus", "cc1", "ld", "ninja"]
)
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass(frozen=True)
class Sample:
    """What the engine's processes have done so far; `at` and `cpu` in seconds, `read`, `written`, `rss` and `gpu` in bytes.

    `gpu` is None where NVML gives nothing, `answering` says that HTTP requests of the waiter make it write, `dead` names
    workers that ended.
    """

    at: float
    cpu: float = 0.0
    read: int = 0
    written: int = 0
    rss: int = 0
    gpu: int | None = None
    compiling: bool = False
    answering: bool = False
    dead: tuple[str, ...] = ()


@dataclass
class Judge:
    """Takes samples in order; says why the start is lost, or None.

    `weights` is the size of the models in bytes. `quiet_s`: how long nothing at all may happen, at least; in the time in which
    all weights could be read once more at the best rate that was seen, a pause is no hang yet. `spin_s`: how long CPU may be
    burnt while nothing else changes.
    """

    weights: int
    quiet_s: float = 30.0
    spin_s: float = 300.0
    rate: float = 0.0  # bytes a second
    _read: int = 0
    _last: Sample | None = None
    _rss: int = 0
    _gpu: int | None = None
    _worked: float = 0.0
    _busy: float = 0.0
    _dead: dict[str, float] = field(default_factory=dict)

    def patience(self) -> float:
        """Seconds in which nothing may happen."""
        if not self._known():
            return max(self.quiet_s, min(UNKNOWN_S, 2 * self.quiet_s))
        return max(self.quiet_s, min(LONGEST_S, self.weights / self.rate))

    def _known(self) -> bool:
        return self.rate > 0 and self._read >= SHARE * self.weights

    def see(self, now: Sample) -> str | None:
        """The reason to give up, None to wait on."""
        last, self._last = self._last, now
        if last is None:
            self._worked = self._busy = now.at
            self._rss, self._gpu = now.rss, now.gpu
            return None
        seconds = max(now.at - last.at, 1e-6)
        self._read = now.read
        self.rate = max(self.rate, (now.read - last.read) / seconds)
        if self._works(last, now):
            self._worked = now.at
        if now.cpu - last.cpu >= BUSY * seconds:
            self._busy = now.at
        return self._lost(now)

    def _works(self, last: Sample, now: Sample) -> bool:
        """Whether anything but CPU time shows work."""
        works = now.compiling or now.read - last.read >= READ
        works |= not now.answering and now.written - last.written >= WRITTEN
        if abs(now.rss - self._rss) >= CHANGED:
            works, self._rss = True, now.rss
        if now.gpu is not None and (self._gpu is None or abs(now.gpu - self._gpu) >= CHANGED):
            works, self._gpu = True, now.gpu
        return works

    def _lost(self, now: Sample) -> str | None:
        self._dead = {name: self._dead.get(name, now.at) for name in now.dead}
        if gone := [name for name, since in self._dead.items() if now.at - since >= GRACE_S]:
            return f"{', '.join(gone)} ended, and the engine goes on without"
        quiet, spun = now.at - max(self._worked, self._busy), now.at - self._worked
        if quiet > self.patience():
            return (
                f"it hangs: for {quiet:.0f} s no CPU time, no byte read or written, no memory changed "
                f"(bound {self.patience():.0f} s: {self.basis()})"
            )
        if spun > self.spin_s:
            return (
                f"it spins: for {spun:.0f} s it burns CPU and nothing else changes (bound {self.spin_s:.0f} s); on several "
                "GPUs this is most often a collective that waits for a link"
            )
        return None

    def basis(self) -> str:
        """Where the bound of a quiet time comes from."""
        if not self._known():
            return "the weights were not read yet"
        return f"{self.weights / 1e9:.1f} GB of weights at {self.rate / 1e6:.0f} MB/s"


def weights_of(paths: list[str]) -> int:
    """Bytes of the weights in model folders; 0 for a folder that can't be read."""
    total = 0
    for path in paths:
        try:
            total += sum(f.stat().st_size for f in Path(path).iterdir() if f.suffix in WEIGHTS)
        except OSError:
            continue
    return total


@dataclass
class Process:
    """One look at a process."""

    name: str
    state: str
    cpu: float
    rss: int
    read: int = 0
    written: int = 0
    at: str = ""  # where it waits in the kernel


class Processes:
    """All processes of the engine's control group but this one, and compilers of the same user elsewhere.

    Compilers of others count because instances share the caches of their release: one compiles, the rest wait for its lock.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.proc, self.pid = proc, pid
        self.group = (proc / str(pid) / "cgroup").read_text(encoding="ascii")
        self.seen: dict[int, Process] = {}
        self.workers: dict[int, str] = {}
        self.cpu, self.read, self.written = 0.0, 0, 0
        self._ticks, self._page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")

    def _look(self, folder: Path) -> Process:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        found = Process(name, rest[0], (int(rest[11]) + int(rest[12])) / self._ticks, int(rest[21]) * self._page)
        try:
            for line in (folder / "io").read_text(encoding="ascii").splitlines():
                key, _, value = line.partition(": ")
                # Bytes of read() and bytes of page faults from a disk: weights come in either way.
                if key in ("rchar", "read_bytes"):
                    found.read = max(found.read, int(value))
                elif key == "wchar":
                    found.written = int(value)
            found.at = (folder / "wchan").read_text(encoding="ascii").strip("0")
        except OSError:  # not ours to see
            pass
        return found

    def sample(self, gpu: int | None, answering: bool) -> Sample:
        """Look at everything once."""
        found: dict[int, Process] = {}
        compiling = False
        for folder in self.proc.glob("[0-9]*"):
            try:
                pid = int(folder.name)
                if pid == os.getpid() or folder.stat().st_uid != os.getuid():
                    continue
                if (folder / "cgroup").read_text(encoding="ascii") == self.group:
                    found[pid] = self._look(folder)
                    compiling |= found[pid].name in COMPILERS
                else:
                    compiling |= (folder / "comm").read_text(encoding="utf-8").strip() in COMPILERS
            except (OSError, ValueError):  # ended meanwhile
                continue
        for pid, now in found.items():
            before = self.seen.get(pid, Process("", "", 0.0, 0))
            self.cpu += max(0.0, now.cpu - before.cpu)
            self.read += max(0, now.read - before.read)
            self.written += max(0, now.written - before.written)
            if now.name.startswith(WORKER) and now.state != "Z":
                self.workers[pid] = now.name
        self.seen = found
        dead = tuple(f"{n} (pid {p})" for p, n in self.workers.items() if p not in found or found[p].state == "Z")
        rss = sum(p.rss for p in found.values())
        return Sample(time.monotonic(), self.cpu, self.read, self.written, rss, gpu, compiling, answering, dead)

    def describe(self) -> str:
        """What was last seen of each process, for the person who has to find out."""
        rows = [
            f"{p.name} (pid {pid}) {p.state}{f' in {p.at}' if p.at else ''}, {p.cpu:.0f} s CPU, {p.rss // MIB} MiB"
            for pid, p in sorted(self.seen.items())
        ]
        return "; ".join([*rows[:12], *([f"and {len(rows) - 12} more"] if len(rows) > 12 else [])])


def stale_locks(cache: Path) -> list[str]:
    """Locks that a killed build of a torch extension left: the next one waits for them for ever."""
    return sorted(str(path) for path in cache.glob("torch_extensions/**/lock"))


class GpuMemory(threading.Thread):
    """Bytes used on GPUs, by NVML. A thread of its own: a driver in trouble lets NVML hang, and the waiter must not."""

    class _Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    def __init__(self, uuids: list[str], pause_s: float = 1.0) -> None:
        super().__init__(daemon=True)
        self.uuids, self.pause_s = uuids, pause_s
        self.used: int | None = None

    def run(self) -> None:
        """Until the process ends, or NVML refuses."""
        if not self.uuids:
            return
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        handles = [ctypes.c_void_p() for _ in self.uuids]
        if nvml.nvmlInit_v2():
            return
        for uuid, handle in zip(self.uuids, handles, strict=True):
            if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
                return
        while True:
            memory = [self._Memory() for _ in handles]
            if any(nvml.nvmlDeviceGetMemoryInfo(h, ctypes.byref(m)) for h, m in zip(handles, memory, strict=True)):
                self.used = None
                return
            self.used = sum(m.used for m in memory)
            time.sleep(self.pause_s)
