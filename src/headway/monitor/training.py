"""What a training run came to, in a handful of rows: did it learn, how fast, how far off-policy, what was lost.

The same rows stand at the end of `headway train`, in `headway report` and at the top of the report page. Means and
rates are those of the measured window, counts those of the whole run, as everywhere in this package.
"""

from __future__ import annotations

from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.monitor.report import RunReport, Validation
from headway.monitor.tables import number, percent, seconds

_TRAINER = "train"
_MOST_REASONS = 3


class Row(NamedTuple):
    """One line: a name, what it came to, and the small print."""

    name: str
    value: str
    note: str = ""


def training_rows(report: RunReport) -> list[Row]:
    """The rows that this run has something to say about."""
    rows = [_held_out(report.validations), _success(report), _reward(report), _steps(report), _speed(report)]
    rows += [_work(report), _lag(report), _torn(report)]
    rows += [_dropped(report), _waited(report), _incidents(report)]
    return [row for row in rows if row is not None]


def training_table(report: RunReport) -> Table:
    """The rows as a table without lines, narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim")
    for row in training_rows(report):
        table.add_row(*map(Text, row))
    return table


def render_training(report: RunReport, console: Console | None = None) -> None:
    """Print the table."""
    (console or Console()).print(training_table(report))


def _held_out(validations: tuple[Validation, ...]) -> Row | None:
    judged = [one for one in validations if one.reward is not None]
    if not judged:
        return None
    first, last = judged[0], judged[-1]
    assert first.reward is not None and last.reward is not None
    if len(judged) == 1:
        return Row("held-out reward", number(last.reward), f"after step {last.trained}, {last.samples} samples")
    best = max(judged, key=lambda one: one.reward or 0.0)
    note = f"after step {first.trained} and {last.trained}, {last.samples} samples"
    if best.reward is not None and best.reward > last.reward:
        note += f"; best {number(best.reward)} after {best.trained}"
    return Row("held-out reward", f"{number(first.reward)} → {number(last.reward)}", note)


def _success(report: RunReport) -> Row | None:
    """Of held-out episodes where there are any, else of those made for training."""
    name = "held-out success" if report.held_out_episodes else "success"
    known = [one for one in report.held_out_episodes or report.episodes if one.success is not None]
    if not known:
        return None
    first, last = known[0], known[-1]
    note = f"{number(last.turns)} turns, {percent(last.invalid)} of them invalid"
    if len(known) > 1:
        note += f" ({percent(first.invalid)} before)"
    value = percent(last.success or 0.0)
    return Row(name, value if len(known) == 1 else f"{percent(first.success or 0.0)} → {value}", note)


def _reward(report: RunReport) -> Row | None:
    speed = report.throughput
    if speed.reward_first is None or speed.reward_last is None:
        return None
    rewarded = sum(step.reward is not None for step in speed.steps)
    if rewarded == 1:
        return Row("training reward", number(speed.reward_last), "of the only step")
    tenth = max(1, rewarded // 10)
    note = "first and last step" if tenth == 1 else f"means of the first and last {tenth} steps"
    return Row("training reward", f"{number(speed.reward_first)} → {number(speed.reward_last)}", note)


def _steps(report: RunReport) -> Row:
    speed = report.throughput
    made = len({step.trained for step in speed.steps})
    value = f"{made:,} in {seconds(report.duration_s)}"
    if not made:
        return Row("steps", value)
    note = f"{seconds(speed.step_mean_s)} a step, {seconds(speed.train_mean_s)} of it training"
    again = len(speed.steps) - made
    return Row("steps", value, f"{note}; {again} made again after a loss" if again else note)


def _speed(report: RunReport) -> Row | None:
    speed, pool = report.throughput, report.usage.pool
    if not speed.steps:
        return None
    note = f"{number(speed.actions_per_s)} tokens/s trained"
    if pool is not None:
        note += f", {number(pool.actions_per_s)} generated"
    return Row("samples/s", number(speed.samples_per_s), note)


def _work(report: RunReport) -> Row | None:
    speed = report.throughput
    if not speed.mfu:
        return None
    return Row("training", f"{number(speed.train_tflops)} TFLOP/s", f"MFU {percent(speed.mfu)} of the chip, in bf16")


def _lag(report: RunReport) -> Row | None:
    lag = report.lag
    if not lag.samples:
        return None
    note = f"versions; {number(lag.mean_in_flight)} while made, {number(lag.mean_in_queue)} while waiting"
    return Row("lag", f"mean {number(lag.mean)}, max {lag.max}", note)


def _torn(report: RunReport) -> Row | None:
    """Only where something is wrong: the same weights must say the same."""
    torn = [step for step in report.throughput.steps if step.torn]
    if not torn:
        return None
    worst = max(torn, key=lambda step: step.mismatch or 0.0)
    note = f"KL a token on the same weights, after step {worst.trained}; {len(torn)} steps"
    return Row("engine ≠ trainer", number(worst.mismatch or 0.0), note)


def _dropped(report: RunReport) -> Row | None:
    ends = report.ends
    if not ends.started and not ends.dropped:
        return None
    reasons = [f"{reason} {number(count)}" for reason, count in ends.drops.items()]
    if len(reasons) > _MOST_REASONS:
        rest = sum(list(ends.drops.values())[_MOST_REASONS:])
        reasons = [*reasons[:_MOST_REASONS], f"other {number(rest)}"]
    value = f"{number(ends.dropped)} ({percent(ends.drop_share)})" if ends.dropped else "none"
    return Row("dropped samples", value, ", ".join(reasons))


def _waited(report: RunReport) -> Row | None:
    for role in report.usage.roles:
        if role.role == _TRAINER and role.states and report.throughput.steps:
            return Row("trainer waited", percent(role.waiting), "of the time, for samples")
    return None


def _incidents(report: RunReport) -> Row | None:
    if not report.faults:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.faults.items())
    return Row("incidents", number(sum(report.faults.values())), kinds)
