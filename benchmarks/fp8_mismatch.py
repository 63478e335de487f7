"""What 8 bits do to the probabilities of a trained model, on any machine.

    python benchmarks/fp8_mismatch.py --model DIRECTORY --data gsm8k_test.jsonl --texts 12

The model reads questions with their answers in float32, and again with what the engine would round: weights and inputs
of linear layers to fp8 with a scale for each row (head and embedding stay), keys and values to fp8 without a scale, or
results of all modules to bfloat16. Per token of the answers: mean and worst |Δ log-probability|, the mean of
KL(rounded ‖ float32) over the whole vocabulary, and the effective sample size of the weights exp(Δ) for tokens that the
rounded model would draw. Products themselves are in float32: a GPU adds its own rounding to these figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from headway.engines.native.quantized_products import FP8, LARGEST, quantize_rows

WAYS = ("bfloat16", "weights in fp8", "KV in fp8", "weights and KV in fp8")


def round_kv(x: Tensor) -> Tensor:
    return x.float().clamp(-LARGEST, LARGEST).to(FP8).float()


def attend_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, round_kv(key), round_kv(value), mask, **options)


def change(model: Any, way: str) -> Callable[[], None]:
    """Let `model` round in this way; returns what undoes it."""
    handles: list[Any] = []
    kept: list[tuple[nn.Linear, Tensor]] = []
    linears = [one for name, one in model.named_modules() if isinstance(one, nn.Linear) and "lm_head" not in name]
    if way == "bfloat16":
        for module in model.modules():
            if not list(module.children()) and not isinstance(module, nn.Embedding):
                handles.append(module.register_forward_hook(round_result))
    if "weights" in way:
        for one in linears:
            kept.append((one, one.weight.data))
            one.weight.data = quantize_rows(one.weight.data).restore()
            handles.append(one.register_forward_pre_hook(quantize_input))
    model.set_attn_implementation("rounded" if "KV" in way else "sdpa")

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for one, weight in kept:
            one.weight.data = weight

    return undo


def round_result(module: nn.Module, args: Any, result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(one.bfloat16().to(one.dtype) for one in result)
    return result.bfloat16().to(result.dtype)


def quantize_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (quantize_rows(args[0].flatten(0, -2)).restore().view_as(args[0]), *args[1:])


@torch.no_grad()
def read(model: Any, texts: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Log-probabilities of the whole vocabulary at every token of the answers."""
    return [torch.log_softmax(model(ids[None]).logits[0, start - 1 : -1].float(), -1) for ids, start in texts]


def compare(exact: list[Tensor], found: list[Tensor], texts: list[tuple[Tensor, int]]) -> dict[str, float]:
    gaps, divergence, weights = [], [], []
    generator = torch.Generator().manual_seed(0)
    for p, q, (ids, start) in zip(exact, found, texts, strict=True):
        chosen = ids[start:, None]
        gaps.append((p.gather(1, chosen) - q.gather(1, chosen)).abs().flatten())
        divergence.append((q.exp() * (q - p)).sum(-1))
        drawn = torch.multinomial(q.exp(), 16, replacement=True, generator=generator)
        weights.append((p.gather(1, drawn) - q.gather(1, drawn)).exp().flatten())
    gap, weight = torch.cat(gaps), torch.cat(weights)
    return {
        "tokens": len(gap),
        "mean": float(gap.mean()),
        "worst": float(gap.max()),
        "kl": float(torch.cat(divergence).mean()),
        "ess": float(weight.sum() ** 2 / (weight**2).sum() / len(weight)),
    }


def main() -> None:
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a model, or a name of a hub")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with `question` and `answer`")
    parser.add_argument("--texts", type=int, default=12)
    args = parser.parse_args()
    AttentionInterface.register("rounded", attend_rounded)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    texts = []
    for line in args.data.read_text(encoding="utf-8").splitlines()[: args.texts]:
        row = json.loads(line)
        question = tokenizer(row["question"] + "\n")["input_ids"]
        answer = tokenizer(row["answer"])["input_ids"]
        texts.append((torch.tensor(question + answer), len(question)))
    model.set_attn_implementation("sdpa")
    exact = read(model, texts)
    table = Table("", "tokens", "mean |Δ|", "worst |Δ|", "KL", "effective sample size", title=str(args.model))
    for way in WAYS:
        undo = change(model, way)
        row = compare(exact, read(model, texts), texts)
        undo()
        cells = (f"{row['mean']:.4f}", f"{row['worst']:.2f}", f"{row['kl']:.1e}", f"{row['ess']:.3f}")
        table.add_row(way, f"{row['tokens']:,}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
