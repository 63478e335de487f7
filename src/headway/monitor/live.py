"""What a run is doing now, in the terminal.

On a terminal: a small panel, redrawn at most every `refresh_s` seconds of event time. Elsewhere (a file, a pipe, a
job log): one plain line a training step. Time is the events' own, so a simulated run is shown by its virtual
clock; no thread is started, and nothing is drawn between events.

    with LiveDisplay(monitor, console) as live:
        log.attach(live)

It reads a `Monitor` that is attached to the same log *before* it, and keeps no numbers of its own.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.monitor.events import Event
from headway.monitor.report import Monitor
from headway.monitor.tables import number, seconds
from headway.monitor.throughput import StepRecord

_RECENT = 8
_INCIDENTS = ("error", "restart", "down", "degrade", "stall")
_SIGNS = {"running": "●", "waiting": "○", "emitting": "◆", "idle": "·", "stopped": "■"}


class LiveDisplay:
    """A sink that shows; the panel on a terminal, a line a step elsewhere."""

    def __init__(self, monitor: Monitor, console: Console | None = None, *, refresh_s: float = 0.25) -> None:
        self._monitor = monitor
        self._console = console or Console()
        self._refresh_s = refresh_s
        self._next_s = float("-inf")
        self._incident = ""
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        if event.kind in _INCIDENTS:
            self._incident = incident_line(event)
            if self._live is None:
                self._print(self._incident)
        if self._live is None:
            if event.kind == "step.end":
                self._print(step_line(self._monitor))
        elif event.time_s >= self._next_s:
            self._next_s = event.time_s + self._refresh_s
            self._live.update(self.panel(event.time_s), refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def panel(self, now_s: float) -> Group:
        """The picture of this moment."""
        steps = self._monitor.throughput.steps
        rows: list[Table | Text] = [Text(_headline(self._monitor, now_s), style="bold")]
        if steps:
            rows.append(Text(_progress(self._monitor, steps[-_RECENT:])))
        rows.append(_roles(self._monitor))
        if self._incident:
            rows.append(Text(self._incident, style="red"))
        return Group(*rows)


def step_line(monitor: Monitor) -> str:
    """One step as one line of a log, made to be read and to be searched."""
    last = monitor.throughput.steps[-1]
    versions = monitor.lag.versions
    reward = "-" if last.reward is None else number(last.reward)
    samples_per_s = last.samples / last.seconds if last.seconds else 0.0
    return (
        f"[{seconds(last.end_s)}] step {last.trained}: reward {reward}, {number(last.seconds)} s "
        f"({number(last.train_s)} training), {number(samples_per_s)} samples/s, lag {monitor.lag.last_lag}, "
        f"served {versions.served}, dropped {monitor.lag.dropped}"
    )


def incident_line(event: Event) -> str:
    """A fault as one line; control characters of foreign messages do not reach the terminal."""
    details = ", ".join(f"{key}: {value}" for key, value in event.data.items())
    line = f"[{seconds(event.time_s)}] {event.kind} {event.who} {details}"
    return "".join(letter if letter.isprintable() else " " for letter in line)[:300]


def _headline(monitor: Monitor, now_s: float) -> str:
    versions = monitor.lag.versions
    trained = 0 if versions.trained is None else versions.trained
    served = trained if versions.served is None else versions.served
    return f"step {trained}   served {served}   {seconds(now_s - (monitor.clock.first_s or 0.0))}"


def _progress(monitor: Monitor, recent: list[StepRecord]) -> str:
    spent_s = sum(step.seconds for step in recent) or 1.0
    rewards = [step.reward for step in recent if step.reward is not None]
    reward = number(sum(rewards) / len(rewards)) if rewards else "-"
    parts = (
        f"reward {reward}",
        f"{number(spent_s / len(recent))} s/step",
        f"{number(sum(step.samples for step in recent) / spent_s)} samples/s",
        f"{number(sum(step.actions for step in recent) / spent_s)} actions/s",
        f"lag {monitor.lag.last_lag}",
        f"dropped {number(monitor.lag.dropped)}",
    )
    return "   ".join(parts)


def _roles(monitor: Monitor) -> Table:
    """What each role is doing, a few to a row."""
    table = Table.grid(padding=(0, 3))
    cells = [f"{_SIGNS.get(state, '!')} {who} {state}" for who, state in monitor.usage.states.items()]
    busy, engines = monitor.usage.engines_busy
    if engines:
        cells.append(f"● engines {busy} of {engines} busy, {monitor.usage.open_requests} requests")
    for first in range(0, len(cells), 4):
        table.add_row(*(Text(cell) for cell in cells[first : first + 4]))
    return table
