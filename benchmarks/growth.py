"""How cost and memory grow on a CPU: with the length of answers, the slots of an engine and the tokens of a step.

    python benchmarks/growth.py                    # SmolLM2-135M: half an hour on an idle machine
    python benchmarks/growth.py --quick            # two points of each line
    python benchmarks/growth.py --only run --json

Every figure comes from a process of its own with one thread. Memory is what a process has beyond its base (the
interpreter with torch and transformers loaded), against what has to be there by the shape of the model and the
settings (`growth/computed.py`). What the columns mean and what follows: docs/results/growth.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from growth.memory import processes

HERE = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MODEL = "smollm2-135m-instruct"
LENGTHS, SLOTS, TOKENS = (32, 64, 128, 256, 512), (4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096)
FIXED_SLOTS, FIXED_LENGTH = 8, 64
LIMIT = 1.3
"""What memory may be of what was computed."""
LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    part: str
    what: str
    tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    base_mb: float = 0.0
    """Before there was a model."""
    peak_mb: float = 0.0
    rest_mb: float = 0.0
    """When all was done and nothing let go of yet."""
    computed_mb: dict[str, float] = field(default_factory=dict)
    """Beyond the base, by what it is for."""

    @property
    def ratio(self) -> float:
        """Measured memory beyond the base, of what was computed; 0 where nothing was."""
        wanted = sum(self.computed_mb.values())
        return (self.peak_mb - self.base_mb) / wanted if wanted else 0.0


# -- what is measured


def engine_rows(model: str, points: list[tuple[str, int, int]]) -> Iterator[Row]:
    """`points`: the line it belongs to, slots, length."""
    with Published(model) as versions:
        for part, slots, length in points:
            found = child("engine", {"model": model, "slots": slots, "length": length, "versions": versions})
            yield row(part, f"{slots} slots × {length}", found)


def trainer_rows(model: str, sizes: tuple[int, ...]) -> Iterator[Row]:
    for checkpointing in (True, False):
        for tokens in sizes:
            found = child("trainer", {"model": model, "tokens": tokens, "checkpointing": checkpointing})
            yield row(
                f"trainer, {'recomputing' if checkpointing else 'keeping'} activations", f"{tokens} tokens", found
            )


def row(part: str, what: str, found: dict[str, Any]) -> Row:
    known = {
        name: found[name] for name in ("tokens", "cpu_s", "wall_s", "base_mb", "peak_mb", "rest_mb", "computed_mb")
    }
    return Row(part=part, what=what, **known)


def child(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "growth.measured", kind],
        cwd=HERE,
        env={**os.environ, **ONE_THREAD},
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{kind} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Published:
    """Two versions of a model in shared memory, as a trainer holds them, for engines in other processes."""

    def __init__(self, model: str) -> None:
        import torch

        from growth.measured import BUCKET_MB
        from headway.models.model_loading import load_model
        from headway.weights.weight_store import SharedArena, WeightStore

        torch.set_num_threads(1)
        self._store = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=torch.float32, arena=SharedArena())
        loaded = load_model(model, torch.float32)
        for version in range(2):
            self._store.publish(version, dict(loaded.named_parameters()))

    def __enter__(self) -> list[dict[str, Any]]:
        return asyncio.run(self._described())

    def __exit__(self, *failure: Any) -> None:
        self._store.close()

    async def _described(self) -> list[dict[str, Any]]:
        from headway.codec import encode

        found = []
        for version in range(2):
            manifest, buckets = await self._store.gather(version)
            described = [encode(bucket).hex() async for bucket in buckets]
            found.append({"manifest": encode(manifest).hex(), "buckets": described})
        return found


# -- a whole run


def run_rows(model: str) -> Iterator[Row]:
    """`headway train` for a few steps: PSS of each process at its largest, and of all together."""
    from growth.computed import Shape, engine_mb, trainer_mb
    from growth.measured import BUCKET_MB, VERSIONS
    from headway.models.model_loading import make_architecture_factory

    prompts, group, prompt, answer, pack_rows = 4, 4, 48, 32, 8
    settings = [
        f"pretrain={model}",
        f"rollout_batch_size={prompts}",
        f"num_return_sequences_in_group={group}",
        f"prompt_length={prompt}",
        f"response_length={answer}",
        f"actor_train.training_args.per_device_train_batch_size={pack_rows}",
        *("max_steps=5", "eval_steps=0", "save_steps=0", "device=cpu"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        largest, together, wall_s = watched(settings, Path(folder))
    shape = Shape.of(make_architecture_factory(model)())
    trainer = trainer_mb(
        shape,
        pack_tokens=pack_rows * (prompt + answer),
        tree_tokens=prompt + group * answer,
        checkpointing=False,
        versions=VERSIONS,
    )
    computed = {
        "versions held": {"versions held": trainer.pop("versions held")},
        "trainer": trainer,
        "engine-0": engine_mb(
            shape, slots=2 * prompts * group, slot_tokens=prompt + answer, prefix_tokens=0, bucket_mb=BUCKET_MB
        ),
    }
    every = {f"{name}, {what}": mb for name, parts in computed.items() for what, mb in parts.items()}
    base_mb = child("base", {"model": model})["base_mb"]
    for name, peak_mb in largest.items():
        base = base_mb if name in ("trainer", "engine-0") else 0.0
        yield Row(part="whole run", what=name, base_mb=base, peak_mb=peak_mb, computed_mb=computed.get(name, {}))
    idle_mb = 2 * base_mb + largest["main"] + largest["libraries"]
    yield Row(
        part="whole run", what="all at one time", wall_s=wall_s, base_mb=idle_mb, peak_mb=together, computed_mb=every
    )


def watched(settings: list[str], folder: Path) -> tuple[dict[str, float], float, float]:
    """Largest PSS of each process and of what they share, of all at one time, and how long it took."""
    command = [sys.executable, "-m", "headway", "train", str(HERE.parent / "examples" / "arithmetic.yaml")]
    largest: dict[str, float] = {}
    together, began = 0.0, time.monotonic()
    with (folder / "main.log").open("w") as log:
        started = subprocess.Popen([*command, *settings, f"output_dir={folder / 'run'}"], stdout=log, stderr=log)
        while started.poll() is None:
            seen = list(processes(started.pid))
            now = {one.output: one.own_mb for one in seen}
            now |= {"versions held": sum(one.shared_mb for one in seen), "libraries": sum(one.files_mb for one in seen)}
            largest |= {name: max(mb, largest.get(name, 0.0)) for name, mb in now.items()}
            together = max(together, sum(now.values()))
            time.sleep(LOOK_S)
    if started.returncode:
        raise RuntimeError((folder / "main.log").read_text()[-2000:])
    return largest, together, time.monotonic() - began


# -- the table


def measure(options: argparse.Namespace) -> Iterator[Row]:
    lengths, slots, tokens = ((each[0], each[2]) if options.quick else each for each in (LENGTHS, SLOTS, TOKENS))
    points = [("engine, length", FIXED_SLOTS, length) for length in lengths if "length" in options.only]
    points += [("engine, slots", one, FIXED_LENGTH) for one in slots if "slots" in options.only]
    if points:
        yield from engine_rows(options.model, points)
    if "trainer" in options.only:
        yield from trainer_rows(options.model, tokens)
    if "run" in options.only:
        yield from run_rows(options.model)


def show(rows: list[Row]) -> None:
    table = Table(title=f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, one thread each")
    for column in (
        "",
        "",
        "CPU ms/token",
        "tokens/s",
        "base MB",
        "peak MB",
        "at rest",
        "beyond base",
        "computed",
        "ratio",
    ):
        table.add_column(column, justify="right" if column else "left")
    part = ""
    for one in rows:
        if one.part != part:
            table.add_section()
        beyond, wanted = one.peak_mb - one.base_mb, sum(one.computed_mb.values())
        table.add_row(
            one.part if one.part != part else "",
            one.what,
            f"{1000 * one.cpu_s / one.tokens:.1f}" if one.tokens else "",
            f"{one.tokens / one.wall_s:.1f}" if one.tokens else "",
            f"{one.base_mb:,.0f}" if one.base_mb else "",
            f"{one.peak_mb:,.0f}",
            f"{one.rest_mb:,.0f}" if one.rest_mb else "",
            f"{beyond:,.0f}",
            f"{wanted:,.0f}" if wanted else "",
            f"{one.ratio:.2f}{' !' if one.ratio > LIMIT else ''}" if wanted else "",
        )
        part = one.part
    Console(width=140).print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("length", "slots", "trainer", "run")
    parser.add_argument("--only", choices=parts, nargs="*", default=list(parts))
    parser.add_argument("--quick", action="store_true", help="two points of each line")
    parser.add_argument("--json", action="store_true", help="print every measurement as a line of JSON")
    parser.add_argument("--model", default=MODEL, help="`random`: the same shape, no whole run")
    return parser.parse_args(arguments)


def random_model(folder: Path) -> str:
    """A model of the shape of SmolLM2-135M, written down; its tokenizer is empty and never read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    more = {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
    LlamaForCausalLM(LlamaConfig(**shape, **more, tie_word_embeddings=True)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def main(arguments: list[str]) -> None:
    from headway.errors import ConfigError
    from headway.models.model_names import resolve_model

    options, rows = parse(arguments), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            options.model = (
                random_model(Path(folder)) if options.model == "random" else str(resolve_model(options.model))
            )
        except ConfigError as error:
            if options.model != MODEL:
                raise
            print(f"{error}\nGoing on with random weights of the same shape, without the whole run.", file=sys.stderr)
            options.model = random_model(Path(folder))
        if options.model == folder and "run" in options.only:
            options.only.remove("run")
        for one in measure(options):
            rows.append(one)
            if options.json:
                print(json.dumps({**asdict(one), "ratio": round(one.ratio, 3)}), flush=True)
    if not options.json:
        show(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
