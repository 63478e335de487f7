"""What is known of the policy of a run before anything is started: its files, its tokenizer and its size."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """The model of a run, read as far as the controller needs it."""

    path: Path
    critic: Path | None
    tokenizer: Any
    parameters: int
    positions: int | None
    """Longest sequence that the model can read; `None`: it does not say."""
