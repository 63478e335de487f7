"""Measures the memory of a run and the use of its GPUs, for curves, report, panel and status; describes the machine.

Processes and memory come from `/proc`, GPUs from NVML, which needs neither torch nor a context on the device, and the
allocator of torch if this process uses CUDA already. What a machine does not have is left out. One measurement takes
some milliseconds and may block, so it is made on a thread.

| name | meaning |
|---|---|
| `memory/controller_gb` | resident memory of this process |
| `memory/children_gb` | that of all processes below it; pages that they share count in each |
| `memory/host_gb` | memory of the machine that is in use |
| `gpu_memory_gb/<n>` | memory of a GPU that is in use by anybody |
| `gpu_utilization/<n>` | share of the last moments in which it computed |
| `gpu_allocated_gb/<n>`, `gpu_reserved_gb/<n>` | what torch has allocated and reserved in this process |
"""

import ctypes
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GB = 1e9
_PROC = Path("/proc")
_STATM_RESIDENT = 1
_STAT_PARENT = 1


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _NvmlUtilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class ResourceMeter:
    """Measures again and again; opens NVML once."""

    def __init__(self) -> None:
        self._nvml = _open_nvml()

    def measure(self) -> dict[str, float]:
        """Return the values of this moment by name."""
        return {**_measure_memory(), **dict(self._measure_gpus()), **dict(_measure_allocator())}

    def _measure_gpus(self) -> Iterator[tuple[str, float]]:
        if self._nvml is None:
            return
        for place, index in enumerate(_find_visible_gpus(self._nvml)):
            device, memory, use = ctypes.c_void_p(), _NvmlMemory(), _NvmlUtilization()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            if not self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                yield f"gpu_memory_gb/{place}", memory.used / _GB
            if not self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)):
                yield f"gpu_utilization/{place}", use.gpu / 100


def _open_nvml() -> Any:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None


def _find_visible_gpus(nvml: Any) -> list[int]:
    """Return the numbers of the GPUs that this process may use; all of them if that is not said by numbers."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(number.strip().isdigit() for number in visible):
        return [int(number) for number in visible if int(number) < count.value]
    return list(range(count.value))


def _measure_allocator() -> Iterator[tuple[str, float]]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for place in range(torch.cuda.device_count()):
        yield f"gpu_allocated_gb/{place}", torch.cuda.memory_allocated(place) / _GB
        yield f"gpu_reserved_gb/{place}", torch.cuda.memory_reserved(place) / _GB


def _measure_memory() -> dict[str, float]:
    parents, resident = _read_processes()
    if os.getpid() not in resident:
        return {}
    family = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    children = sum(resident[process] for process in family - {os.getpid()})
    values = {"memory/controller_gb": resident[os.getpid()] / _GB, "memory/children_gb": children / _GB}
    known = read_meminfo()
    if {"MemTotal", "MemAvailable"} <= known.keys():
        values["memory/host_gb"] = (known["MemTotal"] - known["MemAvailable"]) / _GB
    return values


def read_meminfo() -> dict[str, int]:
    """Return the sizes in `/proc/meminfo` by name, in bytes; none on a system that has no such file."""
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
        return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    except (OSError, ValueError, IndexError):
        return {}


def _read_processes() -> tuple[dict[int, int], dict[int, int]]:
    """Return the parent and the resident bytes of every process."""
    parents: dict[int, int] = {}
    resident: dict[int, int] = {}
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in _PROC.glob("[0-9]*"):
        try:
            process = int(entry.name)
            state = (entry / "stat").read_bytes().rpartition(b") ")[2].split()
            resident[process] = int((entry / "statm").read_bytes().split()[_STATM_RESIDENT]) * page
            parents[process] = int(state[_STAT_PARENT])
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
    return parents, resident


def describe_machine() -> str:
    """Return devices, cores, memory, system and Python version as one line of text.

    GPUs are named only if torch has been imported already, so that nobody waits for the import here.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [
        *_list_gpu_names(sys.modules.get("torch")),
        f"{cores} CPU core{'s' * (cores != 1)}",
        *_format_host_memory(),
    ]
    parts += [f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    return ", ".join(parts)


def _list_gpu_names(torch: Any) -> list[str]:
    if torch is None or not torch.cuda.is_available():
        return []
    names = Counter(torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count()))
    return [name if count == 1 else f"{count} × {name}" for name, count in names.items()]


def _format_host_memory() -> list[str]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return []
    return [f"{total / 2**30:.0f} GiB"]
