"""A report as text: four tables that fit a terminal of 100 columns and read as well without colour.

Numbers are rounded for people; `RunReport.to_dict` has them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.monitor.report import RunReport
from headway.monitor.usage import EngineUsage

_ENGINE_ROWS = 8
_BAR_COLUMNS = 40


def tables(report: RunReport) -> list[Table]:
    """Summary, roles, lag and, where there are any, drops."""
    parts = [summary_table(report), role_table(report)]
    if report.lag.samples:
        parts.append(lag_table(report))
    if report.ends.dropped:
        parts.append(drop_table(report))
    return parts


def render(report: RunReport, console: Console | None = None) -> None:
    """Print the tables, a blank line between them."""
    console = console or Console()
    for table in tables(report):
        console.print(table)
        console.print()


def summary_table(report: RunReport) -> Table:
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
        ("duration", seconds(report.duration_s)),
        ("steps measured", measured),
        ("seconds per step", number(speed.step_mean_s)),
        ("p50, p95", f"{number(speed.step_p50_s)}, {number(speed.step_p95_s)}"),
        ("of which training", number(speed.train_mean_s)),
        ("samples/s", number(speed.samples_per_s)),
        ("actions/s", number(speed.actions_per_s)),
    ]
    if speed.reward_last is not None and speed.reward_first is not None:
        rows.append(("reward", f"{number(speed.reward_first)} → {number(speed.reward_last)}"))
    return rows


def _health_rows(report: RunReport) -> list[tuple[str, str]]:
    lag, ends, pool = report.lag, report.ends, report.usage.pool
    rows = [
        ("lag", f"mean {number(lag.mean)}, max {lag.max}"),
        ("in flight, in queue", f"{number(lag.mean_in_flight)}, {number(lag.mean_in_queue)}"),
        ("served behind trained", f"mean {number(lag.behind_mean)}, max {lag.behind_max}"),
        ("samples trained", number(ends.trained or lag.samples)),
        ("samples dropped", f"{number(ends.dropped)}  ({percent(ends.drop_share)})"),
    ]
    if pool:
        rows.append(("engines busy", f"{percent(pool.busy)}  ({number(pool.concurrency)} requests at once)"))
    faults = ", ".join(f"{count} {kind}" for kind, count in report.faults.items())
    rows.append(("incidents", faults or "none"))
    return rows


def role_table(report: RunReport) -> Table:
    """Every stage and worker pool, then the engines; beyond a few engines the slackest and the busiest."""
    table = Table(title="Roles", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("role", no_wrap=True)
    for name in ("busy", "waiting", "blocked", "bubble", "at once", "done"):
        table.add_column(name, justify="right", no_wrap=True)
    for role in report.usage.roles:
        at_once, done = (number(role.concurrency), number(role.spans)) if role.spans else ("", "")
        waiting = percent(role.waiting) if role.states else ""
        blocked = percent(role.blocked) if role.states else ""
        table.add_row(Text(role.role), percent(role.busy), waiting, blocked, percent(role.bubble), at_once, done)
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
    cells = (percent(engine.busy), "", "", percent(engine.bubble), number(engine.concurrency), number(engine.requests))
    table.add_row(Text(label), *cells)


def lag_table(report: RunReport) -> Table:
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
            number(bin_.samples),
            percent(bin_.samples / report.lag.samples),
            bar(bin_.samples / tallest, _BAR_COLUMNS),
            number(bin_.in_flight),
            number(bin_.in_queue),
        )
    return table


def drop_table(report: RunReport) -> Table:
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
        table.add_row(Text(name), number(count), percent(count / total), bar(count / tallest, _BAR_COLUMNS))
    return table


def bar(share: float, columns: int) -> str:
    """A bar of `#`: the shortest that is not nothing has one."""
    length = round(share * columns)
    return "#" * (max(1, length) if share > 0 else 0)


def percent(share: float) -> str:
    """`41.3%`."""
    return f"{max(100 * share, 0.0):.1f}%"  # a share that rounding left just below nothing is nothing


def number(value: float) -> str:
    """Three or four figures, thousands with a comma."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    for limit, digits in ((100, 1), (1, 2), (0.01, 3)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return "0" if value == 0 else f"{value:.1e}"


def seconds(value: float) -> str:
    """`2 h 05 min`, `3 min 20 s` or `4.20 s`."""
    if value < 60:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plain_text(report: RunReport, width: int = 100) -> str:
    """The tables as text without colour."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        render(report, console)
    return strip_right(capture.get().splitlines())


def strip_right(lines: Iterable[str]) -> str:
    """Lines without the padding at their ends."""
    return "\n".join(line.rstrip() for line in lines) + "\n"
