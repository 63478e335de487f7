"""What large models cost on one GPU: 7B with adapters and in full, 32B with adapters. Seconds, MFU, memory.

    python benchmarks/lora_gpu.py                                # every row, about two minutes on an H200
    python benchmarks/lora_gpu.py --rows 7b-lora 32b-lora --tokens 16384
    python benchmarks/lora_gpu.py --device cpu --rows tiny-lora tiny-full --length 24 --tokens 100     # does it run?

Random weights of the shapes of Qwen2.5, made on the device; answers of equal length, four to a prompt (two from 32k
tokens on); one optimizer step a batch; the step of a learner, without publishing. MFU counts what mathematics needs:
four operations for each frozen weight and token (no gradient of it is computed), six for each trained one, and those of
causal attention, whatever is recomputed. The peak is that of dense bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from end_to_end import machine
from headway.algorithms.advantages import AdvantageSettings
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.policy_model import count_token_operations, peak_tflops
from headway.trainers.local.settings import LocalSettings, LoraSettings, OptimizerSettings
from headway.trainers.local.training_thread import CommitGate
from trainer_gpu import PROMPT, VOCABULARY, batch_of

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to train one shape."""

    shape: str
    lora: bool = True
    recompute: bool = False
    eight_bit: bool = False
    stochastic_rounding: bool = False
    offload: bool = False
    steps: int = 3
    """Measured steps, after one that is not."""

    @property
    def name(self) -> str:
        parts = ["LoRA, rank 32" if self.lora else "full", "recomputed" if self.recompute else "kept"]
        parts += ["8-bit moments"] * self.eight_bit + ["stochastic bf16"] * self.stochastic_rounding
        return ", ".join([self.shape, *parts, *["state on the host"] * self.offload])


ROWS = {
    "7b-lora": Row(shape="7b"),
    "7b-lora-recomputed": Row(shape="7b", recompute=True),
    "7b-full": Row(shape="7b", lora=False, recompute=True, eight_bit=True, stochastic_rounding=True),
    "7b-full-masters": Row(shape="7b", lora=False, recompute=True, eight_bit=True, steps=2),
    "7b-full-offload": Row(shape="7b", lora=False, recompute=True, offload=True, steps=1),
    "32b-lora": Row(shape="32b", recompute=True, steps=9),
    "tiny-lora": Row(shape="tiny"),
    "tiny-full": Row(shape="tiny", lora=False, recompute=True, eight_bit=True, stochastic_rounding=True, offload=True),
}


def model_of(row: Row, args: argparse.Namespace) -> Any:
    """Random, in the precision of training."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=False, **SHAPES[row.shape])
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def measured(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps after the first."""
    length, group = args.length - PROMPT if args.length > PROMPT else args.length, 4 if args.length < 32768 else 2
    prompts, steps = max(args.tokens // (group * args.length), 1), args.steps or row.steps
    began = time.perf_counter()
    learner = LocalLearner(
        model_of(row, args),
        LocalSettings(
            advantages=AdvantageSettings(),
            optimizer=OptimizerSettings(
                learning_rate=1e-5,
                offload=row.offload,
                eight_bit=row.eight_bit,
                stochastic_rounding=row.stochastic_rounding,
            ),
            lora=LoraSettings(rank=32, alpha=64) if row.lora else None,
            precision="bf16" if args.device == "cuda" else "fp32",
            device=args.device,
            micro_batch_tokens=args.pack,
            gradient_checkpointing=row.recompute,
        ),
    )
    made_s = time.perf_counter() - began
    batches = [batch_of(version, prompts, group, length) for version in range(steps + 1)]
    gate, config = CommitGate(), learner.policy.causal.config
    learner.learn(batches[0], CommitGate())
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began, metrics = time.perf_counter(), {}
    for batch in batches[1:]:
        metrics = learner.learn(batch, gate := CommitGate())
    assert gate.committed
    step_s = (time.perf_counter() - began) / steps
    tokens = metrics["packed_tokens"]
    keys = PROMPT + length / 2
    attention = 3 * 4 * config.num_hidden_layers * config.hidden_size * keys * prompts * group * length
    needed = count_token_operations(learner.policy.causal) * tokens + attention
    return {
        "row": row.name,
        "length": args.length,
        "steps": steps + 1,
        "made_s": made_s,
        "tokens_a_step": tokens,
        "step_s": step_s,
        "tokens_s": tokens / step_s,
        "tflops": needed / step_s / 1e12,
        "mfu": needed / step_s / 1e12 / (peak_tflops(args.device) or float("nan")),
        "offload_s": metrics.get("offload_s", 0.0),
        "gb": torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else float("nan"),
        "loss": metrics["loss"],
        "micro_batch_tokens": metrics["micro_batch_tokens"],
    }


def main() -> None:
    """Run, print one table."""
    args = arguments()
    table = Table(
        "shape", "s/step", "tokens/s", "TFLOP/s", "MFU", "GB", "of them optimizer, s",
        title=f"answers of {args.length} tokens with their prompt, {machine()}",
    )  # fmt: skip
    for name in args.rows:
        try:
            row = measured(ROWS[name], args)
        except Exception as error:
            row = {"row": ROWS[name].name, "error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if "error" not in row:
            numbers = [f"{row['step_s']:.2f}", f"{row['tokens_s']:,.0f}", f"{row['tflops']:.0f}", f"{row['mfu']:.1%}"]
            table.add_row(row["row"], *numbers, f"{row['gb']:.1f}", f"{row['offload_s']:.1f}")
    Console(width=140).print(table)


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=["7b-lora", "7b-lora-recomputed", "7b-full", "32b-lora"]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=0, help="measured steps, instead of those of the row")
    parser.add_argument("--pack", type=int, default=8192, help="tokens of one forward pass")
    parser.add_argument("--out", type=Path, default=None, help="file that gets one line of JSON for each row")
    return parser.parse_args()


if __name__ == "__main__":
    main()
