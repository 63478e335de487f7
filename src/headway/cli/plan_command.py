"""`headway plan`: how many GPUs should train, how many generate, and how far may rollout run ahead?

    headway plan examples/simulate_think.yaml --gpus 40 --alpha 0,1,2,4

Simulates the promising splits of N GPUs and the synchronous run on all of them, and ranks them by trained tokens per
second. The configuration gives batch, lengths and costs; its own devices and α are what is searched for, so they are
not looked at. Only splits that `headway train` accepts are offered.
"""

import argparse
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from headway.cli.command_line import add_json_option, make_console, print_json
from headway.cli.simulate_command import PIPE_WIDTH, add_calibration_options, calibrate_config, load_simulation
from headway.errors import ConfigError
from headway.monitor.report_tables import format_number, format_percent
from headway.monitor.run_report import to_plain_json
from headway.sim.planner import GpuSplitOption, GpuSplitPlan, plan_gpu_split, recommend_split
from headway.sim.simulated_run import make_scenario
from headway.sim.split_check import count_gpus_per_trainer_copy, make_split_check

HELP = "rank the ways to use N GPUs, the synchronous one included"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="+", metavar="CONFIG|key=value", help="YAML file, then overrides key=value")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs there are")
    parser.add_argument("--alpha", type=parse_numbers, default=(0.0, 1.0, 2.0, 4.0), metavar="A,B,…", help="α to try")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="rows to print")
    add_calibration_options(parser)
    add_json_option(parser)


def parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def run_command(args: argparse.Namespace) -> int:
    """Simulate the options and print them in order of trained tokens per second."""
    if args.top < 1:
        raise ConfigError("must be at least 1", key="--top", value=args.top)
    _, resolved = load_simulation(args.arguments)
    resolved = calibrate_config(resolved, args)
    notes = Console(stderr=True, highlight=False)

    def print_progress(option: GpuSplitOption) -> None:
        if not args.json and notes.is_terminal:
            notes.print(f"simulated {option.name}: {format_number(option.seconds_per_step)} s a step", style="dim")

    scenario, copy = make_scenario(resolved), count_gpus_per_trainer_copy(resolved)
    plan = plan_gpu_split(
        scenario,
        gpus=args.gpus,
        alphas=args.alpha,
        trainer_gpus=copy,
        check=make_split_check(resolved),
        on_option=print_progress,
    )
    if args.json:
        print_json(plan_to_json(plan, args.top))
        return 0
    console = make_console(PIPE_WIDTH)
    console.print(make_ranking_table(plan, args.top))
    if plan.synchronous.refused:
        console.print(f"{plan.synchronous.name}: train refuses it: {plan.synchronous.refused}", markup=False)
    shrunk = f", at down to 1/{plan.scale} of batch and engines" if plan.scale > 1 else ""
    console.print(f"{len(plan.options)} of {plan.considered} options were simulated{shrunk}.", style="dim")
    console.print()
    console.print(recommend_split(plan), markup=False)
    return 0


def plan_to_json(plan: GpuSplitPlan, top: int) -> dict[str, Any]:
    options = plan.options[:top]
    rows = [{**to_plain_json(option), "speed_up": round(plan.speed_up(option), 4)} for option in options]
    return {
        "gpus": plan.gpus,
        "scale": plan.scale,
        "considered": plan.considered,
        "simulated": len(plan.options),
        "verdict": recommend_split(plan),
        "synchronous": to_plain_json(plan.synchronous),
        "options": rows,
    }


def make_ranking_table(plan: GpuSplitPlan, top: int) -> Table:
    """Make the table of the best options and of the synchronous one, whatever its rank."""
    table = Table(title=f"{plan.gpus} GPUs", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 0), pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("option", no_wrap=True)
    for heading in ("tokens/s", "gain", "s/step", "length", "lag", "train", "engines", "slots", "drop"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, option in enumerate(plan.options, start=1):
        if place > top and not option.colocated:
            continue
        seconds = format_number(option.seconds_per_step) if option.finished else "stopped"
        speed = (format_number(option.tokens_per_s), f"{plan.speed_up(option):.2f}×", seconds)
        facts = (format_number(option.trained_length), format_number(option.lag_mean))
        shares = (option.train_busy, option.generate_busy, option.slots_filled, option.drop_share)
        cells = (str(place), option.name, *speed, *facts, *map(format_percent, shares))
        table.add_row(*cells, style="bold" if option.colocated else None)
    return table
