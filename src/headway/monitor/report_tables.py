"""A report as text: four tables that fit a terminal of 100 columns and read as well without colour.

Numbers are rounded for people; `RunReport.to_dict` has them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.monitor.role_usage import EngineUsage
from headway.monitor.run_report import RunReport, ValidationResult

_ENGINE_ROWS = 8
_BAR_COLUMNS = 40


def make_report_tables(report: RunReport) -> list[Table]:
    """Summary, roles, lag and, where there are any, drops."""
    parts = [make_summary_table(report), make_role_table(report)]
    if report.lag.samples:
        parts.append(make_lag_table(report))
    if report.ends.dropped:
        parts.append(make_drop_table(report))
    return parts


def print_report(report: RunReport, console: Console | None = None) -> None:
    """Print the tables, a blank line between them."""
    console = console or Console()
    for table in make_report_tables(report):
        console.print(table)
        console.print()


def make_summary_table(report: RunReport) -> Table:
    """Two columns of names and values."""
    table = Table(title="Run", box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
    speed, health = _speed_rows(report), _health_rows(report)
    height = max(len(speed), len(health))
    padding = [("", "")] * height
    for left, right in zip([*speed, *padding][:height], [*health, *padding][:height], strict=True):
        table.add_row(*map(Text, (*left, *right)))
    return table


def _speed_rows(report: RunReport) -> list[tuple[str, str]]:
    speed, window = report.throughput, report.window
    measured = f"{window.steps} of {len(speed.steps)}" if window.warmed_up else f"{window.steps}, warm-up included"
    rows = [
        ("duration", format_duration(report.duration_s)),
        ("steps measured", measured),
        ("seconds per step", format_number(speed.step_mean_s)),
        ("p50, p95", f"{format_number(speed.step_p50_s)}, {format_number(speed.step_p95_s)}"),
        ("of which training", format_number(speed.train_mean_s)),
        ("samples/s", format_number(speed.samples_per_s)),
        ("actions/s", format_number(speed.actions_per_s)),
    ]
    if speed.reward_last is not None and speed.reward_first is not None:
        rows.append(("reward", f"{format_number(speed.reward_first)} → {format_number(speed.reward_last)}"))
    return rows


def _health_rows(report: RunReport) -> list[tuple[str, str]]:
    lag, ends, pool = report.lag, report.ends, report.usage.pool
    rows = [
        ("lag", f"mean {format_number(lag.mean)}, max {lag.max}"),
        ("in flight, in queue", f"{format_number(lag.mean_in_flight)}, {format_number(lag.mean_in_queue)}"),
        ("served behind trained", f"mean {format_number(lag.behind_mean)}, max {lag.behind_max}"),
        ("samples trained", format_number(ends.trained or lag.samples)),
        ("samples dropped", f"{format_number(ends.dropped)}  ({format_percent(ends.drop_share)})"),
    ]
    if pool:
        rows.append(
            ("engines busy", f"{format_percent(pool.busy)}  ({format_number(pool.concurrency)} requests at once)")
        )
    faults = ", ".join(f"{count} {kind}" for kind, count in report.faults.items())
    rows.append(("incidents", faults or "none"))
    return rows


def make_role_table(report: RunReport) -> Table:
    """Every stage and worker pool, then the engines; beyond a few engines the slackest and the busiest."""
    table = Table(title="Roles", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("role", no_wrap=True)
    for name in ("busy", "waiting", "blocked", "bubble", "at once", "done"):
        table.add_column(name, justify="right", no_wrap=True)
    for role in report.usage.roles:
        at_once, done = (format_number(role.concurrency), format_number(role.spans)) if role.spans else ("", "")
        waiting = format_percent(role.waiting) if role.states else ""
        blocked = format_percent(role.blocked) if role.states else ""
        table.add_row(
            Text(role.role), format_percent(role.busy), waiting, blocked, format_percent(role.bubble), at_once, done
        )
    pool = report.usage.pool
    if pool:
        table.add_section()
        _add_engine(table, pool, f"all {len(report.usage.engines)} engines")
        for engine in _shown_engines(report.usage.engines):
            _add_engine(table, engine, f"  {engine.engine}")
    return table


def _shown_engines(engines: tuple[EngineUsage, ...]) -> tuple[EngineUsage, ...]:
    if len(engines) <= _ENGINE_ROWS:
        return engines
    by_load = sorted(engines, key=lambda engine: engine.busy)
    half = _ENGINE_ROWS // 2
    return (*by_load[:half], *by_load[-half:])


def _add_engine(table: Table, engine: EngineUsage, label: str) -> None:
    cells = (
        format_percent(engine.busy),
        "",
        "",
        format_percent(engine.bubble),
        format_number(engine.concurrency),
        format_number(engine.requests),
    )
    table.add_row(Text(label), *cells)


def make_lag_table(report: RunReport) -> Table:
    """The lag histogram, with bars."""
    table = Table(title="Lag of trained samples, in policy versions", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("lag", justify="right")
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("in flight", justify="right")
    table.add_column("in queue", justify="right")
    tallest = max(bin_.samples for bin_ in report.lag.histogram)
    for bin_ in report.lag.histogram:
        table.add_row(
            str(bin_.lag),
            format_number(bin_.samples),
            format_percent(bin_.samples / report.lag.samples),
            format_bar(bin_.samples / tallest, _BAR_COLUMNS),
            format_number(bin_.in_flight),
            format_number(bin_.in_queue),
        )
    return table


def make_drop_table(report: RunReport) -> Table:
    """Dropped samples by reason."""
    return _counts_table("Dropped samples", "reason", report.ends.drops)


def _counts_table(title: str, head: str, counts: Mapping[str, int]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column(head, no_wrap=True)
    table.add_column("samples", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    total, tallest = sum(counts.values()), max(counts.values(), default=1)
    for name, count in counts.items():
        table.add_row(
            Text(name), format_number(count), format_percent(count / total), format_bar(count / tallest, _BAR_COLUMNS)
        )
    return table


def format_bar(share: float, columns: int) -> str:
    """A bar of `#`: the shortest that is not nothing has one."""
    length = round(share * columns)
    return "#" * (max(1, length) if share > 0 else 0)


def format_percent(share: float) -> str:
    """`41.3%`."""
    return f"{max(100 * share, 0.0):.1f}%"  # a share that rounding left just below nothing is nothing


def format_number(value: float) -> str:
    """Three or four figures, thousands with a comma."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    for limit, digits in ((100, 1), (1, 2), (0.01, 3)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return "0" if value == 0 else f"{value:.1e}"


def format_duration(value: float) -> str:
    """`2 h 05 min`, `3 min 20 s` or `4.20 s`."""
    if value < 60:
        return f"{format_number(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_report_text(report: RunReport, width: int = 100) -> str:
    """The tables as text without colour."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        print_report(report, console)
    return strip_line_ends(capture.get().splitlines())


def strip_line_ends(lines: Iterable[str]) -> str:
    """Lines without the padding at their ends."""
    return "\n".join(line.rstrip() for line in lines) + "\n"


_TRAINER = "train"
_MOST_REASONS = 3


class SummaryRow(NamedTuple):
    """One line: a name, what it came to, and the small print."""

    name: str
    value: str
    note: str = ""


def make_summary_rows(report: RunReport) -> list[SummaryRow]:
    """The rows that this run has something to say about."""
    rows = [_held_out(report.validations), _success(report), _reward(report), _steps(report), _speed(report)]
    rows += [_work(report), _lag(report), _torn(report)]
    rows += [_dropped(report), _waited(report), _incidents(report)]
    return [row for row in rows if row is not None]


def make_training_table(report: RunReport) -> Table:
    """The rows as a table without lines, narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim")
    for row in make_summary_rows(report):
        table.add_row(*map(Text, row))
    return table


def print_training_summary(report: RunReport, console: Console | None = None) -> None:
    """Print the table."""
    (console or Console()).print(make_training_table(report))


def _held_out(validations: tuple[ValidationResult, ...]) -> SummaryRow | None:
    judged = [one for one in validations if one.reward is not None]
    if not judged:
        return None
    first, last = judged[0], judged[-1]
    assert first.reward is not None and last.reward is not None
    if len(judged) == 1:
        return SummaryRow(
            "held-out reward", format_number(last.reward), f"after step {last.trained}, {last.samples} samples"
        )
    best = max(judged, key=lambda one: one.reward or 0.0)
    note = f"after step {first.trained} and {last.trained}, {last.samples} samples"
    if best.reward is not None and best.reward > last.reward:
        note += f"; best {format_number(best.reward)} after {best.trained}"
    return SummaryRow("held-out reward", f"{format_number(first.reward)} → {format_number(last.reward)}", note)


def _success(report: RunReport) -> SummaryRow | None:
    """Of held-out episodes where there are any, else of those made for training."""
    name = "held-out success" if report.held_out_episodes else "success"
    known = [one for one in report.held_out_episodes or report.episodes if one.success is not None]
    if not known:
        return None
    first, last = known[0], known[-1]
    note = f"{format_number(last.turns)} turns, {format_percent(last.invalid)} of them invalid"
    if len(known) > 1:
        note += f" ({format_percent(first.invalid)} before)"
    value = format_percent(last.success or 0.0)
    return SummaryRow(name, value if len(known) == 1 else f"{format_percent(first.success or 0.0)} → {value}", note)


def _reward(report: RunReport) -> SummaryRow | None:
    speed = report.throughput
    if speed.reward_first is None or speed.reward_last is None:
        return None
    rewarded = sum(step.reward is not None for step in speed.steps)
    if rewarded == 1:
        return SummaryRow("training reward", format_number(speed.reward_last), "of the only step")
    tenth = max(1, rewarded // 10)
    note = "first and last step" if tenth == 1 else f"means of the first and last {tenth} steps"
    return SummaryRow(
        "training reward", f"{format_number(speed.reward_first)} → {format_number(speed.reward_last)}", note
    )


def _steps(report: RunReport) -> SummaryRow:
    speed = report.throughput
    made = len({step.trained for step in speed.steps})
    value = f"{made:,} in {format_duration(report.duration_s)}"
    if not made:
        return SummaryRow("steps", value)
    note = f"{format_duration(speed.step_mean_s)} a step, {format_duration(speed.train_mean_s)} of it training"
    again = len(speed.steps) - made
    return SummaryRow("steps", value, f"{note}; {again} made again after a loss" if again else note)


def _speed(report: RunReport) -> SummaryRow | None:
    speed, pool = report.throughput, report.usage.pool
    if not speed.steps:
        return None
    note = f"{format_number(speed.actions_per_s)} tokens/s trained"
    if pool is not None:
        note += f", {format_number(pool.actions_per_s)} generated"
    return SummaryRow("samples/s", format_number(speed.samples_per_s), note)


def _work(report: RunReport) -> SummaryRow | None:
    speed = report.throughput
    if not speed.mfu:
        return None
    return SummaryRow(
        "training",
        f"{format_number(speed.train_tflops)} TFLOP/s",
        f"MFU {format_percent(speed.mfu)} of the chip, in bf16",
    )


def _lag(report: RunReport) -> SummaryRow | None:
    lag = report.lag
    if not lag.samples:
        return None
    note = f"versions; {format_number(lag.mean_in_flight)} while made, {format_number(lag.mean_in_queue)} while waiting"
    return SummaryRow("lag", f"mean {format_number(lag.mean)}, max {lag.max}", note)


def _torn(report: RunReport) -> SummaryRow | None:
    """Only where something is wrong: the same weights must say the same."""
    torn = [step for step in report.throughput.steps if step.torn]
    if not torn:
        return None
    worst = max(torn, key=lambda step: step.mismatch or 0.0)
    note = f"KL a token on the same weights, after step {worst.trained}; {len(torn)} steps"
    return SummaryRow("engine ≠ trainer", format_number(worst.mismatch or 0.0), note)


def _dropped(report: RunReport) -> SummaryRow | None:
    ends = report.ends
    if not ends.started and not ends.dropped:
        return None
    reasons = [f"{reason} {format_number(count)}" for reason, count in ends.drops.items()]
    if len(reasons) > _MOST_REASONS:
        rest = sum(list(ends.drops.values())[_MOST_REASONS:])
        reasons = [*reasons[:_MOST_REASONS], f"other {format_number(rest)}"]
    value = f"{format_number(ends.dropped)} ({format_percent(ends.drop_share)})" if ends.dropped else "none"
    return SummaryRow("dropped samples", value, ", ".join(reasons))


def _waited(report: RunReport) -> SummaryRow | None:
    for role in report.usage.roles:
        if role.role == _TRAINER and role.states and report.throughput.steps:
            return SummaryRow("trainer waited", format_percent(role.waiting), "of the time, for samples")
    return None


def _incidents(report: RunReport) -> SummaryRow | None:
    if not report.faults:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.faults.items())
    return SummaryRow("incidents", format_number(sum(report.faults.values())), kinds)
