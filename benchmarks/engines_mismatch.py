"""How far each engine's log-probabilities are from the trainer's: the same model, prompts and sampling for all of them.

    python benchmarks/engines_mismatch.py --out mismatch.json                    # one GPU, 0.5B shape in bf16
    python benchmarks/engines_mismatch.py --model DIRECTORY --engines native "vllm over HTTP"
    python benchmarks/engines_mismatch.py --shape tiny --device cpu --engines native --samples 8 --tokens 16

Every engine draws its own tokens. Then one forward pass in the trainer's precision says what the trainer would have
said about each of them, after the same temperature, top-k and top-p. Let Δ = ℓ_trainer − ℓ_engine of a token. The table
has mean and worst |Δ|, an estimate of KL(engine ‖ trainer) = E[exp(Δ) − 1 − Δ], and the effective sample size of the
weights exp(Δ) as a share of the tokens: 1 means that no correction is needed. The random model is made sharp, so that a
token has about two nats of entropy, as in a trained one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.end_to_end import SHAPES, machine, make_model
from benchmarks.server_engines import WAYS, make_engine, make_words

from headway.config import load_config
from headway.engines.base import Progress, Request
from headway.types import SamplingParams
from headway.weights.shared_memory import PayloadReader
from headway.weights.weight_store import SharedArena, WeightStore

SAMPLINGS = {
    "T = 1": {},
    "T = 0.7": {"temperature": 0.7},
    "top-k 20, top-p 0.9": {"top_k": 20, "top_p": 0.9},
}


def make_sharp_model(directory: Path, args: argparse.Namespace) -> Path:
    """A random model whose next token has about two nats of entropy."""
    from transformers import AutoModelForCausalLM

    make_model(directory, args)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.norm.weight.mul_(args.sharp)
    model.save_pretrained(directory)
    return directory


def make_native_engine(args: argparse.Namespace, model: Path) -> Any:
    """Our own engine, in this process."""
    from headway.engines.native.native_engine import NativeEngine
    from headway.engines.native.settings import NativeSettings
    from headway.models.model_loading import make_architecture_factory

    resolved = load_config(None, make_words(args, "native", model, model.parent / "unused"))
    settings = NativeSettings(
        slots=64,
        slot_tokens=resolved.derived.sequence_length,
        device=args.device,
        dtype="bfloat16" if args.device == "cuda" else "float32",
    )
    return NativeEngine("engine/0", make_architecture_factory(model), settings, open_payload=PayloadReader().open)


async def draw(engine: Any, store: WeightStore, args: argparse.Namespace) -> dict[str, list[tuple[Request, Progress]]]:
    """Serve version 0, and draw every sample of every way of sampling."""
    manifest, buckets = await store.gather(0)
    await engine.start()
    await engine.receiver.begin(manifest)
    async for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()
    found = await draw_samples(engine, args)
    await engine.close()
    return found


async def draw_samples(engine: Any, args: argparse.Namespace) -> dict[str, list[tuple[Request, Progress]]]:
    """Draw every sample of every way of sampling."""
    found: dict[str, list[tuple[Request, Progress]]] = {}
    for name, changes in SAMPLINGS.items():
        params = SamplingParams(max_new_tokens=args.tokens, **changes)  # type: ignore[arg-type]
        pairs = []
        for number in range(args.samples):
            prompt = tuple(10 + (7 * number + 3 * place) % 80 for place in range(24))
            request = Request(request_id=f"{name}-{number}", session=str(number), prompt=prompt, params=params)
            pairs.append((request, Progress()))
        await asyncio.gather(*(engine.generate(request, progress) for request, progress in pairs))
        found[name] = pairs
    return found


def truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities after temperature, top-k and top-p, in that order, as all engines do it."""
    logits = logits.float() / params.temperature
    if params.top_k > 0:
        least = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        ordered, places = logits.sort(dim=-1)
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        outside[..., -1] = False
        logits = logits.masked_fill(outside.scatter(-1, places, outside), -torch.inf)
    return logits.log_softmax(-1)


def compare(model: Any, pairs: list[tuple[Request, Progress]]) -> dict[str, float]:
    """One forward pass for each sample, and the numbers of the table."""
    ours, theirs = [], []
    for request, progress in pairs:
        tokens = torch.tensor([[*request.prompt, *progress.actions]], device=model.device)
        with torch.no_grad():
            logits = model(tokens).logits[0, len(request.prompt) - 1 : -1]
        chosen = tokens[0, len(request.prompt) :, None]
        ours.append(truncate(logits, request.params).gather(-1, chosen)[:, 0].cpu())
        theirs.append(torch.tensor(list(progress.logps)))
    trainer, engine = torch.cat(ours).double(), torch.cat(theirs).double()
    both = torch.isfinite(trainer)
    delta = (trainer - engine)[both]
    weights = delta.exp()
    return {
        "tokens": len(engine),
        "entropy": float(-engine.mean()),
        "mean": float(delta.abs().mean()),
        "worst": float(delta.abs().max()),
        "kl": float((weights - 1 - delta).mean()),
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "outside": float((~both).double().mean()),
    }


def main() -> None:
    """Draw with every engine, compare, print one table."""
    from transformers import AutoModelForCausalLM

    args = parse_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="headway-mismatch-"))
    directory = args.model or make_sharp_model(scratch / "model", args)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(args.device).eval()
    store = WeightStore(bucket_mb=512.0, wire_dtype=None, arena=SharedArena())
    store.publish(0, dict(model.named_parameters()))
    rows = []
    for name in args.engines:
        try:
            engine = (
                make_native_engine(args, directory)
                if name == "native"
                else make_engine(args, name, "shared_memory", directory, scratch)
            )
            drawn = asyncio.run(draw(engine, store, args))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}"[:3000], flush=True)
            continue
        for sampling, pairs in drawn.items():
            rows.append({"engine": name, "sampling": sampling, **compare(model, pairs)})
            print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1), encoding="utf-8")
    store.close()
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table("engine", "sampling", "tokens", "entropy", "mean |Δ|", "worst |Δ|", "KL", "ESS", title=machine())
    for row in rows:
        numbers = [f"{row['entropy']:.2f}", f"{row['mean']:.2e}", f"{row['worst']:.3f}", f"{row['kl']:.1e}"]
        table.add_row(row["engine"], row["sampling"], str(row["tokens"]), *numbers, f"{row['ess']:.4f}")
    Console(width=120).print(table)


def parse_arguments() -> argparse.Namespace:
    """Parse what to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=None, help="directory of a model; empty: a random one")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--engines", nargs="+", choices=WAYS, default=["native", "vllm"])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sharp", type=float, default=9.0)
    parser.add_argument("--python", default="")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.mean_length, args.prompts, args.length, args.steps = 0, 8, args.tokens + 64, 1
    args.transport, args.share, args.learning_rate, args.sleeps = "auto", 0.1, 1e-6, False
    return args


if __name__ == "__main__":
    main()
