"""How each contestant of the peer benchmark is told what to do, and how its report is read.

A contestant gets the same `Plan` and gives back a command with its environment, and a function that reads the steps
it wrote. All are separate processes; nobody imports anybody. Two threads mean: one process with two, or two with one.
Who takes turns inside one step (α = 0, TRL) has all threads for each turn; who overlaps has its share for each side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import yaml

from headway.monitor.event_files import read_event_log
from peer.work import Step, Work

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
REQUIREMENTS = ("torch==2.13.0", "trl==1.16.0")
"""In this order: torch first and by itself, held by the constraints, or a build for GPUs comes with TRL."""
PROMPT_TOKENS = 48
"""Longest prompt: the chat template around `a op b = ?` has 36."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of one contestant."""

    work: Work
    model: Path
    data: Path
    run_dir: Path
    steps: int
    """Warm-up included."""
    threads: int
    micro_batch: int
    """Samples of one forward and backward pass."""
    checkpointing: bool
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run that can be started."""

    command: list[str]
    environment: dict[str, str]
    read: Callable[[], list[Step]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trl:
    """GRPOTrainer of TRL, in an environment of its own."""

    python: Path
    processes: int = 1
    """Data parallel, each with its share of the threads."""
    continuous_batching: bool = False
    """Generation by `transformers` continuous batching instead of `generate()`."""
    tail: int = 0

    @property
    def name(self) -> str:
        more = f", {self.processes} processes" if self.processes > 1 else ""
        return "TRL" + more + (", continuous batching" if self.continuous_batching else "")

    def start(self, plan: Plan) -> Start:
        job, steps = plan.run_dir / "job.json", plan.run_dir / "steps.jsonl"
        threads = max(plan.threads // self.processes, 1)
        job.write_text(json.dumps(self._job(plan, threads), indent=2), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        command = [str(self.python), *(launcher if self.processes > 1 else [])]
        command += [str(HERE / "trl_grpo.py"), str(job), str(steps)]
        return Start(command=command, environment=_environment(threads), read=lambda: _rows(steps))

    def _job(self, plan: Plan, threads: int) -> dict[str, object]:
        work, length = plan.work, PROMPT_TOKENS + plan.work.cap
        share = work.samples // self.processes
        blocks = {"num_blocks": share * ceil(length / 32) + share, "max_batch_tokens": 128 + share}
        return {
            "model": str(plan.model),
            "data": str(plan.data),
            "run_dir": str(plan.run_dir),
            "prompts": work.prompts,
            "group": work.group,
            "cap": work.cap,
            "reward": work.reward,
            "steps": plan.steps,
            "micro_batch": min(plan.micro_batch, share),
            "learning_rate": plan.learning_rate,
            "seed": plan.seed,
            "checkpointing": plan.checkpointing,
            "threads": threads,
            "continuous_batching": self.continuous_batching,
            "continuous_batching_config": blocks if self.continuous_batching else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Headway:
    """`headway train` with one α."""

    alpha: int

    @property
    def name(self) -> str:
        return f"Headway α={self.alpha}"

    @property
    def tail(self) -> int:
        """Steps after the measured ones, so that none is measured whose successors need no generation any more."""
        return self.alpha

    def start(self, plan: Plan) -> Start:
        config = plan.run_dir / "headway.yaml"
        threads = plan.threads if self.alpha == 0 else max(plan.threads // 2, 1)
        config.write_text(yaml.safe_dump(self._config(plan, threads), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "headway", "train", str(config), f"async_generation_ratio={self.alpha}"]
        return Start(command=command, environment=_environment(threads), read=lambda: _events(plan.run_dir))

    def _config(self, plan: Plan, threads: int) -> dict[str, object]:
        work, strategy = plan.work, {"num_threads": threads}
        slots = work.samples * (1 + self.alpha)
        training = {
            "learning_rate": plan.learning_rate,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "per_device_train_batch_size": min(plan.micro_batch, work.samples),
        }
        return {
            "pretrain": str(plan.model),
            "output_dir": str(plan.run_dir),
            "resume": "never",
            "seed": plan.seed,
            "device": "cpu",
            "max_steps": plan.steps,
            "save_steps": 0,
            "eval_steps": 0,
            "track_with": [],
            "prompt_length": PROMPT_TOKENS,
            "response_length": work.cap,
            "rollout_batch_size": work.prompts,
            "num_return_sequences_in_group": work.group,
            "filter_zero_variance": False,  # TRL keeps such groups: everyone generates equally many
            "pg_variant": "ppo",
            "adv_estimator": "grpo",
            "loss_agg_mode": "token-mean",
            "actor_train": {
                "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": not plan.checkpointing},
                "training_args": training,
                "data_args": {"file_name": str(plan.data), "shuffle": False},
                "strategy_args": {"strategy_config": strategy},
            },
            "actor_infer": {
                "model_args": {"dtype": "fp32"},
                "generating_args": {"temperature": 1.0, "max_new_tokens": work.cap},
                "strategy_args": {"strategy_config": {**strategy, "max_num_seqs": slots}},
            },
            "rewards": {"default": {"reward_fn": f"{HERE / 'reward.py'}:{work.reward}"}},
        }


Contestant = Trl | Headway


def trl_environment(folder: Path) -> Path:
    """The interpreter of a virtual environment with TRL, made where it is not there yet."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists() or ready.read_text(encoding="utf-8").split() != list(REQUIREMENTS):
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for requirement in REQUIREMENTS:
            install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), requirement]
            subprocess.run(install, check=True)
        ready.write_text("\n".join(REQUIREMENTS), encoding="utf-8")
    return python


def _environment(threads: int) -> dict[str, str]:
    number = str(threads)
    threading = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), number)
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **threading, **quiet}


def _rows(path: Path) -> list[Step]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    keys = ("end_s", "samples", "tokens", "reward", "generate_s")
    return [Step(**{key: row[key] for key in keys}) for row in map(json.loads, lines)]


def _events(run_dir: Path) -> list[Step]:
    """From the event log, which lies in the run's folder or below it."""
    ledgers = sorted(run_dir.rglob("ledger.sqlite"))
    if not ledgers:
        return []
    ends = [event for event in read_event_log(ledgers[0].parent) if event.kind == "step.end"]
    return [
        Step(
            end_s=each.time_s,
            samples=each.data["samples"],
            tokens=each.data["actions"],
            reward=each.data["reward"],
            skipped=round(each.data.get("train/skipped_samples", 0)),
        )
        for each in ends
    ]
