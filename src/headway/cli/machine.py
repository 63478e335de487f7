"""What this machine has and how fast it copies: cores, memory, GPUs, packages, room, bandwidth.

Everything is asked of the system itself or of torch; what cannot be asked is left out. The measurements take about a
second and are what one core gets now, whatever else is running.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import disk_usage
from typing import Any

PACKAGES = ("torch", "transformers", "ray", "vllm", "sglang")
_MEMORY_BYTES, _DISK_BYTES, _CHUNK = 128 << 20, 64 << 20, 8 << 20
_MEMINFO, _SHARED, _CONTROL_GROUP = Path("/proc/meminfo"), Path("/dev/shm"), Path("/sys/fs/cgroup")


def free_memory() -> dict[str, int]:
    """Bytes by where they are: `host`, `GPU 0`, …"""
    limits = [one for one in (_meminfo("MemAvailable"), _container_left()) if one is not None]
    found = {"host": min(limits)} if limits else {}
    return found | {f"GPU {number}": gpu["free"] for number, gpu in enumerate(gpus())}


def total_memory() -> int | None:
    """Of the host, in bytes."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int | None:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _container_left() -> int | None:
    """What a control group leaves; `None` where there is no limit."""
    try:
        most, used = (
            (_CONTROL_GROUP / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current")
        )
        return None if most == "max" else max(int(most) - int(used), 0)
    except (OSError, ValueError):
        return None


def gpus() -> list[dict[str, Any]]:
    """Name, memory and free memory of each GPU that torch sees."""
    try:
        import torch
    except ImportError:
        return []
    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        found.append({"name": torch.cuda.get_device_name(number), "total": total, "free": free})
    return found


def packages() -> dict[str, str | None]:
    """Versions of what Headway can run on; `None`: not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def room(directory: Path) -> dict[str, int]:
    """Free bytes on the disk of `directory`, and of shared memory that has names."""
    places = {"disk": _existing(directory), "shared memory": _SHARED}
    return {name: disk_usage(path).free for name, path in places.items() if path.is_dir()}


def _existing(path: Path) -> Path:
    """The nearest directory that is there already."""
    path = path.absolute()
    return path if path.is_dir() else _existing(path.parent)


def bandwidth(directory: Path) -> dict[str, float]:
    """Bytes a second: of a copy in memory, and of a file in `directory`, written to the disk and read back."""
    found = {"memory copy": _memory_bandwidth()}
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(directory), prefix=".headway-check-") as file:
            found |= _disk_bandwidth(file)
    except OSError:
        pass  # not ours to write in, or full: what there is room for is said elsewhere
    return found


def _memory_bandwidth() -> float:
    source = memoryview(bytearray(b"x") * _MEMORY_BYTES)  # zeros would be one page, read again and again
    target = memoryview(bytearray(_MEMORY_BYTES))

    def copy() -> None:
        target[:] = source

    copy()
    return _MEMORY_BYTES / min(_timed(copy) for _ in range(3))


def _disk_bandwidth(file: Any) -> dict[str, float]:
    data, left = os.urandom(_CHUNK), range(0, _DISK_BYTES, _CHUNK)

    def write() -> None:
        for _ in left:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())

    def read() -> None:
        file.seek(0)
        while file.read(_CHUNK):
            pass

    written_s = _timed(write)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"disk write": _DISK_BYTES / written_s, "disk read": _DISK_BYTES / _timed(read)}


def _timed(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return max(time.perf_counter() - began_s, 1e-9)
