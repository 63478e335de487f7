"""The machine that a run is planned for: cores, cards with their memory, and the logical devices on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headway.config.config_blocks import DevicesConfig
from headway.errors import ConfigError
from headway.extras import suggest_install
from headway.processes.child_process import count_usable_cores

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run may use of a machine, or of several equal ones."""

    cores: int
    gpus: int
    """Cards of one node."""
    gpu_memory_gib: float = 0.0
    """Memory of one card. 0: not known, and nothing is refused for it."""
    nodes: int = 1
    logical_devices: int | None = None
    """Logical devices of one node, which share its cards evenly. `None`: one for each card, or one CPU."""

    @property
    def devices(self) -> int:
        """Number of logical devices of one node."""
        return self.logical_devices or max(self.gpus, 1)

    @property
    def is_virtual(self) -> bool:
        """Whether several logical devices share a card, or the cores of a CPU."""
        return self.devices > max(self.gpus, 1)

    @property
    def device_memory_gib(self) -> float:
        """Memory of one logical device: its share of the card that has most of them."""
        return self.gpu_memory_gib / -(-self.devices // max(self.gpus, 1))

    def locate(self, device: int) -> int:
        """Return the card of a logical device; both are numbered through all nodes."""
        node, local = divmod(device, self.devices)
        return node * max(self.gpus, 1) + local * max(self.gpus, 1) // self.devices

    def arrange(self, wanted: DevicesConfig, device: str) -> Machine:
        """Return the machine with the logical devices that `wanted` asks for. Raises `ConfigError`."""
        there, kind = (self.gpus, "GPU") if device == "cuda" else (self.cores, "core")
        if wanted.physical is not None and wanted.physical > there:
            problem = f"this machine has {there} {kind}{'s' if there > 1 else ''}"
            raise ConfigError(problem, key="devices.physical", value=wanted.physical, hint=f"at most {there}")
        if device == "cpu":
            cores, devices = wanted.physical or self.cores, wanted.count or 1
            return replace(self, cores=cores, gpus=0, gpu_memory_gib=0.0, logical_devices=devices)
        physical = wanted.physical or min(there, wanted.count or there)
        return replace(self, gpus=physical, logical_devices=wanted.count or physical)


def find_machine() -> Machine:
    """Look at this machine; torch is asked only where there are GPUs, because it takes seconds to load."""
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
    return read_machine() if has_gpus else Machine(cores=count_usable_cores(), gpus=0)


def read_machine() -> Machine:
    """Look at this machine. Raises `ConfigError` where torch is not installed."""
    try:
        import torch
    except ImportError as error:
        hint = suggest_install("train")
        raise ConfigError("training needs torch and transformers", key="device", hint=hint) from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(cores=count_usable_cores(), gpus=gpus, gpu_memory_gib=_read_gpu_memory_gib(gpus))


def _read_gpu_memory_gib(gpus: int) -> float:
    """Return the memory of the smallest card; 0 where the driver does not say."""
    import torch

    try:
        sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(gpus)]
    except (RuntimeError, AssertionError):
        return 0.0
    return min(sizes, default=0) / _GIB


def make_visible_gpus_env(gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment of a child that sees these GPUs alone, which are numbered as this process sees them."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)}
