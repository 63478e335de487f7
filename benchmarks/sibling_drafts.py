"""What drafts from siblings would save: real answers to GSM8K, and how far n-grams of siblings predict them.

    python benchmarks/sibling_drafts.py --model PATH --data gsm8k_test.jsonl --prompts 8 --tokens 256

The native engine answers each question several times on a CPU. Then every answer is played again: in each step the
longest n-gram that ends what it has so far is looked up in what siblings have written by then (and, to compare, in the
answer itself and its prompt), and what followed there is the draft. A draft token is accepted by rejection sampling
with the probability that the model gives it, which is how often the token that was really drawn is the same one. So the
mean number of tokens in a step follows from the texts alone. The tail is where at most a quarter of a group still runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_gpu import Given
from headway.engines.base import Progress, Request
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings
from headway.types import SamplingParams

MOST_GRAM = 6
"""Tokens of the longest n-gram that is looked up."""


async def answer(options: argparse.Namespace, lines: list[str]) -> list[tuple[list[int], list[list[int]]]]:
    """Return the prompt of each group and its answers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    settings = NativeSettings(
        slots=options.prompts * options.members, slot_tokens=1024, threads=options.threads, prefill_tokens=512
    )
    engine = NativeEngine(
        "engine/0",
        lambda: AutoModelForCausalLM.from_config(model.config),
        settings,
        eos=(tokenizer.eos_token_id,),
        make_receiver=Given,  # type: ignore[arg-type]
    )
    await engine.receiver.take(0, dict(model.named_parameters()))  # type: ignore[attr-defined]
    asked, parts = [], []
    for number, line in enumerate(lines):
        chat = [{"role": "user", "content": json.loads(line)["question"]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        for member in range(options.members):
            params = SamplingParams(max_new_tokens=options.tokens, temperature=options.temperature)
            name = f"{number}/{member}"
            asked.append(Request(request_id=name, session=name, prompt=prompt, params=params, prefix_key=number))
            parts.append(Progress())
    await asyncio.gather(*(engine.generate(each, part) for each, part in zip(asked, parts, strict=True)))
    await engine.close()
    groups = []
    for first in range(0, len(asked), options.members):
        members = [list(part.actions) for part in parts[first : first + options.members]]
        groups.append((list(asked[first].prompt), members))
    return groups


class GramTable:
    """What followed each n-gram, the latest last."""

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}

    def add(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Enter the n-grams of `tokens` that are followed by a token in `start` to `end`."""
        for at in range(max(start, 1), end):
            for size in range(1, min(MOST_GRAM, at) + 1):
                self._follows[tuple(tokens[at - size : at])] = (tokens[:end], at)

    def draft(self, tokens: Sequence[int], most: int, shortest: int) -> Sequence[int]:
        """Return what followed the longest n-gram that `tokens` end with."""
        for size in range(min(MOST_GRAM, len(tokens)), shortest - 1, -1):
            found = self._follows.get(tuple(tokens[-size:]))
            if found is not None:
                return found[0][found[1] : found[1] + most]
        return ()


def replay(
    prompt: list[int], members: list[list[int]], which: int, *, most: int, shortest: int, siblings: bool, own: bool
) -> tuple[list[int], list[int]]:
    """Play one answer with drafts; returns the position and the tokens of every step."""
    target, at = members[which], 0
    starts, made = [], []
    while at < len(target):
        table = GramTable()
        if own:
            table.add([*prompt, *target[:at]], 1, len(prompt) + at)
        if siblings:
            for number, other in enumerate(members):
                if number != which:  # all began together: a sibling has written as much by now, or has ended
                    table.add(other, 1, min(len(other), at + 1))
        draft = table.draft([*prompt[-MOST_GRAM:], *target[:at]], most, shortest)
        accepted = 0
        while accepted < len(draft) and at + accepted < len(target) and draft[accepted] == target[at + accepted]:
            accepted += 1
        starts.append(at)
        made.append(min(accepted + 1, len(target) - at))
        at += made[-1]
    return starts, made


def measure(groups: list[tuple[list[int], list[list[int]]]], **options: Any) -> tuple[float, float]:
    """Return tokens a step over everything, and in the tail."""
    whole, tail = [0, 0], [0, 0]
    for prompt, members in groups:
        lengths = sorted(len(member) for member in members)
        begin = lengths[-(len(members) // 4) - 1]
        for which in range(len(members)):
            for start, made in zip(*replay(prompt, members, which, **options), strict=True):
                whole[0] += made
                whole[1] += 1
                if start >= begin:
                    tail[0] += made
                    tail[1] += 1
    return whole[0] / whole[1], tail[0] / max(1, tail[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", help="keep the answers in this file, or read them where it exists")
    options = parser.parse_args()
    if options.save and Path(options.save).exists():
        groups = [tuple(group) for group in json.loads(Path(options.save).read_text())]
    else:
        groups = asyncio.run(answer(options, Path(options.data).read_text().splitlines()[: options.prompts]))
        if options.save:
            Path(options.save).write_text(json.dumps(groups))
    lengths = [len(member) for _, members in groups for member in members]
    print(f"{len(groups)} groups, {sum(lengths)} tokens, longest {max(lengths)}, temperature {options.temperature}")
    for most in (3, 7):
        for shortest in (1, 2, 3):
            cells = []
            for siblings, own in ((True, False), (False, True), (True, True)):
                found = measure(groups, most=most, shortest=shortest, siblings=siblings, own=own)  # type: ignore[arg-type]
                cells.append(f"{found[0]:.3f} (tail {found[1]:.3f})")
            print(f"drafts of {most}, n-grams from {shortest}: siblings {cells[0]}, own {cells[1]}, both {cells[2]}")


if __name__ == "__main__":
    main()
