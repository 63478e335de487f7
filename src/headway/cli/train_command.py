"""`headway train`: train a policy as a configuration says, and go on where an earlier process left off.

    headway train examples/arithmetic.yaml async_generation_ratio=2
    headway train runs/mine --resume
    headway train examples/arithmetic.yaml --dry-run      # who would live where and need what; nothing is started

Exit codes: 0 all steps are done, 1 the run ended early (its state is saved; the last line says how to go on), 2 the
input is wrong and nothing was started, 130 interrupted twice.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headway.cli.config_command import split_arguments
from headway.cli.machine_inventory import print_layout
from headway.config import ResolvedConfig, load_config
from headway.config.document import Source
from headway.errors import ConfigError, HeadwayError
from headway.flow.training_flow import RunSummary
from headway.launch.memory_needs import estimate_component_needs
from headway.launch.run_directory import CONFIG_FILE, EVENTS_FILE, LEDGER_FILE, RunDirectory
from headway.launch.training_session import PreparedRun, open_run_directory, prepare_run, run_training
from headway.monitor.event_log import read_events
from headway.monitor.live_display import LiveDisplay
from headway.monitor.report_page import render_report_page
from headway.monitor.report_tables import print_training_summary
from headway.monitor.run_report import RunMonitor, make_run_report
from headway.monitor.trackers import make_trackers

PIPE_WIDTH = 160
_STOPPING = "the run stops after this step, with a checkpoint; once more, and it stops at once"

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: _SubParsers) -> None:
    """Add `run_training`."""
    parser = subparsers.add_parser("train", help="train a policy")
    parser.add_argument(
        "arguments", nargs="*", metavar="FILE|RUN|key=value", help="YAML file or run directory, then overrides"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run that is there; an error if none is")
    parser.add_argument("--dry-run", action="store_true", help="check it, say what would go where, and start nothing")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Check, train, show."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also before there is a run to stop
    resolved = load_run_config(args.arguments)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    prepared = prepare_run(resolved)
    if args.resume and not (prepared.directory / LEDGER_FILE).exists():
        raise ConfigError("there is no run to go on with", key="output_dir", value=str(prepared.directory))
    if args.dry_run:
        print_introduction(prepared, 0, console)
        print_layout(estimate_component_needs(resolved, prepared.placement, prepared.policy), console)
        return 0
    with open_run_directory(prepared) as directory:
        done, wanted = directory.count_trained_steps(), resolved.config.max_steps
        if done >= wanted:
            console.print(f"{directory.path} is finished: {done} steps. Raise max_steps, or choose another output_dir.")
            return 0
        print_introduction(prepared, done, console)
        try:
            summary = asyncio.run(train_with_display(prepared, directory, console))
        except (asyncio.CancelledError, KeyboardInterrupt):
            if directory.started:
                step = directory.count_trained_steps()
                what = f"interrupted; the newest checkpoint is that of step {step}, and no sample is lost"
                _say_how_to_go_on(what, directory.path)
                return 130
            raise KeyboardInterrupt from None
        except ConfigError:
            raise
        except HeadwayError as error:
            _say_how_to_go_on(f"ended early after step {_trained(directory)}: {error}", directory.path)
            return 1
    return print_conclusion(prepared, summary, console)


def load_run_config(arguments: list[str]) -> ResolvedConfig:
    """The configuration that the command line describes: a file, or the directory of an earlier run."""
    return resolve_source(*split_arguments(arguments))


def resolve_source(source: Source, overrides: list[str]) -> ResolvedConfig:
    """The same from Python."""
    if isinstance(source, str) and Path(source).is_dir():
        saved = Path(source) / CONFIG_FILE
        if not saved.is_file():
            raise ConfigError(
                f"{source} is a directory without {CONFIG_FILE}", hint="a YAML file, or the directory of a run"
            )
        return load_config(str(saved), [*overrides, *_policy(overrides), f"output_dir={source}"])
    return load_config(source, overrides)


def _policy(overrides: list[str]) -> list[str]:
    """A run has written down which model each role took from `pretrain`; another `pretrain` is another policy."""
    given = [word for word in overrides if word.startswith("pretrain=")]
    roles = ("actor_train", "actor_infer", "reference")
    return [f"{role}.model_args.model_name_or_path={word.partition('=')[2]}" for word in given for role in roles]


def print_introduction(prepared: PreparedRun, done: int, console: Console) -> None:
    """What will run, in three lines, and what was noticed."""
    config, derived = prepared.resolved.config, prepared.resolved.derived
    each, of = ("starts", "episodes") if derived.pipeline == "agentic" else ("prompts", "answers")
    console.print(
        f"{config.exp_name}: {prepared.policy.parameters / 1e6:,.1f}M parameters from {prepared.policy.path.name}, "
        f"{derived.groups_per_step} {each} × {derived.group_size} {of} a step, {config.max_steps} steps\n"
        f"headway α = {derived.async_generation_ratio:g}: a sample is at most {_versions(derived.bound)} old when it is trained; "
        f"loss {config.pg_variant}, advantages {config.adv_estimator}\n"
        f"{prepared.placement.summary}; everything goes to {prepared.directory}",
        soft_wrap=True,
        markup=False,
    )
    for note in (*prepared.resolved.notes, *prepared.sources.notes):
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if done:
        console.print(f"going on from step {done}", markup=False)


def _versions(count: int) -> str:
    return f"{count} version{'' if count == 1 else 's'}"


async def train_with_display(prepared: PreparedRun, directory: RunDirectory, console: Console) -> RunSummary:
    """Train with a display and trackers."""
    config = prepared.resolved.config
    monitor = RunMonitor()
    with ExitStack() as stack:
        trackers = make_trackers(
            config.track_with, directory.path, project=config.exp_name, config=prepared.resolved.changed()
        )
        for tracker in trackers:
            stack.callback(tracker.close)
        live = stack.enter_context(LiveDisplay(monitor, console, steps=config.max_steps))
        return await run_training(
            prepared,
            directory,
            sinks=[monitor, *trackers, live],
            tick=live.tick,
            on_interrupt=lambda name: console.print(f"{name}: {_STOPPING}", markup=False),
        )


def print_conclusion(prepared: PreparedRun, summary: RunSummary, console: Console) -> int:
    """The table, the page, and where things are."""
    path = prepared.directory
    with (path / EVENTS_FILE).open(encoding="utf-8") as lines:
        print_training_summary(make_run_report(read_events(lines)), console)
    page: Path | str = path / "report.html"
    try:
        (path / "report.html").write_text(render_report_page(path), encoding="utf-8")
    except OSError as error:
        page = f"cannot be written: {error.strerror}"
    for what, where in (("report", page), ("checkpoints", prepared.checkpoints)):
        console.print(f"{what:<12}{where}", soft_wrap=True, markup=False)
    if summary.finished:
        return 0
    _say_how_to_go_on(f"ended early after step {summary.trained}: {summary.reason}", path)
    return 1


def _trained(directory: RunDirectory) -> str:
    """Of the newest checkpoint, as far as the ledger can be asked."""
    try:
        return str(directory.count_trained_steps())
    except HeadwayError:
        return "?"


def _say_how_to_go_on(what: str, path: Path) -> None:
    print(what, file=sys.stderr)
    print(f"go on with: headway train {path} --resume", file=sys.stderr)
