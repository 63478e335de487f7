"""What every contestant of a peer benchmark has to do: the prompts, the groups, the lengths, the model.

All read the same prompts in the same order from one file, and the same model folder. Where lengths are fixed, that
folder is a copy whose end-of-turn token is one the model practically never draws, so nobody has to be told to go on.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
NEVER_DRAWN = "<empty_output>"
"""A special token of SmolLM2 that chats do not contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One setting of the benchmark."""

    prompts: int
    """Of one step."""
    group: int
    """Answers to each."""
    cap: int
    """Longest answer, in tokens."""
    fixed: bool
    """Equal work: nobody may end before the cap, and rewards are drawn by lot so that nobody can leave a group out."""

    @property
    def name(self) -> str:
        return f"{self.prompts}x{self.group}x{self.cap}" + (" fixed" if self.fixed else "")

    @property
    def reward(self) -> str:
        """Name of a function of `peer/reward.py`."""
        return "lot" if self.fixed else "last_number"

    @property
    def samples(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step, as a contestant reported it."""

    end_s: float
    """On the contestant's clock: only differences count."""
    samples: int
    tokens: int
    """Of the answers that were trained on."""
    reward: float
    skipped: int = 0
    """Samples without an advantage that no gradient was computed for."""
    generate_s: float | None = None
    """Where generation and training take turns, how long the first took."""


def parse_work(text: str) -> list[Work]:
    """`8x8x12` → the same with natural and with fixed lengths; `8x8x12:fixed` or `:natural` → one of them."""
    shape, _, which = text.partition(":")
    prompts, group, cap = (int(number) for number in shape.split("x"))
    wanted = {"": (False, True), "natural": (False,), "fixed": (True,)}[which]
    return [Work(prompts=prompts, group=group, cap=cap, fixed=fixed) for fixed in wanted]


def write_tasks(path: Path, count: int, seed: int) -> None:
    """`count` tasks `a op b = ?` of one digit; all three hundred in one order before any comes again."""
    dice = random.Random(seed)
    rows: list[dict[str, object]] = []
    while len(rows) < count:
        every = [
            {"prompt": f"{a} {sign} {b} = ?", "answer": operation(a, b)}
            for a in range(10)
            for b in range(10)
            for sign, operation in OPERATIONS.items()
        ]
        dice.shuffle(every)
        rows += every
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]), encoding="utf-8")


def model_folder(name: str) -> Path:
    """A folder with safetensors and a tokenizer: `name` itself, or what Headway makes of a built-in name."""
    if Path(name).is_dir():
        return Path(name).resolve()
    from headway.models.model_names import resolve_model

    return Path(resolve_model(name))


def never_ending(model: Path, copy: Path) -> Path:
    """A copy of `model` that answers until it is cut off; weights are linked, not copied."""
    copy.mkdir(parents=True)
    for source in model.iterdir():
        if source.suffix == ".safetensors":
            (copy / source.name).symlink_to(source.resolve())
        elif source.is_file():
            shutil.copy(source, copy)
    vocabulary = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    if NEVER_DRAWN not in ids:
        raise SystemExit(f"{model}: no token {NEVER_DRAWN} to end with; fixed lengths are for SmolLM2 only")
    _change(copy / "tokenizer_config.json", eos_token=NEVER_DRAWN)
    for name in ("config.json", "generation_config.json"):
        _change(copy / name, eos_token_id=ids[NEVER_DRAWN])
    return copy


def _change(path: Path, **values: object) -> None:
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**held, **values}, indent=2), encoding="utf-8")
