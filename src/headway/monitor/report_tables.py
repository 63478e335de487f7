"""A report as text: four tables that fit a terminal of 100 columns, and a summary of a training run in a few rows.

The summary answers what a user asks first: did it learn, how fast, how far off-policy, what was lost. It stands at the
end of `headway train`, in `headway report` and at the top of the report page. Numbers are rounded for people;
`RunReport.to_dict` has them whole.
"""

from itertools import zip_longest
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.monitor.role_usage import EngineUsage
from headway.monitor.run_report import RunReport
from headway.monitor.sample_bias import BiasSummary

_MOST_ENGINE_ROWS = 8
_BAR_COLUMNS = 24
_MOST_DROP_REASONS = 3


# -- numbers


def format_percent(share: float) -> str:
    """Return a share as `41.3%`; one that rounding left just below 0 is 0."""
    return f"{max(100 * share, 0.0):.1f}%"


def format_number(value: float) -> str:
    """Return three or four figures, thousands with a comma."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    for limit, digits in ((100, 1), (1, 2), (0.01, 3)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return "0" if value == 0 else f"{value:.1e}"


def format_duration(value: float) -> str:
    """Return seconds as `2 h 05 min`, `3 min 20 s` or `4.20 s`."""
    if value < 60:
        return f"{format_number(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _format_bar(share: float) -> str:
    """Return a bar of `#`, at least one for every share above 0."""
    return "#" * (max(1, round(share * _BAR_COLUMNS)) if share > 0 else 0)


# -- the tables of a report


def print_report(report: RunReport, console: Console | None = None) -> None:
    """Print the tables, with a blank line after each."""
    console = console or Console()
    tables = [_make_overview_table(report), _make_role_table(report)]
    if report.lag.samples:
        tables.append(_make_lag_table(report))
    if report.ends.dropped:
        tables.append(_make_drop_table(report))
    if report.bias is not None:
        tables.append(_make_bias_table(report.bias))
    for table in tables:
        console.print(table)
        console.print()
    if report.bias is not None and (difference := report.bias.describe()):
        console.print(Text(difference))
        console.print()


def format_report_text(report: RunReport, width: int = 100) -> str:
    """Return the tables as text without colour and without padding at the ends of lines."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        print_report(report, console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _make_overview_table(report: RunReport) -> Table:
    """Return two columns of names and values."""
    table = Table(title="Run", box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
    for left, right in zip_longest(_make_speed_rows(report), _make_health_rows(report), fillvalue=("", "")):
        table.add_row(*map(Text, (*left, *right)))
    return table


def _make_speed_rows(report: RunReport) -> list[tuple[str, str]]:
    speed, window = report.throughput, report.window
    measured = f"{window.steps} of {len(speed.steps)}" if window.warmed_up else f"{window.steps}, warm-up included"
    rows = [
        ("duration", format_duration(report.duration_s)),
        ("steps measured", measured),
        ("seconds per step", format_number(speed.step_mean_s)),
        ("p50, p95", f"{format_number(speed.step_p50_s)}, {format_number(speed.step_p95_s)}"),
        ("of which training", format_number(speed.train_mean_s)),
        ("generation", format_number(report.phases.generation_s)),
        ("log-probabilities", format_number(report.phases.logp_s)),
        ("update", format_number(report.phases.update_s)),
        ("weight sync", format_number(report.phases.sync_s)),
        ("samples/s", format_number(speed.samples_per_s)),
        ("actions/s", format_number(speed.actions_per_s)),
    ]
    if speed.reward_last is not None and speed.reward_first is not None:
        rows.append(("reward", f"{format_number(speed.reward_first)} → {format_number(speed.reward_last)}"))
    return rows


def _make_health_rows(report: RunReport) -> list[tuple[str, str]]:
    lag, ends, pool = report.lag, report.ends, report.usage.pool
    rows = [
        ("lag", f"mean {format_number(lag.mean)}, max {lag.max}"),
        ("in flight, in queue", f"{format_number(lag.mean_in_flight)}, {format_number(lag.mean_in_queue)}"),
        ("served behind trained", f"mean {format_number(lag.behind_mean)}, max {lag.behind_max}"),
        ("samples trained", format_number(ends.trained or lag.samples)),
        ("samples dropped", f"{format_number(ends.dropped)}  ({format_percent(ends.drop_share)})"),
    ]
    if pool:
        rows += [("engines busy", format_percent(pool.busy)), ("requests at once", format_number(pool.concurrency))]
    return [*rows, ("incidents", _format_faults(report) or "none")]


def _format_faults(report: RunReport) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in report.faults.items())


def _make_table(title: str, first_column: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column(first_column, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table


def _make_role_table(report: RunReport) -> Table:
    """Return every stage and worker pool, then the engines; of many engines, the least and the most busy ones."""
    table = _make_table("Roles", "role", "busy", "waiting", "blocked", "bubble", "at once", "done")
    for role in report.usage.roles:
        busy, bubble = format_percent(role.busy), format_percent(role.bubble)
        at_once, done = (format_number(role.concurrency), format_number(role.spans)) if role.spans else ("", "")
        waiting, blocked = (format_percent(role.waiting), format_percent(role.blocked)) if role.states else ("", "")
        table.add_row(Text(role.role), busy, waiting, blocked, bubble, at_once, done)
    engines, pool = report.usage.engines, report.usage.pool
    if pool:
        table.add_section()
        _add_engine_row(table, pool, f"all {len(engines)} engines")
        if len(engines) > _MOST_ENGINE_ROWS:
            by_load, half = sorted(engines, key=lambda engine: engine.busy), _MOST_ENGINE_ROWS // 2
            engines = (*by_load[:half], *by_load[-half:])
        for engine in engines:
            _add_engine_row(table, engine, f"  {engine.engine}")
    return table


def _add_engine_row(table: Table, engine: EngineUsage, label: str) -> None:
    busy, bubble = format_percent(engine.busy), format_percent(engine.bubble)
    table.add_row(Text(label), busy, "", "", bubble, format_number(engine.concurrency), format_number(engine.requests))


def _make_lag_table(report: RunReport) -> Table:
    """Return the lag histogram, with bars."""
    table = Table(title="Lag of trained samples, in policy versions", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("lag", "samples", "share", "", "in flight", "in queue"):
        table.add_column(name, justify="right" if name else "left", no_wrap=name in ("samples", ""))
    tallest = max(lag.samples for lag in report.lag.histogram)
    for lag in report.lag.histogram:
        share, bar = format_percent(lag.samples / report.lag.samples), _format_bar(lag.samples / tallest)
        parts = map(format_number, (lag.in_flight, lag.in_queue))
        table.add_row(str(lag.lag), format_number(lag.samples), share, bar, *parts)
    return table


def _make_drop_table(report: RunReport) -> Table:
    """Return the dropped samples by reason."""
    table = _make_table("Dropped samples", "reason", "samples", "share", "")
    counts = report.ends.drops
    total, most = sum(counts.values()), max(counts.values(), default=1)
    for reason, count in counts.items():
        table.add_row(Text(reason), format_number(count), format_percent(count / total), _format_bar(count / most))
    return table


def _make_bias_table(bias: BiasSummary) -> Table:
    """Return length and reward of what was started, dropped and trained."""
    table = _make_table("Started, dropped, trained", "samples", "mean length", "mean reward")
    rows = {
        "started": (bias.length_started, bias.reward_started),
        "dropped": (bias.length_dropped, bias.reward_dropped),
        "trained": (bias.length_trained, bias.reward_trained),
    }
    for name, means in rows.items():
        table.add_row(name, *("-" if mean is None else format_number(mean) for mean in means))
    table.add_row("bias", f"{100 * bias.length_bias:+.1f}%", f"{100 * bias.reward_bias:+.1f}%")
    return table


# -- the summary of a training run


class SummaryRow(NamedTuple):
    """One line of the summary."""

    name: str
    value: str
    note: str = ""
    """The small print."""


def make_summary_rows(report: RunReport) -> list[SummaryRow]:
    """Return the rows for which the run has numbers."""
    learning = (_summarize_held_out, _summarize_success, _summarize_reward, _summarize_steps, _summarize_speed)
    health = (_summarize_work, _summarize_lag, _summarize_mismatch, _summarize_drops, _summarize_bias)
    rows = [summarize(report) for summarize in (*learning, *health, _summarize_waiting)]
    if report.faults:
        rows.append(SummaryRow("incidents", format_number(sum(report.faults.values())), _format_faults(report)))
    return [row for row in rows if row is not None]


def print_training_summary(report: RunReport, console: Console | None = None) -> None:
    """Print the rows as a table without lines, narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim")
    for row in make_summary_rows(report):
        table.add_row(*map(Text, row))
    (console or Console()).print(table)


def _summarize_held_out(report: RunReport) -> SummaryRow | None:
    rewards = [(one, one.reward) for one in report.validations if one.reward is not None]
    if not report.validations:
        return None
    name = "held-out reward" + (" (mixed versions)" if any(one.mixed for one in report.validations) else "")
    if not rewards:
        return SummaryRow(name, "-", report.validations[-1].describe_failures())
    failed = [one for one in report.validations if one.failed]
    failures = f"; after {failed[-1].trained} {failed[-1].describe_failures()}" if failed else ""
    (first, first_reward), (last, last_reward) = rewards[0], rewards[-1]
    if len(rewards) == 1:
        note = f"after step {last.trained}, {last.samples} samples{failures}"
        return SummaryRow(name, format_number(last_reward), note)
    best, best_reward = max(rewards, key=lambda pair: pair[1])
    note = f"after step {first.trained} and {last.trained}, {last.samples} samples"
    if best_reward > last_reward:
        note += f"; best {format_number(best_reward)} after {best.trained}"
    return SummaryRow(name, f"{format_number(first_reward)} → {format_number(last_reward)}", note + failures)


def _summarize_success(report: RunReport) -> SummaryRow | None:
    """Summarize held-out episodes if there are any, else those generated for training."""
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


def _summarize_reward(report: RunReport) -> SummaryRow | None:
    speed = report.throughput
    if speed.reward_first is None or speed.reward_last is None:
        return None
    rewarded = sum(step.reward is not None for step in speed.steps)
    if rewarded == 1:
        return SummaryRow("training reward", format_number(speed.reward_last), "of the only step")
    tenth = max(1, rewarded // 10)
    note = "first and last step" if tenth == 1 else f"means of the first and last {tenth} steps"
    value = f"{format_number(speed.reward_first)} → {format_number(speed.reward_last)}"
    return SummaryRow("training reward", value, note)


def _summarize_steps(report: RunReport) -> SummaryRow:
    speed = report.throughput
    made = len({step.trained for step in speed.steps})
    value = f"{made:,} in {format_duration(report.duration_s)}"
    if not made:
        return SummaryRow("steps", value)
    note = f"{format_duration(speed.step_mean_s)} a step, {format_duration(speed.train_mean_s)} of it training"
    again = len(speed.steps) - made
    return SummaryRow("steps", value, f"{note}; {again} made again after a loss" if again else note)


def _summarize_speed(report: RunReport) -> SummaryRow | None:
    speed, pool = report.throughput, report.usage.pool
    if not speed.steps:
        return None
    note = f"{format_number(speed.actions_per_s)} tokens/s trained"
    if pool is not None:
        note += f", {format_number(pool.actions_per_s)} generated"
    return SummaryRow("samples/s", format_number(speed.samples_per_s), note)


def _summarize_work(report: RunReport) -> SummaryRow | None:
    speed = report.throughput
    if not speed.mfu:
        return None
    note = f"MFU {format_percent(speed.mfu)} of the chip, in bf16"
    return SummaryRow("training", f"{format_number(speed.train_tflops)} TFLOP/s", note)


def _summarize_lag(report: RunReport) -> SummaryRow | None:
    lag = report.lag
    if not lag.samples:
        return None
    in_flight, in_queue = format_number(lag.mean_in_flight), format_number(lag.mean_in_queue)
    note = f"versions; {in_flight} while made, {in_queue} while waiting"
    return SummaryRow("lag", f"mean {format_number(lag.mean)}, max {lag.max}", note)


def _summarize_mismatch(report: RunReport) -> SummaryRow | None:
    """Warn if engines and trainer computed different probabilities under the same weights."""
    steps = [step for step in report.throughput.steps if step.is_mismatched]
    if not steps:
        return None
    worst = max(steps, key=lambda step: step.mismatch or 0.0)
    note = f"KL a token on the same weights, after step {worst.trained}; {len(steps)} steps"
    return SummaryRow("engine ≠ trainer", format_number(worst.mismatch or 0.0), note)


def _summarize_drops(report: RunReport) -> SummaryRow | None:
    ends = report.ends
    if not ends.started and not ends.dropped:
        return None
    reasons = [f"{reason} {format_number(count)}" for reason, count in ends.drops.items()]
    if len(reasons) > _MOST_DROP_REASONS:
        others = sum(list(ends.drops.values())[_MOST_DROP_REASONS:])
        reasons = [*reasons[:_MOST_DROP_REASONS], f"other {format_number(others)}"]
    value = f"{format_number(ends.dropped)} ({format_percent(ends.drop_share)})" if ends.dropped else "none"
    return SummaryRow("dropped samples", value, ", ".join(reasons))


def _summarize_bias(report: RunReport) -> SummaryRow | None:
    """Summarize the lengths of what was trained, against what was started."""
    bias = report.bias
    if bias is None or bias.length_trained is None or bias.length_started is None:
        return None
    note = f"trained {format_number(bias.length_trained)} tokens, started {format_number(bias.length_started)}"
    if bias.length_dropped is not None:
        note += f", dropped at {format_number(bias.length_dropped)}"
    if bias.reward_dropped is not None and bias.reward_started is not None:
        note += f"; reward {format_number(bias.reward_started)} started, {format_number(bias.reward_dropped)} dropped"
    return SummaryRow("length bias", f"{100 * bias.length_bias:+.1f}%", note)


def _summarize_waiting(report: RunReport) -> SummaryRow | None:
    for role in report.usage.roles:
        if role.role == "train" and role.states and report.throughput.steps:
            return SummaryRow("trainer waited", format_percent(role.waiting), "of the time, for samples")
    return None
