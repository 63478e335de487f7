"""`headway train`: train a policy as a configuration says, and continue where an earlier process stopped.

    headway train examples/arithmetic.yaml async_generation_ratio=2
    headway train runs/mine --resume
    headway train examples/arithmetic.yaml --dry-run      # which component would run where and need what memory

Exit codes: 0 all steps are done, 1 the run ended early (its state is saved; the last line says how to go on), 2 the
input is wrong and nothing was started, 75 SIGTERM stopped it, as a batch system does before its time limit (the same
command goes on), 130 interrupted twice.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from headway.cli.cluster_command import print_layout, print_memory_fit
from headway.cli.code_trial import try_user_code
from headway.cli.command_line import ProgressLines, add_run_arguments, load_run_config, make_console
from headway.errors import ConfigError, HeadwayError
from headway.extras import suggest_install
from headway.flow.training_flow import RunSummary
from headway.launch.training_session import PreparedRun, identify_run, open_run_directory, prepare_run, run_training
from headway.monitor.event_files import read_event_log
from headway.monitor.live_display import LiveDisplay
from headway.monitor.report_page import render_report_page
from headway.monitor.report_tables import print_training_summary
from headway.monitor.run_report import RunMonitor, make_run_report
from headway.monitor.trackers import GuardedSink, make_exports, make_trackers
from headway.placement.memory_needs import estimate_component_needs
from headway.placement.plan_table import describe_plan
from headway.runs.dashboard_link import DashboardLink
from headway.runs.hub_upload import upload_checkpoint
from headway.runs.run_changes import OptionChange
from headway.runs.run_directory import LEDGER_FILE, LOCK_FILE, RunDirectory, find_checkpoint_of_run

HELP = "train a policy"
RESUMABLE = 75
"""Exit code after SIGTERM: start the same command again. Its name in `sysexits.h` is EX_TEMPFAIL."""
_PANEL_EVERY_S, _LINES_EVERY_S = 1.0, 5.0
"""How often a panel gets the status of the run, and lines, which rarely need it."""
_STOPPING = "the run stops after this step, with a checkpoint; once more, and it stops at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the run that is there; an error if none is")
    parser.add_argument("--dry-run", action="store_true", help="check it, try its code once, say what would go where")
    parser.add_argument("--no-dashboard", action="store_true", help="open no port for a live page")


def run_command(args: argparse.Namespace) -> int:
    """Check the configuration, train, and show how it went."""
    received: list[str] = []

    def terminate(number: int, frame: object) -> None:
        received.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)  # applies before there is a run to stop, too
    try:
        code = _train(args, received)
    except KeyboardInterrupt:
        if signal.SIGTERM.name not in received:
            raise
        print("stopped by SIGTERM before the run had begun", file=sys.stderr)
        return RESUMABLE
    return RESUMABLE if code in (1, 130) and signal.SIGTERM.name in received else code


def _train(args: argparse.Namespace, received: list[str]) -> int:
    """Train, append the names of signals to `received`, and return the exit code, whatever ended the run."""
    resolved = load_run_config(args.arguments)
    console, path = make_console(), Path(resolved.config.output_dir).expanduser()
    if not args.dry_run and (path / LOCK_FILE).exists():
        with RunDirectory(path):  # another run is at work here: refused before the model is read
            pass
    with ProgressLines("checking model, data and rewards") as progress:
        prepared = prepare_run(resolved, on_phase=lambda what: progress.say(f"reading {what}"))
    if args.resume and not (prepared.directory / LEDGER_FILE).exists():
        raise ConfigError("there is no run to go on with", key="output_dir", value=str(prepared.directory))
    if args.dry_run:
        directory = RunDirectory(prepared.directory)
        directory.refuse_lost_ledger(prepared.checkpoints)
        directory.compare_identity(prepared.resolved, *identify_run(prepared))
        print_introduction(prepared, 0, console, directory.changes)
        if directory.started:
            console.print(f"there is a run in {directory.path}: it would go on", markup=False, soft_wrap=True)
        _print_plan(prepared, console)
        with ProgressLines("trying rewards and environments once"):
            lines = asyncio.run(try_user_code(prepared))
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
        return 0
    with open_run_directory(prepared) as directory:
        done, wanted = directory.count_trained_steps(), prepared.resolved.config.max_steps
        if done >= wanted:
            directory.save_open_samples()
            _print_changes(directory.changes, console)
            print_finished(directory.path, done, console)
            return 0
        print_introduction(prepared, done, console, directory.changes)
        try:
            live = not args.no_dashboard
            summary = asyncio.run(train_with_display(prepared, directory, console, received, dashboard=live))
        except (asyncio.CancelledError, KeyboardInterrupt):
            if directory.started:
                step = directory.count_trained_steps()
                what = f"interrupted; the newest checkpoint is that of step {step}, and no sample is lost"
                _print_how_to_resume(what, directory.path)
                return 130
            raise KeyboardInterrupt from None
        except ConfigError:
            raise
        except HeadwayError as error:
            _print_how_to_resume(f"ended early{_describe_trained_steps(directory)}: {error}", directory.path)
            return 1
    try:
        return print_conclusion(prepared, summary, console)
    except KeyboardInterrupt:  # a second one, which came too late to end the run at once
        if summary.finished:
            print(f"interrupted; the run is finished. For its report: headway report {directory.path}", file=sys.stderr)
        else:
            _print_how_to_resume(f"ended early after step {summary.trained}: {summary.reason}", directory.path)
        return 130


def _print_plan(prepared: PreparedRun, console: Console) -> None:
    """Print where the components would go, and whether the memory that they need is free."""
    needs = estimate_component_needs(prepared.resolved, prepared.placement, prepared.policy)
    if prepared.placement.budget is None:
        print_layout(needs, console)
        return
    plan = describe_plan(prepared.resolved, replace(prepared.placement, notes=()))  # notes are in the introduction
    console.print("\n".join(plan), markup=False, soft_wrap=True)
    print_memory_fit(needs, console)


def print_introduction(
    prepared: PreparedRun, done: int, console: Console, changes: Sequence[OptionChange] = ()
) -> None:
    """Print a few lines about what will run, the notes, and what changed since the process before."""
    config, derived = prepared.resolved.config, prepared.resolved.derived
    each, of = ("starts", "episodes") if derived.pipeline == "agentic" else ("prompts", "answers")
    console.print(
        f"{config.exp_name}: {prepared.policy.parameters / 1e6:,.1f}M parameters from {prepared.policy.path.name}, "
        f"{derived.groups_per_step} {each} × {derived.group_size} {of} a step, {config.max_steps} steps\n"
        f"α = {config.async_generation_ratio:g}: a sample is at most {derived.bound} "
        f"version{'' if derived.bound == 1 else 's'} old when it is trained\n"
        f"loss {config.pg_variant}, advantages {config.adv_estimator}\n"
        f"{prepared.placement.summary}\n"
        f"everything goes to {prepared.directory}",
        soft_wrap=True,
        markup=False,
    )
    for note in prepared.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if done:
        console.print(f"going on from step {done}", markup=False)
    _print_changes(changes, console)


def _print_changes(changes: Sequence[OptionChange], console: Console) -> None:
    for change in changes:
        console.print(f"changed since the last start: {change}", soft_wrap=True, markup=False)


async def train_with_display(
    prepared: PreparedRun,
    directory: RunDirectory,
    console: Console,
    received: list[str] | None = None,
    *,
    dashboard: bool = False,
) -> RunSummary:
    """Train with the live display and the trackers of the configuration; append the names of signals to `received`."""
    config = prepared.resolved.config
    monitor = RunMonitor()

    def on_interrupt(name: str, is_clean: bool) -> None:
        if received is not None:
            received.append(name)
        if is_clean:
            console.print(f"{name}: {_STOPPING}", markup=False)

    with ExitStack() as stack:
        if dashboard:
            _print_link(stack.enter_context(DashboardLink(directory.path)), directory.path, console)
        changed = prepared.resolved.changed()
        trackers: list[GuardedSink] = []
        trackers += make_trackers(
            config.track_with, directory.path, project=config.track_project or config.exp_name, config=changed
        )
        trackers += make_exports(
            prometheus_port=config.prometheus_port,
            opentelemetry_endpoint=config.opentelemetry_endpoint,
            run=directory.path.name,
        )
        for tracker in trackers:
            stack.callback(tracker.close)
        live = stack.enter_context(LiveDisplay(monitor, console, steps=config.max_steps))
        return await run_training(
            prepared,
            directory,
            sinks=[monitor, *trackers, live],
            tick=live.tick,
            show=live.show,
            show_every_s=_PANEL_EVERY_S if live.is_panel else _LINES_EVERY_S,
            on_interrupt=on_interrupt,
        )


def print_finished(path: Path, done: int, console: Console) -> None:
    """Say that a run has nothing left to do."""
    console.print(
        f"{path} is finished: {done} steps. Raise max_steps or max_epochs, or choose another output_dir.",
        soft_wrap=True,
    )


def add_rewards(summary: RunSummary, path: Path) -> RunSummary:
    """Return the summary with the rewards in the event log of the run, those of earlier processes included."""
    report = make_run_report(read_event_log(path))
    rewards = {step.trained: step.reward for step in report.throughput.steps if step.reward is not None}
    held_out = {one.trained: one.reward for one in report.validations if one.reward is not None}
    return replace(summary, rewards=rewards, held_out=held_out)


def _print_link(link: DashboardLink, directory: Path, console: Console) -> None:
    """Print where the run can be watched."""
    what = link.address or f"headway dashboard {directory} (needs {suggest_install('dashboard')})"
    console.print(f"live page: {what}", markup=False, soft_wrap=True)


def print_conclusion(prepared: PreparedRun, summary: RunSummary, console: Console) -> int:
    """Print the summary, write the report page, push a finished run if asked to, say where all is. Return the code."""
    path = prepared.directory
    print_training_summary(make_run_report(read_event_log(path)), console)
    page: Path | str = path / "report.html"
    try:
        (path / "report.html").write_text(render_report_page(path), encoding="utf-8")
    except OSError as error:
        page = f"cannot be written: {error.strerror}"
    found = (("report", page), ("live page", f"headway dashboard {path}"), ("checkpoints", prepared.checkpoints))
    for what, where in found:
        console.print(f"{what:<12}{where}", soft_wrap=True, markup=False)
    if summary.finished:
        return _push_to_hub(prepared, console)
    _print_how_to_resume(f"ended early after step {summary.trained}: {summary.reason}", path)
    return 1


def _push_to_hub(prepared: PreparedRun, console: Console) -> int:
    """Upload the last checkpoint if the configuration asks for it. Return 1 if the hub refuses."""
    repository = prepared.resolved.config.push_to_hub
    newest = find_checkpoint_of_run(prepared.directory, print) if repository else None
    if repository is None or newest is None:
        return 0
    try:
        console.print(f"{'pushed to':<12}{upload_checkpoint(newest, repository)}", soft_wrap=True, markup=False)
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _describe_trained_steps(directory: RunDirectory) -> str:
    """Return the step of the newest checkpoint in words, or nothing where the ledger cannot be read."""
    try:
        return f" after step {directory.count_trained_steps()}"
    except HeadwayError:
        return ""


def _print_how_to_resume(what: str, path: Path) -> None:
    print(what, file=sys.stderr)
    print(f"go on with: headway train {path} --resume", file=sys.stderr)
