"""GRPO with TRL's own trainer, on a CPU: the script that `benchmarks/peer_trl.py` runs inside TRL's environment.

    python trl_grpo.py JOB.json STEPS.jsonl

Uses TRL's public interface only and imports nothing of Headway. Writes one line a step: when it ended, how long its
generation took, CPU seconds of this process so far, samples, tokens of all answers, mean reward. With several processes
the first one writes, and samples, tokens and reward are those of all of them, as TRL logs them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reward
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Stamps steps from outside: one begins, rewards are asked for when answers are there, it ends, it is logged."""

    def __init__(self, steps: Path, samples: int, judge: Callable[..., float]) -> None:
        self._steps, self._samples, self._judge = steps, samples, judge
        self._begun_s = self._answered_s = self._ended_s = self._cpu_s = 0.0

    def reward(self, completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        self._answered_s = time.monotonic()
        texts = [messages[-1]["content"] for messages in completions]
        return [self._judge(text, {"answer": right}) for text, right in zip(texts, answer, strict=True)]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun_s = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ended_s, self._cpu_s = time.monotonic(), time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" not in logs or not state.is_world_process_zero:
            return
        row = {
            "end_s": self._ended_s,
            "generate_s": self._answered_s - self._begun_s,
            "cpu_s": self._cpu_s,
            "samples": self._samples,
            "tokens": round(logs["completions/mean_length"] * self._samples),
            "reward": logs["reward"],
        }
        with self._steps.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def config_of(job: dict[str, Any]) -> GRPOConfig:
    """The settings that do the work asked for and no more; why each was chosen is in docs/results/peer_trl.md."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    samples = job["prompts"] * job["group"]
    return GRPOConfig(
        output_dir=job["run_dir"],
        max_steps=job["steps"],
        seed=job["seed"],
        # The batch: all answers of a step are generated at once, then trained in micro-batches, one optimizer step.
        num_generations=job["group"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=samples // (job["micro_batch"] * processes),
        num_iterations=1,
        shuffle_dataset=False,
        # Generation.
        max_completion_length=job["cap"],
        temperature=1.0,
        use_vllm=False,
        use_transformers_continuous_batching=job["continuous_batching"],
        transformers_continuous_batching_config=job["continuous_batching_config"],
        # The objective, as Headway computes it.
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        scale_rewards="group",
        # The optimizer.
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        # The machine.
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=job["checkpointing"],
        dataloader_num_workers=0,
        # Nothing on the side.
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(job_path: str, steps_path: str) -> None:
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["data"]).read_text(encoding="utf-8").splitlines()]
    tasks = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    clock = Clock(Path(steps_path), job["prompts"] * job["group"], getattr(reward, job["reward"]))
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=[clock.reward],
        args=config_of(job),
        train_dataset=Dataset.from_list(tasks),
        callbacks=[clock],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
