"""The layout of a node on one card: ranks and engines on virtual devices, killed on the way, beside one process.

    python benchmarks/virtual_node.py                                             # one GPU: 0.5B shape, 20 steps each
    python benchmarks/virtual_node.py --shape tiny --device cpu --engines 4 --length 8 --steps 6     # does it run?

Every layout is one run of `headway train` with several logical devices on one card. One engine and one trainer rank are
killed by SIGKILL on the way; no verdict is given until the engine is back. Checked after each run: every engine has
served every version with the same checksum of its tensors, all steps were trained, and the ledger has lost nothing.
Then the batches that were trained are replayed in one process, from the initial weights: losses and gradient norms have
to be those of the ranks up to rounding. The same configuration also runs in one process, for its seconds per step. The
model is random, of the shape of Qwen2.5, and rewards are drawn by lot. The hybrid layout is that of full
cards: engines sleep during a step and have one set of weights, one version is on the card, and moments live on the
host. With `--no-full-cards` it is that of cards with room. What a sleep frees, and the most memory that was in use, are
read from the card, which nobody else should use meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.end_to_end import SHAPES, machine, make_model

from headway.config import load_config
from headway.flow.training_flow import AsyncTrainingFlow
from headway.launch.training_session import PreparedRun, open_run_context, open_run_directory, prepare_run
from headway.ledger import Ledger
from headway.monitor.event_log import LoggedEvent
from headway.types import Batch

RANKS = 2
LAYOUTS = ("hybrid", "decoupled")
COMPARED = ("train/loss", "train/grad_norm")


@dataclass(slots=True, kw_only=True)
class LayoutResult:
    """What one layout has shown."""

    layout: str
    step_s: float = 0.0
    """Median seconds between two steps."""
    single_step_s: float = 0.0
    versions: int = 0
    """Versions that engines have served, those after the loss of the trainer counted again."""
    unequal: list[str] = field(default_factory=list)
    """Versions that engines have served with different checksums, or not all of them."""
    restarts: dict[str, int] = field(default_factory=dict)
    """How often each killed component came back."""
    losses: list[tuple[float, ...]] = field(default_factory=list)
    """Loss and gradient norm of each step, in the ranks and in one process."""
    largest_difference: float = 0.0
    """Largest difference of those, as a share of numbers above 1. A loss is a small difference of such numbers."""
    lost: list[str] = field(default_factory=list)
    """What the ledger says is missing."""
    freed_gib: list[float] = field(default_factory=list)
    """Memory of the card that was free before and after each sleep of all engines, on average."""
    most_used_gib: float = 0.0
    """Most memory of the card that was in use while versions were read and before and after each sleep."""
    plan: str = ""
    """Sets of weights of an engine, versions on the cards and transport, as planned."""
    spans_s: dict[str, float] = field(default_factory=dict)
    """Median seconds of each kind of span on the timeline."""


def make_configuration(args: argparse.Namespace, layout: str, model: Path, run_dir: Path) -> dict[str, Any]:
    """Make the configuration of a layout; `single …` is the same in one process."""
    single, alpha = layout.startswith("single"), 1 if layout.endswith("decoupled") else 0
    ranks, engines = list(range(RANKS)), list(range(args.engines))
    devices, samples = args.engines, args.prompts * args.group
    if layout == "decoupled":
        engines, devices = [RANKS + number for number in engines], RANKS + args.engines
    mapped, per_device = ({}, 1) if single else ({"device_mapping": ranks}, RANKS)
    placed: dict[str, Any] = {
        "devices": {"kind": args.device, "count": devices, "physical": 1},
        "hybrid_engine": alpha == 0,
        "processes": True,
        "actor_infer": {"device_mapping": engines},
    }
    return {
        "exp_name": layout.replace(" ", "-"),
        "output_dir": str(run_dir),
        "pretrain": str(model),
        "device": args.device,
        "async_generation_ratio": alpha,
        "pg_variant": "tis",
        "filter_zero_variance": False,
        "rollout_batch_size": args.prompts,
        "num_return_sequences_in_group": args.group,
        "prompt_length": 64,
        "response_length": args.length,
        "max_steps": args.steps,
        "save_steps": max(args.steps // 2, 1),
        "save_total_limit": 1,
        "eval_steps": 0,
        "track_with": [],
        "reliability": {"restart_backoff_s": 0.1},
        "weight_transfer": {"compare_served": True},
        **({"processes": False} if single else placed),
        "actor_train": {
            **mapped,
            "model_args": {"disable_gradient_checkpointing": True},
            "training_args": {"learning_rate": 1e-5, "per_device_train_batch_size": samples // per_device},
            "data_args": {"file_name": "addition"},
        },
        "rewards": {
            "addition": {
                "reward_fn": f"{Path(__file__).parent / 'end_to_end.py'}:lot",
                "reward_args": {"gate": f"{run_dir}.gate"},
            }
        },
    }


def prepare_layout(args: argparse.Namespace, layout: str, model: Path, run_dir: Path) -> PreparedRun:
    """Prepare a run; the hybrid layout is that of full cards."""
    prepared = prepare_run(load_config(make_configuration(args, layout, model, run_dir)))
    if layout != "hybrid" or not args.full_cards:
        return prepared
    placement = prepared.placement
    places = {name: replace(place, sleeps=True, weight_sets=1) for name, place in placement.places.items()}
    transport = replace(placement.transport, versions=1)
    return replace(prepared, placement=replace(placement, places=places, transport=transport))


class SleepWatch:
    """Reads the memory of the card before and after engines go to sleep, and while a version arrives."""

    def __init__(self) -> None:
        self.free_gib: list[tuple[str, float]] = []
        self.most_used_gib = 0.0

    def __call__(self, event: LoggedEvent) -> None:
        if event.who in ("device turns", "param_update") and event.kind in ("span.begin", "span.end"):
            import torch

            if torch.cuda.is_available():
                free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info())
                self.most_used_gib = max(self.most_used_gib, total - free)
                if event.who == "device turns":
                    self.free_gib.append((event.kind, free))

    def summarize(self) -> list[float]:
        """Return the mean before and after."""
        both = [[free for kind, free in self.free_gib if kind == wanted] for wanted in ("span.begin", "span.end")]
        return [statistics.mean(found) for found in both] if all(both) else []


class Progress:
    """Prints steps, and whether engines serve equal weights, so that a run that is cut has told what it has seen."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._sums: dict[int, dict[str, str]] = {}

    def __call__(self, event: LoggedEvent) -> None:
        if event.kind == "step.end":
            print(f"[{event.time_s:.1f} s] step {event.data['trained']}", flush=True)
        elif event.kind in ("up", "restart"):
            self._sums.clear()
            print(f"[{event.time_s:.1f} s] {event.who}: {event.kind}", flush=True)
        elif event.kind == "served":
            sums = self._sums.setdefault(event.data["version"], {})
            sums[event.who] = event.data.get("checksum", "")
            if len(sums) == self._engines:
                equal = "equal" if len(set(sums.values())) == 1 and "" not in sums.values() else f"unequal: {sums}"
                print(f"[{event.time_s:.1f} s] version {event.data['version']}: {equal}", flush=True)


class Chaos:
    """Kills an engine after a quarter of the steps, and a rank in the middle of the step after three quarters."""

    def __init__(self, logs: Path, steps: int) -> None:
        self._logs, self._victims = logs, {"engine-1": steps // 4, "trainer-1": steps * 3 // 4}
        self._gate = logs.parent.with_name(f"{logs.parent.name}.gate")
        self.killed: list[str] = []

    def __call__(self, event: LoggedEvent) -> None:
        if event.kind == "up" and event.who == "engine/1":
            self._gate.unlink(missing_ok=True)
        if event.kind != "step.begin":
            return
        for name, step in list(self._victims.items()):
            if event.data["trained"] >= step:
                del self._victims[name]
                asyncio.get_running_loop().call_later(0.05, self._kill, name)

    def _kill(self, name: str) -> None:
        wanted = str(self._logs / f"{name}.log")
        for entry in Path("/proc").glob("[0-9]*/fd/1"):
            try:
                if str(entry.readlink()) == wanted:
                    if name.startswith("engine"):
                        self._gate.touch()
                    os.kill(int(entry.parts[2]), signal.SIGKILL)
                    self.killed.append(name)
            except OSError:
                continue


async def train(
    prepared: PreparedRun, directory: Any, *, kill: bool, watch: SleepWatch | None = None
) -> tuple[list[LoggedEvent], dict[int, Batch]]:
    """Train to the end. Return the events, and for each step the batch that made it in the end."""
    events: list[LoggedEvent] = []
    batches: dict[int, Batch] = {}
    chaos = Chaos(directory.path / "logs", prepared.resolved.config.max_steps)
    engines = len(prepared.placement.list_components("engine"))
    sinks = [events.append, Progress(engines), *([chaos] if kill else []), *([watch] if watch else [])]
    async with open_run_context(prepared, directory, sinks=sinks) as context:
        flow = AsyncTrainingFlow(
            trainer=replace(context, on_trained=lambda batch, trained: batches.update({trained: batch}))
        )
        summary = await flow.run()
    if not summary.finished:
        raise RuntimeError(f"{prepared.resolved.config.exp_name} ended early: {summary.reason}")
    if kill and len(chaos.killed) != 2:
        raise RuntimeError(f"only {chaos.killed} were killed")
    return events, batches


def compare_engines(events: list[LoggedEvent], engines: int) -> tuple[int, list[str]]:
    """Return how many versions were served, and those whose checksums differ or that an engine has not served.

    A new trainer begins anew: its versions are others than those of the same numbers before.
    """
    served: dict[tuple[int, int], dict[str, str]] = {}
    trainers = 0
    for event in events:
        trainers += event.kind == "up" and event.who == "trainer"
        if event.kind == "served":
            served.setdefault((trainers, event.data["version"]), {})[event.who] = event.data.get("checksum", "")
    wrong = [
        f"version {version}: {found}"
        for (_, version), found in served.items()
        if len(set(found.values())) != 1 or "" in found.values()
    ]
    last = max(served)
    return len(served), wrong + ([] if len(served[last]) == engines else [f"the last one only on {list(served[last])}"])


def replay(args: argparse.Namespace, prepared: PreparedRun, batches: Mapping[int, Batch]) -> list[Mapping[str, float]]:
    """Train the same batches in one process and return the metrics of each step."""
    from headway.launch.components import ComponentArgs
    from headway.launch.language_components import make_local_trainer
    from headway.weights.transports import make_weight_store

    component = ComponentArgs(
        config=prepared.resolved.changed(), model=str(prepared.policy.path), critic=None, device=args.device, threads=1
    )
    trainer = make_local_trainer(component, make_weight_store(prepared.resolved, args.device))

    async def train_all() -> list[Mapping[str, float]]:
        try:
            return [await trainer.train(batches[step]) for step in sorted(batches)]
        finally:
            await trainer.close()

    return asyncio.run(train_all())


def measure_spans(events: list[LoggedEvent]) -> dict[str, float]:
    """Return the seconds of each kind of span on the timeline, as a median of all."""
    begun: dict[tuple[str, int], tuple[str, float]] = {}
    found: dict[str, list[float]] = {}
    for event in events:
        key = event.who, event.data.get("span", -1)
        if event.kind == "span.begin":
            begun[key] = event.data["name"], event.time_s
        elif event.kind == "span.end" and key in begun:
            name, begin_s = begun.pop(key)
            words = [word for word in name.split() if not any(letter.isdigit() for letter in word)]
            found.setdefault(f"{event.who.partition('/')[0]}: {' '.join(words)}", []).append(event.time_s - begin_s)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure_step_s(events: list[LoggedEvent]) -> float:
    """Return the median time between two steps, which a few recoveries do not change."""
    ends = [event.time_s for event in events if event.kind == "step.end"]
    return statistics.median(later - earlier for earlier, later in pairwise(ends))


def measure_layout(args: argparse.Namespace, layout: str, model: Path, scratch: Path) -> LayoutResult:
    """Run one layout, run it in one process, and replay it."""
    prepared = prepare_layout(args, layout, model, scratch / layout)
    placement = prepared.placement
    sets, transport = placement.places["engine/0"].weight_sets, placement.transport
    result = LayoutResult(layout=layout, plan=f"{sets} sets, {transport.buffers} versions, {transport.kind}")
    print(placement.summary, transport, flush=True)
    with open_run_directory(prepared) as directory:
        events, batches = asyncio.run(train(prepared, directory, kill=args.kill, watch=(watch := SleepWatch())))
    result.freed_gib, result.most_used_gib = watch.summarize(), watch.most_used_gib
    result.step_s = measure_step_s(events)
    result.versions, result.unequal = compare_engines(events, args.engines)
    for name in ("engine/1", "trainer"):
        result.restarts[name] = sum(event.kind == "up" and event.who == name for event in events)
    ledger = Ledger(scratch / layout / "ledger.sqlite")
    result.lost = [str(problem) for problem in ledger.audit()]
    ledger.close()
    result.spans_s = measure_spans(events)
    print(json.dumps(asdict(result)), flush=True)
    if args.single:
        result.single_step_s = measure_single(args, layout, model, scratch)
        print(f"one process: {result.single_step_s:.2f} s a step", flush=True)
    metrics = {event.data["trained"]: event.data for event in events if event.kind == "step.end"}
    for step, alone in zip(sorted(batches), replay(args, prepared, batches), strict=True):
        pairs = [(metrics[step][name], alone[name.removeprefix("train/")]) for name in COMPARED]
        result.losses.append(tuple(number for pair in pairs for number in pair))
        for ranks, one in pairs:
            difference = abs(ranks - one) / max(abs(ranks), abs(one), 1.0)
            result.largest_difference = max(result.largest_difference, difference)
    return result


def measure_single(args: argparse.Namespace, layout: str, model: Path, scratch: Path) -> float:
    """Run the same configuration in one process. Return the seconds of a step."""
    single = prepare_layout(args, f"single {layout}", model, scratch / f"single-{layout}")
    with open_run_directory(single) as directory:
        events, _ = asyncio.run(train(single, directory, kill=False))
    return measure_step_s(events)


def show(args: argparse.Namespace, results: list[LayoutResult]) -> None:
    """Print one table."""
    what = f"{args.shape}, {args.prompts} × {args.group} × {args.length} tokens, {args.steps} steps, {machine()}"
    table = Table(
        "layout",
        "s/step",
        "one process",
        "versions",
        "unequal",
        "lost",
        "came back",
        "difference",
        "GiB free before and in a sleep, most used",
        title=what,
    )
    for one in results:
        back = ", ".join(f"{name} {times}×" for name, times in one.restarts.items())
        numbers = [f"{one.step_s:.2f}", f"{one.single_step_s:.2f}", str(one.versions), str(len(one.unequal))]
        memory = " ".join(f"{size:.1f}" for size in (*one.freed_gib, one.most_used_gib))
        table.add_row(one.layout, *numbers, str(len(one.lost)), back, f"{one.largest_difference:.1e}", memory)
    Console(width=160).print(table)


def main() -> None:
    """Run every layout and print one table."""
    args = parse_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="headway-virtual-node-"))
    results = []
    try:
        model = make_model(scratch / "model", args)
        for layout in args.layouts:
            results.append(measure_layout(args, layout, model, scratch))
            print(json.dumps(asdict(results[-1])), flush=True)
            if args.out:
                args.out.write_text(json.dumps([asdict(one) for one in results], indent=1), encoding="utf-8")
            shutil.rmtree(scratch / layout, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show(args, results)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse what to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--full-cards", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--single", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="file for the results as JSON, written after each layout")
    args = parser.parse_args(words)
    args.mean_length = 0
    return args


if __name__ == "__main__":
    main()
