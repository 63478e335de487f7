"""The status of a run at one moment: each stage with its state, its queue and its waits, each engine, and memory.

`flow.flow_status` takes it. It travels as JSON through the control socket and the status file of a run directory; the
panel of `headway train` and `headway status` draw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from headway.errors import HeadwayError
from headway.monitor.report_tables import format_duration

STATE_SIGNS = {"running": "●", "waiting": "○", "emitting": "◆", "idle": "·", "stopped": "■"}
_MOST_WAITS = 4
"""Waits of a stage that a table shows; the wait-for graph has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStatus:
    """One wait of a stage."""

    on: str
    what: str
    seconds: float

    def describe(self) -> str:
        return f"{self.on}: {self.what}, {format_duration(self.seconds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """One stage."""

    role: str
    state: str
    seconds: float
    """Time in this state."""
    queue: int = 0
    """Items in its inbound channel."""
    waits: tuple[WaitStatus, ...] = ()
    """Its waits, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine."""

    name: str
    health: str
    version: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment."""

    phase: str
    """`starting`, `training`, or `ended`."""
    trained: int = 0
    served: int = 0
    steps: int = 0
    """Number of steps of the whole run."""
    level: str = "normal"
    """How far the run is degraded."""
    stages: tuple[StageStatus, ...] = ()
    engines: tuple[EngineStatus, ...] = ()
    quiet_s: float = 0.0
    """Time since the last event that shows progress."""
    culprits: tuple[str, ...] = ()
    """Whoever is waited for and waits for nobody, oldest first."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Use of memory and GPUs, by name of the curve."""
    finished: bool | None = None
    """Whether an ended run has done all its steps."""
    reason: str = ""
    """Why it ended early."""
    process: int = 0
    host: str = ""
    time_s: float = 0.0
    """When it was taken, as seconds since 1970."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: object) -> RunStatus:
        """Return the status that `to_json` was called on. Raise `HeadwayError` for anything else."""
        try:
            if not isinstance(data, Mapping):
                raise TypeError(f"it is {type(data).__name__}")
            stages = tuple(
                StageStatus(**{**stage, "waits": tuple(WaitStatus(**wait) for wait in stage["waits"])})
                for stage in data["stages"]
            )
            engines = tuple(EngineStatus(**engine) for engine in data["engines"])
            rest = {"stages": stages, "engines": engines, "culprits": tuple(data["culprits"])}
            status = RunStatus(**{**data, **rest})
            if not (isinstance(status.usage, Mapping) and isinstance(status.time_s, int | float)):
                raise TypeError("usage or time_s has another type")
            return status
        except (KeyError, TypeError) as error:
            raise HeadwayError(f"not the status of a run: {error!r}") from error


def make_stage_table(stages: Sequence[StageStatus], *, width: int | None = None) -> Group:
    """Return a row for each stage: state, since when, items in its queue, and its oldest waits on lines of their own.

    A table that has to fit into `width` columns has one line for each stage, with its oldest wait as far as it fits.
    """
    rows = [
        (
            f"{STATE_SIGNS.get(stage.state, '!')} {stage.role}",
            f"{stage.state} {format_duration(stage.seconds)}",
            f"{stage.queue} queued" if stage.queue else "",
        )
        for stage in stages
    ]
    widths = [max((len(row[place]) for row in rows), default=0) + 2 for place in range(3)]
    shown: list[Text | Padding] = []
    for cells, stage in zip(rows, stages, strict=True):
        head = "".join(cell.ljust(wide) for cell, wide in zip(cells, widths, strict=True))
        lines = [f"waits for {wait.describe()}" for wait in stage.waits[:_MOST_WAITS]]
        if width is not None:
            head += _shorten("".join(lines[:1]), max(0, width - sum(widths)))
            lines = []
        shown.append(Text(head.rstrip(), no_wrap=True, overflow="crop"))
        shown += [Padding(Text(line), (0, 0, 0, 4), expand=False) for line in lines]
    return Group(*shown)


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: max(0, length - 1)]}…"[:length]


def format_engines(engines: Sequence[EngineStatus], most: int = 8) -> list[str]:
    """Return a line for each engine; many healthy ones that serve the same version share a line."""
    alike: dict[tuple[str, int], list[EngineStatus]] = {}
    for engine in engines:
        alike.setdefault((engine.health, engine.version), []).append(engine)
    lines = []
    for (health, version), members in alike.items():
        requests = sum(engine.requests for engine in members)
        names = ", ".join(engine.name for engine in members[:most])
        more = f" and {len(members) - most} more" if len(members) > most else ""
        lines.append(f"{names}{more}: {health}, version {version}, {requests} requests")
    return lines


def format_usage(usage: Mapping[str, float]) -> str:
    """Return the use of memory and GPUs as one line."""
    memory = [f"{key.partition('/')[2][:-3]} {value:.1f}" for key, value in usage.items() if key.startswith("memory/")]
    parts = [f"memory in GB: {', '.join(memory)}"] if memory else []
    for key, used_gb in usage.items():
        kind, _, number = key.partition("/")
        if kind == "gpu_memory_gb":
            busy = usage.get(f"gpu_utilization/{number}")
            parts.append(f"GPU {number}: {used_gb:.1f} GB" + ("" if busy is None else f", {busy:.0%} busy"))
    return "; ".join(parts)
