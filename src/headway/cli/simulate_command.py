"""`headway simulate`: the real scheduler on a virtual clock, with back ends that only cost time.

    headway simulate examples/simulate_small.yaml async_generation_ratio=1 --out runs/one
    headway simulate theirs.yaml --lengths lengths.txt --calibrate gen=247,logp=88,update=286,sync=1,gpus=16

Prints the report and leaves a page, a trace, the event log and the report as JSON behind. The same configuration and
seed give the same event log, byte for byte.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from headway.cli.command_line import make_console, print_json, split_arguments
from headway.config import ResolvedConfig, load_config
from headway.errors import HeadwayError
from headway.flow.training_flow import RunSummary
from headway.monitor.event_log import EventSink, JsonlSink, LoggedEvent
from headway.monitor.live_display import LiveDisplay
from headway.monitor.perfetto_trace import write_perfetto_trace
from headway.monitor.report_tables import print_report
from headway.monitor.run_report import RunMonitor, RunReport, to_plain_json
from headway.monitor.timeline_page import render_timeline_page
from headway.runs.run_directory import write_config_origins
from headway.sim.cost_calibration import calibrate_costs, describe_lengths, parse_phases
from headway.sim.simulated_run import make_scenario, run_scenario

HELP = "run a configuration on a virtual clock"
PIPE_WIDTH = 110
"""Columns where the output is not a terminal: narrow enough for a report, wide enough for every table."""
_SUBDIRECTORY = "simulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Results of one simulated run."""

    summary: RunSummary
    report: RunReport
    events: list[LoggedEvent]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, with how the run ended."""
        return {"summary": to_plain_json(self.summary), **self.report.to_dict()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "YAML file (- for standard input), then overrides key=value"
    parser.add_argument("arguments", nargs="+", metavar="CONFIG|key=value", help=what)
    parser.add_argument("--json", action="store_true", help="print only the report, for machines")
    parser.add_argument("--seed", type=int, help="instead of the configuration's")
    parser.add_argument("--steps", type=int, help="training steps, instead of simulation.steps")
    where = f"where files go (<output_dir>/{_SUBDIRECTORY} if that is given, else runs/simulate-<configuration>)"
    parser.add_argument("--out", type=Path, help=where)
    add_calibration_options(parser)


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that set costs and lengths by what somebody measured."""
    phases = "seconds per step of a synchronous run: gen, logp, colocated_logp, update, sync, switch; and its gpus"
    parser.add_argument("--calibrate", metavar="gen=…,update=…", help=phases)
    parser.add_argument("--costs", metavar="FILE", help="a simulation: block, such as `headway measure --out` writes")
    parser.add_argument("--lengths", metavar="FILE", help="response lengths: one a line, or those of one prompt a line")


def run_command(args: argparse.Namespace) -> int:
    """Simulate, print the report, write files. Return 1 when the run ended early."""
    name, resolved = load_simulation(args.arguments, seed=args.seed, steps=args.steps)
    resolved = calibrate_config(resolved, args)
    out: Path = args.out or _choose_directory(name, resolved)
    console = make_console(PIPE_WIDTH)
    with _make_writable(out / "events.jsonl").open("w", encoding="utf-8", newline="\n") as log:
        result = simulate_run(resolved, log=JsonlSink(log), console=None if args.json else console)
    write_config_origins(out, resolved)
    written = write_result_files(result, out, title=name)
    if args.json:
        print_json(result.to_dict())
    else:
        console.print()
        print_report(result.report, console)
        for path, what in written.items():
            console.print(f"{path}  {what}", soft_wrap=True, markup=False)
    if not result.summary.finished:
        print(f"ended early after step {result.summary.trained}: {result.summary.reason}", file=sys.stderr)
    return 0 if result.summary.finished else 1


def _choose_directory(name: str, resolved: ResolvedConfig) -> Path:
    """Return a directory that no run of the same configuration writes to."""
    if "output_dir" in resolved.provenance:
        return Path(resolved.config.output_dir) / _SUBDIRECTORY
    return Path("runs") / f"simulate-{name}"


def load_simulation(
    arguments: list[str], *, seed: int | None = None, steps: int | None = None
) -> tuple[str, ResolvedConfig]:
    """Return the name and the configuration that the command line describes."""
    source, overrides = split_arguments(arguments)
    if seed is not None:
        overrides.append(f"seed={seed}")
    if steps is not None:
        overrides.append(f"simulation.steps={steps}")
    name = Path(source).stem if isinstance(source, str) else "run"
    return name, load_config(source, overrides)


def calibrate_config(resolved: ResolvedConfig, args: argparse.Namespace) -> ResolvedConfig:
    """Return the configuration with the lengths and the costs that the command line gives, and print the costs."""
    if args.costs:
        costs_file = load_config(args.costs, [])
        given = {key: value for key, value in costs_file.changed().items() if key.startswith("simulation.")}
        resolved = load_config(resolved.given(), given)
    keys: dict[str, Any] = dict(describe_lengths(args.lengths)) if args.lengths else {}
    if keys:
        resolved = load_config(resolved.given(), keys)
    if args.calibrate:
        costs = calibrate_costs(make_scenario(resolved), parse_phases(args.calibrate))
        keys |= costs
        resolved = load_config(resolved.given(), costs)
    for key, value in keys.items():
        print(f"{key}={value}", file=sys.stderr)
    if note := _describe_assumed_costs(resolved):
        print(note, file=sys.stderr)
    return resolved


def _describe_assumed_costs(resolved: ResolvedConfig) -> str:
    """Return a note if the configuration does not say what engines or the trainer cost, so that defaults are used."""
    costs = resolved.config.simulation
    kinds = {"engine": "an engine", "trainer": "the trainer"}
    given = {key.split(".")[1] for key, origin in resolved.provenance.items() if _is_given_cost(key, origin)}
    assumed = [kinds[kind] for kind in kinds if kind not in given]
    if not assumed:
        return ""
    engine, trainer = costs.engine, costs.trainer
    return (
        f"note: the costs of {' and '.join(assumed)} are assumed, because there is no simulation: block for them "
        f"(a decode step {engine.step_s:g} s and {engine.step_per_request_s:g} s a request, training "
        f"{trainer.gpu_s_per_token:g} GPU-seconds a token). `headway measure` finds them on this machine"
    )


def _is_given_cost(key: str, origin: str) -> bool:
    return key.startswith("simulation.") and key.count(".") > 1 and origin != "default"


def simulate_run(
    resolved: ResolvedConfig, *, log: JsonlSink | None = None, console: Console | None = None
) -> SimulatedRun:
    """Run on the virtual clock, and print the progress to `console`."""
    monitor = RunMonitor(resolved.config.simulation.warmup_steps)
    events: list[LoggedEvent] = []
    sinks: list[EventSink] = [monitor, events.append] if log is None else [log, monitor, events.append]
    if console is None:
        summary = run_scenario(make_scenario(resolved), sinks=sinks)
    else:
        with LiveDisplay(monitor, console, refresh_s=30.0) as display:
            summary = run_scenario(make_scenario(resolved), sinks=[*sinks, display])
    return SimulatedRun(summary=summary, report=monitor.report(), events=events)


def write_result_files(result: SimulatedRun, out: Path, *, title: str) -> dict[Path, str]:
    """Write the page, the trace and the report. Return each file with a description."""
    page, trace, report = out / "timeline.html", out / "trace.json", out / "report.json"
    steps = len(result.report.throughput.steps) - result.report.window.steps
    page.write_text(render_timeline_page(result.events, title=title, warmup_steps=max(steps, 1)), encoding="utf-8")
    with trace.open("w", encoding="utf-8", newline="\n") as stream:
        write_perfetto_trace(result.events, stream)
    report.write_text(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {
        page: "the run as a page, open it in a browser",
        trace: "the same for ui.perfetto.dev",
        out / "events.jsonl": f"{len(result.events):,} events",
        report: "the report as JSON",
    }


def _make_writable(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise HeadwayError(f"--out {path.parent}: {error.strerror}") from error
    return path
