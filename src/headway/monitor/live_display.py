"""Shows in the terminal what a run is doing now.

On a terminal it is a small panel, redrawn at most every `refresh_s` seconds. In a file, a pipe or a job log it is one
plain line per training step, validation and incident; incidents that come again and again are counted.

    with LiveDisplay(monitor, console, steps=200) as live:
        log.attach(live)
        ...
        live.tick(clock())       # called by a timer, so that long steps do not look frozen

Time is that of the events, so a simulated run is shown by its virtual clock; no thread is started. The display reads a
`RunMonitor` that is attached to the same log *before* it, and keeps no numbers of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.monitor import events
from headway.monitor.episode_outcomes import EpisodeOutcomes
from headway.monitor.event_log import LoggedEvent
from headway.monitor.event_record import Event
from headway.monitor.report_tables import format_duration, format_number
from headway.monitor.run_report import RunMonitor, ValidationResult
from headway.monitor.run_status import STATE_SIGNS, RunStatus, format_engines, format_usage, make_stage_table
from headway.monitor.throughput import StepRecord

_RECENT_STEPS = 8
_LEAST_BIAS_STEPS = 3
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 32
_BAR_COLUMNS = 24
_FIXED_LINES = 9
"""Lines of the panel that are always there: four above the stages; memory, bias, an incident and the prompt below."""
_STARTING = "starting trainer, engines and reward workers: they load the model"
_QUIET_S, _QUIET_LATER_S, _QUIET_SHARE = 10.0, 60.0, 1 / 6
"""Longest silence without a panel until the first step is done, and afterwards; what takes long is told less often."""
_MILESTONES = (events.RunBegin, events.RunReady, events.StepEnd, events.ValidateEnd)
_INCIDENT_EVENTS = (
    events.ErrorReport,
    events.BackendRestart,
    events.BackendDown,
    events.BackendUp,
    events.RunDegrade,
    events.RunRestore,
    events.RunStall,
)
_REPEATS_SHOWN, _REPEAT_MILESTONES = 3, frozenset(10**power for power in range(1, 10))
"""How often incidents that differ only in numbers are printed; then only the tenth, the hundredth and so on."""


class LiveDisplay:
    """A sink that shows a panel on a terminal and prints lines elsewhere. `steps` is the number of steps, if known."""

    def __init__(
        self, monitor: RunMonitor, console: Console | None = None, *, refresh_s: float = 0.25, steps: int | None = None
    ) -> None:
        self._monitor = monitor
        self._console = console or Console()
        self._refresh_s = refresh_s
        self._steps = steps
        self._next_s = float("-inf")
        self._incident = ""
        self._repeats: Counter[str] = Counter()
        """Incidents so far, by what they have in common."""
        self._bias_shown = self._is_starting = False
        self._said_s: float | None = None
        """Time of the last line about a step or the start; `None`: the run is not at work."""
        self._repeated_s = 0.0
        """Time of the last line that says what is waited for."""
        self._status: RunStatus | None = None
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, logged: LoggedEvent) -> None:
        time_s, event = logged
        incident = ""
        if isinstance(event, _INCIDENT_EVENTS) and not self._was_told(event):
            incident = self._incident = format_incident_line(logged)
            pattern = _make_incident_pattern(event)
            repeats = self._repeats[pattern] = self._repeats[pattern] + 1
            if repeats > _REPEATS_SHOWN:
                incident = f"{incident} ({repeats:,} times so far)" if repeats in _REPEAT_MILESTONES else ""
        if isinstance(event, events.RunBegin | events.RunReady):
            self._is_starting = isinstance(event, events.RunBegin)
        if isinstance(event, _MILESTONES):
            self._said_s = self._repeated_s = time_s
        elif isinstance(event, events.RunEnd):
            self._said_s = None
        if self._live is not None:
            self.tick(time_s)
        elif isinstance(event, events.RunBegin):
            self._print(_STARTING)
        elif isinstance(event, events.RunReady):
            self._print(f"[{format_duration(time_s)}] all components are up; the first answers are generated")
        elif isinstance(event, events.StepEnd):
            self._print(format_step_line(self._monitor))
            difference = describe_bias(self._monitor)
            if difference and not self._bias_shown:
                self._bias_shown = True
                self._print(f"[{format_duration(time_s)}] {difference}")
        elif isinstance(event, events.ValidateEnd):
            held_out = self._monitor.episodes.validations
            self._print(format_validation_line(self._monitor.incidents.validations[-1], held_out))
        elif incident:
            waits = event.graph.splitlines()[1:] if isinstance(event, events.RunStall) else []
            self._print("\n".join([incident, *map(_keep_printable, waits)]))  # at once: nothing comes in between

    def _was_told(self, event: Event) -> bool:
        """Return whether the line before has said why an engine is down: its error follows it."""
        before = self._incident
        return isinstance(event, events.ErrorReport) and f"{event.who}: down" in before and event.message in before

    def tick(self, now_s: float) -> None:
        """Redraw the panel, or say what is waited for, if it is due. `now_s` is on the clock of the events."""
        if self._live is not None and now_s >= self._next_s:
            self._next_s = now_s + self._refresh_s
            self._live.update(self.panel(now_s), refresh=True)
        elif self._live is None and self._said_s is not None:
            longest_s = _QUIET_LATER_S if self._monitor.throughput.steps else _QUIET_S
            if now_s - self._repeated_s >= max(longest_s, _QUIET_SHARE * (now_s - self._said_s)):
                self._repeated_s = now_s
                self._print(self._format_wait(now_s))

    def _format_wait(self, now_s: float) -> str:
        """Return what a run without news is waiting for."""
        waits = self._status.culprits if self._status is not None else ()
        awaited = f": {_keep_printable(waits[0])}" if waits else ""
        if self._is_starting:
            return f"[{format_duration(now_s)}] still starting{awaited}" if awaited else _STARTING
        step = (self._monitor.lag.versions.trained or 0) + 1
        made = f"{self._monitor.throughput.generated:,} tokens of finished requests since the last step"
        return f"[{format_duration(now_s)}] step {step} is under way, {made}{awaited}"

    def show(self, status: RunStatus) -> None:
        """Take the newest status of the run, which the panel shows with the next redrawing."""
        self._status = status

    @property
    def is_panel(self) -> bool:
        """Whether there is a panel, on a terminal."""
        return self._live is not None

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def panel(self, now_s: float) -> Group:
        monitor = self._monitor
        steps = monitor.throughput.steps
        rows: list[Group | Table | Text] = [Text(_format_headline(monitor, now_s, self._steps), style="bold")]
        if steps or monitor.incidents.validations:
            width = self._console.width
            rows.append(_format_learning(steps, monitor.incidents.validations, monitor.episodes.steps, width))
        if steps:
            rows.append(Text(_format_progress(monitor, steps[-_RECENT_STEPS:])))
        doing = self._format_wait(now_s) if self._is_starting else _format_current_step(monitor, now_s)
        rows.append(Text(doing, style="dim"))
        rows.append(_make_role_grid(monitor))
        if self._status is not None:
            # Whatever the terminal, the lines above and below stay in sight: what is long in between is cut.
            room = max(8, self._console.height - _FIXED_LINES)
            rows[-1] = make_stage_table(self._status.stages[:room], width=self._console.width)
            engines = format_engines(self._status.engines)[: max(1, room - len(self._status.stages))]
            lines = [*engines, format_usage(self._status.usage)]
            rows += [Text(line, style="dim") for line in lines if line]
        if difference := describe_bias(monitor):
            rows.append(Text(difference, style="yellow"))
        if self._incident:
            rows.append(Text(self._incident, style="red"))
        for row in rows:
            if isinstance(row, Text):
                row.no_wrap, row.overflow = True, "ellipsis"
        return Group(*rows)


def describe_bias(monitor: RunMonitor) -> str:
    """Return one sentence if trained samples are not like those that were started, judged from the third step on."""
    bias = monitor.bias.bias()
    return "" if bias is None or len(monitor.throughput.steps) < _LEAST_BIAS_STEPS else bias.describe()


def format_step_line(monitor: RunMonitor) -> str:
    """Return one step as one line of a log, made to be read and to be searched."""
    steps, validations = monitor.throughput.steps, monitor.incidents.validations
    last, spent_s = steps[-1], steps[-1].seconds or 1.0
    reward = "-" if last.reward is None else format_number(last.reward)
    before_s = steps[-2].end_s if len(steps) > 1 else float("-inf")
    held_out = ""
    if validations and validations[-1].time_s >= before_s and validations[-1].reward is not None:
        held_out = f", {validations[-1].label} {format_number(validations[-1].reward)}"
    line = (
        f"[{format_duration(last.end_s)}] step {last.trained}: "
        f"reward {reward}{_format_success(monitor.episodes.steps)}{held_out}, {format_number(last.seconds)} s "
        f"({format_number(last.train_s)} training), {format_number(last.samples / spent_s)} samples/s, "
        f"{format_number(last.actions / spent_s)} tokens/s ({format_number(last.generated / spent_s)} generated), "
        f"lag {format_number(last.lag)}, served {monitor.lag.versions.served}, dropped {monitor.lag.dropped}"
    )
    if last.filled:
        line += f", {last.filled} of {last.groups} groups with equal rewards ({last.replaced} were replaced)"
    if last.is_mismatched:
        line += f", engines and trainer are {format_number(last.mismatch or 0.0)} nats apart on the same weights"
    return line


def format_validation_line(validation: ValidationResult, episodes: Sequence[EpisodeOutcomes] = ()) -> str:
    """Return a validation as one line."""
    reward = "-" if validation.reward is None else format_number(validation.reward)
    time = format_duration(validation.time_s)
    success = _format_success(episodes)
    failures = validation.describe_failures()
    counted = f"{validation.samples}; {failures}" if failures else str(validation.samples)
    return f"[{time}] {validation.label} after step {validation.trained}: {reward}{success} ({counted})"


def _format_success(episodes: Sequence[EpisodeOutcomes]) -> str:
    """Return the outcome of the newest episodes, if there are any."""
    if not episodes or episodes[-1].success is None:
        return ""
    return f", success {format_number(episodes[-1].success)}, invalid {format_number(episodes[-1].invalid)}"


def format_incident_line(logged: LoggedEvent) -> str:
    """Return a fault as one line; control characters of third-party messages do not reach the terminal."""
    if isinstance(logged.event, events.RunStall):
        first = logged.event.graph.partition("\n")[0].strip()
        quiet = "" if logged.event.quiet_s is None else f" for {logged.event.quiet_s:g} s"
        return _keep_printable(f"[{format_duration(logged.time_s)}] nothing has moved{quiet}; {first}")
    data = logged.data
    if isinstance(logged.event, events.BackendUp):
        version, verb = data.get("version"), "goes on" if logged.who == "trainer" else "serves"
        since = "" if version is None else f", {verb} from version {version}"
        return f"[{format_duration(logged.time_s)}] {logged.who}: back in service{since}"
    message = data.pop("message", None) or data.pop("error", "")
    data.pop("error", None)
    details = [str(message)] if message else []
    details += [f"{key} {value}" for key, value in data.items()]
    text = f"{logged.kind}: {', '.join(details)}" if details else logged.kind
    line = f"[{format_duration(logged.time_s)}] {logged.who}: {text}"
    return _keep_printable(line)


def _keep_printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line)[:300]


def _make_incident_pattern(event: Event) -> str:
    """Return what incidents that differ only in numbers have in common."""
    message = event.message if isinstance(event, events.ErrorReport) else ""
    return re.sub(r"\d+", "#", f"{event.kind} {event.who} {message}")


def make_sparkline(values: Sequence[float], columns: int = _SPARK_COLUMNS) -> str:
    """Return a curve in one line of text; more values than columns are averaged."""
    count = min(len(values), columns)
    edges = [round(place * len(values) / count) for place in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not means:
        return ""
    low, high = min(means), max(means)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((mean - low) / (high - low) * top) if high > low else top // 2] for mean in means)


def _format_headline(monitor: RunMonitor, now_s: float, total: int | None) -> str:
    versions = monitor.lag.versions
    trained = 0 if versions.trained is None else versions.trained
    served = trained if versions.served is None else versions.served
    spent = format_duration(max(0.0, now_s - (monitor.clock.first_s or 0.0)))
    if not total:
        return f"step {trained}   served {served}   {spent}"
    filled = round(_BAR_COLUMNS * min(1.0, trained / total))
    bar = "━" * filled + "╌" * (_BAR_COLUMNS - filled)
    remaining = _format_remaining_time(monitor, now_s, total - trained)
    return f"step {trained}/{total}  {bar}  {spent}{remaining}   served {served}"


def _format_remaining_time(monitor: RunMonitor, now_s: float, left: int) -> str:
    recent = monitor.throughput.steps[-_RECENT_STEPS:]
    if not recent or left <= 0:
        return ""
    each_s = sum(step.seconds for step in recent) / len(recent)
    return f", {format_duration(max(0.0, left * each_s - (now_s - recent[-1].end_s)))} left"


def _format_learning(
    steps: Sequence[StepRecord],
    validations: Sequence[ValidationResult],
    episodes: Sequence[EpisodeOutcomes],
    width: int,
) -> Text:
    """Return reward, held-out reward and success, each with its curve."""
    parts = []
    for name, values, recent in (
        ("reward", [step.reward for step in steps], _RECENT_STEPS),
        (validations[-1].label if validations else "", [one.reward for one in validations], 1),
        ("success", [one.success for one in episodes], _RECENT_STEPS),
    ):
        known = [value for value in values if value is not None]
        if known:
            last = known[-recent:]
            parts.append((f"{name} {format_number(sum(last) / len(last))}", known))
    # Curves share what the words leave of the line.
    columns = (width - sum(len(words) + 4 for words, _ in parts)) // max(1, len(parts))
    lines = [f"{words} {make_sparkline(known, min(_SPARK_COLUMNS, max(4, columns)))}" for words, known in parts]
    if validations and validations[-1].failed:
        lines.append(validations[-1].describe_failures())
    return Text("   ".join(lines), style="green")


def _format_progress(monitor: RunMonitor, recent: Sequence[StepRecord]) -> str:
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


def _format_lengths(monitor: RunMonitor) -> str:
    bias = monitor.bias.bias()
    if bias is None or bias.length_trained is None or bias.length_started is None:
        return ""
    return f"   length {format_number(bias.length_trained)} of {format_number(bias.length_started)} started"


def _format_current_step(monitor: RunMonitor, now_s: float) -> str:
    """Return what moves while a step is under way."""
    steps = monitor.throughput.steps
    since_s = steps[-1].end_s if steps else monitor.clock.first_s or 0.0
    made = format_number(monitor.throughput.generated)
    spent = format_duration(max(0.0, now_s - since_s))
    return f"this step {spent}   {made} tokens of finished requests{_format_lengths(monitor)}"


def _make_role_grid(monitor: RunMonitor) -> Table:
    """Return what each role is doing, a few to a row."""
    table = Table.grid(padding=(0, 3))
    cells = [f"{STATE_SIGNS.get(state, '!')} {who} {state}" for who, state in monitor.usage.states.items()]
    busy, engines = monitor.usage.engines_busy
    if engines:
        cells.append(f"● engines {busy} of {engines} busy, {monitor.usage.open_requests} requests")
    for first in range(0, len(cells), 4):
        table.add_row(*(Text(cell) for cell in cells[first : first + 4]))
    return table
