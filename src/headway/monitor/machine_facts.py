"""Describes the machine of a run for its `RunBegin` event.

GPUs are named only if torch has been imported already, so that nobody waits for the import here.
"""

import os
import platform
import sys
from collections import Counter
from typing import Any


def describe_machine() -> str:
    """Return devices, cores, memory, system and Python version as one line of text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [*_gpus(sys.modules.get("torch")), f"{cores} CPU core{'s' * (cores != 1)}", *_memory()]
    parts += [f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    return ", ".join(parts)


def _gpus(torch: Any) -> list[str]:
    if torch is None or not torch.cuda.is_available():
        return []
    names = Counter(torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count()))
    return [name if count == 1 else f"{count} × {name}" for name, count in names.items()]


def _memory() -> list[str]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return []
    return [f"{total / 2**30:.0f} GiB"]
