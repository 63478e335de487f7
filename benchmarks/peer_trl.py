"""Headway and TRL's GRPOTrainer on the same CPU, model, prompts, groups and lengths, one after the other.

    python benchmarks/peer_trl.py                          # all settings, all contestants: hours
    python benchmarks/peer_trl.py --work 2x4x32:fixed --only trl headway-1 --steps 3
    python benchmarks/peer_trl.py --json > runs/peer_trl.json

TRL comes from PyPI into a virtual environment of its own (`--env`). Everyone is held to the same cores. Seconds per
step are those between two ends of steps, after the warm-up; what a contestant generates and throws away does not count
as samples or tokens. A contestant that fails is a row that says so. The machine should have nothing else to do: its
load at the start is reported. What was chosen and why: docs/results/peer_trl.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peer.contestants import Contestant, Headway, Plan, Trl, trl_environment
from peer.processes import Ran, watch
from peer.work import Step, Work, model_folder, never_ending, parse_work, write_tasks

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = Path.home() / ".cache" / "headway" / "peers" / "trl"
NAMES = ("trl", "trl-2p", "trl-cb", "headway-0", "headway-1", "headway-2")
SPARE_STEPS = 8
"""Steps' worth of tasks beyond the last one, for those who start groups ahead."""
COLUMNS = ("s/step", "generating", "samples/s", "tokens/s", "tokens each", "gradient", "PSS MB", "RSS MB", "reward")
RATIOS = ("speed", "PSS")
LAST_STEPS = 3
"""Steps that the final reward is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one contestant."""

    work: str
    contestant: str
    failed: str | None
    """Why there are no figures."""
    step_s: float = 0.0
    generate_s: float | None = None
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    tokens_per_answer: float = 0.0
    gradient_share: float = 0.0
    """Share of samples that a gradient was computed for; those without advantage need none."""
    reward_first: float = 0.0
    """Of the first step of the run: nobody has learned anything yet."""
    reward_last: float = 0.0
    peak_pss_mb: float = 0.0
    peak_rss_mb: float = 0.0
    wall_s: float = 0.0
    """The whole run, start and warm-up included."""


def row_of(name: str, work: Work, steps: list[Step], ran: Ran, options: argparse.Namespace, log: Path) -> Row:
    wanted = options.warmup + options.steps
    if ran.code != 0 or len(steps) < wanted:
        why = "took too long" if ran.code is None else f"exit code {ran.code}"
        return Row(work=work.name, contestant=name, failed=f"{why}, {len(steps)} of {wanted} steps, see {log}")
    measured = steps[options.warmup : wanted]
    seconds = measured[-1].end_s - steps[options.warmup - 1].end_s
    samples, tokens = sum(step.samples for step in measured), sum(step.tokens for step in measured)
    if work.fixed and tokens < 0.995 * samples * work.cap:
        short = f"{tokens / samples:.1f} tokens an answer where {work.cap} are fixed"
        return Row(work=work.name, contestant=name, failed=short)
    generating = [step.generate_s for step in measured if step.generate_s is not None]
    return Row(
        work=work.name,
        contestant=name,
        failed=None,
        step_s=seconds / len(measured),
        generate_s=statistics.mean(generating) if generating else None,
        samples_per_s=samples / seconds,
        tokens_per_s=tokens / seconds,
        tokens_per_answer=tokens / samples,
        gradient_share=1.0 - sum(step.skipped for step in measured) / samples,
        reward_first=steps[0].reward,
        reward_last=statistics.mean(step.reward for step in measured[-LAST_STEPS:]),
        peak_pss_mb=ran.peak_pss_mb,
        peak_rss_mb=ran.peak_rss_mb,
        wall_s=ran.wall_s,
    )


def run_one(contestant: Contestant, work: Work, model: Path, seed: int, options: argparse.Namespace) -> Row:
    run_dir: Path = options.out / f"{work.name} {contestant.name} {seed}".replace(" ", "_").replace(",", "")
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    steps = options.warmup + options.steps + contestant.tail
    write_tasks(run_dir / "tasks.jsonl", work.prompts * (steps + SPARE_STEPS), seed)
    plan = Plan(
        work=work,
        model=never_ending(model, run_dir / "model") if work.fixed else model,
        data=run_dir / "tasks.jsonl",
        run_dir=run_dir,
        steps=steps,
        threads=options.threads,
        micro_batch=options.micro_batch,
        checkpointing=options.checkpointing,
        learning_rate=options.learning_rate,
        seed=seed,
    )
    start, log = contestant.start(plan), run_dir / "log.txt"
    ran = watch(start.command, start.environment, log, options.limit_s)
    return row_of(contestant.name, work, start.read(), ran, options, log)


def contestants(names: list[str], environment: Path) -> list[Contestant]:
    found: list[Contestant] = []
    python = trl_environment(environment) if any(name.startswith("trl") for name in names) else environment
    for name in names:
        system, _, variant = name.partition("-")
        if system == "headway":
            found.append(Headway(alpha=int(variant)))
        else:
            found.append(Trl(python=python, processes=2 if variant == "2p" else 1, continuous_batching=variant == "cb"))
    return found


def machine(options: argparse.Namespace) -> dict[str, object]:
    """What the figures hold for."""

    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False).stdout.strip()

    processor = [line.partition(":")[2].strip() for line in said("lscpu").splitlines() if line.startswith("Model name")]
    asked = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('trl', 'torch', 'transformers')))"
    python = options.env / "bin" / "python"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": said("git", "rev-parse", "--short", "HEAD") + ("+" if said("git", "status", "--porcelain") else ""),
        "processor": f"{processor[0] if processor else 'unknown'}, {os.cpu_count()} cores",
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "headway_runs_on": " ".join(f"{name} {version(name)}" for name in ("torch", "transformers")),
        "trl_runs_on": said(str(python), "-c", asked) if python.exists() else "not there",
    }


def median_rows(rows: list[Row]) -> list[tuple[Row, str]]:
    """Of the runs of one contestant the one with the median seconds per step, and the range of all."""
    chosen = []
    for name in dict.fromkeys(row.contestant for row in rows):
        own = [row for row in rows if row.contestant == name]
        good = sorted((row for row in own if row.failed is None), key=lambda row: row.step_s)
        if len(good) < len(own):
            chosen.append((next(row for row in own if row.failed is not None), ""))
        else:
            spread = f" ({good[0].step_s:.1f} – {good[-1].step_s:.1f})" if len(good) > 1 else ""
            chosen.append((good[(len(good) - 1) // 2], spread))
    return chosen


def table_of(work: Work, rows: list[Row]) -> Table:
    """Ratios are to the fastest TRL of this setting: more than 1 is better."""
    table = Table(title=f"{work.name}: prompts x group x cap")
    table.add_column("")
    for column in (*COLUMNS, *RATIOS):
        table.add_column(column, justify="right")
    chosen = median_rows(rows)
    peers = [row for row, _ in chosen if row.contestant.startswith("TRL") and row.failed is None]
    best = min(peers, key=lambda row: row.step_s, default=None)
    for row, spread in chosen:
        if row.failed is not None:
            table.add_row(row.contestant, "failed")
            continue
        table.add_row(
            row.contestant,
            f"{row.step_s:.1f}{spread}",
            f"{row.generate_s:.1f}" if row.generate_s is not None else "",
            f"{row.samples_per_s:.2f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_answer:.1f}",
            f"{row.gradient_share:.0%}",
            f"{row.peak_pss_mb:.0f}",
            f"{row.peak_rss_mb:.0f}",
            f"{row.reward_first:.2f} → {row.reward_last:.2f}",
            f"{best.step_s / row.step_s:.2f} ×" if best else "",
            f"{best.peak_pss_mb / row.peak_pss_mb:.2f} ×" if best else "",
        )
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="contestants, in this order")
    parser.add_argument(
        "--work",
        nargs="+",
        default=["8x8x12", "2x4x32"],
        help="prompts x group x cap, :natural or :fixed for one alone",
    )
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, at least one")
    parser.add_argument("--repeat", type=int, default=1, help="runs of everyone in turn, each with a seed of its own")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder or built-in name")
    parser.add_argument("--threads", type=int, default=2, help="of everyone, in all")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of one forward and backward pass")
    parser.add_argument("--checkpointing", action="store_true", help="everyone recomputes activations")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=7200.0, help="a run that takes longer is ended")
    parser.add_argument("--env", type=Path, default=ENVIRONMENT, help="TRL's virtual environment, made if missing")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "peer_trl", help="what runs leave behind")
    parser.add_argument("--json", action="store_true", help="print every run for machines instead of tables")
    options = parser.parse_args(arguments)
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps must be at least 1")
    if sys.platform != "linux":
        parser.error("memory is read from /proc: Linux only")
    options.env, options.out = options.env.absolute(), options.out.absolute()
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)  # children inherit it
    console = Console(stderr=options.json, width=140, highlight=False)
    entrants, model = contestants(options.only, options.env), model_folder(options.model)
    about = {**machine(options), "cores_used": len(cores), "model": model.name}
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    results: list[Row] = []
    for work in [work for text in options.work for work in parse_work(text)]:
        rows: list[Row] = []
        for turn in range(options.repeat):
            for entrant in entrants:
                row = run_one(entrant, work, model, options.seed + turn, options)
                console.print(f"{work.name}: {row.contestant}: {row.failed or f'{row.step_s:.1f} s a step'}")
                rows.append(row)
        console.print(table_of(work, rows))
        results += rows
    if options.json:
        settings = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
        print(json.dumps({"machine": about, "settings": settings, "runs": [asdict(row) for row in results]}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
