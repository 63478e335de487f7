"""Models that come with Headway, by name: `pretrain: text-images`.

Each is a directory with `config.json`, `model.safetensors` and a `README.md` that tells how the model was made.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from headway.errors import ConfigError

TEXT_IMAGES = "text-images"
"""Draws four digits in 16 × 32 pixels, often wrong and sometimes cluttered: a base that a reward can improve."""

_CHECKPOINTS = Path(__file__).parent / "checkpoints"


def list_shipped_models() -> tuple[str, ...]:
    """Return the names that `find_shipped_model` knows."""
    return tuple(sorted(path.parent.name for path in _CHECKPOINTS.glob("*/config.json")))


def find_shipped_model(name: str) -> Path:
    """Return the directory of a model. Raises `ConfigError` for an unknown name."""
    names = list_shipped_models()
    if name not in names:
        close = get_close_matches(name, names, 1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        hint = f"one of {', '.join(names)}, or a directory"
        raise ConfigError(f"is no model that comes with Headway{meant}", key="pretrain", value=name, hint=hint)
    return _CHECKPOINTS / name
