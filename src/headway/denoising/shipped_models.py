"""Models that come with Headway, by name: `pretrain: text-images`.

Each is a directory with `config.json`, `model.safetensors` and a `README.md` that says how it was made.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from headway.errors import ConfigError

TEXT_IMAGES = "text-images"
"""Four digits in 16 × 32 pixels, often wrong and sometimes cluttered: a base for a reward to improve."""

_HOME = Path(__file__).parent / "checkpoints"


def list_shipped_models() -> tuple[str, ...]:
    """What `find_shipped_model` knows."""
    return tuple(sorted(path.parent.name for path in _HOME.glob("*/config.json")))


def find_shipped_model(name: str) -> Path:
    """The directory of a model. Raises `ConfigError`."""
    names = list_shipped_models()
    if name not in names:
        close = get_close_matches(name, names, 1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        hint = f"one of {', '.join(names)}, or a directory"
        raise ConfigError(f"is no model that comes with Headway{meant}", key="pretrain", value=name, hint=hint)
    return _HOME / name
