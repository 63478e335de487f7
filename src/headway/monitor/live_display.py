"""What a run is doing now, in the terminal.

On a terminal: a small panel, redrawn at most every `refresh_s` seconds. Elsewhere (a file, a pipe, a job log): one
plain line a training step, one a validation, one an incident; incidents that come again and again are counted.

    with LiveDisplay(monitor, console, steps=200) as live:
        log.attach(live)
        ...
        live.tick(clock())       # from a timer of the caller's, so that long steps do not look frozen

Time is the events' own, so a simulated run is shown by its virtual clock; no thread is started. It reads a `RunMonitor`
that is attached to the same log *before* it, and keeps no numbers of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.monitor.episode_outcomes import EpisodeOutcomes
from headway.monitor.event_log import LoggedEvent
from headway.monitor.report_tables import format_duration, format_number
from headway.monitor.run_report import RunMonitor, ValidationResult
from headway.monitor.throughput import StepRecord

_RECENT = 8
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 32
_BAR_COLUMNS = 24
_INCIDENTS = ("error", "restart", "down", "degrade", "stall")
_SHOWN, _MILESTONES = 3, frozenset(10**power for power in range(1, 10))
"""How often an incident is printed, apart from its numbers; then only the tenth, the hundredth time and so on."""
_SIGNS = {"running": "●", "waiting": "○", "emitting": "◆", "idle": "·", "stopped": "■"}


class LiveDisplay:
    """A sink that shows; the panel on a terminal, lines elsewhere. `steps` is where the run ends, if that is known."""

    def __init__(
        self,
        monitor: RunMonitor,
        console: Console | None = None,
        *,
        refresh_s: float = 0.25,
        steps: int | None = None,
    ) -> None:
        self._monitor = monitor
        self._console = console or Console()
        self._refresh_s = refresh_s
        self._steps = steps
        self._next_s = float("-inf")
        self._incident = ""
        self._times: Counter[str] = Counter()
        """Incidents of one kind so far."""
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

    def __call__(self, event: LoggedEvent) -> None:
        kind = event.kind
        if kind in _INCIDENTS:
            self._incident = format_incident_line(event)
            times = self._times[_pattern(event)] = self._times[_pattern(event)] + 1
        if self._live is not None:
            self.tick(event.time_s)
        elif kind == "step.end":
            self._print(format_step_line(self._monitor))
        elif kind == "validate.end":
            held_out = self._monitor.episodes.validations
            self._print(format_validation_line(self._monitor.incidents.validations[-1], held_out))
        elif kind in _INCIDENTS and (times <= _SHOWN or times in _MILESTONES):
            self._print(self._incident if times <= _SHOWN else f"{self._incident} ({times:,} times so far)")

    def tick(self, now_s: float) -> None:
        """Time has passed: redraw the panel if it is due. `now_s` is on the clock of the events."""
        if self._live is not None and now_s >= self._next_s:
            self._next_s = now_s + self._refresh_s
            self._live.update(self.panel(now_s), refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def panel(self, now_s: float) -> Group:
        """The picture of this moment."""
        monitor = self._monitor
        steps = monitor.throughput.steps
        rows: list[Table | Text] = [Text(_headline(monitor, now_s, self._steps), style="bold")]
        if steps or monitor.incidents.validations:
            rows.append(_learning(steps, monitor.incidents.validations, monitor.episodes.steps))
        if steps:
            rows.append(Text(_progress(monitor, steps[-_RECENT:])))
        rows.append(Text(_now(monitor, now_s), style="dim"))
        rows.append(_roles(monitor))
        if self._incident:
            rows.append(Text(self._incident, style="red"))
        return Group(*rows)


def format_step_line(monitor: RunMonitor) -> str:
    """One step as one line of a log, made to be read and to be searched."""
    steps, validations = monitor.throughput.steps, monitor.incidents.validations
    last = steps[-1]
    reward = "-" if last.reward is None else format_number(last.reward)
    before_s = steps[-2].end_s if len(steps) > 1 else float("-inf")
    held_out = ""
    if validations and validations[-1].time_s >= before_s and validations[-1].reward is not None:
        held_out = f", held-out {format_number(validations[-1].reward)}"
    spent_s = last.seconds or 1.0
    return (
        f"[{format_duration(last.end_s)}] step {last.trained}: reward {reward}{_success(monitor.episodes.steps)}{held_out}, "
        f"{format_number(last.seconds)} s "
        f"({format_number(last.train_s)} training), {format_number(last.samples / spent_s)} samples/s, "
        f"{format_number(last.actions / spent_s)} tokens/s ({format_number(last.generated / spent_s)} generated), "
        f"lag {format_number(last.lag)}, served {monitor.lag.versions.served}, dropped {monitor.lag.dropped}"
        + _filled(last)
        + (
            f", engines and trainer are {format_number(last.mismatch or 0.0)} nats apart on the same weights"
            if last.torn
            else ""
        )
    )


def _filled(step: StepRecord) -> str:
    """Only where the limit of replacing was reached."""
    if not step.filled:
        return ""
    return f", {step.filled} of {step.groups} groups with equal rewards ({step.replaced} were replaced)"


def format_validation_line(validation: ValidationResult, episodes: Sequence[EpisodeOutcomes] = ()) -> str:
    """A validation as one line."""
    reward = "-" if validation.reward is None else format_number(validation.reward)
    reward += _success(episodes)
    return f"[{format_duration(validation.time_s)}] held-out after step {validation.trained}: {reward} ({validation.samples})"


def _success(episodes: Sequence[EpisodeOutcomes]) -> str:
    """Of the newest ones, where there are any."""
    if not episodes or episodes[-1].success is None:
        return ""
    return f", success {format_number(episodes[-1].success)}, invalid {format_number(episodes[-1].invalid)}"


def format_incident_line(event: LoggedEvent) -> str:
    """A fault as one line; control characters of foreign messages do not reach the terminal."""
    data = dict(event.data)
    message = data.pop("message", None) or data.pop("error", "")
    data.pop("error", None)
    details = [str(message)] if message else []
    details += [f"{key} {value}" for key, value in data.items()]
    line = f"[{format_duration(event.time_s)}] {event.who}: {event.kind}{': ' if details else ''}{', '.join(details)}"
    return "".join(letter if letter.isprintable() else " " for letter in line)[:300]


def _pattern(event: LoggedEvent) -> str:
    """What incidents that differ only in numbers have in common."""
    return re.sub(r"\d+", "#", f"{event.kind} {event.who} {event.data.get('message', '')}")


def make_sparkline(values: Sequence[float], columns: int = _SPARK_COLUMNS) -> str:
    """A curve in one line of text; more values than columns are averaged."""
    count = min(len(values), columns)
    edges = [round(place * len(values) / count) for place in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not means:
        return ""
    low, high = min(means), max(means)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((mean - low) / (high - low) * top) if high > low else top // 2] for mean in means)


def _headline(monitor: RunMonitor, now_s: float, total: int | None) -> str:
    versions = monitor.lag.versions
    trained = 0 if versions.trained is None else versions.trained
    served = trained if versions.served is None else versions.served
    spent = format_duration(max(0.0, now_s - (monitor.clock.first_s or 0.0)))
    if not total:
        return f"step {trained}   served {served}   {spent}"
    filled = round(_BAR_COLUMNS * min(1.0, trained / total))
    bar = "━" * filled + "╌" * (_BAR_COLUMNS - filled)
    return f"step {trained}/{total}  {bar}  {spent}{_eta(monitor, now_s, total - trained)}   served {served}"


def _eta(monitor: RunMonitor, now_s: float, left: int) -> str:
    recent = monitor.throughput.steps[-_RECENT:]
    if not recent or left <= 0:
        return ""
    each_s = sum(step.seconds for step in recent) / len(recent)
    return f", {format_duration(max(0.0, left * each_s - (now_s - recent[-1].end_s)))} left"


def _learning(
    steps: Sequence[StepRecord], validations: Sequence[ValidationResult], episodes: Sequence[EpisodeOutcomes]
) -> Text:
    """Reward and held-out reward, each with its curve."""
    parts = []
    for name, values, recent in (
        ("reward", [step.reward for step in steps], _RECENT),
        ("held-out", [one.reward for one in validations], 1),
        ("success", [one.success for one in episodes], _RECENT),
    ):
        known = [value for value in values if value is not None]
        if known:
            last = known[-recent:]
            parts.append(f"{name} {format_number(sum(last) / len(last))} {make_sparkline(known)}")
    return Text("   ".join(parts), style="green")


def _progress(monitor: RunMonitor, recent: Sequence[StepRecord]) -> str:
    spent_s = sum(step.seconds for step in recent) or 1.0
    parts = (
        f"{format_number(spent_s / len(recent))} s/step",
        f"{format_number(sum(step.samples for step in recent) / spent_s)} samples/s",
        f"{format_number(sum(step.actions for step in recent) / spent_s)} tokens/s trained",
        f"{format_number(sum(step.generated for step in recent) / spent_s)} generated",
        f"lag {format_number(recent[-1].lag)}",
        f"dropped {format_number(monitor.lag.dropped)}",
    )
    return "   ".join(parts)


def _now(monitor: RunMonitor, now_s: float) -> str:
    """What moves while a step is under way."""
    steps = monitor.throughput.steps
    since_s = steps[-1].end_s if steps else monitor.clock.first_s or 0.0
    made = format_number(monitor.throughput.generated)
    return f"this step {format_duration(max(0.0, now_s - since_s))}   {made} tokens of finished requests"


def _roles(monitor: RunMonitor) -> Table:
    """What each role is doing, a few to a row."""
    table = Table.grid(padding=(0, 3))
    cells = [f"{_SIGNS.get(state, '!')} {who} {state}" for who, state in monitor.usage.states.items()]
    busy, engines = monitor.usage.engines_busy
    if engines:
        cells.append(f"● engines {busy} of {engines} busy, {monitor.usage.open_requests} requests")
    for first in range(0, len(cells), 4):
        table.add_row(*(Text(cell) for cell in cells[first : first + 4]))
    return table
