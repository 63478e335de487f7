"""The extension of a worker whose weights come by CUDA IPC (`--worker-extension-cls headway_ipc_worker.IpcExtension`).

vLLM 0.26 imports `ray` at the top of its `ipc` back end, and uses it there only to send weights from a ray actor. Where
ray is not installed, an empty module stands in for it while vLLM imports that back end, and is taken away again.
"""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

from headway_worker import WeightReloadExtension  # type: ignore[import-not-found]


def import_ipc_backend(name: str = "vllm.distributed.weight_transfer.ipc_engine") -> None:
    """Import vLLM's `ipc` back end, whether or not ray is installed."""
    missing = find_spec("ray") is None
    if missing:
        sys.modules["ray"] = ModuleType("ray")
    try:
        importlib.import_module(name)
    finally:
        if missing:
            del sys.modules["ray"]


import_ipc_backend()


class IpcExtension(WeightReloadExtension):  # type: ignore[misc]
    """Is mixed into every worker, like the class that it extends."""
