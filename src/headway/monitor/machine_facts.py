"""What a run runs on, in words, for its `run.begin` event: `log.emit("run.begin", "run", ..., **machine_facts())`.

GPUs are named only where torch has been imported already: nobody waits for it here.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from typing import Any

from headway.version import VERSION


def describe_machine() -> dict[str, str]:
    """`machine`: devices, cores, memory and system; `headway`: the version."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [*_gpus(sys.modules.get("torch")), f"{cores} CPU core{'s' * (cores != 1)}", *_memory()]
    parts += [f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    return {"machine": ", ".join(parts), "headway": VERSION}


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
