"""vLLM and SGLang beside our own engine on one card: whole runs that lose their engine.

    python benchmarks/server_engines.py --out train.json                # 20 steps with each engine, each killed once
    python benchmarks/server_engines.py --shape tiny --device cpu --prompts 4 --length 8 --steps 6 --python PYTHON

Each run is the same configuration: a random model whose vocabulary are characters learns to write digits. Its engine or
server, is killed in the middle; the ledger is audited afterwards: no sample may be lost or be there twice.
What an update costs, and more about one server: `benchmarks/one_server.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.end_to_end import SHAPES, machine, make_model
from benchmarks.virtual_node import measure_spans

from headway.config import load_config
from headway.launch.training_session import open_run_directory, prepare_run, run_training
from headway.ledger import Ledger
from headway.monitor.event_log import LoggedEvent

STRATEGY = "actor_infer.strategy_args"
WAYS: dict[str, dict[str, Any]] = {
    "native": {f"{STRATEGY}.strategy_name": "native"},
    "vllm": {f"{STRATEGY}.strategy_name": "vllm", f"{STRATEGY}.strategy_config.in_process": True},
    "vllm over HTTP": {f"{STRATEGY}.strategy_name": "vllm", f"{STRATEGY}.strategy_config.launch": True},
    "sglang over HTTP": {f"{STRATEGY}.strategy_name": "sglang", f"{STRATEGY}.strategy_config.launch": True},
}


def make_server_args(package: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return options of servers: without graphs they start sooner; SGLang's backends need no package beside it."""
    if package == "vllm":
        return {"enforce-eager": True} if args.eager else {}
    graphs = {"disable-cuda-graph": True} if args.eager else {"disable-prefill-cuda-graph": True}
    return {  # its share is of what is free, and others take memory meanwhile: the tokens are the limit
        **graphs,
        "attention-backend": "triton" if args.device == "cuda" else "torch_native",
        "sampling-backend": "pytorch",
        "max-total-tokens": 131072 if args.device == "cuda" else 16384,
        "device": args.device,
    }


def share_of_digits(text: str, task_data: Mapping[str, Any]) -> float:
    """A reward that any model can learn: the share of digits in an answer."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def make_words(args: argparse.Namespace, way: str, model: Path, run_dir: Path) -> dict[str, Any]:
    """Make the configuration, which is the same for every engine but for its name."""
    words: dict[str, Any] = {
        "exp_name": way.replace(" ", "-"),
        "output_dir": str(run_dir),
        "pretrain": str(model),
        "device": args.device,
        "async_generation_ratio": 1,
        "pg_variant": "tis",
        "processes": True,
        "filter_zero_variance": False,
        "rollout_batch_size": args.prompts,
        "num_return_sequences_in_group": 8,
        "prompt_length": 64,
        "response_length": args.length,
        "max_steps": args.steps,
        "save_steps": 0,
        "eval_steps": 0,
        "track_with": [],
        "reliability.restart_backoff_s": 0.1,
        "weight_transfer.transport": args.transport,
        "actor_train.model_args.disable_gradient_checkpointing": True,
        "actor_train.training_args.learning_rate": args.learning_rate,
        "actor_train.training_args.per_device_train_batch_size": 16,
        "actor_train.data_args.file_name": "addition",
        "rewards.addition.reward_fn": f"{Path(__file__)}:share_of_digits",
        f"{STRATEGY}.strategy_config.gpu_memory_utilization": 0.5 if way.startswith("sglang") else args.share,
        **WAYS[way],
    }
    if way != "native":
        words[f"{STRATEGY}.strategy_config.server_args"] = make_server_args(way.split()[0], args)
        if args.python:
            words[f"{STRATEGY}.strategy_config.server_python"] = args.python
    return words


class Killer:
    """Kills the engine, or its server, after some steps."""

    def __init__(self, logs: Path, step: int) -> None:
        self._logs, self._step = logs, step
        self.killed: list[str] = []
        self.back_s = 0.0
        self._at = 0.0

    def __call__(self, event: LoggedEvent) -> None:
        if event.kind == "step.end" and not self._at and event.data["trained"] >= self._step:
            self._at = event.time_s
            asyncio.get_running_loop().call_later(0.05, self._kill)
        if event.kind == "up" and event.who == "engine/0" and self._at and not self.back_s:
            self.back_s = event.time_s - self._at

    def _kill(self) -> None:
        for name in ("engine-0-server.log", "engine-0.log"):
            found = []
            for entry in Path("/proc").glob("[0-9]*/fd/1"):
                try:
                    if str(entry.readlink()) == str(self._logs / name):
                        found.append(int(entry.parts[2]))
                except OSError:
                    continue
            if found:
                victims = sorted(found)  # of a server the first is the watchdog, which must outlive it
                os.kill(victims[1] if name.endswith("server.log") and len(victims) > 1 else victims[0], signal.SIGKILL)
                self.killed.append(name)
                return


def print_step(event: LoggedEvent) -> None:
    """Print what matters as it happens, for runs that are cut off."""
    if event.kind == "step.end":
        shown = {key: event.data.get(f"train/{key}") for key in ("reward", "entropy", "ratio_mean", "lag_max")}
        print(f"step {event.data['trained']} at {event.time_s:.1f} s: {json.dumps(shown)}", flush=True)
    elif event.kind in ("up", "down", "error"):
        print(
            f"{event.kind} {event.who} at {event.time_s:.1f} s: {str(event.data.get('message', ''))[:300]}", flush=True
        )


def train(args: argparse.Namespace, way: str, model: Path, scratch: Path) -> dict[str, Any]:
    """Train once, and return what was measured and what the ledger says."""
    run_dir = scratch / way.replace(" ", "-")
    begun = time.perf_counter()
    prepared = prepare_run(load_config(None, make_words(args, way, model, run_dir)))
    events: list[LoggedEvent] = []
    with open_run_directory(prepared) as directory:
        killer = Killer(directory.path / "logs", args.kill_step)
        sinks = [events.append, print_step, *([killer] if args.kill else [])]
        summary = asyncio.run(run_training(prepared, directory, sinks=sinks))
    ends = [event for event in events if event.kind == "step.end"]
    later = ends[args.kill_step + 1 :]  # the engine has been killed and is back
    seconds = later[-1].time_s - later[0].time_s if len(later) > 1 else 0.0
    ledger = Ledger(run_dir / "ledger.sqlite")
    lost = [str(problem) for problem in ledger.audit()]
    ledger.close()
    fresh = [event.data for event in ends if event.data.get("train/lag_max") == 0]
    return {
        "engine": way,
        "transport": prepared.placement.transport.kind,
        "finished": summary.finished,
        "why": summary.reason,
        "steps": len(ends),
        "samples": sum(event.data["samples"] for event in ends),
        "audit": lost,
        "killed": killer.killed,
        "back_s": killer.back_s,
        "step_s": seconds / max(len(later) - 1, 1),
        "samples_per_s": sum(event.data["samples"] for event in later[1:]) / seconds if seconds else 0.0,
        "spans_s": measure_spans(events),
        "reward": [event.data["reward"] for event in ends],
        "entropy": [event.data.get("train/entropy") for event in ends],
        "ratio": [(data["train/ratio_mean"], data["train/ratio_max"]) for data in fresh if "train/ratio_mean" in data],
        "errors": [f"{event.who}: {event.data.get('message', '')}"[:300] for event in events if event.kind == "error"][
            :8
        ],
        "whole_s": time.perf_counter() - begun,
    }


# -- engines without a run


async def update_times(engine: Any, store: Any, version: int) -> tuple[float, float]:
    """Return the seconds of a whole update, and of its flip."""
    begin = time.perf_counter()
    manifest, buckets = await store.gather(version)
    await engine.receiver.begin(manifest)
    async for bucket in buckets:
        await engine.receiver.load(bucket)
    flip = time.perf_counter()
    await engine.receiver.flip()
    end = time.perf_counter()
    return end - begin, end - flip


async def measure_engine(engine: Any, store: Any, tensors: Any, first: int, times: int) -> dict[str, Any]:
    """Update an engine again and again; what it generates must carry each version."""
    from headway.engines.base import Progress, Request
    from headway.types import SamplingParams

    found = []
    for version in range(first, first + times + 1):
        store.publish(version, tensors)
        found.append(await update_times(engine, store, version))
        progress = Progress()
        params = SamplingParams(max_new_tokens=8)
        await engine.generate(Request(request_id=f"r{version}", session="s", prompt=(5, 9, 1), params=params), progress)
        assert [run.version for run in progress.runs] == [version], progress.runs
    store.close()
    return {"first_s": found[0], "update_s": found[1:]}


def make_engine(args: argparse.Namespace, way: str, kind: str, model: Path, scratch: Path) -> Any:
    """Make an engine of a way that takes weights by a transport."""
    from headway.launch.in_process_engines import make_in_process_engines
    from headway.launch.inference_servers import ServerOptions, make_server_engines
    from headway.weights.transports import TransportPlan

    logs = scratch / f"{way}-{kind}".replace(" ", "-") / "logs"
    logs.mkdir(parents=True)
    options = ServerOptions(
        resolved=load_config(None, make_words(args, way, model, logs.parent)),
        model=model,
        device=args.device,
        replicas=1,
        slots=64,
        threads=2,
        logs=logs,
        transport=TransportPlan(kind=kind),  # type: ignore[arg-type]
        cache_bytes=2 << 30,
        sleeps=args.sleeps,
    )
    return (make_in_process_engines if way == "vllm" else make_server_engines)(options)[0]


def make_empty_model(directory: Path, args: argparse.Namespace) -> Path:
    """Write the files of a model without its weights."""
    from transformers import Qwen2Config

    from headway.models.tiny_model import make_character_tokenizer

    tokenizer = make_character_tokenizer()
    config = Qwen2Config(
        vocab_size=151_936 if args.shape != "tiny" else 1000,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
        **SHAPES[args.shape],
    )
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_random_model(directory: Path, device: str) -> Any:
    """Make a model with random weights on the device, in the trainer's precision."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype).eval()


def show_runs(rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    names = ("engine", "steps", "samples", "audit", "killed", "back s", "s/step", "samples/s", "update s")
    table = Table(*names, title=machine())
    for row in rows:
        numbers = [str(row["steps"]), str(row["samples"]), str(len(row["audit"])), ", ".join(row["killed"])]
        numbers += [f"{row[key]:.2f}" for key in ("back_s", "step_s", "samples_per_s")]
        table.add_row(row["engine"], *numbers, f"{row['spans_s'].get('update of an engine', 0.0):.3f}")
    Console(width=140).print(table)


def main() -> None:
    """Run what is asked for."""
    args = parse_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="headway-servers-"))
    model = make_model(scratch / "model", args)
    rows = []
    for way in args.ways:
        try:
            rows.append(train(args, way, model, scratch))
        except Exception as error:
            print(f"{way}: {type(error).__name__}: {error}"[:3000], flush=True)
            continue
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1), encoding="utf-8")
    show_runs(rows)


def parse_arguments() -> argparse.Namespace:
    """Parse what to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["native", "vllm", "vllm over HTTP"])
    parser.add_argument("--share", type=float, default=0.1, help="of the card's memory for each engine")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--vocabulary", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--transport", default="auto", help="shared_memory: servers load files")
    parser.add_argument("--python", default="", help="interpreter that has vLLM or SGLang; empty: this one")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kill-step", type=int, default=3, help="after which the engine or server is killed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.mean_length, args.sleeps = 0, False
    return args


if __name__ == "__main__":
    main()
