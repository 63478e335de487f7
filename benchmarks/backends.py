"""Does a run learn the same wherever it runs? One configuration as processes of this machine, as actors on three nodes
of Ray, and with vLLM as its engine; what that costs in seconds is in the same table.

    make test-vllm                                             # makes the environment that has vLLM
    python benchmarks/backends.py --out sums.jsonl             # a tiny model learns to add, minutes
    python benchmarks/backends.py --task arithmetic --seeds 1 --steps 8 --eval-steps 2 --store-mb 2000 --out more.jsonl
    python benchmarks/backends.py --draw sums.jsonl more.jsonl --picture backends.svg

Every run is `headway train` in a process of its own, with one trainer and two engines of a thread each; which back end
is first changes from seed to seed. The three nodes are three raylets of this machine with a store each
(`ray.cluster_utils.Cluster`), there before a run begins: no network is measured. With `vllm` each engine is a server
that the run starts, with `vllm inside` it runs vLLM in its own process. Validation draws at temperature 1, for
`arithmetic` on problems never trained on; for `sums` on the hundred there are, because so small a model learns them by
heart.

**Noise.** A seed is the problems, their order, and what our own engine draws; asynchrony is not in it, and on vLLM the
tokens are not either. So runs of one back end differ, and the question is whether back ends differ by more. A run's
level is the mean of its validations after the start. If the back end did not matter, its name could be exchanged
among the runs of a seed: p is the share of all such exchanges whose means lie at least as far apart as those seen.

Mismatch is what the engine says about its tokens against what the trainer says, over steps all of whose samples were
made by the weights that are trained. An update is from the end of a step until the last engine serves its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import permutations, product
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.monitor.event_files import read_event_log
from headway.monitor.event_log import LoggedEvent

ROOT = Path(__file__).parents[1]
BACKENDS = ("local", "ray", "vllm", "vllm inside")
STRATEGY = "actor_infer.strategy_args"
SUMS = [
    "async_generation_ratio=1",
    "pg_variant=tis",
    "rollout_batch_size=16",
    "num_return_sequences_in_group=8",
    "prompt_length=48",
    "response_length=4",
    "actor_train.model_args.disable_gradient_checkpointing=true",
    "actor_train.training_args.learning_rate=2e-3",
    "actor_train.training_args.per_device_train_batch_size=16",
    "rewards.arithmetic.reward_fn=numeric",
]
"""What a model of 0.1 million parameters learns within a minute."""
TIMES = 3
"""How often each of the hundred sums is asked in a validation."""
ARITHMETIC = [str(ROOT / "examples" / "arithmetic.yaml")]


def main() -> None:
    """Run every cell, or draw what was written; print one table for each task."""
    args = arguments()
    if args.draw:
        found = [json.loads(line) for path in args.draw for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        found = measured(args)
    for task in dict.fromkeys(cell["task"] for cell in found):
        cells = [cell for cell in found if cell["task"] == task]
        show(task, cells)
        compare(cells)
    if args.picture:
        draw(found, args.picture)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, a line for each as it ends."""
    found = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-backends-")))
        address = stack.enter_context(three_nodes(args.store_mb)) if "ray" in args.backends else ""
        task = [*SUMS, *sums_in(scratch)] if args.task == "sums" else ARITHMETIC
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # nodes and servers end with us; Ray has set its own
        for turn, seed in enumerate(args.seeds):
            for backend in turned(args.backends, turn):
                found.append(
                    run(
                        args,
                        scratch / f"{backend.replace(' ', '-')}-{seed}",
                        [*task, *words_for(backend, args, address)],
                        seed,
                    )
                )
                found[-1] = {"task": args.task, "backend": backend, "seed": seed, **found[-1], **machine()}
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found[-1]) + "\n")
    return found


def turned(names: list[str], by: int) -> list[str]:
    """Another one first each time."""
    by %= len(names)
    return [*names[by:], *names[:by]]


@contextmanager
def three_nodes(store_mb: int) -> Iterator[str]:
    """Raylets of one slot each on this machine; the address of their head."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": store_mb << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def sums_in(directory: Path) -> list[str]:
    """The hundred sums as `tiny-sums` was taught them; and that model with heads 32 wide, the narrowest for vLLM."""
    from headway.models.tiny_model import make_tiny_model

    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    for name, rows in {"train": sums, "validation": sums * TIMES}.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_tiny_model(directory / "model", heads=2)
    return [
        f"pretrain={directory / 'model'}",
        f"actor_train.data_args.file_name={directory / 'train.jsonl'}",
        f"validation.data_args.file_name={directory / 'validation.jsonl'}",
    ]


def words_for(backend: str, args: argparse.Namespace, address: str) -> list[str]:
    """What a configuration says of where it runs."""
    if backend == "ray":
        return ["cluster.kind=ray", f"cluster.address={address}"]
    if backend == "local":
        return ["processes=true"]
    return [
        "processes=true",
        f"{STRATEGY}.strategy_name=vllm",
        f"{STRATEGY}.strategy_config.{'in_process' if backend == 'vllm inside' else 'launch'}=true",
        f"{STRATEGY}.strategy_config.server_python={args.vllm_python}",
        f"{STRATEGY}.strategy_config.server_args={{enforce-eager: true}}",
    ]


def run(args: argparse.Namespace, directory: Path, task: list[str], seed: int) -> dict[str, Any]:
    """One of them: its curves, and how long things took."""
    words = [
        f"output_dir={directory}",
        f"seed={seed}",
        f"max_steps={args.steps}",
        f"eval_steps={args.eval_steps}",
        "save_steps=0",
        "track_with=[]",
        "device=cpu",
        "num_gpus_per_node=1",
        "actor_train.device_mapping=[0]",
        "actor_infer.device_mapping=[1,2]",
        "actor_train.strategy_args.strategy_config.num_threads=1",
        f"{STRATEGY}.strategy_config.num_threads=1",
        *args.set,
    ]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", *task, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    cell = {"process_s": round(time.monotonic() - began_s, 1)}
    if done.returncode:
        return {**cell, "failed": (done.stderr or done.stdout)[-2000:]}
    return {**cell, **curves(list(read_event_log(directory)))}


def curves(events: list[LoggedEvent]) -> dict[str, Any]:
    """Rewards by step, seconds of a step, of an update and of the start, and how far engine and trainer are apart."""
    steps = [event for event in events if event.kind == "step.end"]
    ended = {event.data["trained"]: event.time_s for event in steps}
    served: dict[int, float] = {}
    for event in events:
        if event.kind == "served" and event.data["version"] in ended:
            served[event.data["version"]] = event.time_s
    updates = [served[version] - ended[version] for version in served if version > 1]
    fresh = [event.data for event in steps if event.data["train/lag_max"] == 0]
    validated = [event.data for event in events if event.kind == "validate.end"]
    return {
        "validated": [[data["trained"], round(data["reward"], 4)] for data in validated],
        "reward": [round(event.data["reward"], 4) for event in steps],
        "lag": round(mean(event.data["train/lag_mean"] for event in steps), 3),
        "samples": sum(event.kind == "sample.end" and event.data["end"] == "trained" for event in events),
        "start_s": round(next(event.time_s for event in events if event.kind == "served") - events[0].time_s, 2),
        "step_s": round((steps[-1].time_s - steps[0].time_s) / (len(steps) - 1), 3),
        "update_s": round(median(updates), 4),
        "fresh_steps": len(fresh),
        "mismatch_kl": mean(data["train/behaviour_kl"] for data in fresh) if fresh else None,
        "mismatch_ratio_max": max(data["train/ratio_max"] for data in fresh) if fresh else None,
    }


def machine() -> dict[str, Any]:
    """Where, and which tree."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    return {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "commit": commit or "unknown"}


def level(cell: dict[str, Any]) -> float:
    """Of a learning curve: the mean of validations, without that before training."""
    return mean(reward for step, reward in cell["validated"] if step)


def show(task: str, cells: list[dict[str, Any]]) -> None:
    """A row for each run."""
    names = (
        "on",
        "seed",
        "validated by step",
        "level",
        "lag",
        "KL",
        "largest ratio",
        "start s",
        "s a step",
        "update s",
    )
    table = Table(*names, title=f"{task}; {cells[0]['machine']}, commit {cells[0]['commit']}")
    for cell in sorted(cells, key=lambda cell: (BACKENDS.index(cell["backend"]), cell["seed"])):
        if "failed" in cell:
            table.add_row(cell["backend"], str(cell["seed"]), f"failed: {cell['failed'][-300:]}")
            continue
        table.add_row(
            cell["backend"],
            str(cell["seed"]),
            " ".join(f"{reward:.2f}" for _, reward in cell["validated"]),
            f"{level(cell):.3f}",
            f"{cell['lag']:.2f}",
            f"{cell['mismatch_kl']:.1e}" if cell["fresh_steps"] else "",
            f"{cell['mismatch_ratio_max']:.5f}" if cell["fresh_steps"] else "",
            f"{cell['start_s']:.1f}",
            f"{cell['step_s']:.3f}",
            f"{cell['update_s']:.3f}",
        )
    Console(width=170).print(table)


def compare(cells: list[dict[str, Any]]) -> None:
    """Do back ends differ by more than runs of one do? Over seeds that ended on all of them."""
    levels: dict[int, dict[str, float]] = {}
    for cell in cells:
        if "failed" not in cell:
            levels.setdefault(cell["seed"], {})[cell["backend"]] = level(cell)
    backends = [name for name in BACKENDS if any(name in of_seed for of_seed in levels.values())]
    rows = [[of_seed[name] for name in backends] for of_seed in levels.values() if len(of_seed) == len(backends)]
    if len(rows) < 2 or len(backends) < 2:
        return
    columns = list(zip(*rows, strict=True))
    noise = sqrt(mean(stdev(column) ** 2 for column in columns))
    for name, column in zip(backends, columns, strict=True):
        print(f"{name}: level {mean(column):.3f}, standard deviation over {len(rows)} seeds {stdev(column):.3f}")
    print(f"means of back ends lie {apart(rows):.3f} apart, p = {share_as_far(rows):.2f}")
    print(f"standard error of a difference of two, by the spread of seeds: {noise * sqrt(2 / len(rows)):.3f}")


def apart(rows: Iterable[Iterable[float]]) -> float:
    """The distance between the highest and the lowest of the means of the columns."""
    means = [mean(column) for column in zip(*rows, strict=True)]
    return max(means) - min(means)


def share_as_far(rows: list[list[float]]) -> float:
    """Of all exchanges of columns within rows, those that put the means at least as far apart."""
    seen = apart(rows)
    ways = [apart(way) >= seen - 1e-12 for way in product(*(permutations(row) for row in rows))]
    return sum(ways) / len(ways)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """A panel for each task: thin lines are runs, thick ones their means."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(cell["task"] for cell in found))
    figure, panels = pyplot.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 3.4), layout="constrained", squeeze=False
    )
    for axes, task in zip(panels[0], tasks, strict=True):
        for number, backend in enumerate(BACKENDS):
            runs = [c["validated"] for c in found if (c["task"], c["backend"]) == (task, backend) and "failed" not in c]
            for curve in runs:
                axes.plot(*zip(*curve, strict=True), color=f"C{number}", linewidth=0.7, alpha=0.5)
            if runs:
                steps = [step for step, _ in runs[0]]
                means = [mean(reward for _, reward in point) for point in zip(*runs, strict=True)]
                axes.plot(steps, means, color=f"C{number}", linewidth=2, label=f"{backend}, {len(runs)} seeds")
        axes.set(title=task, xlabel="steps", ylabel="validation reward")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("sums", "arithmetic"), default="sums")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument(
        "--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python", help="that has vLLM"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-steps", type=int, default=10)
    parser.add_argument("--store-mb", type=int, default=300, help="object store of each node")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more of the configuration")
    parser.add_argument("--out", type=Path, help="a line for each run, appended")
    parser.add_argument("--draw", type=Path, nargs="+", help="run nothing: tables and picture of what --out wrote")
    parser.add_argument("--picture", type=Path, help="an svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
