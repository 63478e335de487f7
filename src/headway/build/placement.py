"""Where the parts of a run live on this machine: device, processes and threads.

On a CPU trainer and engines are processes of their own. Where cores are few, each gets a thread for every core, and
whoever has work uses what the other leaves: a step of the example took 13 s on two cores instead of 20 s with one core
each. Threads that wait must then sleep, not spin (`OMP_WAIT_POLICY`, set for every child). Many cores are shared out:
half to the engines, the rest to the trainer; roles that take turns (hybrid) get all of them. On one GPU the roles are
threads of one process, because two processes on one card hardly overlap.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from headway.config import Resolved
from headway.errors import ConfigError

Device = Literal["cpu", "cuda"]
_FEW = 4
"""Cores up to which nobody is kept from any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One machine's share-out."""

    device: Device
    processes: bool
    """Trainer and engines each in a process of their own."""
    train_threads: int
    infer_threads: int
    replicas: int

    @property
    def text(self) -> str:
        """One line for people."""
        where = "processes" if self.processes else "threads of one process"
        engines = f"{self.replicas} engine{'s' if self.replicas > 1 else ''} × {self.infer_threads}"
        return f"{self.device}: trainer × {self.train_threads} and {engines} CPU threads, as {where}"


def place(resolved: Resolved) -> Placement:
    """What the configuration asks for, or what suits this machine. Raises `ConfigError`."""
    config, derived = resolved.config, resolved.derived
    device = _device(config.device)
    cores, replicas = usable_cores(), derived.replicas if device == "cuda" or _mapped(resolved) else 1
    half = max((cores // 2) // replicas, 1)
    whole = derived.hybrid or (cores <= _FEW and replicas == 1)
    infer = cores if whole else half
    train = cores if whole else max(cores - half * replicas, 1)
    return Placement(
        device=device,
        processes=config.processes if config.processes is not None else device == "cpu",
        train_threads=config.actor_train.strategy_args.strategy_config.num_threads or train,
        infer_threads=config.actor_infer.strategy_args.strategy_config.num_threads or infer,
        replicas=replicas,
    )


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _mapped(resolved: Resolved) -> bool:
    return resolved.config.actor_infer.device_mapping is not None


def _device(wanted: str) -> Device:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            "training needs torch and transformers", key="device", value=wanted, hint="pip install 'headway[train]'"
        ) from error
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("torch sees no GPU here", key="device", value=wanted, hint="cpu, or auto")
    return "cuda" if there and wanted != "cpu" else "cpu"
