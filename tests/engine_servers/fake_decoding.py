"""A small inference server without its HTTP: requests that decode together, one token a step.

The model is a table of logits, read from a safetensors file: the next token depends on the last one. Weights really
come from the disk, tokens are really drawn, log-probabilities really belong to the draw.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

TENSOR = "table"


class Model(Protocol):
    """Whatever has logits."""

    def load(self, directory: Path) -> None: ...

    def logits(self, tokens: list[int]) -> list[float]: ...


class Table:
    """`table[n]` are the logits after token n."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows

    def load(self, directory: Path) -> None:
        from safetensors.numpy import load_file

        tensors = load_file(directory / "model.safetensors")
        if TENSOR not in tensors:
            raise KeyError(f"There is no module or parameter named {min(tensors)!r} in Table")
        self.rows = tensors[TENSOR].tolist()

    def logits(self, tokens: list[int]) -> list[float]:
        return self.rows[tokens[-1]]


@dataclass(eq=False)
class Sequence:
    """One request at work. What it makes is put into `events`: token, log-probability, label; or how it ended."""

    key: str
    prompt: list[int]
    count: int
    temperature: float
    top_k: int
    ends: set[int]
    salt: str
    made: list[int] = field(default_factory=list)
    events: asyncio.Queue[tuple[int, float, str] | str] = field(default_factory=asyncio.Queue)
    over: bool = False

    def end(self, how: str) -> None:
        if not self.over:
            self.over = True
            self.events.put_nowait(how)


class Decoder:
    """`step_s` is what a step takes. `raw`: log-probabilities are taken before the temperature."""

    def __init__(self, model: Model, *, label: str = "default", step_s: float = 0.002, raw: bool = False) -> None:
        self.model, self.label, self.step_s, self.raw = model, label, step_s, raw
        self.running: list[Sequence] = []
        self.going = asyncio.Event()
        self.going.set()
        self.midway = asyncio.Event()
        """Somebody has made a dozen tokens."""
        self.hung = False
        self.torn = False
        """A load has failed half-way."""
        self.loads: list[str] = []
        self.loaded_while_running = 0
        self.prefixes: dict[tuple[str, tuple[int, ...]], str] = {}
        """Prompts that have been read, by salt, and under which weights."""
        self.stale = 0
        """Requests that went on from a prefix of other weights."""
        self._random = random.Random(0)
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Decode for ever."""
        while True:
            await self._work.wait()
            await asyncio.sleep(self.step_s)
            ready = [] if self.paused or self.hung else [one for one in self.running if not one.over]
            for sequence in ready:
                self._step(sequence)
            self.running = [one for one in self.running if not one.over]
            if self.paused or not self.running:
                self._work.clear()

    def add(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        self._work.set()

    def abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.end("abort")
        self.running = [one for one in self.running if not one.over]

    @property
    def paused(self) -> bool:
        return not self.going.is_set()

    def pause(self) -> None:
        self.going.clear()

    def go_on(self) -> None:
        self.going.set()
        self._work.set()

    def load(self, directory: Path) -> None:
        """In place, as servers do it: whoever runs meanwhile would see both."""
        self.loaded_while_running += len(self.running)
        self.model.load(directory)
        self.loads.append(directory.name)

    def load_rows(self, rows: list[list[float]], name: str) -> None:
        """In place, as `load` does."""
        assert isinstance(self.model, Table)
        self.loaded_while_running += len(self.running)
        self.model.rows = rows
        self.loads.append(name)

    def _step(self, sequence: Sequence) -> None:
        if not sequence.made:
            known = self.prefixes.setdefault((sequence.salt, tuple(sequence.prompt)), self.label)
            self.stale += known != self.label
        token, logp = self._draw(self.model.logits([*sequence.prompt, *sequence.made]), sequence)
        sequence.made.append(token)
        sequence.events.put_nowait((token, logp, self.label))
        if len(sequence.made) == 12:
            self.midway.set()
        if token in sequence.ends:
            sequence.end("stop")
        elif len(sequence.made) >= sequence.count:
            sequence.end("length")

    def _draw(self, logits: list[float], sequence: Sequence) -> tuple[int, float]:
        scaled = logits if sequence.temperature <= 0 else [value / sequence.temperature for value in logits]
        if sequence.top_k > 0:
            least = sorted(scaled, reverse=True)[min(sequence.top_k, len(scaled)) - 1]
            scaled = [value if value >= least else -math.inf for value in scaled]
        weights = _softmax(scaled)
        token = (
            max(range(len(weights)), key=weights.__getitem__)
            if sequence.temperature <= 0
            else self._random.choices(range(len(weights)), weights)[0]
        )
        return token, math.log((_softmax(logits) if self.raw else weights)[token])


def _softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    total = sum(powers)
    return [power / total for power in powers]


def counting_rows(size: int, sharp: float = 50.0) -> list[list[float]]:
    """n + 1 after n."""
    return [[sharp if column == (row + 1) % size else 0.0 for column in range(size)] for row in range(size)]


def random_rows(size: int, seed: int = 0, spread: float = 2.0) -> list[list[float]]:
    chance = random.Random(seed)
    return [[chance.gauss(0.0, spread) for _ in range(size)] for _ in range(size)]


class Transformer:
    """A decoder of `transformers`, computed anew for every token. A checkpoint that lacks anything is refused."""

    def __init__(self, directory: Path) -> None:
        self.load(directory)

    def load(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model, said = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        if said["missing_keys"] or said["unexpected_keys"]:
            raise KeyError(str(said))
        self._model = model.eval()

    def logits(self, tokens: list[int]) -> list[float]:
        import torch

        with torch.no_grad():
            return self._model(torch.tensor([tokens])).logits[0, -1].tolist()  # type: ignore[no-any-return]
